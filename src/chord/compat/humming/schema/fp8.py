"""`humming.schema.fp8`."""

from chord.compat.refusals import refusing_class
from chord.compat.schema import BaseWeightSchema

Fp8WeightSchema = refusing_class("Fp8WeightSchema", BaseWeightSchema)

__all__ = ["Fp8WeightSchema"]
