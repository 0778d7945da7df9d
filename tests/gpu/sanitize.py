"""Small launches of every shipped configuration, for compute-sanitizer. A script, not a test.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/gpu/sanitize.py

With `indexed`, `grouped` or `layer` behind it, only launches of that kind.

Inputs and expected outputs are made on the CPU, so that Chord's kernels are all that is checked.
Most launches get a grid of a few blocks instead of one a multiprocessor: few blocks go through many
tiles each, share tiles and hand partial sums over, at a hundredth of the work.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import cases
import chord
import tolerance
from chord import device as devices
from chord.jit import launch as launching
from chord.plan.config import Config, shipped_configs
from chord.routing import align

Problem = TypeVar("Problem", "Launch", "GroupedLaunch")


@dataclass(frozen=True)
class Launch:
    """One problem with indexed rows; `blocks` is the grid, 0 for one block a multiprocessor."""

    name: str
    num_experts: int
    n: int
    k: int
    tokens: int
    top_k: int
    blocks: int
    routing: str = "uniform"
    block_m: int = 16


@dataclass(frozen=True)
class GroupedLaunch:
    """One problem with grouped rows: rows of each expert, and the room for them if in slots."""

    name: str
    counts: tuple[int, ...]
    n: int
    k: int
    blocks: int
    slots: int


@dataclass(frozen=True)
class LayerLaunch:
    """One whole layer; `blocks` is the grid of both GEMMs."""

    name: str
    num_experts: int
    hidden: int
    middle: int
    tokens: int
    top_k: int
    blocks: int
    routing: str = "uniform"
    weight_on_input: bool = False


LAUNCHES = (
    Launch("ragged rows, tails of N and K", 4, 136, 352, tokens=23, top_k=2, blocks=3),
    Launch("tiles split over blocks", 2, 264, 1056, tokens=9, top_k=1, blocks=7),
    Launch("many tiles a block", 2, 520, 2080, tokens=70, top_k=1, blocks=2, block_m=64),
    Launch("runs of tiles with a short K", 3, 1032, 32, tokens=200, top_k=2, blocks=3),
    Launch("holes, full grid", 8, 512, 608, tokens=40, top_k=2, blocks=0, routing="holes"),
    Launch("one block for everything", 2, 72, 96, tokens=200, top_k=1, blocks=1),
    Launch("nobody is routed", 4, 64, 64, tokens=4, top_k=2, blocks=0, routing="none"),
)
GROUPED = (
    GroupedLaunch("ragged groups, tails of N and K", (5, 0, 17, 1, 40), 136, 352, 3, slots=41),
    GroupedLaunch("groups split over blocks", (3, 0, 20), 264, 1056, 7, slots=20),
    GroupedLaunch("runs of tiles with a short K", (200, 9), 1032, 32, 3, slots=200),
    GroupedLaunch("one slot an expert, full grid", (1, 0, 1, 1), 72, 96, 0, slots=1),
    GroupedLaunch("no rows in use", (0, 0, 0), 64, 64, 0, slots=8),
)
LAYERS = (
    LayerLaunch("layer of ragged rows", 4, 352, 160, tokens=23, top_k=2, blocks=3),
    LayerLaunch("layer of shared tiles, holes", 2, 1056, 96, 9, 2, blocks=7, routing="holes"),
    LayerLaunch("layer with weighted input", 4, 352, 160, 23, 2, blocks=3, weight_on_input=True),
    LayerLaunch("layer of many routes", 12, 128, 64, tokens=1500, top_k=3, blocks=4),
    LayerLaunch("layer for nobody, full grid", 4, 64, 64, 4, 2, blocks=0, routing="none"),
)
BEFORE, AFTER = 3, 5  # rows of nobody around contiguous ones


@dataclass(frozen=True)
class Operands:
    """One way to launch a problem.

    Attributes:
        name: For the report.
        addressing: Kernel addressing type.
        blocks: Grid, 0 for one block a multiprocessor.
        call: Fills the given output, which lies on the device.
        poison: bf16, [rows + 2, N], what the buffer with its guard rows holds before.
        expected: bf16, [rows + 2, N], and after.
    """

    name: str
    addressing: str
    blocks: int
    call: Callable[[Config, torch.Tensor], object]
    poison: torch.Tensor
    expected: torch.Tensor


@functools.cache
def indexed_operands(problem: Launch) -> Operands:
    weights = cases.random_weights(problem.num_experts, problem.n, problem.k, scale_powers=5)
    x = cases.exact_x(problem.tokens, problem.k)
    ids = cases.topk_ids(problem.tokens, problem.top_k, problem.num_experts, problem.routing)
    where = align(ids, num_experts=problem.num_experts, block_m=problem.block_m)
    tables = [
        table.cuda()
        for table in (where.sorted_token_ids, where.expert_ids, where.num_tokens_post_padded)
    ]
    on_device, experts = x.cuda(), weights.pack().to("cuda")

    def call(config: Config, out: torch.Tensor) -> object:
        return chord.indexed(
            on_device,
            experts,
            *tables,
            problem.top_k,
            block_m=problem.block_m,
            out=out,
            validate=False,
            config=config,
        )

    rows = cases.expected_rows(x, weights, ids, problem.top_k)
    return Operands(problem.name, "Indexed", problem.blocks, call, *buffers(rows))


@functools.cache
def grouped_operands(problem: GroupedLaunch) -> tuple[Operands, ...]:
    """Return a launch for each way to say which rows an expert has; rows of nobody hold NaN."""
    counts, num_experts = problem.counts, len(problem.counts)
    weights = cases.random_weights(num_experts, problem.n, problem.k, scale_powers=5)
    experts = weights.pack().to("cuda")
    sorted_owners = cases.owners_of_counts(counts, before=BEFORE, after=AFTER)
    holes = sorted_owners.clone()
    holes[::7] = -1
    offsets = torch.tensor((BEFORE, *counts)).cumsum(0)
    slots = cases.owners_of_slots(counts, problem.slots)
    forms = (
        ("ContiguousOffsets", sorted_owners, {"expert_offsets": offsets}),
        ("ContiguousIndices", holes, {"m_indices": holes}),
        ("Masked", slots, {"tokens_per_expert": torch.tensor(counts, dtype=torch.int32)}),
    )
    made = []
    for addressing, owners, where in forms:
        x = cases.exact_x(len(owners), problem.k)
        rows = cases.expected_rows(x, weights, owners)
        x[owners < 0] = torch.nan
        call = grouped_call(addressing, x.cuda(), experts, where, num_experts)
        name = f"{problem.name}, {addressing}"
        made.append(Operands(name, addressing, problem.blocks, call, *buffers(rows)))
    return tuple(made)


def grouped_call(
    addressing: str,
    x: torch.Tensor,
    experts: chord.PackedExperts,
    where: dict[str, torch.Tensor],
    num_experts: int,
) -> Callable[[Config, torch.Tensor], object]:
    tables = {name: table.cuda() for name, table in where.items()}

    def call(config: Config, out: torch.Tensor) -> object:
        options = {**tables, "config": config, "validate": False}
        if addressing != "Masked":
            return chord.contiguous(x, experts, out=out, **options)
        slots, out_slots = (rows.view(num_experts, -1, rows.shape[1]) for rows in (x, out))
        return chord.masked(slots, experts, out=out_slots, **options)

    return call


def buffers(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the whole buffer before and after, with guard rows; NaN rows are not written."""
    poison = cases.poisoned(len(rows) + 2, rows.shape[1])
    expected = poison.clone()
    expected[1:-1] = torch.where(rows.isnan(), cases.POISON, rows).bfloat16()
    return poison, expected


