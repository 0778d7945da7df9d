"""Rows grouped by expert, with the whole buffer that has to come out; for two test files.

A case's rows of nobody hold NaN in x and keep what they held in the output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import cases
from chord.plan.config import Config, shipped_configs
from chord.weights import PackedExperts

DEVICE = "cuda"
E = 8
CONFIGS = shipped_configs("sm_90a")
# Tails of N and K, runs of tiles with a short K, more tiles of N than blocks, a long K.
SHAPES = ((72, 160), (200, 352), (1856, 2688), (2880, 2880), (7168, 64), (512, 7168))
# Ragged; empty at both ends and between; full tiles of several configurations; one has all.
COUNTS = (
    (0, 5, 0, 17, 1, 64, 33, 0),
    (1, 1, 1, 1, 1, 1, 1, 1),
    (130, 0, 176, 177, 16, 128, 9, 200),
    (0, 0, 0, 400, 0, 0, 0, 0),
    (0, 0, 0, 0, 0, 0, 0, 0),
)

Call = Callable[..., torch.Tensor]  # chord.contiguous or chord.masked

each_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.label())
each_choice = pytest.mark.parametrize(
    "config", (None, *CONFIGS), ids=lambda config: config.label() if config else "planned"
)


@dataclass(frozen=True, eq=False)
class Case:
    """One launch: `expected` is the whole buffer, [rows + 2, N], with its guard rows."""

    name: str
    x: torch.Tensor
    where: dict[str, Any]
    expected: torch.Tensor


@dataclass(frozen=True, eq=False)
class Layer:
    """Weights of E experts, whole and packed; made once."""

    weights: cases.Weights
    packed: PackedExperts


@functools.lru_cache(maxsize=4)
def layer(n: int, k: int, *, num_experts: int = E, kind: cases.Kind = "exact") -> Layer:
    """Make weights; EXACT scales are 1 to 16, so that a wrong group shows."""
    weights = cases.random_weights(
        num_experts, n, k, kind=kind, scale_powers=5 if kind == "exact" else 1, device=DEVICE
    )
    return Layer(weights, weights.pack())


def rows_of(given: Layer, owners: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return what has to come out for rows with these owners: fp32, [rows, N], poison for -1."""
    rows = cases.expected_rows(x, given.weights, owners)
    return torch.where((owners >= 0).unsqueeze(1), rows, cases.POISON)


def make_case(
    name: str, given: Layer, owners: torch.Tensor, slots: Sequence[int], where: dict[str, Any]
) -> Case:
    """Make a case with EXACT x.

    Args:
        name: For messages.
        given: The weights.
        owners: int32, [rows], expert of each row or -1.
        slots: Leading dimensions of x: (rows,) or (E, max_m).
        where: Arguments that describe the rows.
    """
    _, n, k = given.weights.shape
    x = cases.exact_x(len(owners), k, seed=len(owners), device=DEVICE)
    expected, inside = cases.guarded(len(owners), n, device=DEVICE)
    inside.copy_(rows_of(given, owners, x))
    x[owners < 0] = float("nan")
    return Case(name, x.view(*slots, k), where, expected)


def launch(
    call: Call, case: Case, packed: PackedExperts, config: Config | None, **options: Any
) -> torch.Tensor:
    """Run a case into a poisoned buffer with guard rows; return the buffer."""
    buffer = torch.full_like(case.expected, cases.POISON)
    out = buffer[1:-1].view(*case.x.shape[:-1], packed.n)
    call(case.x, packed, **case.where, out=out, config=config, **options)
    return buffer


def check_exact(
    call: Call,
    packed: PackedExperts,
    todo: Sequence[Case],
    config: Config | None,
    *,
    repeats: int = 1,
    **options: Any,
) -> None:
    """Launch every case `repeats` times and ask the device once whether anything differed."""
    wrong = []
    for case in todo:
        for _ in range(repeats):
            buffer = launch(call, case, packed, config, **options)
            wrong.append((buffer != case.expected).sum())  # NaN counts: nothing expected is NaN
    counts = torch.stack(wrong).view(len(todo), repeats).sum(1).tolist()
    failed = {case.name: count for case, count in zip(todo, counts, strict=True) if count}
    assert not failed, f"wrong values (guard rows included): {failed}"


def check_bits(call: Call, case: Case, packed: PackedExperts, config: Config | None) -> None:
    """Launch a case 20 times, then 5 times from a graph: always the same bits."""

    def bits(buffer: torch.Tensor) -> torch.Tensor:
        return buffer.view(torch.int16)

    first = bits(launch(call, case, packed, config, validate=False))
    differing = []
    for _ in range(20):
        again = bits(launch(call, case, packed, config, validate=False))
        differing.append((again != first).sum())
    buffer = torch.full_like(case.expected, cases.POISON)
    out = buffer[1:-1].view(*case.x.shape[:-1], packed.n)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(case.x, packed, **case.where, out=out, config=config, validate=False)
    for _ in range(5):
        buffer.fill_(cases.POISON)
        graph.replay()
        differing.append((bits(buffer) != first).sum())
    assert not any(torch.stack(differing).tolist())
