"""A small random MoE layer in checkpoint form, and what it should compute, for `chord demo`.

The expected output is computed in FP64 from the checkpoint tensors alone, with no code of the
kernels, the packer or the reference.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from chord.bench.operands import Checkpoint, random_checkpoint
from chord.bench.scenarios import GROUP_SIZE

FILE_NAME = "model-00001-of-00001.safetensors"


def quantization_config(ignore: Iterable[str] = (), **weights: object) -> dict[str, Any]:
    """Return the quantization_config of a W4A16 checkpoint, as compressed-tensors writes it.

    Args:
        ignore: Names or `re:` patterns of the layers that are not quantised.
        weights: Entries of the weights' scheme that differ from Kimi K2's.
    """
    scheme: dict[str, object] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": GROUP_SIZE,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "group",
        "symmetric": True,
        "type": "int",
    }
    group = {
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": scheme | weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": "pack-quantized",
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one MoE layer.

    Attributes:
        num_experts: Routed experts E.
        hidden: Hidden size H.
        intermediate: Intermediate size I of one expert.
        top_k: Experts a token visits.
    """

    num_experts: int = 16
    hidden: int = 1024
    intermediate: int = 512
    top_k: int = 4


def write_checkpoint(folder: Path, shape: LayerShape, layer: int = 1) -> tuple[int, int]:
    """Write one layer of experts as a compressed-tensors checkpoint does.

    Args:
        folder: Existing folder for config.json, the safetensors file and its index.
        shape: Sizes of the layer.
        layer: Layer index in the tensor names.

    Returns:
        Number of tensors and their bytes.
    """
    from safetensors.torch import save_file

    sizes = {
        "gate_proj": (shape.intermediate, shape.hidden),
        "up_proj": (shape.intermediate, shape.hidden),
        "down_proj": (shape.hidden, shape.intermediate),
    }
    tensors: dict[str, torch.Tensor] = {}
    for seed, (projection, (n, k)) in enumerate(sizes.items()):
        weight = random_checkpoint(shape.num_experts, n, k, "cpu", seed)
        for expert in range(shape.num_experts):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}.{projection}"
            tensors[f"{prefix}.weight_packed"] = weight.weight_packed[expert].clone()
            tensors[f"{prefix}.weight_scale"] = weight.weight_scale[expert].clone()
            tensors[f"{prefix}.weight_shape"] = torch.tensor([n, k])
    save_file(tensors, folder / FILE_NAME)
    index = {"weight_map": dict.fromkeys(tensors, FILE_NAME)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"n_routed_experts": shape.num_experts, "quantization_config": quantization_config()}
    (folder / "config.json").write_text(json.dumps(config))
    return len(tensors), sum(tensor.nbytes for tensor in tensors.values())


def expected_output(
    hidden: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_up: Checkpoint,
    down: Checkpoint,
) -> torch.Tensor:
    """Compute the routed experts of one layer in FP64.

    Args:
        hidden: bfloat16, [T, H].
        topk_weights: float32, [T, top_k].
        topk_ids: int32, [T, top_k].
        gate_up: Weight [E, 2 I, H], gate rows first.
        down: Weight [E, H, I].

    Returns:
        float64, [T, H]: the weighted sum of `down(silu(gate(x)) * up(x))` over a token's experts.
    """
    out = torch.zeros(hidden.shape, dtype=torch.float64, device=hidden.device)
    for expert in topk_ids.unique().tolist():
        tokens, slots = (topk_ids == expert).nonzero(as_tuple=True)
        x = hidden[tokens].double()
        gate, up = (x @ gate_up.dequantize(expert).double().T).chunk(2, dim=1)
        y = (torch.nn.functional.silu(gate) * up) @ down.dequantize(expert).double().T
        out.index_add_(0, tokens, y * topk_weights[tokens, slots].double().unsqueeze(1))
    return out
