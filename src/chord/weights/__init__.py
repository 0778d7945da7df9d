"""Weights: the packed layout, its container, packing and unpacking, and checkpoint reading."""

from chord.weights.pack import pack_experts, unpack
from chord.weights.packed import PackedExperts

__all__ = ["PackedExperts", "pack_experts", "unpack"]
