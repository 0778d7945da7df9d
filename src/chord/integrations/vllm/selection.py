"""Which expert layers Chord takes over in vLLM, and in words why it leaves the others.

`decline` is the one statement of it. `chord_method` asks it, says the outcome once in vLLM's log,
and returns Chord's method or None. Formats and shapes follow the rules of `chord.weights`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import vllm.envs as envs
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_wNa16,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    GroupShape,
    QuantKey,
    ScaleDesc,
)

from chord.errors import UnsupportedError
from chord.integrations.vllm import experts
from chord.plan.config import MAX_SEGMENTS
from chord.weights.layout import GROUP_SIZE, reject_shape
from chord.weights.pack import PER_CHANNEL, SUPPORTED_GROUPS
from chord.weights.quantization import refuse_transforms

if TYPE_CHECKING:
    from chord.integrations.vllm.method import ChordMoEMethod

# A logger of vLLM's tree: its handlers and levels apply, and the lines stand among vLLM's own.
_LOG = init_logger("vllm.chord")

# vLLM's choices of an MoE backend that mean Chord. Any other is the user's wish for another kernel.
TAKEN_BACKENDS = ("auto", "humming")

# Settings that ask Humming for what Chord does not do.
_HUMMING_SETTINGS = (
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_USE_F16_ACCUM",
)


def chord_method(
    config: CompressedTensorsConfig | None,
    layer: RoutedExperts,
    prefix: str,
    *,
    asked_by_name: bool = False,
) -> ChordMoEMethod | None:
    """Return Chord's method for an expert layer, or None if vLLM is to serve it.

    Args:
        config: The checkpoint's config, or None if it is not compressed-tensors.
        layer: The layer, before it has weights (int32, [E, N, K/8]).
        prefix: Its name in the model.
        asked_by_name: The user chose Chord by name: where it cannot serve, raise.

    Raises:
        ValueError: Chord was asked for by name and declines, or the projections of the layer are
            quantized in different ways.
    """
    scheme: dict[str, Any] | None = None
    reason: str | None = "the checkpoint is not compressed-tensors"
    if config is not None:
        scheme = _scheme(config, layer, prefix)
        if scheme is None:
            return None  # the checkpoint leaves these experts unquantized
        reason = (
            _decline_user(config, layer)
            or decline(scheme, layer)
            or _decline_rotations(config, _modules(layer, prefix))
        )
    name = re.sub(r"\d+", "*", prefix)
    if scheme is None or reason is not None:
        if asked_by_name and layer.moe_config.moe_backend in TAKEN_BACKENDS:
            raise ValueError(
                f"--quantization chord: Chord does not serve {prefix}: {reason}. Leave the flag "
                f"out to let vLLM choose a kernel"
            )
        _LOG.info_once("Chord leaves %s to vLLM: %s", name, reason)
        return None
    from chord.integrations.vllm.method import ChordMoEMethod

    chosen = experts.experts_class(layer.moe_config)
    _LOG.info_once("Chord serves %s: %s, %s", name, chosen.__name__, _describe(scheme, layer))
    return ChordMoEMethod(
        scheme["weights"], scheme.get("input_activations"), layer.moe_config, chosen
    )


def decline(scheme: dict[str, Any], layer: RoutedExperts) -> str | None:
    """Say why Chord cannot serve a layer of this scheme, or return None if it can.

    Args:
        scheme: What the checkpoint says of the layer: weights, input_activations, format.
        layer: The layer, before its weights exist.
    """
    moe = layer.moe_config
    return (
        _decline_format(scheme)
        or _decline_layer(layer)
        or _decline_shape(scheme, moe)
        or _decline_deployment(scheme, moe)
    )


def _scheme(
    config: CompressedTensorsConfig, layer: RoutedExperts, prefix: str
) -> dict[str, Any] | None:
    """Return the checkpoint's scheme of an expert layer, None if it is unquantized."""
    config._add_fused_moe_to_target_scheme_map()
    schemes = [config.get_scheme_dict(layer, name) for name in _modules(layer, prefix)]
    if any(scheme != schemes[0] for scheme in schemes):
        raise ValueError(
            f"{prefix}: the checkpoint quantizes gate, up and down projections in different ways "
            f"({schemes}); vLLM and Chord need one scheme for all three"
        )
    return schemes[0]


def _modules(layer: RoutedExperts, prefix: str) -> list[str]:
    """Return the names of the first expert's projections, as the checkpoint's config knows them."""
    names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
    return [f"{prefix}.0.{name}" for name in names if name]


def _decline_rotations(config: CompressedTensorsConfig, modules: list[str]) -> str | None:
    """Say that the experts' activations would have to be rotated."""
    if config.transform_config is None:
        return None
    stated = {"transform_config": config.transform_config.model_dump(mode="json")}
    try:
        for module in modules:
            refuse_transforms(stated, module)
    except UnsupportedError as error:
        return str(error)
    return None


