"""Models of the DeepSeek-V3 / Kimi K2 architecture for the runs in vLLM: config and checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from chord.bench.scenarios import GROUP_SIZE
from chord.bench.small_layer import quantization_config


def config(
    *,
    layers: int,
    experts: int,
    intermediate: int,
    heads: int,
    hidden: int = 7168,
    dense: int = 18432,
    q_lora: int = 1536,
    vocab: int = 32000,
) -> dict[str, Any]:
    """Return a config.json: INT4 experts in groups of 32, everything else BF16, as Kimi K2 has it.

    Args:
        layers: Layers; the first is dense, the others have experts.
        experts: Routed experts of a layer, 8 a token.
        intermediate: Features of an expert.
        heads: Attention heads.
        hidden: Features of a token.
        dense: Features of the dense layer's MLP.
        q_lora: Rank of the queries.
        vocab: Words.
    """
    ignored = [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ]
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": dense,
        "kv_lora_rank": 512,
        "max_position_embeddings": 8192,
        "moe_intermediate_size": intermediate,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": heads,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "num_key_value_heads": heads,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": q_lora,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "v_head_dim": 128,
        "vocab_size": vocab,
        "quantization_config": quantization_config(ignored),
    }


def slice_of_tp8() -> dict[str, Any]:
    """Return what one rank of TP8 computes of Kimi K2, 12 expert layers deep."""
    return config(layers=13, experts=384, intermediate=256, heads=8, dense=2304)


def small() -> dict[str, Any]:
    """Return a model of the same architecture whose checkpoint is written in a second."""
    return config(
        layers=4,
        experts=32,
        intermediate=256,
        heads=8,
        hidden=1024,
        dense=2048,
        q_lora=256,
        vocab=4096,
    )


def write(folder: Path, description: dict[str, Any], checkpoint: bool, seed: int = 0) -> Path:
    """Write a model's folder.

    Args:
        folder: Where; made if it is missing.
        description: Its config.json.
        checkpoint: Write weights too, INT4 ones packed by the compressed-tensors library.
        seed: Of the weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(description))
    if checkpoint:
        from safetensors.torch import save_file

        generator = torch.Generator().manual_seed(seed)
        save_file(dict(_tensors(description, generator)), str(folder / "model.safetensors"))
    return folder


def _tensors(c: dict[str, Any], generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint: rows of norm about 1, so every part moves the outcome."""

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)

    hidden, heads, vocab = c["hidden_size"], c["num_attention_heads"], c["vocab_size"]
    query = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    latent = c["kv_lora_rank"] + c["qk_rope_head_dim"]
    value = c["qk_nope_head_dim"] + c["v_head_dim"]
    yield "model.embed_tokens.weight", matrix(vocab, hidden, hidden**0.5).bfloat16()
    yield "lm_head.weight", matrix(vocab, hidden, 4.0).bfloat16()
    yield "model.norm.weight", torch.ones(hidden).bfloat16()
    for layer in range(c["num_hidden_layers"]):
        stem = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{stem}.{norm}.weight", torch.ones(hidden).bfloat16()
        attention = {
            "q_a_proj": matrix(c["q_lora_rank"], hidden),
            "q_b_proj": matrix(heads * query, c["q_lora_rank"]),
            "kv_a_proj_with_mqa": matrix(latent, hidden),
            "kv_b_proj": matrix(heads * value, c["kv_lora_rank"]),
            "o_proj": matrix(hidden, heads * c["v_head_dim"]),
        }
        for name, weight in attention.items():
            yield f"{stem}.self_attn.{name}.weight", weight.bfloat16()
        for norm, size in (("q_a", c["q_lora_rank"]), ("kv_a", c["kv_lora_rank"])):
            yield f"{stem}.self_attn.{norm}_layernorm.weight", torch.ones(size).bfloat16()
        if layer < c["first_k_dense_replace"]:
            mlps = {f"{stem}.mlp": c["intermediate_size"]}
        else:
            mlps = {f"{stem}.mlp.shared_experts": c["moe_intermediate_size"]}
            router = matrix(c["n_routed_experts"], hidden)
            yield f"{stem}.mlp.gate.weight", router.bfloat16()
            bias = torch.rand(c["n_routed_experts"], generator=generator) * 0.1
            yield f"{stem}.mlp.gate.e_score_correction_bias", bias
            inner = c["moe_intermediate_size"]
            for e in range(c["n_routed_experts"]):
                for name, rows, columns in _projections(hidden, inner):
                    whole = f"{stem}.mlp.experts.{e}.{name}"
                    yield from _quantized(whole, matrix(rows, columns))
        for mlp, inner in mlps.items():
            for name, rows, columns in _projections(hidden, inner):
                yield f"{mlp}.{name}.weight", matrix(rows, columns).bfloat16()


def _projections(hidden: int, inner: int) -> tuple[tuple[str, int, int], ...]:
    return (
        ("gate_proj", inner, hidden),
        ("up_proj", inner, hidden),
        ("down_proj", hidden, inner),
    )


def _quantized(name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of one INT4 weight, fp32 [N, K], rounded to the nearest code."""
    from compressed_tensors.compressors import pack_to_int32

    groups = weight.unflatten(-1, (-1, GROUP_SIZE))
    scales = (groups.abs().amax(dim=-1) / 7).bfloat16()
    codes = (groups / scales.float().unsqueeze(-1)).round().clamp(-8, 7).flatten(-2)
    yield f"{name}.weight_packed", pack_to_int32(codes.to(torch.int8), 4)
    yield f"{name}.weight_scale", scales
    yield f"{name}.weight_shape", torch.tensor(weight.shape)
