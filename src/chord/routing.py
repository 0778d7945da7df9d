"""The three ways to say which row belongs to which expert, and `align`, which makes the first.

`Indexed`, `Contiguous` and `Masked` are plain containers. Their constructors check what the host
knows (dtypes, shapes, devices); `validate` checks the values as well, which makes the host wait
for the device and therefore cannot run inside CUDA graph capture.

An expert id is always local: it indexes the weight of this rank. -1 means "nobody here".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chord.arguments import check_readable, check_tensor, truth, whole_number
from chord.errors import InputError

_INTEGERS = (torch.int32, torch.int64)
_INT_LIMIT = 1 << 31


def _check_vector(
    name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    check_tensor(name, tensor)
    if tensor.dtype not in dtypes or tensor.dim() != 1 or not tensor.is_contiguous():
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise InputError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}; "
            f"it must be {wanted}, of one dimension and contiguous"
        )
    if tensor.device != device:
        raise InputError(f"{name} is on {tensor.device}, the other tensors are on {device}")


def _check_expert_ids(name: str, ids: torch.Tensor, num_experts: int) -> None:
    """Refuse expert ids outside -1..num_experts-1 (waits for the device)."""
    if not ids.numel():
        return
    low, high = (int(value) for value in torch.aminmax(ids))
    if low < -1 or high >= num_experts:
        raise InputError(
            f"{name} holds ids from {low} to {high}; they must be 0..{num_experts - 1}, or -1 "
            f"for none"
        )


@dataclass(frozen=True, eq=False)
class Indexed:
    """Routes sorted by expert in blocks of block_m, as vLLM's `moe_align_block_size` gives them.

    Route r stands for input row `r // top_k` and output row r, r in 0..num_tokens * top_k - 1.
    Block b holds routes `sorted_token_ids[b * block_m : (b + 1) * block_m]` of one expert,
    `expert_ids[b]`; slots that only fill a block hold the pad id num_tokens * top_k. Only the
    first `num_tokens_post_padded` slots and their blocks are read: buffers may be larger. Blocks
    of expert -1 are skipped.

    Attributes:
        sorted_token_ids: int32, [P].
        expert_ids: int32, [B].
        num_tokens_post_padded: int32, [1], on the device.
        top_k: routes per input row; 1 if every route has a row of its own.
        block_m: slots of a block.
    """

    sorted_token_ids: torch.Tensor
    expert_ids: torch.Tensor
    num_tokens_post_padded: torch.Tensor
    top_k: int
    block_m: int

    def __post_init__(self) -> None:
        check_tensor("sorted_token_ids", self.sorted_token_ids)
        device = self.sorted_token_ids.device
        for name in ("sorted_token_ids", "expert_ids", "num_tokens_post_padded"):
            _check_vector(name, getattr(self, name), (torch.int32,), device)
        if self.num_tokens_post_padded.numel() != 1:
            raise InputError(
                f"num_tokens_post_padded has {self.num_tokens_post_padded.numel()} elements; "
                f"it must hold the one number of used slots"
            )
        top_k, block_m = (whole_number(name, getattr(self, name)) for name in ("top_k", "block_m"))
        if top_k < 1 or block_m < 1:
            raise InputError(f"top_k={top_k}, block_m={block_m}: both must be at least 1")
        if top_k >= _INT_LIMIT or block_m >= _INT_LIMIT:
            raise InputError(
                f"top_k={top_k}, block_m={block_m}: rows are counted in 32 bits, below 2^31"
            )

    def validate(self, num_tokens: int, num_experts: int) -> None:
        """Check every value that a kernel would read; waits for the device.

        Args:
            num_tokens: rows of the input x, [num_tokens, K].
            num_experts: local experts of the weight.

        Raises:
            InputError: a value out of range, a route that appears twice, or buffers that show
                another block_m.
        """
        for name in ("sorted_token_ids", "expert_ids", "num_tokens_post_padded"):
            check_readable(name, getattr(self, name))
        num_routes = num_tokens * self.top_k
        used = int(self.num_tokens_post_padded.item())
        slots = self.sorted_token_ids.numel()
        if not 0 <= used <= slots or used % self.block_m:
            raise InputError(
                f"num_tokens_post_padded={used} must be a multiple of block_m={self.block_m} "
                f"within 0..{slots}, the length of sorted_token_ids"
            )
        num_blocks = used // self.block_m
        if num_blocks > self.expert_ids.numel():
            raise InputError(
                f"expert_ids has {self.expert_ids.numel()} entries; num_tokens_post_padded={used} "
                f"with block_m={self.block_m} needs {num_blocks}"
            )
        block_experts = self.expert_ids[:num_blocks]
        _check_expert_ids("expert_ids", block_experts, num_experts)
        blocks = (block_experts >= 0).nonzero().flatten()
        ids = self.sorted_token_ids[:used].view(num_blocks, self.block_m)[blocks].long()
        if not ids.numel():
            return
        low, high = (int(value) for value in torch.aminmax(ids))
        if low < 0 or high > num_routes:
            routes = f"routes are 0..{num_routes - 1}" if num_routes else "there are no routes"
            raise InputError(
                f"sorted_token_ids holds ids from {low} to {high}; {routes} ({num_tokens} rows, "
                f"top_k={self.top_k}) and the pad id is {num_routes}"
            )
        uses = torch.bincount(ids.flatten(), minlength=num_routes + 1)[:num_routes]
        if bool((uses > 1).any()):
            route = int(uses.argmax())
            raise InputError(
                f"sorted_token_ids holds the id {route} {int(uses[route])} times; a route has one "
                f"output row, so it may appear once (the pad id of {num_tokens} rows with "
                f"top_k={self.top_k} is {num_routes}: is that the buffers'?)"
            )
        is_route = ids < num_routes
        late = (is_route[:, 1:] & ~is_route[:, :-1]).any(1)
        if bool(late.any()):
            block = int(blocks[int(late.int().argmax())])
            raise InputError(
                f"sorted_token_ids has a route after padding in block {block} (slots "
                f"{block * self.block_m}..{(block + 1) * self.block_m - 1}, block_m="
                f"{self.block_m}); padding ends a block: is block_m that of the buffers?"
            )
        self._check_block_m(used)

    def _check_block_m(self, used: int) -> None:
        """Refuse a block_m that the buffers contradict where another one explains them.

        Buffers may be larger than what is used, so their lengths alone prove nothing. But if they
        fit another power of two and not block_m, the experts' ids decide: those of the blocks in
        use ascend, and do not go on beyond them.
        """
        slots, named = self.sorted_token_ids.numel(), self.expert_ids.numel()
        if -(-slots // self.block_m) == named:
            return
        ids = self.expert_ids.tolist()
        given = used // self.block_m
        for other in (1 << bits for bits in range(slots.bit_length() + 1)):
            if -(-slots // other) != named or used % other:
                continue
            meant = used // other
            if meant > given:
                is_wrong = max(ids[given:meant]) >= 0 and _ascends(ids[:meant])
            else:
                is_wrong = min(ids[meant:given], default=0) < 0 or not _ascends(ids[:given])
            if is_wrong:
                raise InputError(
                    f"block_m={self.block_m} makes {given} blocks of num_tokens_post_padded="
                    f"{used}, but the lengths of sorted_token_ids ({slots}) and expert_ids "
                    f"({named}) fit block_m={other}, and so do the ids of its {meant} blocks; pass "
                    f"the block_m that they were made with (or expert_ids[:{given}], if that is "
                    f"{self.block_m})"
                )


def _ascends(ids: list[int]) -> bool:
    """Tell whether the ids of at least 0 ascend."""
    owned = [expert for expert in ids if expert >= 0]
    return owned == sorted(owned)


@dataclass(frozen=True, eq=False)
class Contiguous:
    """Rows sorted by expert: x is [R, K], out is [R, N], described in one of two ways.

    Attributes:
        expert_offsets: int32 or int64, [E + 1]: expert e owns rows
            expert_offsets[e] .. expert_offsets[e + 1] - 1. Rows before the first and from the
            last offset on belong to nobody.
        m_indices: int32 or int64, [R]: the expert of each row, ascending, -1 for rows of nobody
            (anywhere).
    """

    expert_offsets: torch.Tensor | None = None
    m_indices: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if (self.expert_offsets is None) == (self.m_indices is None):
            given = "neither" if self.m_indices is None else "both"
            raise InputError(
                f"{given} of expert_offsets and m_indices given; rows are described by exactly one"
            )
        if self.expert_offsets is not None:
            offsets = self.expert_offsets
            check_tensor("expert_offsets", offsets)
            _check_vector("expert_offsets", offsets, _INTEGERS, offsets.device)
            if offsets.numel() < 2:
                raise InputError(
                    f"expert_offsets has {offsets.numel()} elements; E experts need E + 1 offsets"
                )
        if self.m_indices is not None:
            check_tensor("m_indices", self.m_indices)
            _check_vector("m_indices", self.m_indices, _INTEGERS, self.m_indices.device)

    def validate(self, num_rows: int, num_experts: int) -> None:
        """Check every value; waits for the device.

        Args:
            num_rows: rows R of the input x, [R, K].
            num_experts: local experts of the weight.

        Raises:
            InputError: a wrong length, a value out of range, or rows that are not in order.
        """
        if self.expert_offsets is not None:
            offsets = self.expert_offsets
            check_readable("expert_offsets", offsets)
            if offsets.numel() != num_experts + 1:
                raise InputError(
                    f"expert_offsets has {offsets.numel()} elements; {num_experts} experts need "
                    f"{num_experts + 1}"
                )
            if bool((offsets[1:] < offsets[:-1]).any()):
                raise InputError(
                    "expert_offsets decreases; offsets must ascend from expert to expert"
                )
            first, last = int(offsets[0]), int(offsets[-1])
            if first < 0 or last > num_rows:
                raise InputError(
                    f"expert_offsets runs from {first} to {last}; x has rows 0..{num_rows}"
                )
        if self.m_indices is not None:
            indices = self.m_indices
            check_readable("m_indices", indices)
            if indices.numel() != num_rows:
                raise InputError(
                    f"m_indices has {indices.numel()} elements; x has {num_rows} rows, one each"
                )
            _check_expert_ids("m_indices", indices, num_experts)
            owned = indices[indices >= 0]
            if bool((owned[1:] < owned[:-1]).any()):
                raise InputError(
                    "m_indices descends; rows must be sorted by expert (-1 may stand anywhere)"
                )


@dataclass(frozen=True, eq=False)
class Masked:
    """A fixed number of rows per expert, of which the first few count: x is [E, max_m, K].

    Attributes:
        tokens_per_expert: int32, [E]: valid rows of each expert, 0..max_m.
        expected: a hint, the usual number of valid rows per expert; it may change the speed,
            never the result.
    """

    tokens_per_expert: torch.Tensor
    expected: int | None = None

    def __post_init__(self) -> None:
        tokens = self.tokens_per_expert
        check_tensor("tokens_per_expert", tokens)
        _check_vector("tokens_per_expert", tokens, (torch.int32,), tokens.device)
        if self.expected is not None and whole_number("expected", self.expected) < 0:
            raise InputError(f"expected={self.expected} must not be negative; leave it out")

    def validate(self, max_rows: int, num_experts: int) -> None:
        """Check every value; waits for the device.

        Args:
            max_rows: second dimension of the input x, [E, max_rows, K].
            num_experts: local experts of the weight.

        Raises:
            InputError: a wrong length or a count outside 0..max_rows.
        """
        tokens = self.tokens_per_expert
        check_readable("tokens_per_expert", tokens)
        if tokens.numel() != num_experts:
            raise InputError(
                f"tokens_per_expert has {tokens.numel()} elements; the weight has {num_experts} "
                f"experts, one each"
            )
        low, high = (int(value) for value in torch.aminmax(tokens))
        if low < 0 or high > max_rows:
            raise InputError(
                f"tokens_per_expert runs from {low} to {high}; x has {max_rows} rows per expert"
            )


def align(
    topk_ids: torch.Tensor,
    *,
    num_experts: int,
    block_m: int,
    expert_map: torch.Tensor | None = None,
    validate: bool | None = None,
) -> Indexed:
    """Sort routes by expert and pad each expert to whole blocks, without a wait for the device.

    Routes of id -1, and those whose expert the map gives to another rank, are dropped. Routes of
    one expert keep their order; experts stand in the order of their local ids. Sizes depend on
    shapes alone, so the call can be captured in a CUDA graph.

    An id that is neither -1 nor an expert is an error, here as in `chord.reference.fused_moe`. To
    see one the host has to wait for the device, which this call is there to avoid: so it is looked
    for on the CPU, or on request, and otherwise dropped, as vLLM's `moe_align_block_size` does.

    Args:
        topk_ids: int32 or int64, [T, top_k], expert of each route.
        num_experts: range of the ids: all experts of the model if expert_map is given, else the
            local ones.
        block_m: slots of a block.
        expert_map: int32 or int64, [num_experts], local index of each expert or -1.
        validate: check the values of both tensors, which waits for the device; None does so where
            nothing has to wait, on the CPU.

    Returns:
        Indexed with sorted_token_ids [T * top_k + num_experts * (block_m - 1)], filled up with
        the pad id T * top_k, and local expert_ids, -1 beyond the last used block.

    Raises:
        InputError: a wrong dtype, shape or device, or a checked value out of range.

    Example:
        >>> import torch
        >>> routing = align(torch.tensor([[1, 0], [1, -1]]), num_experts=2, block_m=2)
        >>> routing.sorted_token_ids
        tensor([1, 4, 0, 2, 4, 4], dtype=torch.int32)
        >>> routing.expert_ids
        tensor([ 0,  1, -1], dtype=torch.int32)
    """
    _check_topk_ids(topk_ids)
    num_experts = whole_number("num_experts", num_experts)
    block_m = whole_number("block_m", block_m)
    if num_experts < 1 or block_m < 1:
        raise InputError(f"num_experts={num_experts}, block_m={block_m}: both must be at least 1")
    if expert_map is not None:
        _check_map(expert_map, num_experts, topk_ids.device)
    capacity = topk_ids.numel() + num_experts * (block_m - 1)
    if capacity >= _INT_LIMIT:
        raise InputError(
            f"num_experts={num_experts} with block_m={block_m} and topk_ids "
            f"{list(topk_ids.shape)} make {capacity} slots; they are counted in 32 bits, below 2^31"
        )
    if topk_ids.device.type == "cpu" if validate is None else truth("validate", validate):
        check_readable("topk_ids", topk_ids)
        _check_expert_ids("topk_ids", topk_ids, num_experts)
        if expert_map is not None:
            _check_expert_ids("expert_map", expert_map, num_experts)
    device = topk_ids.device
    num_routes = topk_ids.numel()
    num_blocks = -(-capacity // block_m)

    # Group routes by expert; the group num_experts collects what is dropped.
    group = local_experts(topk_ids, num_experts, expert_map).flatten()
    group = torch.where((group < 0) | (group >= num_experts), num_experts, group)
    order = torch.argsort(group, stable=True)
    group = group[order]
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(0, group, torch.ones_like(group))
    first_route = counts.cumsum(0) - counts

    # Give each expert whole blocks; the dropped group goes to one slot behind the buffer.
    blocks_end = torch.div(counts[:num_experts] + block_m - 1, block_m, rounding_mode="floor")
    blocks_end = blocks_end.cumsum(0)
    slots_end = blocks_end * block_m
    first_slot = torch.cat((slots_end.new_zeros(1), slots_end))
    rank = torch.arange(num_routes, device=device) - first_route[group]
    slot = torch.where(group == num_experts, capacity, first_slot[group] + rank)
    sorted_ids = torch.full((capacity + 1,), num_routes, dtype=torch.int32, device=device)
    sorted_ids[slot] = order.int()
    sorted_ids[capacity:].fill_(num_routes)  # an item assignment would wait for the device

    block = torch.arange(num_blocks, device=device)
    block_expert = torch.searchsorted(blocks_end, block, right=True)
    block_expert = torch.where(block_expert == num_experts, -1, block_expert)
    return Indexed(
        sorted_token_ids=sorted_ids[:capacity],
        expert_ids=block_expert.int(),
        num_tokens_post_padded=slots_end[-1:].int(),
        top_k=topk_ids.shape[1],
        block_m=block_m,
    )


def local_experts(
    topk_ids: torch.Tensor, num_experts: int, expert_map: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the local expert of each route, -1 where there is none here, without host sync.

    Args:
        topk_ids: int32 or int64, any shape, ids 0..num_experts-1; others give -1.
        num_experts: range of the ids.
        expert_map: int32 or int64, [num_experts], local index of each expert or -1; without it
            the ids are local already.

    Returns:
        int64, the shape of topk_ids.

    Raises:
        InputError: a wrong dtype, shape or device.
    """
    check_tensor("topk_ids", topk_ids)
    num_experts = whole_number("num_experts", num_experts)
    if topk_ids.dtype not in _INTEGERS or not 1 <= num_experts < _INT_LIMIT:
        raise InputError(
            f"topk_ids is {topk_ids.dtype} and num_experts={num_experts}; they must be int32 or "
            f"int64, and at least 1"
        )
    if expert_map is not None:
        _check_map(expert_map, num_experts, topk_ids.device)
    ids = topk_ids.long()
    is_known = (ids >= 0) & (ids < num_experts)
    # An id of -1 would read the map's last entry: look up expert 0 instead and discard it.
    ids = torch.where(is_known, ids, 0)
    if expert_map is not None:
        ids = expert_map.long()[ids]
    return torch.where(is_known, ids, -1)


def _check_map(expert_map: torch.Tensor, num_experts: int, device: torch.device) -> None:
    _check_vector("expert_map", expert_map, _INTEGERS, device)
    if expert_map.numel() != num_experts:
        raise InputError(
            f"expert_map has {expert_map.numel()} elements; num_experts={num_experts} needs one "
            f"for each"
        )


def _check_topk_ids(topk_ids: torch.Tensor) -> None:
    check_tensor("topk_ids", topk_ids)
    if topk_ids.dtype not in _INTEGERS or topk_ids.dim() != 2 or topk_ids.shape[1] < 1:
        raise InputError(
            f"topk_ids is {topk_ids.dtype} {list(topk_ids.shape)}; it must be int32 or int64 "
            f"[T, top_k]"
        )
