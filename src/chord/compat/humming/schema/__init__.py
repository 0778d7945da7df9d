"""`humming.schema`."""

from chord.compat.refusals import refusing_class
from chord.compat.schema import (
    BaseInputSchema,
    BaseWeightSchema,
    CompressedTensorsWeightSchema,
    HummingInputSchema,
    HummingWeightSchema,
)

AWQWeightSchema = refusing_class("AWQWeightSchema", BaseWeightSchema)
BitnetWeightSchema = refusing_class("BitnetWeightSchema", BaseWeightSchema)
CompressedTensorsInputSchema = refusing_class("CompressedTensorsInputSchema", BaseInputSchema)
Fp8InputSchema = refusing_class("Fp8InputSchema", BaseInputSchema)
GPTQWeightSchema = refusing_class("GPTQWeightSchema", BaseWeightSchema)
GptOssMxfp4WeightSchema = refusing_class("GptOssMxfp4WeightSchema", BaseWeightSchema)
Mxfp4WeightSchema = refusing_class("Mxfp4WeightSchema", BaseWeightSchema)

__all__ = [
    "AWQWeightSchema",
    "BaseInputSchema",
    "BaseWeightSchema",
    "BitnetWeightSchema",
    "CompressedTensorsInputSchema",
    "CompressedTensorsWeightSchema",
    "Fp8InputSchema",
    "GPTQWeightSchema",
    "GptOssMxfp4WeightSchema",
    "HummingInputSchema",
    "HummingWeightSchema",
    "Mxfp4WeightSchema",
]
