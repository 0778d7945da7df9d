"""Measure every legal candidate on this card and keep the best as a profile row.

The candidates and what may run are `chord.plan`'s; the timer is `chord.timing`'s. Owned here: which
row counts stand for which ranges, and the files that `chord.plan.select` reads.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from chord.bench import machine, records
from chord.bench.operands import random_checkpoint
from chord.bench.run import Chord, problem_of
from chord.bench.scenarios import Case, Projection, Series, Suite, cases, layer
from chord.bench.work import Work, make_work
from chord.device import DeviceFacts, facts_of
from chord.plan.config import Config, shipped_configs
from chord.plan.legality import reject
from chord.plan.problem import GemmProblem
from chord.plan.select import rows_that_count
from chord.timing import Call, measure_in_turns, method

BLOCK_M = 16
# A first look at every candidate, then more time for those that could be the fastest.
WARMUP_MS, REPEAT_MS, FINAL_MS = 3.0, 15.0, 60.0
_FINALISTS, _CLOSE = 3, 1.06
# Loads are seldom even. So those this close to the fastest are timed with a third of all rows on
# one expert too, and both times count: a tile that just holds what each expert has when loads are
# even can be 2 % faster than the next wider one, and 10 % slower where they are not. But so much
# skew is rare: even loads have the larger share.
_NEAR, _EVEN_SHARE = 1.03, 0.75
# The choice of the row before stays where it is this close to the fastest: neighbouring problems
# then run the same kernel, and time grows without steps.
_AS_FAST = 1.005
# Beyond the largest measured row count the cost model decides again.
_LAST_STRETCH = 1.25
# A configuration that needs more than this times the passes over each expert that the one with the
# largest tiles needs is not worth its time.
_MOST_PASSES = 3


@dataclass(frozen=True)
class Task:
    """One projection, one way to say which rows an expert has, and the counts to measure.

    Attributes:
        profile: What the file is called behind the card's name; "" for the card's own file.
        num_experts: Experts on one rank.
        projection: The GEMM.
        series: The counts, what they count, and how rows spread.
        few: Rows, less than a token has slots, to measure as well: what a caller may expect on one
            rank of many.
    """

    profile: str
    num_experts: int
    projection: Projection
    series: Series
    few: tuple[int, ...] = ()

    def cases(self) -> list[Case]:
        """Return a case for each count, smallest first."""
        return self._cases(self.series)

    def skewed_cases(self) -> list[Case]:
        """Return the same with a third of all rows on one expert, where rows are indexed."""
        if self.series.addressing != "indexed":
            return self.cases()
        return self._cases(dataclasses.replace(self.series, loads="third"))

    def num_shown(self) -> int:
        """Return how often `measure` calls `on_row`."""
        return len(self.cases())

    def measure(self, on_row: Callable[[Measured], None]) -> list[dict[str, object]]:
        """Return the profile's rows; `on_row` and errors are those of `search`."""
        return profile_rows(search(self, on_row))

    def _cases(self, series: Series) -> list[Case]:
        both = (Series(self.few, loads="nested"), series)
        suite = Suite("tune", self.num_experts, (self.projection,), both)
        return list(cases(suite, self.projection))


@dataclass(frozen=True)
class Measured:
    """All candidates for one problem.

    Attributes:
        problem: What was measured.
        all_us: Every candidate with its median for even loads, microseconds, cold L2, fastest
            first.
        scores: What they are chosen by, less is better (`score`).
    """

    problem: GemmProblem
    all_us: tuple[tuple[Config, float], ...]
    scores: dict[Config, float]

    @property
    def config(self) -> Config:
        """The fastest configuration, or one about as fast that suffers less from skew."""
        return min(self.scores, key=lambda config: self.scores[config])


