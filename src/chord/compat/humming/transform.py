"""`humming.transform`."""

from chord.compat.forward import prepare_and_transform_humming_tensors

__all__ = ["prepare_and_transform_humming_tensors"]
