"""The one generator of test inputs: weights, activations, routings and shapes, all seeded.

CPU tests, GPU tests, emulator tests and benchmarks build their inputs here. Two kinds:

EXACT   Each row of x has 16 values of +1 or -1, the last at column K-1; codes are random and
        scales 1. Every output is then an integer of at most 128 in magnitude: exact in bf16 in
        any order of summation, so a kernel must match bit for bit. With scales that are other
        powers of two, sums are still exact in fp32: compare with the reference rounded once.
REAL    x ~ N(0, 1), scales uniform in 0.002 to 0.02. Compare row by row with `tolerance`.

Weights come in checkpoint form; `pack` makes the packed weight. The conversions here are written
apart from the package's, from the definition of the format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from chord.plan.config import Config, DirectConfig
from chord.weights import PackedExperts, pack_experts
from chord.weights.layout import UNIT_K

Kind = Literal["exact", "real"]
POISON = 12345.0
NON_ZEROS = 16
Device = torch.device | str

# --- shapes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """One MoE layer of a model, whole: E experts, hidden H, intermediate I."""

    name: str
    experts: int
    hidden: int
    intermediate: int
    top_k: int

    def w13(self, tp: int = 1) -> tuple[int, int]:
        """N and K of gate_up on one of tp ranks."""
        return 2 * self.intermediate // tp, self.hidden

    def w2(self, tp: int = 1) -> tuple[int, int]:
        """N and K of down on one of tp ranks."""
        return self.hidden, self.intermediate // tp


KIMI_K2 = Layer("Kimi K2", experts=384, hidden=7168, intermediate=2048, top_k=8)


def takes(config: Config | None, k: int) -> bool:
    """Say whether a configuration is for this K: the direct kernel is for short ones alone."""
    return not isinstance(config, DirectConfig) or k <= config.max_k


def k_for(config: Config | None, k: int) -> int:
    """Return K, or the longest of the same tail that the configuration takes."""
    return k if takes(config, k) else config.max_k - -k % UNIT_K


# Field case 4: (N, K) that are not multiples of any large tile.
RAGGED_SHAPES = (
    (5760, 2880),
    (2880, 2880),
    (3712, 2688),
    (1856, 2688),
    (2688, 1856),
    (1408, 2048),
    (2048, 704),
    (2816, 2048),
    (2048, 1408),
    (2880, 1440),
    (2048, 352),
    (2048, 1344),
    (512, 7168),
    (7168, 256),
    (7168, 128),
    (7168, 64),
    (7168, 32),
)
RAGGED_TOKENS = (1, 17, 64, 130)

# The same kinds of raggedness, small enough for the CPU: tails of N (in units of 64 and in
# 16-row tiles) and of K (in units of 64).
SMALL_SHAPES = (
    (64, 64),
    (128, 192),
    (8, 32),
    (24, 32),
    (48, 96),
    (72, 160),
    (136, 64),
    (200, 352),
    (64, 2880),
)

# --- weights in checkpoint form -----------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """Codes and scales of E experts.

    Attributes:
        codes: uint8, [E, N, K].
        scales: bf16, [E, N, K/32].
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, N and K."""
        num_experts, n, k = self.codes.shape
        return num_experts, n, k

    @property
    def words(self) -> torch.Tensor:
        """int32, [E, N, K/8]: `weight_packed` of a compressed-tensors checkpoint."""
        return pack_words(self.codes)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return `(code - 8) * scale`, [E, N, K]."""
        scales = self.scales.to(dtype).repeat_interleave(32, dim=-1)
        return (self.codes.to(dtype) - 8) * scales

    def pack(self, *, interleave_gate_up: bool = False) -> PackedExperts:
        """Pack from the checkpoint's words."""
        return pack_experts(self.words, self.scales, interleave_gate_up=interleave_gate_up)


def generator(seed: int, device: Device = "cpu") -> torch.Generator:
    """Return a generator on a device, seeded."""
    return torch.Generator(device).manual_seed(seed)


