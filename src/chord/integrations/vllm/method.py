"""The weights of an expert layer in vLLM: created as vLLM loads them, packed once, reloadable.

vLLM loads a compressed-tensors checkpoint into the parameters that its own method creates; Chord
keeps these. After loading, both projections are packed, one after the other: at most one projection
is there twice. What stays are two parameters, `w13_weight` and `w2_weight`.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEQuantConfig,
    FusedMoEQuantDesc,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

import chord
from chord.integrations.vllm.experts import ChordExpertsBase
from chord.weights.pack import PER_CHANNEL

_LOG = init_logger("vllm.chord")

_PROJECTIONS = ("w13", "w2")


class ChordMoEMethod(compressed_tensors_moe_wna16.CompressedTensorsWNA16MoEMethod):
    """vLLM's method for INT4 experts of compressed-tensors, computed by Chord.

    Args:
        weight_quant: The checkpoint's description of the weights (compressed-tensors).
        input_quant: Of the activations; None, or `selection` would have declined.
        moe: vLLM's description of the layer.
        experts_cls: Who computes.
    """

    def __init__(
        self,
        weight_quant: Any,
        input_quant: Any,
        moe: FusedMoEConfig,
        experts_cls: type[ChordExpertsBase],
    ) -> None:
        # Not vLLM's own __init__: it would choose one of its backends.
        FusedMoEMethodBase.__init__(self, moe)
        self.weight_quant = weight_quant
        self.input_quant = input_quant
        self.symmetric = weight_quant.symmetric
        self.num_bits = weight_quant.num_bits
        self.packed_factor = Fraction(32, weight_quant.num_bits)
        self.strategy = getattr(weight_quant.strategy, "value", weight_quant.strategy)
        self.group_size = PER_CHANNEL if self.strategy == "channel" else weight_quant.group_size
        self.experts_cls = experts_cls
        self.is_transposed = False
        self.is_marlin = False
        self.input_dtype = torch.bfloat16
        self.moe_kernel: mk.FusedMoEKernel | None = None

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Create the parameters that vLLM loads a checkpoint into, and begin to compile.

        Args:
            layer: Gets `w13_weight_packed`, int32 [E, 2I, H / 8], and the like.
            num_experts: E, experts of this rank.
            hidden_size: H.
            intermediate_size_per_partition: I, this rank's part.
            params_dtype: dtype of the scales.
            extra_weight_attrs: Attributes of the parameters, the loader among them.
        """
        super().create_weights(
            layer,
            num_experts,
            hidden_size,
            intermediate_size_per_partition,
            params_dtype,
            **extra_weight_attrs,
        )
        # Gate and up each bring the shape of their half. A reload counts what arrives to know when
        # a layer is whole: without this it would stop a few numbers early.
        layer.w13_weight_shape.weight_loader_numel = 2 * layer.w13_weight_shape.numel()
        if layer.w13_weight_packed.is_cuda:
            index = layer.w13_weight_packed.get_device()
            self.experts_cls.begin_kernels(self.moe, num_experts, index)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Pack the loaded weights and drop their checkpoint form.

        Raises:
            ValueError: A reload brought only a part of the layer.
            UnsupportedError: Scales that Chord does not take.
        """
        _check_reload(layer)
        for name in _PROJECTIONS:
            packed = chord.pack_experts(
                getattr(layer, f"{name}_weight_packed").data,
                getattr(layer, f"{name}_weight_scale").data,
                group_size=self.group_size,
                actorder=getattr(self.weight_quant.actorder, "value", None),
                interleave_gate_up=name == "w13" and self.experts_cls.interleave_gate_up,
            )
            for part in ("packed", "scale", "shape"):
                delattr(layer, f"{name}_weight_{part}")
            weight = torch.nn.Parameter(packed.data, requires_grad=False)
            layer.register_parameter(f"{name}_weight", weight)
        if self.moe_kernel is None:  # a reload keeps the one that CUDA graphs were captured with
            self.moe_quant_config = self.get_fused_moe_quant_config(layer)
            self.moe_kernel = self._make_kernel(layer, self.moe_quant_config)
            self.moe_kernel.fused_experts.load_kernels(layer.w13_weight, layer.w2_weight)

    def _make_kernel(
        self, layer: RoutedExperts, quant_config: FusedMoEQuantConfig
    ) -> mk.FusedMoEKernel:
        """Join the deployment's all-to-all with Chord's experts."""
        prepare_finalize = maybe_make_prepare_finalize(
            moe=self.moe,
            quant_config=quant_config,
            routing_tables=layer._expert_routing_tables(),
            allow_new_interface=True,
            use_monolithic=False,
        )
        slots: dict[str, int] = {}
        if prepare_finalize.activation_format == mk.FusedMoEActivationFormat.BatchedExperts:
            slots["max_num_tokens"] = prepare_finalize.max_num_tokens_per_rank()
            slots["num_dispatchers"] = prepare_finalize.num_dispatchers()
        experts = self.experts_cls(self.moe, quant_config, **slots)
        return mk.FusedMoEKernel(prepare_finalize, experts)

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig:
        """Return that activations stay as they are, and SwiGLU's limit."""
        return FusedMoEQuantConfig(
            _a1=FusedMoEQuantDesc(),
            _a2=FusedMoEQuantDesc(),
            _w1=FusedMoEQuantDesc("int4"),
            _w2=FusedMoEQuantDesc("int4"),
            gemm1_clamp_limit=getattr(layer, "swiglu_limit", None),
        )

    @property
    def supports_eplb(self) -> bool:
        """Return False: `selection` leaves layers under EPLB to vLLM."""
        return False


def _check_reload(layer: RoutedExperts) -> None:
    """Refuse a reload that brought only a part of a layer: the rest is not initialised."""
    info = get_layerwise_info(layer)
    if info.kernel_tensors is None:
        return  # the first load
    seen = set()
    for name, call in info.loaded_weights:
        expert = layer._map_global_expert_id_to_local_expert_id(call.arguments["expert_id"])
        if expert >= 0 and name.endswith(("_packed", "_scale")):
            seen.add((name, call.arguments["shard_id"], expert))
    wanted = 6 * layer.local_num_experts  # codes and scales of gate, up and down
    if len(seen) < wanted:
        raise ValueError(
            f"the reload brought {len(seen)} of the {wanted} weights and scales of "
            f"{layer.layer_name}; the others are gone, because a layer is packed as a whole: send "
            f"all tensors of a layer in one update, and reload now or restart"
        )