@dataclass(frozen=True)
class LayerOperands:
    """A whole layer: `call` runs it with both GEMMs of one configuration."""

    name: str
    addressings: tuple[str, str]
    blocks: int
    call: Callable[[Config], torch.Tensor]
    expected: torch.Tensor


@functools.cache
def layer_operands(problem: LayerLaunch) -> LayerOperands:
    sizes = ((2 * problem.middle, problem.hidden), (problem.hidden, problem.middle))
    weights = [cases.random_weights(problem.num_experts, *size, kind="real") for size in sizes]
    packed = [w.pack(interleave_gate_up=i == 0) for i, w in enumerate(weights)]
    hidden = cases.real_x(problem.tokens, problem.hidden)
    ids = cases.topk_ids(problem.tokens, problem.top_k, problem.num_experts, problem.routing)
    router = cases.topk_weights(problem.tokens, problem.top_k, kind="real")
    options: dict[str, Any] = {"apply_router_weight_on_input": problem.weight_on_input}
    if not problem.weight_on_input:
        shared = cases.real_x(problem.tokens, problem.hidden, seed=5)
        options |= {"routed_scaling_factor": 2.5, "shared_output": shared}
    expected = chord.reference.fused_moe(hidden, *packed, router, ids, **options)
    given = [tensor.cuda() for tensor in (hidden, router, ids)]
    w13, w2 = (p.to("cuda") for p in packed)
    if "shared_output" in options:
        options["shared_output"] = options["shared_output"].cuda()

    def call(config: Config) -> torch.Tensor:
        return chord.fused_moe(given[0], w13, w2, *given[1:], configs=(config, config), **options)

    gate_up = "RoutedGateUpWeighted" if problem.weight_on_input else "RoutedGateUp"
    return LayerOperands(problem.name, (gate_up, "RoutedDown"), problem.blocks, call, expected)


