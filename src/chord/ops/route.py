"""Sorting routes by expert on a GPU: how many blocks, and the kernels they are launched with."""

from __future__ import annotations

from typing import NamedTuple

from chord.jit.fixed import FixedLauncher, fixed_launcher
from chord.jit.launch import NOTHING_UNCLEARED, Uncleared
from chord.jit.params import COUNT, ROUTE, ROUTE_THREADS
from chord.plan.config import NO_SUM

_ALONE = 1024  # routes that one block places as fast as two kernels would
_SHARE = 512  # routes of a block beyond, while there are multiprocessors: 32 a warp
_CLEARED_WORDS = 16 * ROUTE_THREADS  # of scratch that a block clears, while there are others


class RouteIds(NamedTuple):
    """What the kernels are told of the routes, in the order of RouteIds in route_ids.cuh.

    Attributes:
        ids: Address of the ids.
        expert_map: Address of the map, 0 for none.
        wide_ids: Whether ids are int64.
        wide_map: Whether the map is int64.
        num_routes: Routes.
        num_ids: Ids are 0 to num_ids - 1; others are nobody's.
        num_experts: Local experts E.
    """

    ids: int
    expert_map: int
    wide_ids: int
    wide_map: int
    num_routes: int
    num_ids: int
    num_experts: int


class Buffers(NamedTuple):
    """What the sort writes, in the order of RouteParams in route.cuh.

    Attributes:
        offsets: Address of the first position of each expert, int32 [E + 1], 0 if not wanted.
        routes: Address of the route of each position, int32 [capacity].
        positions: Address of the position of each route, int32 [R], 0 if not wanted.
        block_experts: Address of the expert of each block, int32 [num_blocks], 0 if not wanted.
        num_rows_padded: Address of the number of positions in use, 0 if not wanted.
        block_m: What the first position of an expert is a multiple of.
        capacity: Positions that there is room for.
        num_blocks: Blocks that there is room for.
    """

    offsets: int
    routes: int
    positions: int
    block_experts: int
    num_rows_padded: int
    block_m: int
    capacity: int
    num_blocks: int


def grid(num_routes: int, num_sms: int) -> tuple[int, int]:
    """Return blocks of the grid, and the routes that each of them places."""
    if num_routes <= _ALONE:
        return 1, num_routes
    blocks = min(-(-num_routes // _SHARE), num_sms)
    return blocks, -(-num_routes // blocks)


def num_counts(num_routes: int, num_experts: int, num_sms: int) -> int:
    """Return the words that the blocks leave for each other, 0 for one block alone."""
    blocks, _ = grid(num_routes, num_sms)
    return blocks * num_experts if blocks > 1 else 0


def load(index: int) -> tuple[FixedLauncher, FixedLauncher]:
    """Return both kernels, whichever a number of routes takes: they are there before a capture.

    Raises:
        CaptureError, CompileError: As `fixed_launcher`.
    """
    return fixed_launcher(COUNT, index), fixed_launcher(ROUTE, index)


def launch(
    index: int,
    stream: int,
    routes: RouteIds,
    num_sms: int,
    counts: int,
    buffers: Buffers,
    uncleared: Uncleared = NOTHING_UNCLEARED,
) -> None:
    """Launch the sort on `stream` of device `index`, the current one.

    Scratch is cleared by blocks that have no routes, and so takes no time of its own.

    Args:
        index: The device.
        stream: Handle of the stream.
        routes: The routes.
        num_sms: Multiprocessors.
        counts: Address of `num_counts` words of scratch; any where that is 0.
        buffers: Where the result goes.
        uncleared: Scratch of the kernels behind the sort, for them to find it cleared.

    Raises:
        CaptureError, CompileError: As `load`.
    """
    count, route = load(index)
    blocks, share = grid(routes.num_routes, num_sms)
    if blocks > 1:
        count.launch(stream, blocks, (*routes, share, counts))
    clearing = min(-(-uncleared.words // _CLEARED_WORDS), max(num_sms - blocks, 1))
    values = (*routes, share, counts, *buffers, blocks, *uncleared, NO_SUM)
    route.launch(stream, blocks + clearing, values)
