"""From the command line's flags to a config class, through vLLM's own ModelConfig."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm.model_executor.layers.quantization as quantization
from layers import checkpoint_config
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig

from chord.integrations.vllm import register
from chord.integrations.vllm.config import (
    ChordCompressedTensorsConfig,
    ChordConfig,
    ChordHummingConfig,
)

pytestmark = pytest.mark.usefixtures("platform")


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Register the plugin, and take it out of vLLM's registry again."""
    methods = list(quantization.QUANTIZATION_METHODS)
    classes = dict(quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG)
    register()
    yield
    quantization.QUANTIZATION_METHODS[:] = methods
    quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG.clear()
    quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG.update(classes)


def model(folder: Path, quantization_config: dict[str, Any]) -> str:
    """Write the config.json of a small DeepSeek-V3 model."""
    description = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "kv_lora_rank": 512,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 256,
        "n_group": 1,
        "n_routed_experts": 32,
        "n_shared_experts": 1,
        "num_attention_heads": 8,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 4,
        "num_key_value_heads": 8,
        "q_lora_rank": 256,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "topk_group": 1,
        "torch_dtype": "bfloat16",
        "v_head_dim": 128,
        "vocab_size": 4096,
        "quantization_config": quantization_config,
    }
    (folder / "config.json").write_text(json.dumps(description))
    return str(folder)


@pytest.mark.parametrize(
    ("flag", "config"),
    [
        (None, ChordCompressedTensorsConfig),
        ("compressed-tensors", ChordCompressedTensorsConfig),
        ("chord", ChordConfig),
        ("humming", ChordHummingConfig),
    ],
)
def test_flags(flag: str | None, config: type, tmp_path: Path) -> None:
    folder = model(tmp_path, checkpoint_config())
    made = ModelConfig(model=folder, tokenizer=folder, skip_tokenizer_init=True, quantization=flag)
    assert type(VllmConfig._get_quantization_config(made, LoadConfig())) is config


def test_the_flag_on_another_checkpoint(tmp_path: Path) -> None:
    described = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    folder = model(tmp_path, {**described, "desc_act": False})
    arguments = {"model": folder, "tokenizer": folder, "skip_tokenizer_init": True}
    with pytest.raises(ValueError, match="checkpoint's quant_method is 'gptq'; Chord serves"):
        ModelConfig(**arguments, quantization="chord")
    assert ModelConfig(**arguments).quantization != "chord"
