"""Measure every legal candidate on this card and keep the fastest as a profile row.

The candidates and what may run are `chord.plan`'s; the timer is `chord.timing`'s. Owned here: which
row counts stand for which ranges, and the file that `chord.plan.select` reads.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import chord
from chord import routing
from chord.bench import machine, records
from chord.bench.operands import random_checkpoint, random_rows
from chord.bench.scenarios import SUITES, TOP_K, Projection, route
from chord.device import DeviceFacts, facts_of
from chord.plan.config import Config, shipped_configs
from chord.plan.legality import reject
from chord.plan.problem import GemmProblem
from chord.timing import measure

BLOCK_M = 16
WARMUP_MS, REPEAT_MS = 3.0, 15.0
# Beyond the largest measured row count the cost model decides again.
_LAST_STRETCH = 1.25
# A decode configuration that needs more passes than this over each expert is not worth its time.
_MOST_PASSES = 3

# Tokens routed on one rank: those of the suites, and enough between them that neighbouring choices
# stand for their surroundings.
TOKENS = {
    48: (1, 2, 4, 8, 14, 20, 30, 40, 50, 64, 80, 96, 128, 160, 192, 256, 384, 512, 768, 1024, 2048),
    384: (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
}


@dataclass(frozen=True)
class Measured:
    """The fastest configuration for one problem.

    Attributes:
        problem: What was measured.
        config: The fastest configuration.
        us: Its median, microseconds, cold L2.
        all_us: Every candidate with its median, fastest first.
    """

    problem: GemmProblem
    config: Config
    us: float
    all_us: tuple[tuple[Config, float], ...]


def tasks() -> list[tuple[int, Projection]]:
    """Return the (experts, projection) pairs of the benchmark suites, each once."""
    return list(
        dict.fromkeys(
            (suite.num_experts, projection)
            for suite in SUITES.values()
            for projection in suite.projections
        )
    )


def candidates(problem: GemmProblem, device: DeviceFacts) -> Iterator[Config]:
    """Yield the shipped configurations that may run `problem` and could be the fastest."""
    for config in shipped_configs(device.arch):
        passes = math.ceil(problem.rows_per_expert / config.tile_rows)
        slow = config.kernel == "decode" and passes > _MOST_PASSES
        if not slow and reject(config, problem, device) is None:
            yield config


def search(
    num_experts: int,
    projection: Projection,
    on_row: Callable[[Measured], None] = lambda row: None,
) -> list[Measured]:
    """Measure one projection over its row counts on the current GPU.

    Args:
        num_experts: Experts on one rank.
        projection: The GEMM.
        on_row: Called with each finished row.

    Raises:
        UnsupportedError: There is no GPU.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    facts = facts_of(device.index)
    checkpoint = random_checkpoint(num_experts, projection.n, projection.k, device)
    experts = chord.pack_experts(checkpoint.weight_packed, checkpoint.weight_scale)
    del checkpoint
    top_k = TOP_K if projection.name == "gate_up" else 1
    measured = []
    for tokens in TOKENS[num_experts]:
        num_routes = tokens * TOP_K
        problem = GemmProblem(num_experts, projection.n, projection.k, num_routes)
        aligned = routing.align(
            route(tokens, num_experts, device), num_experts=num_experts, block_m=BLOCK_M
        )
        x = random_rows(num_routes // top_k, projection.k, device)
        out = torch.empty(num_routes, projection.n, dtype=torch.bfloat16, device=device)
        times: list[tuple[Config, float]] = []
        for config in candidates(problem, facts):
            call = functools.partial(
                chord.indexed,
                x,
                experts,
                aligned.sorted_token_ids,
                aligned.expert_ids,
                aligned.num_tokens_post_padded,
                top_k,
                block_m=BLOCK_M,
                out=out,
                validate=False,
                config=config,
            )
            timing = measure(call, warmup_ms=WARMUP_MS, repeat_ms=REPEAT_MS)
            times.append((config, round(timing.median_us, 1)))
        times.sort(key=lambda pair: pair[1])
        measured.append(Measured(problem, *times[0], tuple(times)))
        on_row(measured[-1])
    return measured


def profile_rows(measured: Sequence[Measured]) -> list[dict[str, object]]:
    """Return the rows of one projection: each choice stands up to the geometric middle.

    Args:
        measured: Rows of one projection, fewest routed rows first.
    """
    counts = [row.problem.routed_rows for row in measured]
    ends = [math.isqrt(low * high) for low, high in itertools.pairwise(counts)]
    ends.append(int(counts[-1] * _LAST_STRETCH))
    rows: list[dict[str, object]] = []
    first = 1
    for row, last in zip(measured, ends, strict=True):
        rows.append(
            {
                "num_experts": row.problem.num_experts,
                "n": row.problem.n,
                "k": row.problem.k,
                "addressing": row.problem.addressing,
                "rows_from": first,
                "rows_to": last,
                "kernel": row.config.kernel,
                "config": row.config.fields(),
                "us": row.us,
                "date": records.today(),
            }
        )
        first = last + 1
    return rows


def write_profile(rows: Sequence[dict[str, object]], card: str, path: Path) -> Path:
    """Write a profile whole or not at all.

    Args:
        rows: What `profile_rows` returned, for all projections.
        card: Short name of the card, the stem that `chord.plan.select` looks for.
        path: The file.
    """
    head = json.dumps(
        {"card": card, "driver": machine.driver(), "kernel_digest": machine.kernel_digest()}
    )
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(f'{head[:-1]}, "rows": [\n  {lines}\n]}}\n')
    os.replace(temporary, path)
    return path
