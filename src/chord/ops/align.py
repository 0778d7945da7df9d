"""`chord.align`: the buffers of vLLM's `moe_align_block_size`, by the layer's own sort."""

from __future__ import annotations

import torch

from chord import device as devices
from chord import routing
from chord.arguments import check_tensor, whole_number
from chord.errors import InputError
from chord.jit import launch as launching
from chord.jit.params import ROUTE_MAX_EXPERTS
from chord.ops import checks, route

_MOST_SLOTS = (1 << 31) - (1 << 16)  # kernels count in 32 bits and step past the end by less


def align(
    topk_ids: torch.Tensor,
    *,
    num_experts: int,
    block_m: int,
    expert_map: torch.Tensor | None = None,
) -> routing.Indexed:
    """Sort routes by expert and pad each expert to whole blocks, for `chord.indexed`.

    On a CUDA GPU by the one or two kernels that `chord.fused_moe` sorts with; elsewhere
    `chord.routing.align`, which gives the same buffers. Nothing waits for the device, so ids are
    not validated there, and one that is no expert's counts as -1; on the CPU it is refused.

    Args:
        topk_ids: int32 or int64, [T, top_k], contiguous, expert of each route, -1 for none.
        num_experts: range of the ids, at most 1,024: all experts of the model if expert_map is
            given, else the local ones.
        block_m: slots of a block.
        expert_map: int32 or int64, [num_experts], local index of each expert or -1.

    Returns:
        Indexed with int32 buffers: sorted_token_ids [T * top_k + num_experts * (block_m - 1)],
        filled up with the pad id T * top_k, and local expert_ids, -1 beyond the last used block.

    Raises:
        InputError: An argument breaks a rule; nothing has been launched.
        CompileError: The kernel does not compile or load.
        CaptureError: The kernel is not loaded yet and a CUDA graph is being captured.

    Example:
        >>> import torch, chord
        >>> blocks = chord.align(torch.tensor([[1, 0], [1, -1]]), num_experts=2, block_m=2)
        >>> blocks.sorted_token_ids
        tensor([1, 4, 0, 2, 4, 4], dtype=torch.int32)
    """
    if torch.compiler.is_dynamo_compiling():
        outside = checks.outside_graph(align)
        return outside(topk_ids, num_experts=num_experts, block_m=block_m, expert_map=expert_map)
    num_experts, block_m = (
        whole_number("num_experts", num_experts),
        whole_number("block_m", block_m),
    )
    capacity = _check(topk_ids, num_experts, block_m, expert_map)
    if not topk_ids.is_cuda:
        return routing.align(
            topk_ids, num_experts=num_experts, block_m=block_m, expert_map=expert_map
        )
    return _launch(topk_ids, num_experts, block_m, expert_map, capacity)


def _check(
    topk_ids: torch.Tensor, num_experts: int, block_m: int, expert_map: torch.Tensor | None
) -> int:
    """Check all but values, alike on every device; return the slots of sorted_token_ids."""
    check_tensor("topk_ids", topk_ids)
    integers = (torch.int32, torch.int64)
    if topk_ids.dtype not in integers or topk_ids.dim() != 2 or topk_ids.shape[1] < 1:
        raise InputError(
            f"topk_ids is {topk_ids.dtype} {list(topk_ids.shape)}; it must be int32 or int64 "
            f"[T, top_k]"
        )
    checks.check_contiguous("topk_ids", topk_ids)
    if not 1 <= num_experts <= ROUTE_MAX_EXPERTS or block_m < 1:
        raise InputError(
            f"num_experts={num_experts} must be in 1..{ROUTE_MAX_EXPERTS} (counters of the kernel) "
            f"and block_m={block_m} at least 1"
        )
    if expert_map is not None:
        checks.check_table("expert_map", expert_map, topk_ids, integers)
        if expert_map.numel() != num_experts:
            raise InputError(
                f"expert_map has {expert_map.numel()} elements; num_experts={num_experts} needs "
                f"one for each"
            )
    capacity = topk_ids.numel() + num_experts * (block_m - 1)
    if capacity > _MOST_SLOTS:
        raise InputError(
            f"topk_ids {list(topk_ids.shape)} with block_m={block_m} makes {capacity} slots; at "
            f"most {_MOST_SLOTS} can be counted in 32 bits: align fewer tokens at a time, or with "
            f"a smaller block_m"
        )
    return capacity


def _launch(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_m: int,
    expert_map: torch.Tensor | None,
    capacity: int,
) -> routing.Indexed:
    index = topk_ids.get_device()
    num_routes, num_blocks = topk_ids.numel(), -(-capacity // block_m)
    num_sms = devices.facts_of(index).num_sms
    num_counts = route.num_counts(num_routes, num_experts, num_sms)
    ids, experts, used, counts = (
        torch.empty(size, dtype=torch.int32, device=topk_ids.device)
        for size in (capacity, num_blocks, 1, num_counts)
    )
    routes = route.RouteIds(
        ids=topk_ids.data_ptr(),
        expert_map=0 if expert_map is None else expert_map.data_ptr(),
        wide_ids=int(topk_ids.dtype is torch.int64),
        wide_map=int(expert_map is not None and expert_map.dtype is torch.int64),
        num_routes=num_routes,
        num_ids=num_experts,
        num_experts=num_experts,
    )
    buffers = route.Buffers(
        offsets=0,
        routes=ids.data_ptr(),
        positions=0,
        block_experts=experts.data_ptr(),
        num_rows_padded=used.data_ptr(),
        block_m=block_m,
        capacity=capacity,
        num_blocks=num_blocks,
    )
    with torch.cuda.device(index):
        stream = launching.current_stream(index)
        route.launch(index, stream, routes, num_sms, counts.data_ptr(), buffers)
    return routing.Indexed(ids, experts, used, topk_ids.shape[1], block_m)
