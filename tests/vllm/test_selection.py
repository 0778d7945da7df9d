"""Which layers Chord takes in vLLM, for which deployments and settings, and what it says."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import vllm.logger
from layers import (
    PARALLEL,
    PREFIX,
    all_to_all,
    checkpoint_config,
    config_of,
    expert_parallel,
    make_layer,
    moe_config,
    tensor_parallel,
)
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.humming import HummingConfig

from chord.integrations.vllm.config import (
    ChordCompressedTensorsConfig,
    ChordConfig,
    ChordHummingConfig,
)
from chord.integrations.vllm.experts import ChordBatchedExperts, ChordExperts
from chord.integrations.vllm.method import ChordMoEMethod

pytestmark = pytest.mark.usefixtures("platform")


@pytest.fixture(autouse=True)
def fresh_log() -> None:
    """Let vLLM's log say again what it says once a process."""
    vllm.logger._print_info_once.cache_clear()


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Give the plugin's lines in vLLM's log."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.chord")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)  # the engine does this when it starts
    yield found
    logger.removeHandler(handler)


@pytest.mark.parametrize("config", [ChordCompressedTensorsConfig, ChordConfig, ChordHummingConfig])
@pytest.mark.parametrize("backend", ["auto", "humming"])
@pytest.mark.parametrize(
    ("parallel", "experts"),
    [
        pytest.param(PARALLEL, ChordExperts, id="one"),
        pytest.param(tensor_parallel(2), ChordExperts, id="tp"),
        pytest.param(expert_parallel(2), ChordExperts, id="ep"),
        pytest.param(all_to_all("allgather_reducescatter"), ChordExperts, id="allgather"),
        pytest.param(all_to_all("deepep_high_throughput"), ChordExperts, id="deepep-ht"),
        pytest.param(all_to_all("deepep_v2"), ChordExperts, id="deepep-v2"),
        pytest.param(all_to_all("deepep_low_latency"), ChordBatchedExperts, id="deepep-ll"),
        pytest.param(all_to_all("nixl_ep"), ChordBatchedExperts, id="nixl"),
    ],
)
def test_chord_serves(
    config: type, backend: str, parallel: Any, experts: type, lines: list[str]
) -> None:
    moe = moe_config(parallel, moe_backend=backend)
    method = layer_method(config, moe)
    assert type(method) is ChordMoEMethod
    assert method.experts_cls is experts
    (line,) = lines
    assert line.startswith(f"Chord serves model.layers.*.mlp.experts: {experts.__name__}, INT4")


def layer_method(config: type, moe: Any, changes: dict[str, Any] | None = None) -> Any:
    """Return the method that a config chooses for a layer, without its all-to-all."""
    quant_config = config_of(config, **(changes or {}))
    layer = torch.nn.Module()
    layer.__class__ = type(make_layer(None, moe_config()))
    layer.moe_config = moe
    layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name = "gate_proj", "up_proj"
    layer.ckpt_down_proj_name = "down_proj"
    return quant_config.get_quant_method(layer, PREFIX)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_groups(group: int) -> None:
    method = layer_method(ChordConfig, moe_config(inner=256), {"group_size": group})
    assert type(method) is ChordMoEMethod and method.group_size == group


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)])
def test_cards(platform: Any, capability: tuple[int, int]) -> None:
    platform(*capability)
    assert type(layer_method(ChordConfig, moe_config())) is ChordMoEMethod