def _decline_user(config: CompressedTensorsConfig, layer: RoutedExperts) -> str | None:
    """Say what the user asked for instead."""
    backend = layer.moe_config.moe_backend
    if backend not in TAKEN_BACKENDS:
        return f"--moe-backend {backend} asks for another kernel"
    for name in _HUMMING_SETTINGS:
        if getattr(envs, name):
            return f"{name} is set, which Chord does not do"
    if config.online_quantization_config is not None:
        return "the weights are to be quantized anew while loading"
    return None


def _decline_format(scheme: dict[str, Any]) -> str | None:
    weights = scheme.get("weights")
    if weights is None:
        return "the scheme quantizes no weights"
    layout = scheme.get("format")
    if layout != "pack-quantized":
        return f"format {layout}, Chord reads pack-quantized"
    if scheme.get("input_activations") is not None:
        return "the activations are quantized, Chord's are BF16"
    kind = str(getattr(weights.type, "value", weights.type))
    if weights.num_bits != 4 or kind != "int" or weights.dynamic:
        how = "dynamic " if weights.dynamic else ""
        return f"{how}{weights.num_bits}-bit {kind} weights, Chord's are static 4-bit int"
    if not weights.symmetric:
        return "the weights have zero points, Chord's are symmetric"
    group = _group_size(weights)
    if group not in (*SUPPORTED_GROUPS, PER_CHANNEL):
        return (
            f"{weights.strategy} scales with group size {weights.group_size}, Chord takes groups "
            f"of {', '.join(map(str, SUPPORTED_GROUPS))} and one scale a row"
        )
    return None


def _group_size(weights: Any) -> int | None:
    """Return the group size as `chord.pack_experts` takes it, None if it takes none such."""
    strategy = getattr(weights.strategy, "value", weights.strategy)
    if strategy == "channel":
        return PER_CHANNEL
    return weights.group_size if strategy == "group" else None


def _decline_layer(layer: RoutedExperts) -> str | None:
    moe = layer.moe_config
    if moe.has_bias:
        return "the experts have biases"
    for name in ("swiglu_alpha", "swiglu_beta"):
        for holder in (layer, moe):
            value = getattr(holder, name, None)
            if value is not None:
                return f"{name}={value}, which vLLM's silu has not"
    limit = getattr(layer, "swiglu_limit", None)
    if limit is not None and not limit > 0:
        return f"swiglu_limit={limit}, Chord takes a positive one or none"
    if moe.moe_parallel_config.enable_eplb:
        return "expert load balancing (EPLB) moves experts while serving"
    return None


def _decline_shape(scheme: dict[str, Any], moe: FusedMoEConfig) -> str | None:
    hidden, inner = moe.hidden_dim, moe.intermediate_size_per_partition
    if moe.tp_shard_with_padding:
        return "tensor-parallel slices are padded"
    if moe.num_local_experts > MAX_SEGMENTS:
        return f"{moe.num_local_experts} experts on a rank, Chord takes {MAX_SEGMENTS}"
    group = _group_size(scheme["weights"]) or GROUP_SIZE
    for name, size in (("hidden size", hidden), ("intermediate size of a rank", inner)):
        if group != PER_CHANNEL and size % group:
            return f"{name} {size} is no whole number of groups of {group}"
    return reject_shape(moe.num_local_experts, 2 * inner, hidden) or reject_shape(
        moe.num_local_experts, hidden, inner
    )


def _decline_deployment(scheme: dict[str, Any], moe: FusedMoEConfig) -> str | None:
    """Ask the experts class, in the way in which vLLM asks its own."""
    if str(moe.in_dtype) != "torch.bfloat16":
        return f"activations are {moe.in_dtype}, Chord's are torch.bfloat16"
    chosen = experts.experts_class(moe)
    supported, reason = chosen.is_supported_config(
        chosen, moe, _weight_key(scheme["weights"]), None, chosen.activation_format()
    )
    return None if supported else str(reason)


def _weight_key(weights: Any) -> QuantKey:
    group = _group_size(weights)
    shape = GroupShape.PER_CHANNEL if group == PER_CHANNEL else GroupShape(1, group)
    scale = ScaleDesc(experts.SCALE_DTYPE, True, shape)
    kind = compressed_tensors_wNa16.WNA16_SUPPORTED_TYPES_MAP[weights.num_bits]
    return QuantKey(kind, scale, symmetric=weights.symmetric)


def _describe(scheme: dict[str, Any], layer: RoutedExperts) -> str:
    moe, parallel = layer.moe_config, layer.moe_config.moe_parallel_config
    group = _group_size(scheme["weights"])
    scales = "a scale a row" if group == PER_CHANNEL else f"groups of {group or GROUP_SIZE}"
    spread = f"EP{parallel.ep_size}" if parallel.use_ep else f"TP{parallel.tp_size}"
    if parallel.use_all2all_kernels:
        spread += f" over {parallel.all2all_backend}"
    return (
        f"INT4 in {scales}, {moe.num_local_experts} of {moe.num_experts} experts, hidden "
        f"{moe.hidden_dim}, intermediate {moe.intermediate_size_per_partition}, {spread}"
    )
