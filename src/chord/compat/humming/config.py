"""`humming.config`."""

from chord.compat.config import (
    GemmType,
    InputQuantizationMode,
    LayerConfig,
    MmaType,
    WeightScale2Type,
    WeightScaleType,
)

__all__ = [
    "GemmType",
    "InputQuantizationMode",
    "LayerConfig",
    "MmaType",
    "WeightScale2Type",
    "WeightScaleType",
]