DECLINED = {
    "8-bit": ({"num_bits": 8}, {}, "8-bit int weights, Chord's are static 4-bit int"),
    "zero points": ({"symmetric": False}, {}, "zero points, Chord's are symmetric"),
    "group of 16": ({"group_size": 16}, {}, "group size 16, Chord takes groups of 32, 64, 128"),
    "fp16": ({}, {"in_dtype": torch.float16}, "activations are torch.float16"),
    "bias": ({}, {"has_bias": True}, "biases"),
    "alpha": ({}, {"swiglu_alpha": 1.702}, "swiglu_alpha=1.702"),
    "gelu": ({}, {"activation": MoEActivation.GELU}, "GELU activation"),
    "lora": ({}, {"is_lora_enabled": True}, "LoRA"),
    "hidden": (
        {"strategy": "channel", "group_size": None},
        {"hidden": 136},
        "K=136 is not a positive multiple of 32",
    ),
    "groups along hidden": (
        {"group_size": 128},
        {"hidden": 192, "inner": 128},
        "hidden size 192 is no whole number of groups of 128",
    ),
    "groups cut by tensor parallel": (
        {"group_size": 128},
        {"inner": 256, "parallel": tensor_parallel(4)},
        "intermediate size of a rank 64 is no whole number of groups of 128",
    ),
    "marlin": ({}, {"moe_backend": "marlin"}, "--moe-backend marlin asks for another kernel"),
    "triton": ({}, {"moe_backend": "triton"}, "--moe-backend triton asks for another kernel"),
    "experts": ({}, {"experts": 600}, "600 experts on a rank"),
    "eplb": ({}, {"parallel": expert_parallel(2, enable_eplb=True)}, "EPLB"),
    "flashinfer": (
        {},
        {"parallel": all_to_all("flashinfer_nvlink_one_sided")},
        "does not support parallel config",
    ),
}


@pytest.mark.parametrize(("weights", "moe", "reason"), DECLINED.values(), ids=DECLINED.keys())
def test_declines_with_a_reason(
    weights: dict[str, Any], moe: dict[str, Any], reason: str, lines: list[str], monkeypatch: Any
) -> None:
    stock = object()
    monkeypatch.setattr(CompressedTensorsConfig, "get_quant_method", lambda *_: stock)
    config = moe_config(**moe)
    assert layer_method(ChordCompressedTensorsConfig, config, weights) is stock
    (line,) = lines
    assert line.startswith("Chord leaves model.layers.*.mlp.experts to vLLM: ")
    assert reason in line


@pytest.mark.parametrize(("weights", "moe", "reason"), DECLINED.values(), ids=DECLINED.keys())
def test_asked_by_name_it_raises(
    weights: dict[str, Any], moe: dict[str, Any], reason: str, monkeypatch: Any
) -> None:
    """Only another explicit wish, a --moe-backend, is stronger than --quantization chord."""
    stock = object()
    monkeypatch.setattr(CompressedTensorsConfig, "get_quant_method", lambda *_: stock)
    if "moe_backend" in moe:
        assert layer_method(ChordConfig, moe_config(**moe), weights) is stock
        return
    with pytest.raises(ValueError, match="--quantization chord: Chord does not serve") as caught:
        layer_method(ChordConfig, moe_config(**moe), weights)
    assert reason in str(caught.value)


@pytest.mark.parametrize("limit", [0.0, -1.0])
def test_a_limit_that_is_none_is_left(platform: Any, monkeypatch: Any, limit: float) -> None:
    """At load, not at the first forward."""
    kind = type(make_layer(None, moe_config()))
    monkeypatch.setattr(kind, "swiglu_limit", limit, raising=False)
    with pytest.raises(ValueError, match=rf"swiglu_limit={limit}, Chord takes a positive one"):
        layer_method(ChordConfig, moe_config())


def test_stock_serves_what_chord_declines(platform: Any) -> None:
    """The layer that Chord leaves is vLLM's own, whole: here Marlin's, asked for by flag."""
    layer = make_layer(config_of(ChordCompressedTensorsConfig), moe_config(moe_backend="marlin"))
    assert type(layer.quant_method).__name__ == "CompressedTensorsWNA16MoEMethod"
    assert layer.quant_method.experts_cls.__name__ == "MarlinExperts"


