"""The benchmark scenarios as data: deployments, projections, row counts, and how rows spread.

The one place for them; tests, benchmarks and tuning read it from here. Every size is that of a
released model, from its public config.json (routed experts, hidden_size, moe_intermediate_size,
experts a token):

- Kimi K2, K2.5 (moonshotai): 384, 7168, 2048, 8
- DeepSeek-V3 and R1 (deepseek-ai): 256, 7168, 2048, 8
- Qwen3-235B-A22B (Qwen): 128, 4096, 1536, 8
- GLM-4.5, 4.6, 4.7 (zai-org): 160, 5120, 1536, 8; GLM-4.5-Air: 128, 4096, 1408, 8
- MiniMax-M2 (MiniMaxAI): 256, 3072, 1536, 8
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from chord.errors import InputError

LAYER = "layer"
"""Name of the record of whole layers, beside the suites of single GEMMs (bench/layer.py)."""
TOP_K = 8
GROUP_SIZE = 32
MASKED_SLOTS = 128
"""Slots of an expert in masked rows: what low-latency dispatch buffers have room for, not a count
that a kernel could take for the number of rows."""

Addressing = Literal["indexed", "contiguous", "indices", "masked"]
Loads = Literal["random", "nested", "third", "one", "balanced", "uneven"]

_UNEVEN = (0.7, 1.3)
_SWEEP_TO, _SWEEP_STEP = 20_000, 1.08
# 120 rounds, warm-up included, of a call of 0.4 ms and the flush before it.
_SHORT_CALLS_MS = 60.0


@dataclass(frozen=True)
class Projection:
    """One expert GEMM of a layer on one rank.

    Attributes:
        name: "gate_up" or "down".
        n: Output features.
        k: Reduction length.
    """

    name: str
    n: int
    k: int


@dataclass(frozen=True)
class Series:
    """Rows of a table that differ in their count alone.

    Attributes:
        counts: What is counted, smallest first: tokens where rows are indexed, rows per expert
            where they are grouped, routed rows where loads are nested.
        addressing: How the kernel is told which rows an expert has: by routing buffers, by offsets
            of sorted rows, by an expert for each of them, or by counts of rows in slots.
        loads: How rows spread over the experts. indexed: "random" (normal scores, the best
            TOP_K), "nested" (the first R routes of one random routing, so that more rows never
            mean fewer experts), "third" (random, then a third of all rows on one expert), "one"
            (all rows on one expert). Grouped: "balanced", or "uneven" (uniform in 0.7 to 1.3 of
            the mean, with the same sum).
        name: What tells it from the other series of its suite.
    """

    counts: tuple[int, ...]
    addressing: Addressing = "indexed"
    loads: Loads = "random"
    name: str = ""

    @property
    def unit(self) -> str:
        """What the counts count."""
        if self.addressing != "indexed":
            return "rows per expert"
        return "rows" if self.loads == "nested" else "tokens"


@dataclass(frozen=True)
class Suite:
    """One deployment in one phase.

    Attributes:
        name: How the command line and the records call it.
        num_experts: Experts on one rank.
        projections: GEMMs of the layer.
        series: The rows of the table.
        tokens_per_input: How many of the table's tokens make one input row of this rank's GEMM: 8
            where the count spans the 8 ranks of the deployment, else 1.
        repeat_ms: Most time that is spent on timed calls of one implementation on one row, unless
            its calls are long (`chord.timing.MIN_ROUNDS`).
    """

    name: str
    num_experts: int
    projections: tuple[Projection, ...]
    series: tuple[Series, ...]
    tokens_per_input: int = 1
    repeat_ms: float = 100.0

    @property
    def num_cases(self) -> int:
        """Rows of the whole table."""
        return len(self.projections) * sum(len(series.counts) for series in self.series)

    def expected_seconds(self, num_peers: int = 0) -> float:
        """Estimate the seconds of a run on an H200 whose kernels are compiled already.

        Each row times the dense matmul and every implementation and checks every result; packing
        comes once a projection and implementation. Short calls end at the largest number of
        rounds, before their time is up.

        Args:
            num_peers: Implementations beside Chord.
        """
        timers = 2 + num_peers
        timing = min(1.3 * self.repeat_ms, _SHORT_CALLS_MS) / 1e3
        each = timers * (timing + 0.03) + 0.15 * (1 + num_peers)
        return self.num_cases * each + len(self.projections) * (2 + 3 * num_peers)


@dataclass(frozen=True)
class Case:
    """One row of a benchmark table.

    Attributes:
        suite: Name of the suite.
        projection: The GEMM.
        num_experts: Experts on this rank.
        series: The series that the row is of.
        tokens: The count, as the series counts.
        num_inputs: Tokens that this rank routes; grouped: rows in use.
        num_routes: Rows in use of the output.
    """

    suite: str
    projection: Projection
    num_experts: int
    series: Series
    tokens: int
    num_inputs: int
    num_routes: int

    @property
    def num_rows(self) -> int:
        """Input rows in use: tokens for indexed gate_up, else one a route."""
        return self.num_routes if self.top_k == 1 else self.num_inputs

    @property
    def top_k(self) -> int:
        """Routes that read one input row: TOP_K for indexed gate_up, else 1."""
        shared = self.series.addressing == "indexed" and self.projection.name == "gate_up"
        return TOP_K if shared else 1


def layer(hidden: int, intermediate: int, tp: int = 1) -> tuple[Projection, Projection]:
    """Return the two GEMMs of a layer on one of `tp` ranks that share every expert."""
    slice_of = intermediate // tp
    return Projection("gate_up", 2 * slice_of, hidden), Projection("down", hidden, slice_of)


def sweep_counts(last: int = _SWEEP_TO, step: float = _SWEEP_STEP) -> tuple[int, ...]:
    """Return counts from 1 to `last`, each `step` times the one before, rounded down, or one more.

    Args:
        last: The last count.
        step: The ratio of neighbours, above 1.
    """
    counts = [1]
    while counts[-1] < last:
        counts.append(min(last, max(counts[-1] + 1, int(counts[-1] * step))))
    return tuple(counts)


def _skewed(*counts: int) -> tuple[Series, Series]:
    return (
        Series(counts, loads="third", name="a third on one expert"),
        Series(counts, loads="one", name="all on one expert"),
    )


def _grouped(
    rows: tuple[int, ...], masked: tuple[int, ...], uneven: tuple[int, ...] = ()
) -> tuple[Series, ...]:
    return (
        Series(rows, "contiguous", "balanced", "contiguous"),
        Series(uneven or rows, "contiguous", "uneven", "contiguous, uneven"),
        Series(masked, "masked", "balanced", "masked"),
    )


_KIMI = layer(7168, 2048)
_KIMI_TP8 = layer(7168, 2048, tp=8)
_PREFILL = Series((1024, 2048, 4096, 8192, 16384))
_DECODE = Series((1, 2, 4, 8, 20, 30, 40, 50, 64, 96, 128))
_SHARD = Series((8, 20, 50, 128))
_OTHER = _grouped((128,), (16, 64))
_INDICES = Series((128, 512), "indices", "balanced", "contiguous, m_indices")

SUITES = {
    suite.name: suite
    for suite in (
        Suite("ep8_prefill", 48, _KIMI, (_PREFILL, *_skewed(1024, 8192)), tokens_per_input=8),
        Suite("ep8_decode", 48, _KIMI, (_DECODE, *_skewed(20, 50, 128))),
        Suite("tp8", 384, _KIMI_TP8, (_PREFILL, *_skewed(1024, 8192))),
        Suite("tp8_decode", 384, _KIMI_TP8, (Series((1, 2, 4, 8, 32, 64, 96, 128)), *_skewed(128))),
        Suite("ep16_decode", 24, _KIMI, (_SHARD,)),
        Suite("ep32_decode", 12, _KIMI, (_SHARD,)),
        Suite("ep8_sweep", 48, _KIMI[:1], (Series(sweep_counts(), loads="nested"),), repeat_ms=30),
        Suite("grouped", 48, _KIMI, (*_grouped((128, 256, 512), (8, 16, 32, 64)), _INDICES)),
        Suite("grouped_ep16", 24, _KIMI, _grouped((128, 512), (8, 64))),
        Suite("grouped_ep32", 12, _KIMI, _grouped((128, 512), (8, 64))),
        # Every expert of the model on one rank: as a slice of 8 ranks, or whole.
        Suite("grouped_kimi_k2_tp8", 384, _KIMI_TP8, _OTHER),
        Suite("grouped_deepseek_v3", 256, layer(7168, 2048), _OTHER),
        Suite("grouped_qwen3_235b", 128, layer(4096, 1536), _OTHER),
        Suite("grouped_glm_4_5", 160, layer(5120, 1536), _OTHER),
        Suite("grouped_glm_4_5_air", 128, layer(4096, 1408), _OTHER),
        Suite("grouped_minimax_m2", 256, layer(3072, 1536), _OTHER),
    )
}


def suite_named(name: str) -> Suite:
    """Look a suite up by its name.

    Args:
        name: One of `SUITES`.

    Returns:
        The suite.

    Raises:
        InputError: There is no suite of that name.
    """
    if name not in SUITES:
        raise InputError(f"there is no suite {name!r}; there are {', '.join(SUITES)}")
    return SUITES[name]


def cases(suite: Suite, projection: Projection) -> Iterator[Case]:
    """Iterate over the table rows of one projection, series by series, smallest first.

    Args:
        suite: The deployment.
        projection: One of its GEMMs.

    Yields:
        One case a count.
    """
    for series in suite.series:
        for count in series.counts:
            if series.addressing != "indexed":
                inputs = routes = suite.num_experts * count
            elif series.loads == "nested":
                inputs, routes = -(-count // TOP_K), count
            else:
                inputs = count // suite.tokens_per_input
                routes = inputs * TOP_K
            yield Case(suite.name, projection, suite.num_experts, series, count, inputs, routes)


def route(num_inputs: int, num_experts: int, device: torch.device | str) -> torch.Tensor:
    """Route tokens as every published row was routed: normal scores, the best TOP_K experts.

    The seed is the number of input tokens, so loads are uneven but the same on every run on one
    kind of device (the generators of CPU and CUDA differ).

    Args:
        num_inputs: Tokens.
        num_experts: Experts on this rank.
        device: Where to draw the scores.

    Returns:
        topk_ids: int32, [num_inputs, TOP_K], every id local.
    """
    generator = torch.Generator(device).manual_seed(num_inputs)
    scores = torch.randn(num_inputs, num_experts, generator=generator, device=device)
    return scores.topk(TOP_K, dim=-1).indices.to(torch.int32)


def route_case(case: Case, device: torch.device | str) -> torch.Tensor:
    """Route the tokens of an indexed case.

    Args:
        case: A case of an indexed series.
        device: Where to draw the scores.

    Returns:
        topk_ids: int32, [num_inputs, TOP_K]; case.num_routes of them local, the others -1.
    """
    loads = case.series.loads
    if loads == "nested":
        # One routing for all counts, of which each takes the beginning.
        longest = -(-max(case.series.counts) // TOP_K)
        ids = route(longest, case.num_experts, device)[: case.num_inputs].contiguous()
        ids.view(-1)[case.num_routes :] = -1
        return ids
    ids = route(case.num_inputs, case.num_experts, device)
    if loads == "third":
        ids.view(-1)[::3] = 0
    elif loads == "one":
        ids.zero_()
    return ids


def expert_counts(num_experts: int, mean: int, loads: Loads) -> list[int]:
    """Return the rows of each expert where rows are grouped.

    Args:
        num_experts: Experts on this rank.
        mean: Rows per expert.
        loads: "balanced" or "uneven".

    Returns:
        One count an expert; their sum is num_experts * mean.
    """
    if loads == "balanced":
        return [mean] * num_experts
    generator = torch.Generator().manual_seed(mean)
    low, high = _UNEVEN
    drawn = low + (high - low) * torch.rand(num_experts, generator=generator)
    # Rounding each end of the running sum, so that the counts add up exactly.
    ends = (drawn.cumsum(0) * (num_experts * mean / float(drawn.sum()))).round().long()
    ends[-1] = num_experts * mean
    return torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