# Tokens routed on one rank: those of the suites, and enough between them that neighbouring choices
# stand for their surroundings.
SMALL = (1, 2, 4, 8, 14, 20, 30, 40, 50, 64, 80, 96, 128)
TOKENS = {
    48: (*SMALL, 160, 192, 256, 320, 384, 448, 512, 640, 768, 896, 960, 1024, 1280, 2048),
    24: (*SMALL, 192, 256),
    12: (*SMALL, 192, 256),
    384: (1, 2, 4, 8, 16, 32, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
}
_FEW = (1, 2, 4)
_ROWS_PER_EXPERT = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_GROUPED = {
    "grouped_prefill": Series(_ROWS_PER_EXPERT, "contiguous", "uneven"),
    "grouped_decode": Series(_ROWS_PER_EXPERT, "masked", "uneven"),
}
LAYER_PROFILE = "layer"  # what `chord.bench.tune_layer` measures
PROFILE_NAMES = ("", *_GROUPED, LAYER_PROFILE)

Choice = TypeVar("Choice")
"""What is measured: a configuration, or several that run one after the other."""


def tasks(profile: str) -> list[Task]:
    """Return what a profile measures: Kimi K2's layer, whole experts or a slice of all.

    Args:
        profile: One of PROFILE_NAMES but LAYER_PROFILE.
    """
    whole, sliced = layer(7168, 2048), layer(7168, 2048, tp=8)
    if profile == "":
        return [
            Task(profile, experts, projection, Series(tokens), () if experts == 384 else _FEW)
            for experts, tokens in TOKENS.items()
            for projection in (sliced if experts == 384 else whole)
        ]
    return [
        Task(profile, experts, projection, _GROUPED[profile])
        for experts, projections in ((48, whole), (384, sliced))
        for projection in projections
    ]


def candidates(problem: GemmProblem, device: DeviceFacts) -> Iterator[Config]:
    """Yield the shipped configurations that may run `problem` and could be the fastest."""

    def passes(config: Config) -> int:
        return math.ceil(problem.rows_per_expert / config.tile_rows)

    legal = [c for c in shipped_configs(device.arch) if reject(c, problem, device) is None]
    fewest = min((passes(config) for config in legal), default=0)
    return (config for config in legal if passes(config) <= _MOST_PASSES * fewest)


def search(task: Task, on_row: Callable[[Measured], None] = lambda row: None) -> list[Measured]:
    """Measure one task over its row counts on the current GPU.

    Args:
        task: What to measure.
        on_row: Called with each finished row.

    Raises:
        UnsupportedError: There is no GPU.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    facts = facts_of(device.index)
    n, k = task.projection.n, task.projection.k
    chord = Chord(random_checkpoint(task.num_experts, n, k, device), BLOCK_M)
    measured = []

    def calls(work: Work, configs: Iterable[Config]) -> dict[Config, Call]:
        return {config: chord.prepare_call(work, config) for config in configs}

    def calls_of(case: Case, configs: Iterable[Config]) -> dict[Config, Call]:
        return calls(make_work(case, device), configs)

    for case, skewed in zip(task.cases(), task.skewed_cases(), strict=True):
        work = make_work(case, device)
        problem = problem_of(work)
        if case.series.loads == "nested":  # buffers have room for all slots of a token
            problem = dataclasses.replace(problem, expected_rows=case.num_routes)
        times = fastest_first(calls(work, candidates(problem, facts)))
        scores = dict(times)
        if skewed != case:
            scores = score(times, functools.partial(calls_of, skewed))
        measured.append(Measured(problem, tuple(times), scores))
        on_row(measured[-1])
    return measured


def medians(calls: dict[Choice, Call], repeat_ms: float) -> dict[Choice, float]:
    """Time the calls in turns.

    Args:
        calls: A function without arguments for each configuration.
        repeat_ms: What is measured of each.

    Returns:
        Microseconds.
    """
    times = measure_in_turns(calls, warmup_ms=WARMUP_MS, repeat_ms=repeat_ms)
    return {choice: timing.median_us for choice, timing in times.items()}


def score(
    times: Sequence[tuple[Choice, float]],
    skewed: Callable[[list[Choice]], dict[Choice, Call]],
) -> dict[Choice, float]:
    """Return what configurations are chosen by where loads may be skewed.

    Args:
        times: Configurations with their medians for even loads, fastest first.
        skewed: Makes their calls with skewed loads.

    Returns:
        Of those about as fast as the fastest the weighted geometric mean of both medians, even and
        skewed; `times` where there is no other than the fastest.
    """
    even = dict(times)
    near = [config for config, us in times if us <= _NEAR * times[0][1]]
    if len(near) == 1:
        return even
    uneven = medians(skewed(near), FINAL_MS)
    return {
        config: even[config] ** _EVEN_SHARE * uneven[config] ** (1 - _EVEN_SHARE) for config in near
    }


def fastest_first(calls: dict[Choice, Call]) -> list[tuple[Choice, float]]:
    """Time the calls in turns; those close to the fastest again among themselves.

    Args:
        calls: A function without arguments for each configuration.

    Returns:
        Configurations with their medians in microseconds, fastest first.
    """
    times = medians(calls, REPEAT_MS)
    close = sorted(times, key=lambda config: times[config])[:_FINALISTS]
    close = [config for config in close if times[config] <= _CLOSE * times[close[0]]]
    if len(close) > 1:
        again = medians({config: calls[config] for config in close}, FINAL_MS)
        # The card may be faster or slower among few: the others stay as far behind as they were.
        scale = sum(again.values()) / sum(times[config] for config in close)
        times = {config: scale * us for config, us in times.items()} | again
    ordered = sorted(times.items(), key=lambda pair: pair[1])
    return [(config, round(us, 1)) for config, us in ordered]


def profile_rows(measured: Sequence[Measured]) -> list[dict[str, object]]:
    """Return the rows of one task: each choice stands up to the geometric middle.

    Args:
        measured: Rows of one task, fewest rows first.
    """
    counts = [rows_that_count(row.problem) for row in measured]
    ends = [math.isqrt(low * high) for low, high in itertools.pairwise(counts)]
    ends.append(int(counts[-1] * _LAST_STRETCH))
    rows: list[dict[str, object]] = []
    first = 1
    config = measured[0].config
    for row, last in zip(measured, ends, strict=True):
        if row.scores.get(config, math.inf) > _AS_FAST * row.scores[row.config]:
            config = row.config
        rows.append(
            {
                "num_experts": row.problem.num_experts,
                "n": row.problem.n,
                "k": row.problem.k,
                "addressing": row.problem.addressing,
                "rows_from": first,
                "rows_to": last,
                "kernel": config.kernel,
                "config": config.fields(),
                "us": dict(row.all_us)[config],
                "date": records.today(),
            }
        )
        first = last + 1
    return rows


def write_profile(rows: Sequence[dict[str, object]], card: str, path: Path) -> Path:
    """Write a profile whole or not at all.

    Args:
        rows: What `profile_rows` returned, for all tasks of the profile.
        card: Short name of the card.
        path: The file.
    """
    head = json.dumps(
        {
            "card": card,
            "driver": machine.driver(),
            "kernel_digest": machine.kernel_digest(),
            "timer": method(REPEAT_MS, WARMUP_MS),
        }
    )
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(f'{head[:-1]}, "rows": [\n  {lines}\n]}}\n')
    os.replace(temporary, path)
    return path


def file_name(card: str, profile: str) -> str:
    """Return the name of a profile's file, which `chord.plan.select` looks for.

    Args:
        card: Short name of the card.
        profile: One of PROFILE_NAMES.
    """
    return f"{card}_{profile}.json" if profile else f"{card}.json"
