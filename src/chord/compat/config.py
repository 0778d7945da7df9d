"""Enumerations that engines compare with, and the description of one projection."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from chord.compat.dtypes import TYPES, DataType


class InputQuantizationMode(str, enum.Enum):
    """How activations are quantized. Chord's are BF16: it only ever answers Disabled."""

    Disabled = "none"
    StaticTensor = "static_tensor"
    DynamicToken = "dynamic_token"
    DynamicGroup = "dynamic_group"
    StaticTensorDynamicGroup = "static_tensor_dynamic_group"
    DynamicGroupToken = "dynamic_group_token"

    @property
    def should_quantize(self) -> bool:
        """Whether anything is quantized."""
        return self is not InputQuantizationMode.Disabled

    @property
    def has_secondary_scale(self) -> bool:
        """Whether there are scales of two levels."""
        return self in (
            InputQuantizationMode.StaticTensorDynamicGroup,
            InputQuantizationMode.DynamicGroupToken,
        )

    @property
    def has_group_scale(self) -> bool:
        """Whether groups along a row have scales."""
        return self is InputQuantizationMode.DynamicGroup or self.has_secondary_scale


class MmaType(enum.Enum):
    """Matrix instructions by family."""

    MMA = "mma"
    WGMMA = "wgmma"
    UMMA = "umma"
    MXMMA = "mxmma"


class WeightScaleType(enum.Enum):
    """What shares a weight scale."""

    GROUP = "group"
    BLOCK = "block"
    CHANNEL = "channel"
    TENSOR = "tensor"


class WeightScale2Type(enum.Enum):
    """What shares a second weight scale; Chord's weights have none."""

    NONE = "none"
    CHANNEL = "channel"
    TENSOR = "tensor"


class GemmType(enum.Enum):
    """How rows find their expert."""

    DENSE = "dense"
    INDEXED = "indexed"
    GROUPED_CONTIGUOUS = "grouped_contiguous"
    GROUPED_MASKED = "grouped_masked"


@dataclass(frozen=True)
class LayerConfig:
    """One projection of the experts of a rank, [E, N, K]. Nothing of it is padded outside.

    Attributes:
        shape_n: N, output features.
        shape_k: K, reduction length.
        num_experts: E.
        pad_shape_n: 0.
        pad_shape_k: 0.
        a_dtype: Of activations.
        b_dtype: Of codes.
        c_dtype: Of outputs.
        input_quant_mode: Disabled.
    """

    shape_n: int
    shape_k: int
    num_experts: int
    pad_shape_n: int = 0
    pad_shape_k: int = 0
    a_dtype: DataType = TYPES["bfloat16"]
    b_dtype: DataType = TYPES["uint4"]
    c_dtype: DataType = TYPES["bfloat16"]
    input_quant_mode: InputQuantizationMode = InputQuantizationMode.Disabled
