"""The packed weight layout: constants and offset formulas, the one truth on the Python side.

`kernels/weight_layout.cuh` is the device half. This module computes with plain integers; the
torch code that fills a buffer is `pack.py`, and the tests hold it to the formulas here.

A unit is 64 features (rows of the weight, N) x 64 values along K:

    byte 0     codes   4 row tiles x 32 lanes x 4 k16 steps x one 32-bit word      2048 bytes
    byte 2048  scales  4 row tiles x 8 row pairs x 2 groups x 2 bf16                256 bytes

The units of one 64-feature stripe lie one after another along K, stripes follow along N, experts
outermost: `[E, ceil(N / 64), ceil(K / 64), 2304]` bytes.

Inside a row tile of 16 features, the word of `lane = 4 * g + t` at k16 step `s` holds what that
lane of `mma.m16n8k16` needs of the A operand, as eight 4-bit codes:

    bits      0-3     4-7     8-11    12-15   16-19   20-23   24-27   28-31
    row       g       g+8     g       g+8     g       g+8     g       g+8
    column    2t      2t      2t+8    2t+8    2t+1    2t+1    2t+9    2t+9

So fragment register j has its even column in nibble j of the low half-word and its odd column in
nibble j of the high half-word, and one shift and mask brings both to their places.

The scales of rows g and g+8 stand side by side, for the first group of 32 and then the second, and
are stored as what the kernels multiply the nibbles by: times 2^119 and times 2^115
(STORED_SCALE_FACTORS), which is exact in bf16.

With gate and up interleaved, row tile p holds gate features 8p..8p+7 as rows 0-7 and up features
8p..8p+7 as rows 8-15: registers j and j+1 of a lane are then gate and up of one feature, and
SwiGLU needs no exchange between threads.

Rows beyond N and columns beyond K hold code 8 (the value 0) and scale 0.
"""

from __future__ import annotations

LAYOUT = 2  # of these bytes; 1 had the scales as they are
GROUP_SIZE = 32  # values along K that share a stored scale
UNIT_N = 64
UNIT_K = 64
TILE_N = 16  # rows of the A operand of mma.m16n8k16
CODE_BYTES = 2048
SCALE_BYTES = 256
UNIT_BYTES = CODE_BYTES + SCALE_BYTES

CODE_OFFSET = 8  # value = (code - CODE_OFFSET) * scale
N_MULTIPLE = 8  # eight bf16 outputs fill the 16 bytes that one store instruction writes
K_MULTIPLE = GROUP_SIZE
MAX_N = (1 << 30) - N_MULTIPLE
MAX_EXPERTS = 1024  # of a buffer; the kernels' own limit is plan.legality's
# Of rows g and g + 8: their codes stand in bits 0-3 and 4-7 when the kernels take them for bf16
# patterns (docs/decisions/002-subnormal-dequantisation.md).
STORED_SCALE_FACTORS = (2.0**119, 2.0**115)
SCALE_LIMIT = 256.0  # 2^8 * 2^119 would overflow


def reject_shape(num_experts: int, n: int, k: int) -> str | None:
    """Say why the layout cannot hold `num_experts` weights of [n, k], or return None if it can."""
    if not 1 <= num_experts <= MAX_EXPERTS:
        return f"{num_experts} experts: a packed weight holds 1 to {MAX_EXPERTS}"
    if n > MAX_N:
        return (
            f"N={n} is more than {MAX_N} (a feature's offset in an output row is counted in 32 "
            f"bits); split the output features"
        )
    if n < 1 or n % N_MULTIPLE:
        return (
            f"N={n} is not a positive multiple of {N_MULTIPLE} (an output row is written in "
            f"segments of {N_MULTIPLE} bf16); pad the output features"
        )
    if k < 1 or k % K_MULTIPLE:
        return (
            f"K={k} is not a positive multiple of {K_MULTIPLE} (one scale covers {GROUP_SIZE} "
            f"values along K); a slice must end on a group boundary"
        )
    return None


def unit_grid(n: int, k: int) -> tuple[int, int]:
    """Number of units along N and along K of one expert's [n, k] weight."""
    return -(-n // UNIT_N), -(-k // UNIT_K)


def buffer_shape(num_experts: int, n: int, k: int) -> tuple[int, int, int, int]:
    """Shape of the uint8 buffer: [num_experts, units along N, units along K, UNIT_BYTES]."""
    return (num_experts, *unit_grid(n, k), UNIT_BYTES)


def packed_row(feature: int, n: int, interleaved: bool) -> int:
    """Row of the packed weight that holds a feature, counted in the checkpoint's order."""
    if not interleaved:
        return feature
    is_up, position = divmod(feature, n // 2)
    return position // 8 * TILE_N + is_up * 8 + position % 8


def unit_offset(expert: int, row: int, column: int, n: int, k: int) -> int:
    """Byte offset in the buffer of the unit that holds a packed row and a column."""
    units_n, units_k = unit_grid(n, k)
    return ((expert * units_n + row // UNIT_N) * units_k + column // UNIT_K) * UNIT_BYTES


def code_position(row: int, column: int) -> tuple[int, int]:
    """Byte offset of a code's little-endian 32-bit word in its unit, and the code's lowest bit."""
    tile, tile_row = row % UNIT_N // TILE_N, row % TILE_N
    high_row, g = divmod(tile_row, 8)
    step, step_column = column % UNIT_K // 16, column % 16
    high_column, pair_column = divmod(step_column, 8)
    t, odd = divmod(pair_column, 2)
    lane = 4 * g + t
    register = high_row + 2 * high_column
    return tile * 512 + lane * 16 + step * 4, 4 * register + 16 * odd


def scale_position(row: int, column: int) -> int:
    """Byte offset in the unit of the stored bf16 scale of a packed row and a column."""
    tile, tile_row = row % UNIT_N // TILE_N, row % TILE_N
    high_row, g = divmod(tile_row, 8)
    group = column % UNIT_K // GROUP_SIZE
    return CODE_BYTES + tile * 64 + g * 8 + group * 4 + high_row * 2