def count_wrong_rows(config: Config, given: LayerOperands) -> int:
    """Run the layer twice and count rows that are further off than a layer may be."""
    for addressing in given.addressings:
        set_grid(config, addressing, given.blocks)
    outs = [given.call(config).cpu() for _ in range(2)]
    limit = 2 * tolerance.LAYER_LIMIT  # both sides round
    wrong = [tolerance.row_errors(out, given.expected) > limit for out in outs]
    return int(torch.stack(wrong).sum())


def set_grid(config: Config, addressing: str, blocks: int) -> None:
    """Make this thread's launches of a kernel use a grid of that many blocks."""
    kernel = launching.load(config, addressing, 0)
    launcher = launching.Launcher(kernel, blocks or devices.facts_of(0).num_sms)
    launching._thread.launchers[launching.kernel_key(config, addressing, 0)] = launcher


def count_wrong(config: Config, given: Operands) -> int:
    """Launch twice (the second finds what the first left) and count differing values."""
    set_grid(config, given.addressing, given.blocks)
    wrong = 0
    for _ in range(2):
        buffer = given.poison.cuda()
        given.call(config, buffer[1:-1])
        wrong += int((buffer.cpu() != given.expected).sum())
    return wrong


def gemms_for(config: Config, kinds: list[str]) -> list[Operands]:
    """Return the launches of one GEMM, with a shorter K where the configuration takes no longer."""

    def fitted(problem: Problem) -> Problem:
        return replace(problem, k=cases.k_for(config, problem.k))

    todo = [indexed_operands(fitted(problem)) for problem in LAUNCHES if "indexed" in kinds]
    for problem in GROUPED if "grouped" in kinds else ():
        todo += grouped_operands(fitted(problem))
    return todo


def layers_for(config: Config, kinds: list[str]) -> list[LayerOperands]:
    """Return the whole layers, in the same way."""
    todo = []
    for problem in LAYERS if "layer" in kinds else ():
        hidden, middle = (cases.k_for(config, k) for k in (problem.hidden, problem.middle))
        todo.append(layer_operands(replace(problem, hidden=hidden, middle=middle)))
    return todo


def main() -> int:
    """Run all launches; return 1 if any result is wrong."""
    if not torch.cuda.is_available():
        print("PyTorch sees no CUDA GPU here; run this on a machine with one")
        return 2
    kinds = sys.argv[1:] or ["indexed", "grouped", "layer"]
    if not {"indexed", "grouped", "layer"} & set(kinds):
        print(f"{' '.join(kinds)}: name indexed, grouped or layer, or none for all")
        return 2
    failed = False
    configs = shipped_configs(devices.facts_of(0).arch)
    for config in configs:
        todo, layers = gemms_for(config, kinds), layers_for(config, kinds)
        started = time.perf_counter()
        counts = {given.name: count_wrong(config, given) for given in todo}
        counts |= {given.name: count_wrong_rows(config, given) for given in layers}
        wrong = {name: count for name, count in counts.items() if count}
        seconds = time.perf_counter() - started
        right = f"{2 * len(todo)} launches exact, {2 * len(layers)} layers right"
        verdict = f"WRONG values: {wrong}" if wrong else right
        print(f"{config.label()}: {verdict}, {seconds:.1f} s", flush=True)
        failed |= bool(wrong)
    return 1 if failed or not configs else 0


if __name__ == "__main__":
    sys.exit(main())
