"""Small launches of every shipped configuration, for compute-sanitizer. A script, not a test.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/gpu/sanitize.py

Inputs and expected outputs are made on the CPU, so that Chord's kernels are all that is checked.
Most launches get a grid of a few blocks instead of one a multiprocessor: few blocks go through many
tiles each, share tiles and hand partial sums over, at a hundredth of the work.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import cases
import chord
from chord import device as devices
from chord.jit import launch as launching
from chord.plan.config import Config, shipped_configs
from chord.routing import Indexed, align


@dataclass(frozen=True)
class Launch:
    """One problem; `blocks` is the grid, 0 for one block a multiprocessor."""

    name: str
    num_experts: int
    n: int
    k: int
    tokens: int
    top_k: int
    blocks: int
    routing: str = "uniform"
    block_m: int = 16


LAUNCHES = (
    Launch("ragged rows, tails of N and K", 4, 136, 352, tokens=23, top_k=2, blocks=3),
    Launch("tiles split over blocks", 2, 264, 1056, tokens=9, top_k=1, blocks=7),
    Launch("many tiles a block", 2, 520, 2080, tokens=70, top_k=1, blocks=2, block_m=64),
    Launch("runs of tiles with a short K", 3, 1032, 32, tokens=200, top_k=2, blocks=3),
    Launch("holes, full grid", 8, 512, 608, tokens=40, top_k=2, blocks=0, routing="holes"),
    Launch("one block for everything", 2, 72, 96, tokens=200, top_k=1, blocks=1),
    Launch("nobody is routed", 4, 64, 64, tokens=4, top_k=2, blocks=0, routing="none"),
)


@dataclass(frozen=True)
class Operands:
    """What a launch needs on the device, and the whole expected buffer with guard rows there."""

    x: torch.Tensor
    experts: chord.PackedExperts
    where: Indexed
    poison: torch.Tensor
    expected: torch.Tensor


def operands(problem: Launch) -> Operands:
    weights = cases.random_weights(problem.num_experts, problem.n, problem.k, scale_powers=5)
    x = cases.exact_x(problem.tokens, problem.k)
    ids = cases.topk_ids(problem.tokens, problem.top_k, problem.num_experts, problem.routing)
    where = align(ids, num_experts=problem.num_experts, block_m=problem.block_m)
    rows = cases.expected_rows(x, weights, ids, problem.top_k)
    poison = cases.poisoned(len(rows) + 2, problem.n)
    expected = poison.clone()
    expected[1:-1] = torch.where(rows.isnan(), cases.POISON, rows).bfloat16()
    on_device = Indexed(
        where.sorted_token_ids.cuda(),
        where.expert_ids.cuda(),
        where.num_tokens_post_padded.cuda(),
        where.top_k,
        where.block_m,
    )
    return Operands(x.cuda(), weights.pack().to("cuda"), on_device, poison, expected)


def set_grid(config: Config, blocks: int) -> None:
    """Make this thread's launches of a configuration use a grid of that many blocks."""
    kernel = launching.load(config, "Indexed", 0)
    launcher = launching.Launcher(kernel, blocks or devices.facts_of(0).num_sms)
    launching._thread.launchers[launching.kernel_key(config, "Indexed", 0)] = launcher


def count_wrong(config: Config, problem: Launch, given: Operands) -> int:
    """Launch twice (the second finds what the first left) and count differing values."""
    set_grid(config, problem.blocks)
    wrong = 0
    for _ in range(2):
        buffer = given.poison.cuda()
        chord.indexed(
            given.x,
            given.experts,
            given.where.sorted_token_ids,
            given.where.expert_ids,
            given.where.num_tokens_post_padded,
            problem.top_k,
            block_m=problem.block_m,
            out=buffer[1:-1],
            validate=False,
            config=config,
        )
        wrong += int((buffer.cpu() != given.expected).sum())
    return wrong


def main() -> int:
    """Run all launches; return 1 if any result is wrong."""
    if not torch.cuda.is_available():
        print("PyTorch sees no CUDA GPU here; run this on a machine with one")
        return 2
    todo = [(problem, operands(problem)) for problem in LAUNCHES]
    failed = False
    configs = shipped_configs(devices.facts_of(0).arch)
    for config in configs:
        started = time.perf_counter()
        wrong = {}
        for problem, given in todo:
            count = count_wrong(config, problem, given)
            if count:
                wrong[problem.name] = count
        seconds = time.perf_counter() - started
        verdict = f"WRONG values: {wrong}" if wrong else f"{2 * len(todo)} launches exact"
        print(f"{config.label()}: {verdict}, {seconds:.1f} s", flush=True)
        failed |= bool(wrong)
    return 1 if failed or not configs else 0


if __name__ == "__main__":
    sys.exit(main())
