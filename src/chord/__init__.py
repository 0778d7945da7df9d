"""Chord: the routed experts of W4A16 mixture-of-experts models on NVIDIA Hopper and Blackwell.

    experts = chord.pack_experts(weight_packed, weight_scale)
    y = chord.indexed(x, experts, sorted_token_ids, expert_ids, num_tokens_post_padded, top_k)
    y = chord.contiguous(x, experts, expert_offsets)
    y = chord.masked(x, experts, tokens_per_expert)
    y = chord.fused_moe(hidden, w13, w2, topk_weights, topk_ids)

`chord.reference` holds the same functions in plain PyTorch. Importing this package touches no GPU;
names are imported at their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chord import reference, routing
    from chord.errors import (
        CacheWarning,
        CaptureError,
        ChordError,
        CompileError,
        InputError,
        UnsupportedError,
    )
    from chord.ops.align import align
    from chord.ops.fused_moe import fused_moe, fused_moe_workspace
    from chord.ops.grouped_gemm import indexed
    from chord.ops.grouped_rows import contiguous, masked
    from chord.weights.pack import pack_experts, unpack
    from chord.weights.packed import PackedExperts

__version__ = "0.1.0.dev0"

__all__ = [
    "CacheWarning",
    "CaptureError",
    "ChordError",
    "CompileError",
    "InputError",
    "PackedExperts",
    "UnsupportedError",
    "__version__",
    "align",
    "contiguous",
    "fused_moe",
    "fused_moe_workspace",
    "indexed",
    "masked",
    "pack_experts",
    "reference",
    "routing",
    "unpack",
]

_HOMES = {
    "CacheWarning": "chord.errors",
    "CaptureError": "chord.errors",
    "ChordError": "chord.errors",
    "CompileError": "chord.errors",
    "InputError": "chord.errors",
    "PackedExperts": "chord.weights.packed",
    "UnsupportedError": "chord.errors",
    "align": "chord.ops.align",
    "contiguous": "chord.ops.grouped_rows",
    "fused_moe": "chord.ops.fused_moe",
    "fused_moe_workspace": "chord.ops.fused_moe",
    "indexed": "chord.ops.grouped_gemm",
    "masked": "chord.ops.grouped_rows",
    "pack_experts": "chord.weights.pack",
    "unpack": "chord.weights.pack",
}
_MODULES = ("reference", "routing")


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"chord.{name}")
    else:
        raise AttributeError(f"module 'chord' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
