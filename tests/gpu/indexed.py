"""What the GPU tests of chord.indexed share."""

from __future__ import annotations

import torch

import chord
from chord.plan.config import Config
from chord.routing import Indexed
from chord.weights import PackedExperts


def launch(
    x: torch.Tensor,
    experts: PackedExperts,
    where: Indexed,
    out: torch.Tensor | None = None,
    *,
    config: Config | None = None,
) -> torch.Tensor:
    return chord.indexed(
        x,
        experts,
        where.sorted_token_ids,
        where.expert_ids,
        where.num_tokens_post_padded,
        where.top_k,
        block_m=where.block_m,
        out=out,
        validate=False,
        config=config,
    )