def pack_words(codes: torch.Tensor) -> torch.Tensor:
    """Put codes, uint8 [..., K], into int32 words [..., K/8], element j in bits 4*(j mod 8)."""
    shifts = torch.arange(0, 32, 4, device=codes.device)
    words = (codes.unflatten(-1, (-1, 8)).long() << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def random_weights(
    num_experts: int,
    n: int,
    k: int,
    *,
    kind: Kind = "exact",
    scale_powers: int = 1,
    seed: int = 0,
    device: Device = "cpu",
) -> Weights:
    """Make random codes with scales of a kind.

    EXACT scales are 2^(g mod scale_powers) for group g: all 1 by default; with 5 of them a wrong
    group shows at once.
    """
    g = generator(seed, device)
    codes = torch.randint(0, 16, (num_experts, n, k), generator=g, dtype=torch.uint8, device=device)
    groups = (num_experts, n, k // 32)
    if kind == "real":
        scales = torch.rand(groups, generator=g, device=device) * 0.018 + 0.002
    else:
        power = torch.arange(groups[-1], device=device) % scale_powers
        scales = torch.exp2(power.float()).expand(groups)
    return Weights(codes, scales.bfloat16().contiguous())


def formula_codes(expert: int, n: range, k: range, device: Device = "cpu") -> torch.Tensor:
    """Codes of a part of one expert from a formula, uint8 [len(n), len(k)].

    Field case 3: any part of a weight beyond 2^31 elements can be made again without storing it.
    Neighbours in every direction differ, and so do places that are 2^32 bytes or units of the
    layout apart, because the high bits of each index are mixed in.
    """
    row = torch.arange(n.start, n.stop, n.step, device=device)
    column = torch.arange(k.start, k.stop, k.step, device=device)
    row = row * 5 + (row >> 4) * 3 + (row >> 9) * 7
    column = column * 11 + (column >> 4) * 13 + (column >> 8) * 5
    mixed = row.unsqueeze(-1) + column + expert * 9 + (expert >> 4) * 7
    return (mixed & 15).to(torch.uint8)


# --- activations --------------------------------------------------------------------------------


def exact_x(rows: int, k: int, *, seed: int = 0, device: Device = "cpu") -> torch.Tensor:
    """EXACT activations, bf16 [rows, k]: 16 of +1 or -1 in each row, one of them at column k-1."""
    g = generator(seed, device)
    # One random column in each of 15 equal parts of 0..k-2, so columns of a row never meet.
    parts = NON_ZEROS - 1
    starts = torch.arange(parts, device=device) * (k - 1) // parts
    ends = (torch.arange(parts, device=device) + 1) * (k - 1) // parts
    inside = torch.rand(rows, parts, generator=g, device=device)
    columns = starts + (inside * (ends - starts)).long()
    last = torch.full((rows, 1), k - 1, device=device)
    columns = torch.cat((torch.minimum(columns, ends - 1), last), dim=1)
    signs = torch.randint(0, 2, columns.shape, generator=g, device=device) * 2 - 1
    x = torch.zeros(rows, k, dtype=torch.bfloat16, device=device)
    return x.scatter_(1, columns, signs.bfloat16())


def real_x(rows: int, k: int, *, seed: int = 0, device: Device = "cpu") -> torch.Tensor:
    """REAL activations, bf16 [rows, k], normal."""
    return torch.randn(rows, k, generator=generator(seed, device), device=device).bfloat16()


def random_x(
    rows: int, k: int, *, kind: Kind = "exact", seed: int = 0, device: Device = "cpu"
) -> torch.Tensor:
    """Activations of a kind, bf16 [rows, k]."""
    make = exact_x if kind == "exact" else real_x
    return make(rows, k, seed=seed, device=device)


def one_hot_x(columns: torch.Tensor, k: int) -> torch.Tensor:
    """Return bf16 [len(columns), k] with a single 1 per row: the output is a column of W."""
    x = torch.zeros(len(columns), k, dtype=torch.bfloat16, device=columns.device)
    return x.scatter_(1, columns.long().unsqueeze(1), 1.0)


def poisoned(*shape: int, device: Device = "cpu") -> torch.Tensor:
    """Return a bf16 output buffer filled with 12345 (bf16 keeps 12352), to show what is written."""
    return torch.full(shape, POISON, dtype=torch.bfloat16, device=device)


def guarded(rows: int, n: int, *, device: Device = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Return a poisoned buffer [rows + 2, n] and its middle rows: rows 0 and -1 are guards."""
    buffer = poisoned(rows + 2, n, device=device)
    return buffer, buffer[1:-1]


def is_poison(values: torch.Tensor) -> bool:
    """Tell whether every value is still the filling of `poisoned`."""
    return bool((values == torch.tensor(POISON, dtype=torch.bfloat16, device=values.device)).all())


# --- routing ------------------------------------------------------------------------------------

ROUTINGS = ("uniform", "skewed", "one_expert", "one_each", "none", "holes")


def topk_ids(
    tokens: int,
    top_k: int,
    num_experts: int,
    routing: str = "uniform",
    *,
    seed: int = 0,
    device: Device = "cpu",
) -> torch.Tensor:
    """Choose experts for each token, int32 [tokens, top_k].

    uniform: distinct random experts. skewed: a few experts get most. one_expert: all to expert 0.
    one_each: experts in turn. none: all -1. holes: uniform with a third of the ids -1.
    """
    g = generator(seed, device)
    if routing == "one_expert":
        return torch.zeros(tokens, top_k, dtype=torch.int32, device=device)
    if routing == "none":
        return torch.full((tokens, top_k), -1, dtype=torch.int32, device=device)
    if routing == "one_each":
        routes = torch.arange(tokens * top_k, device=device) % num_experts
        return routes.view(tokens, top_k).int()
    if routing not in ROUTINGS:
        raise ValueError(f"routing={routing!r} is not one of {ROUTINGS}")
    scores = torch.rand(tokens, num_experts, generator=g, device=device)
    if routing == "skewed":
        scores = scores - torch.arange(num_experts, device=device).float().log1p() * 0.3
    ids = scores.topk(top_k, dim=1).indices.int()
    if routing == "holes":
        holes = torch.rand(tokens, top_k, generator=g, device=device) < 1 / 3
        ids = torch.where(holes, -1, ids)
    return ids


def topk_weights(
    tokens: int, top_k: int, *, kind: Kind = "exact", seed: int = 0, device: Device = "cpu"
) -> torch.Tensor:
    """Router weights, fp32 [tokens, top_k]: powers of two from 1/4 to 1 (EXACT), or normalised."""
    g = generator(seed + 1, device)
    if kind == "exact":
        powers = torch.randint(-2, 1, (tokens, top_k), generator=g, device=device)
        return torch.exp2(powers.float())
    weights = torch.rand(tokens, top_k, generator=g, device=device) + 0.05
    return weights / weights.sum(1, keepdim=True)


@dataclass(frozen=True)
class PartialRouting:
    """Field case 1: routing of an expert-parallel rank with remote and missing experts.

    Attributes:
        topk_ids: int32 [33, 8], global ids and -1.
        expert_map: int32 [384], local index or -1.
        local_ids: int32 [33, 8], the same routing with ids already local.
        silent_rows: tokens whose result must be exactly zero.
    """

    topk_ids: torch.Tensor
    expert_map: torch.Tensor
    local_ids: torch.Tensor
    silent_rows: tuple[int, ...]


def partial_routing(seed: int = 0, device: Device = "cpu") -> PartialRouting:
    """Make field case 1: 384 experts over 8 ranks, rank 5 holds 240-287; 33 tokens, top 8."""
    ids = topk_ids(33, 8, 384, seed=seed)
    remote = torch.tensor([0, 47, 100, 239, 288, 300, 350, 383], dtype=torch.int32)
    ids[24] = remote
    ids[25:30] = -1
    ids[30] = torch.tensor([-1] * 7 + [250])
    ids[31] = remote
    ids[31, :2] = torch.tensor([287, 240])
    ids[32] = 383
    expert_map = torch.full((384,), -1, dtype=torch.int32)
    expert_map[240:288] = torch.arange(48, dtype=torch.int32)
    is_local = (ids >= 240) & (ids < 288)
    local = torch.where(is_local, ids - 240, -1).int()
    return PartialRouting(
        ids.to(device), expert_map.to(device), local.to(device), (24, 25, 26, 27, 28, 29, 32)
    )


def owners_of_counts(
    counts: Sequence[int], *, before: int = 0, after: int = 0, device: Device = "cpu"
) -> torch.Tensor:
    """Return the expert of each row, int32 [before + sum(counts) + after], sorted; -1 outside."""
    owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return torch.nn.functional.pad(owners, (before, after), value=-1).int().to(device)


def owners_of_slots(counts: Sequence[int], max_m: int, *, device: Device = "cpu") -> torch.Tensor:
    """Return the expert of each of its max_m rows, int32 [E * max_m], -1 from its count on."""
    slots = torch.arange(max_m).expand(len(counts), -1)
    owners = torch.arange(len(counts)).unsqueeze(1)
    owners = torch.where(slots < torch.tensor(counts).unsqueeze(1), owners, -1)
    return owners.flatten().int().to(device)


def ragged_counts(num_experts: int, mean: int, *, seed: int = 0) -> list[int]:
    """Choose rows of each expert around a mean: a third of the experts have none, one has most."""
    g = generator(seed)
    spread = torch.rand(num_experts, generator=g)
    counts = (spread * 2 * mean + 1).int()
    counts[torch.rand(num_experts, generator=g) < 1 / 3] = 0
    counts[seed % num_experts] = 4 * mean + 1
    return counts.tolist()


def expected_rows(
    x: torch.Tensor, weights: Weights, experts_of_rows: torch.Tensor, top_k: int = 1
) -> torch.Tensor:
    """Return x[r // top_k] @ W[experts_of_rows[r]].T, fp32 [rows, N]; NaN where the expert is -1.

    Computed from the checkpoint's codes and not from the packed weight, so that a fault of the
    packing shows. Exact for EXACT inputs.
    """
    experts_of_rows = experts_of_rows.flatten().long()
    n = weights.codes.shape[1]
    result = torch.full((len(experts_of_rows), n), float("nan"), device=x.device)
    for expert in experts_of_rows.unique().tolist():
        if expert < 0:
            continue
        rows = (experts_of_rows == expert).nonzero().flatten()
        part = Weights(
            weights.codes[expert : expert + 1], weights.scales[expert : expert + 1]
        ).dequantize()[0]
        result[rows] = x[rows // top_k].float() @ part.T
    return result
