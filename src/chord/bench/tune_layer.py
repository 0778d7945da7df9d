"""Choose both GEMMs of the whole layer where they run: whole layers are timed, not kernels.

What is fastest alone need not be in a layer: rows of down lie sorted there, weights are asked for
while gate_up drains, and blocks of the top-k sum fit beside decode's blocks but not beside
prefill's.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

import chord
from chord.bench import layer as layers
from chord.bench import tune
from chord.bench.operands import random_checkpoint
from chord.bench.scenarios import Case, Loads, Projection, Series, Suite, cases, layer
from chord.device import DeviceFacts, facts_of
from chord.ops import layer as operands
from chord.plan import select
from chord.plan.config import Config
from chord.plan.problem import GemmProblem
from chord.timing import Call, GraphCall

Pair = tuple[Config, Config]
"""Configurations of gate_up and down."""

_TOKENS = {
    48: (*tune.SMALL, 192, 256, 384, 512, 768, 1024, 2048),
    384: tune.TOKENS[384],
}
# Of each GEMM so many go into the second round, where each meets each.
_FINALISTS = 3


@dataclass(frozen=True)
class Task:
    """One layer and the token counts to measure.

    Attributes:
        num_experts: Experts on one rank.
        projections: gate_up and down.
        series: The counts.
    """

    num_experts: int
    projections: tuple[Projection, Projection]
    series: Series

    def cases(self, loads: Loads = "random") -> list[Case]:
        """Return a case for each count, smallest first, routed as `loads` says."""
        series = dataclasses.replace(self.series, loads=loads)
        suite = Suite("tune", self.num_experts, self.projections, (series,))
        return list(cases(suite, self.projections[0]))

    def num_shown(self) -> int:
        """Return how often `measure` calls `on_row`."""
        return 2 * len(self.cases())

    def measure(self, on_row: Callable[[tune.Measured], None]) -> list[dict[str, object]]:
        """Measure on the current GPU and return the profile's rows, gate_up's first.

        Args:
            on_row: Called twice for each count, with what was measured for either GEMM; its
                microseconds are those of the layer.

        Raises:
            UnsupportedError: There is no GPU.
        """
        bench = _Bench(self)
        measured: tuple[list[tune.Measured], list[tune.Measured]] = ([], [])
        for case, skewed in zip(self.cases(), self.cases("third"), strict=True):
            for kept, row in zip(measured, bench.search(case, skewed), strict=True):
                kept.append(row)
                on_row(row)
        return [row for kept in measured for row in tune.profile_rows(kept)]


def tasks() -> list[Task]:
    """Return Kimi K2's layers, whole experts and a slice of all."""
    return [
        Task(experts, layer(7168, 2048, tp=8 if experts == 384 else 1), Series(tokens))
        for experts, tokens in _TOKENS.items()
    ]


class _Bench:
    """Weights of a layer, packed."""

    def __init__(self, task: Task) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        gate_up, down = (
            random_checkpoint(task.num_experts, one.n, one.k, self._device, seed=seed)
            for seed, one in enumerate(task.projections)
        )
        self._layer = operands.Layer(layers.pack(gate_up, interleave=True), layers.pack(down))

    def search(self, case: Case, skewed: Case) -> tuple[tune.Measured, tune.Measured]:
        """Measure the candidates for both GEMMs of one case."""
        facts = facts_of(self._device.index)
        problems = operands.problems(self._layer, case.num_routes, self._layer.w13.num_experts)
        gate_up, down = (select.decide(problem, facts).config for problem in problems)
        # First each candidate of one GEMM beside today's choice for the other.
        calls = self._calls(case, around((gate_up, down), problems, facts))
        first = tune.medians(calls, tune.REPEAT_MS)
        times = tune.fastest_first(self._calls(case, finalists(first)))
        scores = tune.score(times, functools.partial(self._calls, skewed))
        return split(problems, times, scores)

    def _calls(self, case: Case, pairs: Iterable[Pair]) -> dict[Pair, Call]:
        """Capture a graph of the layer for each pair; one workspace does for all."""
        w13, w2 = self._layer.w13, self._layer.w2
        hidden, weights, ids = layers.random_tokens(case, w13.k, self._device)
        out = torch.empty_like(hidden)
        num_bytes = chord.fused_moe_workspace(len(hidden), w13, w2, ids.shape[1])
        workspace = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        calls: dict[Pair, Call] = {}
        for pair in pairs:
            chosen = dataclasses.replace(self._layer, configs=pair)
            call = functools.partial(
                operands.run, chosen, hidden, weights, ids, None, out, workspace
            )
            call()  # loads the kernels, which a capture may not
            calls[pair] = GraphCall(call)
        return calls


def around(
    today: Pair, problems: tuple[GemmProblem, GemmProblem], device: DeviceFacts
) -> list[Pair]:
    """Return the pairs in which at most one GEMM differs from today's choice.

    Args:
        today: What runs now.
        problems: Of gate_up and down.
        device: The card.
    """
    gate_up, down = (tune.candidates(problem, device) for problem in problems)
    pairs = [today, *((one, today[1]) for one in gate_up), *((today[0], one) for one in down)]
    return list(dict.fromkeys(pairs))


def finalists(times: dict[Pair, float]) -> list[Pair]:
    """Return the best of each GEMM, each with each of the other's.

    Args:
        times: Microseconds of the pairs that `around` returns.
    """

    def best(side: int) -> list[Config]:
        fastest: dict[Config, float] = {}
        for pair, us in times.items():
            fastest[pair[side]] = min(us, fastest.get(pair[side], us))
        return sorted(fastest, key=lambda config: fastest[config])[:_FINALISTS]

    return list(itertools.product(best(0), best(1)))


def split(
    problems: tuple[GemmProblem, GemmProblem],
    times: Sequence[tuple[Pair, float]],
    scores: dict[Pair, float],
) -> tuple[tune.Measured, tune.Measured]:
    """Return what each GEMM is chosen by: a configuration counts as the best pair with it.

    Args:
        problems: Of gate_up and down.
        times: Pairs with microseconds of the layer, fastest first.
        scores: What pairs are chosen by, less is better; not of all pairs.
    """

    def one(side: int) -> tune.Measured:
        best_us: dict[Config, float] = {}
        for pair, us in times:
            best_us.setdefault(pair[side], us)
        best_score: dict[Config, float] = {}
        for pair, score in sorted(scores.items(), key=lambda item: item[1]):
            best_score.setdefault(pair[side], score)
        return tune.Measured(problems[side], tuple(best_us.items()), best_score)

    return one(0), one(1)