def test_older_cards_are_left(platform: Any, lines: list[str], monkeypatch: Any) -> None:
    platform(8, 0)
    stock = object()
    monkeypatch.setattr(CompressedTensorsConfig, "get_quant_method", lambda *_: stock)
    assert layer_method(ChordCompressedTensorsConfig, moe_config()) is stock
    assert "does not support current device" in lines[0]


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_HUMMING_USE_F16_ACCUM",
        "VLLM_HUMMING_INPUT_QUANT_CONFIG",
        "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
        "VLLM_BATCH_INVARIANT",
    ],
)
def test_settings_that_chord_has_not(name: str, lines: list[str], monkeypatch: Any) -> None:
    stock = object()
    monkeypatch.setattr(CompressedTensorsConfig, "get_quant_method", lambda *_: stock)
    monkeypatch.setenv(name, '{"a": 1}' if name.endswith("CONFIG") else "1")
    assert layer_method(ChordCompressedTensorsConfig, moe_config()) is stock
    assert ("batch invariance" if "BATCH" in name else f"{name} is set") in lines[0]


def test_experts_that_the_checkpoint_leaves_unquantized() -> None:
    for config_class in (ChordCompressedTensorsConfig, ChordConfig):
        described = checkpoint_config()
        described["ignore"].append("re:.*experts.*")
        config = config_class.from_config(described)
        layer = make_layer(config, moe_config())
        assert type(layer.quant_method).__name__ == "UnquantizedFusedMoEMethod"


def test_experts_whose_activations_are_rotated_are_left(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock vLLM 0.33 rotates for linear layers alone, so nobody else would tell."""

    def method(location: str, target: str) -> Any:
        described = checkpoint_config()
        applied = {"targets": [target], "location": location}
        scheme = {"type": "hadamard", "apply": [applied]}
        described["transform_config"] = {"config_groups": {"R4": scheme}}
        layer = make_layer(None, moe_config())
        return ChordCompressedTensorsConfig.from_config(described).get_quant_method(layer, PREFIX)

    stock = object()
    monkeypatch.setattr(CompressedTensorsConfig, "get_quant_method", lambda *_: stock)
    assert method("input", "re:.*down_proj$") is stock
    assert "rotates the input of model.layers.3.mlp.experts.0.down_proj ('R4')" in lines[-1]
    assert type(method("input", "re:.*o_proj$")) is ChordMoEMethod
    assert type(method("weight_input", "re:.*down_proj$")) is ChordMoEMethod


def test_projections_of_different_schemes_are_refused() -> None:
    described = checkpoint_config()
    described["ignore"].append("re:.*experts.*down_proj")
    with pytest.raises(ValueError, match="in different ways"):
        make_layer(ChordCompressedTensorsConfig.from_config(described), moe_config())


def test_other_layers_are_stock() -> None:
    linear = torch.nn.Module()
    linear.__class__ = ReplicatedLinear
    config = config_of(ChordCompressedTensorsConfig)
    method = config.get_quant_method(linear, "model.layers.3.self_attn.o_proj")
    assert type(method) is UnquantizedLinearMethod


def test_humming_of_another_checkpoint_is_stock(monkeypatch: Any, lines: list[str]) -> None:
    stock = object()
    monkeypatch.setattr(HummingConfig, "get_quant_method", lambda *_: stock)
    described = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    config = ChordHummingConfig.from_config(described)
    layer = make_layer(config_of(ChordConfig), moe_config())
    assert config.get_quant_method(layer, PREFIX) is stock
    assert lines[-1].endswith("to vLLM: the checkpoint is not compressed-tensors")


def test_the_flag_wants_a_compressed_tensors_checkpoint() -> None:
    ask = ChordConfig.override_quantization_method
    assert ask(checkpoint_config(), "chord") == "chord"
    assert ask(checkpoint_config(), None) is None
    assert ask({"quant_method": "gptq"}, "humming") is None
    with pytest.raises(ValueError, match="quant_method is 'gptq'"):
        ask({"quant_method": "gptq"}, "chord")
    for config in (ChordCompressedTensorsConfig, ChordHummingConfig):
        assert config.override_quantization_method(checkpoint_config(), "chord") is None


def test_configs_are_not_changed_by_asking() -> None:
    config = config_of(ChordHummingConfig)
    before = copy.deepcopy(config.full_config)
    make_layer(config, moe_config())
    assert config.full_config == before
