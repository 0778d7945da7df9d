"""Rows grouped by expert, with the whole buffer that has to come out; for two test files.

A case's rows of nobody hold NaN or an infinity in x and keep what they held in the output.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import cases
import tolerance
from chord.errors import CaptureError
from chord.jit import launch as launching
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

# Field case 4: 1, 17, 64 and 130 tokens with two experts each, of random routing.
TOKENS_COUNTS = tuple(
    tuple(cases.topk_ids(tokens, 2, E, seed=tokens).flatten().bincount(minlength=E).tolist())
    for tokens in cases.RAGGED_TOKENS
)
# Field case 5: less than a tile for each expert, one with all its room in use, one with none.
SMALL_ROOMS = (1, 4, 8, 17, 32, 63)

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
    poison_rows(x, owners)
    return Case(name, x.view(*slots, k), where, expected)


def poison_rows(x: torch.Tensor, owners: torch.Tensor) -> None:
    """Fill rows of nobody with NaN, inf and -inf in turn."""
    nobody = (owners < 0).nonzero().flatten()
    for first, value in enumerate(("nan", "inf", "-inf")):
        x[nobody[first::3]] = float(value)


@contextlib.contextmanager
def no_kernel_loaded() -> Iterator[None]:
    """Forget loaded kernels inside, as a fresh process would."""
    kept, prepared = dict(launching._loaded), dict(launching._thread.launchers)
    launching._loaded.clear()
    launching._thread.launchers.clear()
    try:
        yield
    finally:
        launching._loaded.update(kept)
        launching._thread.launchers.update(prepared)


def check_cold_capture(call: Call, case: Case, packed: PackedExperts) -> None:
    """Field case 9 (a): a first call inside capture is refused in words, a warm one captured."""
    torch.cuda.synchronize()
    with no_kernel_loaded():
        buffer = torch.full_like(case.expected, cases.POISON)
        out = buffer[1:-1].view(*case.x.shape[:-1], packed.n)

        def step() -> None:
            call(case.x, packed, **case.where, out=out, validate=False)

        graph = torch.cuda.CUDAGraph()
        with pytest.raises(CaptureError, match="warm up first"), torch.cuda.graph(graph):
            step()
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        buffer.fill_(cases.POISON)
        graph.replay()
        tolerance.assert_exact(buffer, case.expected)


def check_bigger_batch(
    call: Call, given: Layer, small: Case, big: tuple[torch.Tensor, dict[str, Any], torch.Tensor]
) -> None:
    """Field case 9 (c): a graph stays right after a bigger eager call and other allocations.

    Args:
        call: What to test.
        given: The weights.
        small: What the graph holds.
        big: x of the bigger call, the arguments that describe its rows, and their owners; its
            output is checked at 200 rows.
    """
    buffer = torch.full_like(small.expected, cases.POISON)
    out = buffer[1:-1].view(*small.x.shape[:-1], given.packed.n)
    call(small.x, given.packed, **small.where, out=out, validate=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(small.x, given.packed, **small.where, out=out, validate=False)
    x, where, owners = big
    many = call(x, given.packed, **where, validate=False)
    named = torch.linspace(0, len(owners) - 1, 200, device=DEVICE).long()
    want = rows_of(given, owners[named], x.view(-1, x.shape[-1])[named])
    want[owners[named] < 0] = 0  # the call's own output begins as zeros
    tolerance.assert_exact(many.view(len(owners), -1)[named], want.bfloat16())
    kept = [torch.randn(1 << 20, device=DEVICE) for _ in range(8)]
    for _ in range(10):
        buffer.fill_(cases.POISON)
        graph.replay()
        tolerance.assert_exact(buffer, small.expected)
    again = call(x, given.packed, **where, validate=False)
    assert torch.equal(many, again)
    assert all(bool(one.isfinite().all()) for one in kept)


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
