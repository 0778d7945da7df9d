"""Sorting routes by expert on a GPU: how many blocks, and the kernels they are launched with."""

from __future__ import annotations

from dataclasses import dataclass

from chord.jit.fixed import fixed_launcher
from chord.jit.params import COUNT, ROUTE

KERNELS = (COUNT, ROUTE)
_ALONE = 1024  # routes that one block places as fast as two kernels would
_SHARE = 512  # routes of a block beyond, while there are multiprocessors: 32 a warp


@dataclass(frozen=True)
class RouteIds:
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


def launch(
    index: int,
    stream: int,
    routes: RouteIds,
    num_sms: int,
    counts: int,
    outputs: tuple[int, int, int, int, int],
    padding: tuple[int, int, int],
) -> None:
    """Launch the sort on `stream` of device `index`, the current one.

    Args:
        index: The device.
        stream: Handle of the stream.
        routes: The routes.
        num_sms: Multiprocessors.
        counts: Address of `num_counts` words of scratch; any where that is 0.
        outputs: Addresses of offsets, routes, positions, block_experts and num_rows_padded (each 0
            where it is not wanted).
        padding: block_m, and the room in `routes` and `block_experts`.

    Raises:
        CaptureError, CompileError: As `fixed_launcher`.
    """
    # Both are there before a capture, whichever its number of routes takes.
    count, route = (fixed_launcher(kernel, index) for kernel in KERNELS)
    blocks, share = grid(routes.num_routes, num_sms)
    # fmt: off
    who = (
        routes.ids, routes.expert_map, routes.wide_ids, routes.wide_map,
        routes.num_routes, routes.num_ids, routes.num_experts, share,
    )
    # fmt: on
    if blocks > 1:
        count.launch(stream, blocks, (*who, counts))
    route.launch(stream, blocks, (*who, counts, *outputs, *padding, 0))
