"""Pack 4-bit expert weights into the layout of `layout.py`, and unpack them exactly.

Packing works in place of the result: some experts (or a part of one) at a time are rearranged
with whole-tensor operations on small buffers and written where they belong, so the peak is input +
output + at most a few hundred MiB, on the CPU as on a GPU. Names of checkpoint tensors are
`checkpoints.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch

from chord.arguments import check_readable, check_tensor, describe, truth, whole_number
from chord.errors import InputError, UnsupportedError
from chord.weights.layout import (
    CODE_BYTES,
    CODE_OFFSET,
    GROUP_SIZE,
    SCALE_LIMIT,
    STORED_SCALE_FACTORS,
    TILE_N,
    UNIT_K,
    UNIT_N,
    buffer_shape,
    reject_shape,
    unit_grid,
)
from chord.weights.packed import PackedExperts, check_packed, refuse_packed_memory

PER_CHANNEL = -1
SUPPORTED_GROUPS = (GROUP_SIZE, 64, 128)
PLAIN_ORDER = (None, False, "", "none", "static", "weight")
SUPPORTED_FORMAT = (
    "Chord packs symmetric 4-bit weights in groups of 32, 64 or 128 along K, or with one scale a "
    "row, in plain order"
)

# Packed bytes that are rearranged at once. Temporaries take about three times as much; a larger
# chunk leaves the CPU's caches, a smaller one leaves a GPU idle between launches.
_CHUNK_BYTES = {"cpu": 8 << 20, "cuda": 64 << 20}

_ALL_PADDING = -0x77777778  # 0x88888888: eight codes 8


def pack_experts(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    group_size: int | None = None,
    interleave_gate_up: bool = False,
    out: PackedExperts | None = None,
    num_bits: int = 4,
    actorder: str | bool | None = None,
    weight_zero_point: torch.Tensor | None = None,
    weight_g_idx: torch.Tensor | None = None,
) -> PackedExperts:
    """Pack the weights of E experts, in checkpoint form, for Chord's kernels.

    The value of a weight is `(code - 8) * scale`, code 0..15.

    Args:
        weight: either int32, [E, N, K/8], the compressed-tensors form `weight_packed` (element j
            of a row in bits 4*(j mod 8) of word j div 8), or uint8, [E, N, K], one code each.
            CPU or CUDA, any strides. E is 1 to 1024; a kernel takes at most 512 experts in a call,
            so larger stacks run by parts (`PackedExperts.expert_range`).
        weight_scale: bf16, [E, N, K/group_size], or [E, N, 1] with group_size=-1, on the same
            device. Each must be finite and below 256 in magnitude. fp16 and fp32 scales are
            rounded to bf16, with a warning that says so.
        group_size: values along K that share a scale: 32 (the default), 64, 128, or -1 (or K) for
            one scale a row. Never guessed from a shape: a scale tensor with another number of
            columns is refused.
        interleave_gate_up: rows 0..N/2-1 are gate, the rest up features; pack them by eights so
            that SwiGLU can be fused. Changes nothing that is visible outside. N % 16 must be 0.
        out: write into this PackedExperts of the same shape, keeping its addresses.
        num_bits: the checkpoint's statement; only 4 is accepted.
        actorder: the checkpoint's statement; "static" and "weight" mean plain order, others are
            refused.
        weight_zero_point: refused unless None.
        weight_g_idx: integer, [..., K], the group of each column; accepted if it is the plain
            order (column // group_size) for every row, refused otherwise.

    Returns:
        PackedExperts on the device of `weight`; `out` itself if it was given.

    Raises:
        InputError: tensors that do not fit together; nothing has been written.
        UnsupportedError: a format or shape that Chord does not do; nothing has been written.

    Example:
        >>> import torch, chord
        >>> words = torch.zeros(8, 512, 256 // 8, dtype=torch.int32)
        >>> scales = torch.full((8, 512, 256 // 32), 0.01, dtype=torch.bfloat16)
        >>> chord.pack_experts(words, scales)
        PackedExperts(E=8, n=512, k=256, 0.6 MiB on cpu)
    """
    for name, tensor in (("weight", weight), ("weight_scale", weight_scale)):
        check_tensor(name, tensor)
        check_readable(name, tensor)
        refuse_packed_memory(name, tensor)
    _refuse_format(num_bits, actorder, weight_zero_point)
    num_experts, n, k = _checkpoint_shape(weight)
    group_size = _check_group_size(group_size, k)
    _check_scale_shape(weight, weight_scale, n, k, group_size)
    if weight_g_idx is not None:
        _check_plain_order(weight_g_idx, k, group_size)
    interleave_gate_up = truth("interleave_gate_up", interleave_gate_up)
    if interleave_gate_up and n % TILE_N:
        raise UnsupportedError(
            f"interleave_gate_up with N={n}: gate and up need a multiple of 8 features each, N a "
            f"multiple of {TILE_N}; pack without interleave_gate_up"
        )
    if out is not None:
        _check_out(out, weight, n, k, interleave_gate_up)
    _check_scale_values(weight_scale)
    if weight.dtype == torch.uint8:
        _check_code_values(weight)
    if weight_scale.dtype != torch.bfloat16:
        warnings.warn(
            f"weight_scale is {weight_scale.dtype}; Chord rounds the scales to torch.bfloat16",
            stacklevel=2,
        )

    if out is None:
        shape = buffer_shape(num_experts, n, k)
        data = torch.empty(shape, dtype=torch.uint8, device=weight.device)
        out = PackedExperts(data, n=n, k=k, gate_up_interleaved=interleave_gate_up)
    for experts, stripes in _chunks(num_experts, n, k, weight.device):
        target = out.data[experts, stripes]
        _write_codes(_word_tiles(weight, experts, stripes, k, interleave_gate_up), target)
        _write_scales(_scale_tiles(weight_scale, experts, stripes, k, interleave_gate_up), target)
    return out


def unpack(experts: PackedExperts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales in the checkpoint's order, the exact inverse of `pack_experts`.

    Args:
        experts: PackedExperts, [E, N, K] inside, any device.

    Returns:
        codes: uint8, [E, N, K], 0..15; the value of a weight is (code - 8) * scale.
        scales: bf16, [E, N, K/32]; scales of larger groups come back repeated.
    """
    check_packed("experts", experts)
    check_readable("experts.data", experts.data)
    num_experts, n, k = experts.num_experts, experts.n, experts.k
    device, interleaved = experts.device, experts.gate_up_interleaved
    codes = torch.empty(num_experts, n, k, dtype=torch.uint8, device=device)
    scales = torch.empty(num_experts, n, k // GROUP_SIZE, dtype=torch.bfloat16, device=device)
    for chunk, stripes in _chunks(num_experts, n, k, device):
        units = experts.data[chunk, stripes]
        _scatter_tiles(_read_codes(units), codes, chunk, stripes, interleaved)
        _scatter_tiles(_read_scales(units), scales, chunk, stripes, interleaved)
    return codes, scales


# Rearrange one chunk. Shapes: c experts, u units along N, v units along K.


def _write_codes(words: torch.Tensor, target: torch.Tensor) -> None:
    """Write checkpoint words, int32 [c, 4u, 2, 8, 8v], into units, uint8 [c, u, v, 2304].

    A checkpoint word holds columns 0-7 of a row, the layout's word two columns of two rows, eight
    apart each. All steps are bit operations on whole words: torch moves single bytes on the CPU
    at a fifth of this speed (2 cores: 14 MiB in 19 ms; a byte-wise permuted copy takes 89 ms).
    """
    low_nibbles, high_nibbles = 0x0F0F0F0F, ~0x0F0F0F0F
    row_g, row_g8 = words[:, :, 0], words[:, :, 1]
    even = row_g8 & low_nibbles
    even <<= 4
    even |= row_g & low_nibbles
    odd = row_g >> 4
    odd &= low_nibbles
    odd |= row_g8 & high_nibbles
    # Byte t of `even` now holds column 2t of both rows, byte t of `odd` column 2t+1. Of each k16
    # step there are two words of either, and lane t wants byte t of all four: transpose bytes.
    even_02, even_13 = _exchange(even[..., 0::2], even[..., 1::2], 0x00FF00FF, 8)
    odd_02, odd_13 = _exchange(odd[..., 0::2], odd[..., 1::2], 0x00FF00FF, 8)
    lane_0, lane_2 = _exchange(even_02, odd_02, 0x0000FFFF, 16)
    lane_1, lane_3 = _exchange(even_13, odd_13, 0x0000FFFF, 16)
    units_n, units_k = target.shape[1:3]
    lanes = target.view(torch.int32)[..., : CODE_BYTES // 4].unflatten(-1, (4, 8, 4, 4))
    for t, lane in enumerate((lane_0, lane_1, lane_2, lane_3)):
        steps = lane.unflatten(-1, (units_k, 4)).unflatten(1, (units_n, 4))
        lanes[..., t, :].copy_(steps.permute(0, 1, 4, 2, 3, 5))


def _exchange(
    a: torch.Tensor, b: torch.Tensor, low: int, shift: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Swap the high parts of a (int32) with the low parts of b (int32), as a 2x2 transpose."""
    first = b & low
    first <<= shift
    first |= a & low
    second = a >> shift
    second &= low
    second |= b & ~low
    return first, second


def _read_codes(units: torch.Tensor) -> torch.Tensor:
    """Read the codes of units, uint8 [c, u, v, 2304], as tiles, uint8 [c, 4u, 2, 8, 64v]."""
    count, units_n, units_k = units.shape[:3]
    # [c, u, v, tile, g, t, step, odd, high column]: a byte is row g (low) and row g+8 (high).
    pairs = units[..., :CODE_BYTES].unflatten(-1, (4, 8, 4, 4, 2, 2))
    pairs = pairs.permute(0, 1, 3, 4, 2, 6, 8, 5, 7)
    pairs = pairs.reshape(count, units_n * 4, 8, units_k * UNIT_K)
    return torch.stack((pairs & 15, pairs >> 4), dim=2)


def _write_scales(scales: torch.Tensor, target: torch.Tensor) -> None:
    """Write scales, bf16 [c, 4u, 2, 8, 2v], into units, uint8 [c, u, v, 2304]."""
    units_n, units_k = target.shape[1:3]
    slots = target.view(torch.bfloat16)[..., CODE_BYTES // 2 :].unflatten(-1, (4, 8, 2, 2))
    source = scales.unflatten(-1, (units_k, 2)).unflatten(1, (units_n, 4))
    # [c, u, v, tile, g, group, high row]
    slots.copy_(source.permute(0, 1, 5, 2, 4, 6, 3))
    for high_row, factor in enumerate(STORED_SCALE_FACTORS):
        slots[..., high_row] *= factor


def _read_scales(units: torch.Tensor) -> torch.Tensor:
    """Read the scales of units, uint8 [c, u, v, 2304], as tiles, bf16 [c, 4u, 2, 8, 2v]."""
    slots = units.view(torch.bfloat16)[..., CODE_BYTES // 2 :].unflatten(-1, (4, 8, 2, 2))
    rows = [slots[..., high_row] / factor for high_row, factor in enumerate(STORED_SCALE_FACTORS)]
    # [c, u, v, tile, g, group, high row] -> [c, u, tile, high row, g, v, group]
    return torch.stack(rows, dim=-1).permute(0, 1, 3, 6, 4, 2, 5).flatten(5, 6).flatten(1, 2)


# Choose chunks, and bring rows of a checkpoint tensor into tiles and back.


def _chunks(
    num_experts: int, n: int, k: int, device: torch.device
) -> Iterator[tuple[slice, slice]]:
    """Yield (experts, stripes of 64 features): whole experts if they are small, else parts."""
    units_n, _ = unit_grid(n, k)
    budget = _CHUNK_BYTES.get(device.type, _CHUNK_BYTES["cpu"])
    stripe_bytes = UNIT_N * k // 2
    stripes_at_once = min(units_n, max(1, budget // stripe_bytes))
    experts_at_once = max(1, budget // (stripe_bytes * units_n))
    for expert in range(0, num_experts, experts_at_once):
        experts = slice(expert, min(expert + experts_at_once, num_experts))
        for stripe in range(0, units_n, stripes_at_once):
            yield experts, slice(stripe, min(stripe + stripes_at_once, units_n))


def _tile_rows(
    source: torch.Tensor, experts: slice, stripes: slice, interleaved: bool
) -> torch.Tensor:
    """View the existing rows of some stripes of source [E, N, X], in packed order.

    Returns [c, rows / 16, 2, 8, X] if interleaved (a tile is then 8 gate and 8 up rows), else
    [c, rows, X].
    """
    if interleaved:
        tiles = source[experts].unflatten(1, (2, -1, 8)).transpose(1, 2)
        return tiles[:, stripes.start * 4 : stripes.stop * 4]
    return source[experts, stripes.start * UNIT_N : stripes.stop * UNIT_N]


def _gather_tiles(
    source: torch.Tensor,
    experts: slice,
    stripes: slice,
    interleaved: bool,
    width: int,
    padding: int,
) -> torch.Tensor:
    """Return stripes of source [E, N, X] as [c, 4u, 2, 8, width], padded where N or X end early."""
    rows = _tile_rows(source, experts, stripes, interleaved)
    tiles = 4 * (stripes.stop - stripes.start)
    count, columns = rows.shape[0], rows.shape[-1]
    is_whole = rows.shape[1] == (tiles if interleaved else tiles * TILE_N) and columns == width
    if is_whole:
        return rows if interleaved else rows.unflatten(1, (tiles, 2, 8))
    padded = source.new_full((count, tiles, 2, 8, width), padding)
    place = padded if interleaved else padded.flatten(1, 3)
    place[:, : rows.shape[1], ..., :columns] = rows
    return padded


def _scatter_tiles(
    tiles: torch.Tensor, result: torch.Tensor, experts: slice, stripes: slice, interleaved: bool
) -> None:
    """Copy tiles [c, 4u, 2, 8, width] into result [E, N, X], dropping the padding."""
    rows = _tile_rows(result, experts, stripes, interleaved)
    source = tiles if interleaved else tiles.flatten(1, 3)
    rows.copy_(source[:, : rows.shape[1], ..., : rows.shape[-1]])


def _word_tiles(
    weight: torch.Tensor, experts: slice, stripes: slice, k: int, interleaved: bool
) -> torch.Tensor:
    """Return checkpoint words of a chunk, int32 [c, 4u, 2, 8, 8v], from either form of weight."""
    columns = unit_grid(UNIT_N, k)[1] * UNIT_K
    if weight.dtype == torch.int32:
        return _gather_tiles(weight, experts, stripes, interleaved, columns // 8, _ALL_PADDING)
    codes = _gather_tiles(weight, experts, stripes, interleaved, columns, CODE_OFFSET)
    pairs = codes[..., 1::2] << 4
    pairs |= codes[..., 0::2]
    return pairs.contiguous().view(torch.int32)


def _scale_tiles(
    scale: torch.Tensor, experts: slice, stripes: slice, k: int, interleaved: bool
) -> torch.Tensor:
    """Return scales of a chunk, one per 32 values, bf16 [c, 4u, 2, 8, 2v]."""
    tiles = _gather_tiles(scale, experts, stripes, interleaved, scale.shape[-1], 0)
    tiles = tiles.to(torch.bfloat16)
    groups = k // GROUP_SIZE
    if scale.shape[-1] != groups:
        tiles = tiles.repeat_interleave(groups // scale.shape[-1], dim=-1)
    return torch.nn.functional.pad(tiles, (0, groups % 2))


# Refuse what is not W4A16 in the supported form. All of it runs before the first write.


def _refuse_format(
    num_bits: int, actorder: str | bool | None, zero_point: torch.Tensor | None
) -> None:
    if whole_number("num_bits", num_bits) != 4:
        raise UnsupportedError(f"num_bits={num_bits}: only 4 is supported; {SUPPORTED_FORMAT}")
    if not isinstance(actorder, str | bool | None) or actorder not in PLAIN_ORDER:
        raise UnsupportedError(
            f"actorder={actorder!r} reorders the columns of a row (act-order groups); "
            f"{SUPPORTED_FORMAT}; actorder static or weight is plain order"
        )
    if zero_point is not None:
        raise UnsupportedError(
            f"weight_zero_point is {describe(zero_point)}: the checkpoint is asymmetric; "
            f"{SUPPORTED_FORMAT}"
        )


def _checkpoint_shape(weight: torch.Tensor) -> tuple[int, int, int]:
    """Return (E, N, K) of a weight in either accepted form."""
    if weight.dtype not in (torch.int32, torch.uint8) or weight.dim() != 3:
        hint = "; add the expert dimension with unsqueeze(0)" if weight.dim() == 2 else ""
        raise InputError(
            f"weight is {weight.dtype} {list(weight.shape)}; pack_experts takes int32 [E, N, K/8] "
            f"(compressed-tensors weight_packed) or uint8 codes [E, N, K]{hint}"
        )
    num_experts, n, columns = weight.shape
    k = columns * 8 if weight.dtype == torch.int32 else columns
    reason = reject_shape(num_experts, n, k)
    if reason is not None:
        raise UnsupportedError(f"weight of shape {list(weight.shape)} ({weight.dtype}): {reason}")
    return num_experts, n, k


def _check_group_size(group_size: int | None, k: int) -> int:
    """Return the number of values that share a scale, K for one scale a row."""
    if group_size is None:
        return GROUP_SIZE
    group_size = whole_number("group_size", group_size)
    if group_size in (PER_CHANNEL, k):
        return k
    if group_size not in SUPPORTED_GROUPS:
        raise UnsupportedError(f"group_size={group_size} is not supported; {SUPPORTED_FORMAT}")
    if k % group_size:
        raise UnsupportedError(
            f"K={k} is {k / group_size:g} groups of group_size={group_size}; K must be a whole "
            f"number of groups"
        )
    return group_size


def _check_scale_shape(
    weight: torch.Tensor, scale: torch.Tensor, n: int, k: int, group_size: int
) -> None:
    if scale.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise UnsupportedError(
            f"weight_scale is {scale.dtype}; scales must be bfloat16 (float16 and float32 are "
            f"rounded to it)"
        )
    wanted = (weight.shape[0], n, k // group_size)
    if scale.shape != wanted:
        raise InputError(
            f"weight_scale has shape {list(scale.shape)}; weight {list(weight.shape)} "
            f"({weight.dtype}, so K={k}) with group_size={group_size} needs {list(wanted)}. "
            f"group_size is never guessed: pass it if it is not {GROUP_SIZE}, and check how "
            f"the tensors were sliced"
        )
    if scale.device != weight.device:
        raise InputError(
            f"weight_scale is on {scale.device}, weight on {weight.device}; move one of them"
        )


def _check_plain_order(g_idx: torch.Tensor, k: int, group_size: int) -> None:
    check_tensor("weight_g_idx", g_idx)
    check_readable("weight_g_idx", g_idx)
    if g_idx.dim() == 0 or g_idx.shape[-1] != k:
        raise InputError(
            f"weight_g_idx has shape {list(g_idx.shape)}; its last dimension must be K={k}"
        )
    plain = torch.arange(k, device=g_idx.device) // group_size
    if not bool((g_idx == plain).all()):
        raise UnsupportedError(
            f"weight_g_idx of shape {list(g_idx.shape)} is not column // {group_size}: act-order "
            f"groups; {SUPPORTED_FORMAT}"
        )


def _check_out(out: PackedExperts, weight: torch.Tensor, n: int, k: int, interleaved: bool) -> None:
    check_packed("out", out)
    seen = (out.num_experts, out.n, out.k, out.gate_up_interleaved)
    wanted = (weight.shape[0], n, k, interleaved)
    if seen != wanted:
        raise InputError(
            f"out holds (E, N, K, gate_up_interleaved) = {seen}, the weight needs {wanted}; "
            f"pass an out of the same kind, or none"
        )
    if out.device != weight.device:
        raise InputError(f"out is on {out.device}, weight on {weight.device}; move one of them")


def _check_scale_values(scale: torch.Tensor) -> None:
    """Refuse scales that are not finite or too large, as they will be stored: in bf16."""
    extremes = []
    per_expert = max(1, scale[0].numel() * 4)
    step = max(1, (64 << 20) // per_expert)
    for part in scale.split(step):
        low, high = torch.aminmax(part.to(torch.bfloat16))
        extremes.append(torch.maximum(-low, high))  # NaN survives both
    largest = torch.stack(extremes).amax().item()
    if largest < SCALE_LIMIT:
        return
    for expert, rows in enumerate(scale):
        bad = (~(rows.to(torch.bfloat16).abs() < SCALE_LIMIT)).nonzero()
        if len(bad):
            row, group = bad[0].tolist()
            raise UnsupportedError(
                f"weight_scale[{expert}, {row}, {group}] = {rows[row, group].item()} (in bf16 "
                f"{rows[row, group].bfloat16().item()}); scales must be finite and below "
                f"{SCALE_LIMIT:g} in magnitude"
            )


def _check_code_values(codes: torch.Tensor) -> None:
    largest = codes.amax().item()
    if largest > 15:
        raise InputError(
            f"weight holds the code {largest}; uint8 weights are unpacked codes 0 to 15, one a byte"
        )
