"""One emulated launch with EXACT inputs and its expected output, for all tests of this folder."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

import cases
from chord.emulator import run
from chord.emulator.runner import Routing
from chord.plan.config import Config, DirectConfig, PrefillConfig
from chord.routing import Contiguous, Indexed, Masked, align

DIRECT_8 = DirectConfig(max_tokens=8, warps=4, max_k=256)
DIRECT_16 = DirectConfig(max_tokens=16, warps=4, max_k=256)
PREFILL_32 = PrefillConfig(block_m=32, min_width=8, width_step=8, block_k=128, stages=2)
# A stage of four units, which K fills in part, batches of stores, the longest tiles first.
PREFILL_LONG = PrefillConfig(
    block_m=48, min_width=16, width_step=8, block_k=256, stages=2, store_eights=3
)


@dataclass(frozen=True)
class Shape:
    """A problem small enough for the CPU.

    Attributes:
        num_experts, n, k: of the weight.
        tokens, top_k: of the routing; `routing` as in cases.topk_ids.
        block_m: slots of a routing block.
        num_blocks: blocks of the launch.
    """

    num_experts: int
    n: int
    k: int
    tokens: int
    top_k: int = 1
    block_m: int = 8
    routing: str = "uniform"
    num_blocks: int = 3

    def __str__(self) -> str:
        return (
            f"E{self.num_experts}-N{self.n}-K{self.k}-T{self.tokens}x{self.top_k}"
            f"-b{self.block_m}-{self.routing}-g{self.num_blocks}"
        )


@dataclass(frozen=True, eq=False)
class Inputs:
    """Operands of a launch and what has to come out; rows of `expected` are NaN where unrouted.

    x and the output have a row of `expected` each, except where Indexed shares rows of x among
    routes and where Masked has [E, max_m, ...] for E * max_m rows.
    """

    x: torch.Tensor
    weights: cases.Weights
    routing: Routing
    expected: torch.Tensor


def inputs(shape: Shape, seed: int = 0) -> Inputs:
    """Make EXACT operands; scales are powers of two that differ from group to group."""
    ids = cases.topk_ids(shape.tokens, shape.top_k, shape.num_experts, shape.routing, seed=seed)
    x = cases.exact_x(shape.tokens, shape.k, seed=seed)
    weights = cases.random_weights(shape.num_experts, shape.n, shape.k, scale_powers=3, seed=seed)
    routing = align(ids, num_experts=shape.num_experts, block_m=shape.block_m)
    expected = cases.expected_rows(x, weights, ids, shape.top_k)
    return Inputs(x, weights, routing, expected)


FORMS = ("offsets32", "offsets64", "indices32", "indices64", "masked")


def grouped_inputs(
    counts: tuple[int, ...], n: int, k: int, form: str, *, max_m: int | None = None
) -> Inputs:
    """Make EXACT operands for rows that are grouped by expert.

    Args:
        counts: rows of each expert.
        n: output features.
        k: reduction length.
        form: of FORMS, how the rows are described. Contiguous rows have three of nobody before and
            behind them.
        max_m: masked: rows that an expert has room for, the largest count by default.
    """
    if form == "masked":
        owners = cases.owners_of_slots(counts, max_m or max(counts))
        return owned_inputs(owners, n, k, Masked(torch.tensor(counts, dtype=torch.int32)))
    owners = cases.owners_of_counts(counts, before=3, after=3)
    dtype = torch.int32 if form.endswith("32") else torch.int64
    if form.startswith("indices"):
        return owned_inputs(owners, n, k, Contiguous(m_indices=owners.to(dtype)), len(counts))
    offsets = torch.tensor((3, *counts)).cumsum(0).to(dtype)
    return owned_inputs(owners, n, k, Contiguous(offsets), len(counts))


def owned_inputs(
    owners: torch.Tensor, n: int, k: int, routing: Contiguous | Masked, num_experts: int = 0
) -> Inputs:
    """Make EXACT operands for rows with these owners, int32 [rows].

    Rows of nobody hold NaN, inf and -inf in turn.
    """
    if isinstance(routing, Masked):
        num_experts = routing.tokens_per_expert.numel()
    weights = cases.random_weights(num_experts, n, k, scale_powers=3)
    x = cases.exact_x(len(owners), k)
    expected = cases.expected_rows(x, weights, owners)
    nobody = (owners < 0).nonzero().flatten()
    for first, value in enumerate(("nan", "inf", "-inf")):
        x[nobody[first::3]] = float(value)
    if isinstance(routing, Masked):
        x = x.view(num_experts, -1, k)
    return Inputs(x, weights, routing, expected)


def foreign_blocks(given: Inputs, every: int, expert: int) -> Inputs:
    """Give every `every`-th routing block to another rank: its expert becomes `expert`.

    Nobody writes its rows then.
    """
    routing = given.routing
    assert isinstance(routing, Indexed)
    experts = routing.expert_ids.clone()
    experts[::every] = expert
    used = int(routing.num_tokens_post_padded)
    blocks = routing.sorted_token_ids[:used].view(-1, routing.block_m)
    here = experts[: len(blocks)]
    dropped = blocks[(here < 0) | (here >= given.weights.shape[0])].flatten()
    expected = given.expected.clone()
    expected[dropped[dropped < len(expected)].long()] = float("nan")
    return replace(given, routing=replace(routing, expert_ids=experts), expected=expected)


def padding_first(given: Inputs) -> Inputs:
    """Turn each routing block around, so that pad slots come before rows."""
    routing = given.routing
    assert isinstance(routing, Indexed)
    used = int(routing.num_tokens_post_padded)
    ids = routing.sorted_token_ids.clone()
    ids[:used] = ids[:used].view(-1, routing.block_m).flip(1).flatten()
    return replace(given, routing=replace(routing, sorted_token_ids=ids))


def check(config: Config, given: Inputs, num_blocks: int, **options: object) -> None:
    """Run a launch and compare bit for bit; rows that nobody routes must stay untouched."""
    rows, n = given.expected.shape
    buffer, out = cases.guarded(rows, n)
    packed = given.weights.pack()
    shaped = out.view(*given.x.shape[:-1], n) if isinstance(given.routing, Masked) else out
    run(config, given.x, packed, given.routing, shaped, num_blocks=num_blocks, **options)
    routed = ~given.expected.isnan().any(dim=1)
    assert torch.equal(out[routed], given.expected[routed].bfloat16()), "routed rows differ"
    assert cases.is_poison(out[~routed]), "a row that nobody routes was written"
    assert cases.is_poison(buffer[0]) and cases.is_poison(buffer[-1]), "a guard row was written"
