"""Expert layers of vLLM, with a compressed-tensors checkpoint and what they have to compute."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from compressed_tensors.compressors import pack_to_int32
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

from chord.bench.small_layer import quantization_config

PREFIX = "model.layers.3.mlp.experts"
EXPERTS, TOP_K, HIDDEN, INNER = 6, 2, 128, 64

PARALLEL = FusedMoEParallelConfig(
    tp_size=1,
    pcp_size=1,
    dp_size=1,
    ep_size=1,
    tp_rank=0,
    pcp_rank=0,
    dp_rank=0,
    ep_rank=0,
    sp_size=1,
    use_ep=False,
    all2all_backend="allgather_reducescatter",
    enable_eplb=False,
)


def tensor_parallel(size: int, rank: int = 0) -> FusedMoEParallelConfig:
    return replace(PARALLEL, tp_size=size, tp_rank=rank)


def expert_parallel(size: int, rank: int = 0, **more: Any) -> FusedMoEParallelConfig:
    return replace(PARALLEL, ep_size=size, ep_rank=rank, use_ep=True, **more)


def all_to_all(backend: str) -> FusedMoEParallelConfig:
    return expert_parallel(2, dp_size=2, all2all_backend=backend)


def checkpoint_config(**weights: Any) -> dict[str, Any]:
    """Return the quantization_config of a Kimi K2 checkpoint; `weights` changes its entries."""
    return quantization_config(["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"], **weights)


def moe_config(
    parallel: FusedMoEParallelConfig = PARALLEL,
    experts: int = EXPERTS,
    hidden: int = HIDDEN,
    inner: int = INNER,
    **more: Any,
) -> FusedMoEConfig:
    arguments: dict[str, Any] = {
        "num_experts": experts,
        "experts_per_token": TOP_K,
        "hidden_dim": hidden,
        "intermediate_size": inner,
        "num_local_experts": experts // parallel.ep_size,
        "num_logical_experts": experts,
        "activation": MoEActivation.SILU,
        "device": "cpu:0",
        "routing_method": RoutingMethodType.DeepSeekV3,
        "moe_parallel_config": parallel,
        "in_dtype": torch.bfloat16,
    }
    return FusedMoEConfig(**{**arguments, **more})


def make_layer(quant_config: Any, moe: FusedMoEConfig, **more: Any) -> RoutedExperts:
    """Make vLLM's layer: it asks quant_config for its method and creates its weights."""
    parallel = moe.moe_parallel_config
    with set_current_vllm_config(VllmConfig()):
        manager = ExpertMapManager(
            max_num_batched_tokens=64,
            top_k=TOP_K,
            global_num_experts=moe.num_experts,
            num_redundant_experts=0,
            num_expert_group=None,
            moe_parallel_config=parallel,
            placement_strategy="linear",
            enable_eplb=False,
        )
        return RoutedExperts(
            PREFIX, torch.bfloat16, moe, quant_config, expert_map_manager=manager, **more
        )


def config_of(cls: type, **weights: Any) -> Any:
    """Make a config from a checkpoint's dictionary, as vLLM does."""
    return cls.from_config(copy.deepcopy(checkpoint_config(**weights)))


@dataclass(frozen=True)
class Checkpoint:
    """One layer's experts: gate, up [E, I, H] and down [E, H, I], codes -8..7 and their scales."""

    codes: dict[str, torch.Tensor]
    scales: dict[str, torch.Tensor]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names within the layer and tensors, packed by the compressed-tensors library."""
        for e in range(EXPERTS):
            for name, codes in self.codes.items():
                yield f"{e}.{name}.weight_packed", pack_to_int32(codes[e], 4)
                yield f"{e}.{name}.weight_scale", self.scales[name][e]
                yield f"{e}.{name}.weight_shape", torch.tensor(codes[e].shape)

    def weight(self, name: str, e: int) -> torch.Tensor:
        """Return a weight as numbers, fp32."""
        scales = self.scales[name][e].float()
        group = self.codes[name].shape[-1] // scales.shape[-1]
        return self.codes[name][e].float() * scales.repeat_interleave(group, dim=-1)


def make_checkpoint(seed: int = 0, group: int = 32) -> Checkpoint:
    """Make random experts; group -1 is one scale a row."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "gate_proj": (INNER, HIDDEN),
        "up_proj": (INNER, HIDDEN),
        "down_proj": (HIDDEN, INNER),
    }
    codes, scales = {}, {}
    for name, (n, k) in shapes.items():
        codes[name] = torch.randint(-8, 8, (EXPERTS, n, k), generator=generator, dtype=torch.int8)
        groups = 1 if group == -1 else k // group
        scale = torch.rand(EXPERTS, n, groups, generator=generator) * 0.02 + 0.002
        scales[name] = scale.bfloat16()
    return Checkpoint(codes, scales)


def load(layer: RoutedExperts, checkpoint: Checkpoint) -> RoutedExperts:
    """Load a checkpoint by vLLM's loader and let the layer's method process it."""
    for _ in layer.load_weights(checkpoint.tensors()):
        pass
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def expected(
    checkpoint: Checkpoint,
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    experts: range = range(EXPERTS),
    inner: slice = slice(None),
    limit: float = math.inf,
) -> torch.Tensor:
    """Compute one rank's part in fp32: some experts, or a slice of each.

    Args:
        checkpoint: The experts.
        x: bf16, [M, H].
        weights: fp32, [M, top_k].
        ids: int, [M, top_k], global; others than `experts` contribute nothing.
        experts: Those of this rank.
        inner: Features of gate and up, and columns of down, of this rank.
        limit: SwiGLU's limit.
    """
    out = torch.zeros(x.shape, dtype=torch.float32)
    for token, slot in ((t, s) for t in range(x.shape[0]) for s in range(ids.shape[1])):
        e = int(ids[token, slot])
        if e in experts:
            row = x[token].float()
            gate = checkpoint.weight("gate_proj", e)[inner] @ row
            up = checkpoint.weight("up_proj", e)[inner] @ row
            middle = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
            down = checkpoint.weight("down_proj", e)[:, inner] @ middle
            out[token] += weights[token, slot] * down
    return out
