"""What a checkpoint says of weights and activations, in humming's terms; all but W4A16 refused.

Two kinds of weights pass: compressed-tensors' packed INT4 as a checkpoint has it, and the same
under the name that humming gives it once it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from chord.compat.config import InputQuantizationMode, WeightScale2Type, WeightScaleType
from chord.compat.dtypes import TYPES, DataType
from chord.compat.refusals import refuse
from chord.weights.pack import PER_CHANNEL, PLAIN_ORDER, SUPPORTED_GROUPS

Tensors = dict[str, torch.Tensor]


class BaseWeightSchema:
    """A kind of quantized weights."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> BaseWeightSchema:
        """Return the kind that a checkpoint's config describes.

        Raises:
            UnsupportedError: It is not W4A16.
        """
        method = config.get("quant_method")
        if method != "compressed-tensors":
            refuse(f"quant_method {method!r} ({_described(config)})")
        return CompressedTensorsWeightSchema.from_config(config)


class BaseInputSchema:
    """A kind of activations."""

    INPUT_SCHEMA_MAP: ClassVar[dict[str, type]] = {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> HummingInputSchema:
        """Return the kind that a config describes: BF16 for an empty one.

        Raises:
            UnsupportedError: Activations are to be quantized.
        """
        wanted = {k: v for k, v in config.items() if k != "quant_method" and v is not None}
        if wanted:
            refuse(f"quantizing activations ({_described(wanted)})")
        return HummingInputSchema()


@dataclass(kw_only=True)
class HummingInputSchema(BaseInputSchema):
    """BF16 activations; anything else is refused."""

    a_dtype: DataType | None = None
    input_scale_group_size: int = 0
    input_scale_dtype: DataType | None = None
    input_quant_mode: InputQuantizationMode = InputQuantizationMode.Disabled
    static_tensor_scale_name: None = None

    def __post_init__(self) -> None:
        if (
            self.a_dtype not in (None, TYPES["bfloat16"])
            or InputQuantizationMode(self.input_quant_mode).should_quantize
        ):
            refuse(f"activations of {self.a_dtype} quantized by {self.input_quant_mode}")

    def to_humming_schema(self, param_dtype: torch.dtype | None = None) -> HummingInputSchema:
        """Return this for activations of a dtype.

        Raises:
            UnsupportedError: The dtype is not bf16.
        """
        if param_dtype not in (None, torch.bfloat16):
            refuse(f"activations of {param_dtype}")
        return self

    def convert_humming(self, tensors: Tensors, **_: Any) -> tuple[HummingInputSchema, Tensors]:
        """Return this and no tensors: activations bring none.

        Args:
            tensors: Of a loaded layer, any shape and dtype.
        """
        return self, {}

    def is_compatible_with(self, *_: Any, **__: Any) -> bool:
        """Return True: BF16 goes with every weight that passes."""
        return True


@dataclass(kw_only=True)
class HummingWeightSchema(BaseWeightSchema):
    """Symmetric INT4 with scales along K, as `chord.pack_experts` takes it; all else is refused.

    Attributes:
        b_dtype: Of codes: uint4, a code stands for code - 8.
        bs_dtype: Of scales.
        weight_scale_group_size: Values along K that share a scale, 0 for one scale a row.
    """

    b_dtype: DataType = TYPES["uint4"]
    bs_dtype: DataType | None = TYPES["bfloat16"]
    weight_scale_group_size: int = 32
    weight_scale_group_size_n: int = 0
    weight_scale_type: WeightScaleType = field(init=False)
    weight_scale_2_type: WeightScale2Type = WeightScale2Type.NONE
    has_zero_point: bool = False
    hadamard_block_size: int = 0

    def __post_init__(self) -> None:
        by_group = self.weight_scale_group_size > 0
        self.weight_scale_type = WeightScaleType.GROUP if by_group else WeightScaleType.CHANNEL
        if (
            DataType.from_any(self.b_dtype) is not TYPES["uint4"]
            or self.weight_scale_group_size not in (0, *SUPPORTED_GROUPS)
            or self.weight_scale_group_size_n > 1
            or WeightScale2Type(self.weight_scale_2_type) is not WeightScale2Type.NONE
            or self.has_zero_point
            or self.hadamard_block_size > 1
        ):
            refuse(f"a weight of this kind ({self})")

    def to_humming_schema(self, param_dtype: torch.dtype | None = None) -> HummingWeightSchema:
        """Return this: it is one."""
        return self


@dataclass(kw_only=True)
class CompressedTensorsWeightSchema(BaseWeightSchema):
    """compressed-tensors' pack-quantized INT4 weights.

    Attributes:
        group_size: As `chord.pack_experts` takes it, -1 for one scale a row.
    """

    group_size: int
    hadamard_block_size: int = 0

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CompressedTensorsWeightSchema:
        """Return the schema of a checkpoint's weights (int32, [E, N, K/8]).

        Raises:
            UnsupportedError: It is not symmetric 4-bit int in plain order with scales along K.
        """
        stated = {"format": "pack-quantized", "type": "int", "num_bits": 4, "symmetric": True}
        for key, value in stated.items():
            if config.get(key, value) != value:
                refuse(f"compressed-tensors {key} {config[key]!r} ({_described(config)})")
        if config.get("actorder") not in PLAIN_ORDER or config.get("dynamic"):
            refuse(f"act-order or dynamic weights ({_described(config)})")
        strategy, group = config.get("strategy"), config.get("group_size")
        if strategy == "channel":
            group = PER_CHANNEL
        if strategy not in ("group", "channel") or group not in (PER_CHANNEL, *SUPPORTED_GROUPS):
            refuse(f"strategy {strategy!r} with group size {group!r}")
        return cls(group_size=group)

    def to_humming_schema(self, param_dtype: torch.dtype | None = None) -> HummingWeightSchema:
        """Return the schema of the weights once they are loaded."""
        return HummingWeightSchema(weight_scale_group_size=max(self.group_size, 0))

    def convert_humming(self, tensors: Tensors, **_: Any) -> tuple[HummingWeightSchema, Tensors]:
        """Return the loaded weights under humming's names; no byte moves.

        Args:
            tensors: weight_packed: int32, [E, N, K/8]; weight_scale: bf16, [E, N, K/group].
        """
        for name in ("weight_zero_point", "weight_g_idx", "bias"):
            if name in tensors:
                refuse(f"a checkpoint with {name}")
        named = {"weight": tensors["weight_packed"], "weight_scale": tensors["weight_scale"]}
        return self.to_humming_schema(), named

    def get_padded_tensors_attrs(
        self,
        shape_n: int,
        shape_k: int,
        param_dtype: torch.dtype,
        num_experts: int | None = None,
        has_bias: bool = False,
        **_: Any,
    ) -> dict[str, dict[str, Any]]:
        """Return names, shapes and dtypes of a projection's parameters, to load a checkpoint into.

        Args:
            shape_n: N.
            shape_k: K.
            param_dtype: dtype of the scales.
            num_experts: E.
            has_bias: Must be False.

        Raises:
            UnsupportedError: A dense layer, or one with a bias.
        """
        if num_experts is None:
            refuse(f"a dense W4A16 layer, N={shape_n}, K={shape_k}")
        if has_bias:
            refuse("experts with biases")
        groups = 1 if self.group_size == PER_CHANNEL else shape_k // self.group_size
        scale_type = "channel" if self.group_size == PER_CHANNEL else "group"
        along = {"input_dim": 1, "output_dim": 0}
        return {
            "weight_packed": {
                "shape": (num_experts, shape_n, shape_k // 8),
                "dtype": torch.int32,
                "extra_attrs": dict(along),
            },
            "weight_scale": {
                "shape": (num_experts, shape_n, groups),
                "dtype": param_dtype,
                "extra_attrs": {"scale_type": scale_type, **along},
            },
            "weight_shape": {"shape": (num_experts, 2), "dtype": torch.int64, "extra_attrs": {}},
        }

    get_tensors_attrs = get_padded_tensors_attrs

    def process_loaded_weight(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return a tensor of the checkpoint as it is, any shape and dtype."""
        return tensor


def _described(config: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in sorted(config.items()))
