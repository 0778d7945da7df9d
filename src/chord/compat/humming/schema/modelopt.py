"""`humming.schema.modelopt`."""

from chord.compat.refusals import refusing_class
from chord.compat.schema import BaseInputSchema, BaseWeightSchema

ModeloptMxfp8WeightSchema = refusing_class("ModeloptMxfp8WeightSchema", BaseWeightSchema)
ModeloptNvfp4InputSchema = refusing_class("ModeloptNvfp4InputSchema", BaseInputSchema)
ModeloptNvfp4WeightSchema = refusing_class("ModeloptNvfp4WeightSchema", BaseWeightSchema)

__all__ = ["ModeloptMxfp8WeightSchema", "ModeloptNvfp4InputSchema", "ModeloptNvfp4WeightSchema"]
