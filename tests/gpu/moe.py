"""Operands of a whole layer on the card, the call, and what has to come out in FP64."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

import cases
import chord
from chord.weights import PackedExperts

DEVICE = "cuda"
_CHUNK = 4096


@dataclass(frozen=True, eq=False)
class Operands:
    """One layer and one batch: ids are int32, weights fp32, [T, top_k]."""

    hidden: torch.Tensor
    w13: cases.Weights
    w2: cases.Weights
    packed13: PackedExperts
    packed2: PackedExperts
    weights: torch.Tensor
    ids: torch.Tensor


@functools.lru_cache(maxsize=3)
def _weights(
    num_experts: int, hidden: int, middle: int, seed: int
) -> tuple[cases.Weights, cases.Weights]:
    return (
        cases.random_weights(
            num_experts, 2 * middle, hidden, kind="real", seed=seed, device=DEVICE
        ),
        cases.random_weights(
            num_experts, hidden, middle, kind="real", seed=seed + 1, device=DEVICE
        ),
    )


def operands(
    num_experts: int,
    hidden: int,
    middle: int,
    top_k: int,
    tokens: int,
    routing: str = "uniform",
    *,
    seed: int = 0,
) -> Operands:
    """Make REAL operands; the packed weights are new in every call."""
    w13, w2 = _weights(num_experts, hidden, middle, seed)
    return Operands(
        hidden=cases.real_x(tokens, hidden, seed=seed, device=DEVICE),
        w13=w13,
        w2=w2,
        packed13=w13.pack(interleave_gate_up=True),
        packed2=w2.pack(),
        weights=cases.topk_weights(tokens, top_k, kind="real", seed=seed, device=DEVICE),
        ids=cases.topk_ids(tokens, top_k, num_experts, routing, seed=seed, device=DEVICE),
    )


def call(given: Operands, **changes: Any) -> torch.Tensor:
    """Run chord.fused_moe on the operands, some of them replaced by name."""
    arguments = {
        "hidden": given.hidden,
        "w13": given.packed13,
        "w2": given.packed2,
        "topk_weights": given.weights,
        "topk_ids": given.ids,
    }
    return chord.fused_moe(**{**arguments, **changes})


def workspace(given: Operands, tokens: int) -> torch.Tensor:
    """Return a workspace of exactly the bytes that a call needs, uint8."""
    size = chord.fused_moe_workspace(tokens, given.packed13, given.packed2, given.ids.shape[1])
    return torch.empty(size, dtype=torch.uint8, device=DEVICE)


def expected(
    given: Operands,
    *,
    swiglu: tuple[float, float, float | None] = (1.0, 0.0, None),
    on_input: bool = False,
) -> torch.Tensor:
    """Compute the layer in FP64 from the checkpoint's codes, with no rounding between."""
    alpha, beta, limit = swiglu
    out = torch.zeros(given.hidden.shape, dtype=torch.float64, device=DEVICE)
    for expert in given.ids.unique().tolist():
        if expert < 0:
            continue
        w13, w2 = (
            cases.Weights(w.codes[expert : expert + 1], w.scales[expert : expert + 1]).dequantize(
                torch.float64
            )[0]
            for w in (given.w13, given.w2)
        )
        tokens, slots = (given.ids == expert).nonzero(as_tuple=True)
        for part in range(0, len(tokens), _CHUNK):
            t, j = tokens[part : part + _CHUNK], slots[part : part + _CHUNK]
            weight = given.weights[t, j].double().unsqueeze(1)
            sums = given.hidden[t].double() @ w13.T * (weight if on_input else 1.0)
            gate, up = sums.chunk(2, dim=1)
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            rows = (gate * torch.sigmoid(alpha * gate) * (up + beta)) @ w2.T
            # A token may name an expert twice: += would add only one of its slots.
            out.index_add_(0, t, rows * (1.0 if on_input else weight))
    return out
