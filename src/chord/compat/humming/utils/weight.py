"""`humming.utils.weight`."""

from chord.compat.refusals import refusing_function

quantize_weight = refusing_function("quantize_weight")

__all__ = ["quantize_weight"]
