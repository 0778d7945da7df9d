"""Reading one MoE layer: names, shards, ranks and slices; bits agree with compressed-tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import cases
from chord.errors import InputError, UnsupportedError
from chord.weights import pack_experts, unpack
from chord.weights.checkpoints import MoELayer, load_moe_layer, slice_features, slice_reduction
from chord.weights.quantization import check_quantization_config

EXPERTS, HIDDEN, INTERMEDIATE = 4, 96, 128
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
NAMES = {
    "kimi_k2": ("model.layers.{}.mlp.experts.{}.{}", ("gate_proj", "up_proj", "down_proj")),
    "kimi_k2.5": (
        "language_model.model.layers.{}.mlp.experts.{}.{}",
        ("gate_proj", "up_proj", "down_proj"),
    ),
    "sparse": ("model.layers.{}.block_sparse_moe.experts.{}.{}", ("w1", "w3", "w2")),
}


def config(**weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*self_attn.*"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "weights": WEIGHTS | weights,
            }
        },
    }


def layer_weights(layer: int) -> tuple[cases.Weights, cases.Weights, cases.Weights]:
    """Gate, up and down of all experts."""
    shapes = ((INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    return tuple(  # type: ignore[return-value]
        cases.random_weights(EXPERTS, n, k, kind="real", seed=10 * layer + i)
        for i, (n, k) in enumerate(shapes)
    )


def tensors_of(layer: int, family: str) -> dict[str, torch.Tensor]:
    pattern, projections = NAMES[family]
    tensors = {}
    for projection, weights in zip(projections, layer_weights(layer), strict=True):
        words = weights.words
        for e in range(EXPERTS):
            module = pattern.format(layer, e, projection)
            tensors[f"{module}.weight_packed"] = words[e].clone()
            tensors[f"{module}.weight_scale"] = weights.scales[e].clone()
            tensors[f"{module}.weight_shape"] = torch.tensor(weights.codes[e].shape)
    tensors[f"model.layers.{layer}.self_attn.q_proj.weight"] = torch.ones(2, 2)
    return tensors


def write(
    folder: Path,
    family: str,
    *,
    layers: tuple[int, ...] = (1, 11),
    sharded: bool = True,
    model_config: dict[str, Any] | None = None,
    change: dict[str, torch.Tensor | None] | None = None,
) -> Path:
    """Write a small checkpoint; `change` replaces tensors, or removes them with None."""
    files: dict[str, dict[str, torch.Tensor]] = {}
    for layer in layers:
        tensors: dict[str, torch.Tensor | None] = {**tensors_of(layer, family), **(change or {})}
        for i, (name, tensor) in enumerate(sorted(tensors.items())):
            # Shards cut through experts and projections, as in real checkpoints.
            file = f"model-{layer:02}-{i % 3}.safetensors" if sharded else "model.safetensors"
            if tensor is not None:
                files.setdefault(file, {})[name] = tensor
    for file, content in files.items():
        save_file(content, folder / file)
    if sharded:
        weight_map = {name: file for file, content in files.items() for name in content}
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    if model_config is None:
        model_config = {"n_routed_experts": EXPERTS, "quantization_config": config()}
        if family == "kimi_k2.5":
            model_config = {"text_config": model_config}
    (folder / "config.json").write_text(json.dumps(model_config))
    return folder


def check(
    loaded: MoELayer, layer: int, experts: slice = slice(None), rank: int = 0, size: int = 1
) -> None:
    """Pack both stacks and compare codes and scales with the layer's own, sliced here."""
    gate, up, down = layer_weights(layer)
    part = INTERMEDIATE // size
    mine = slice(rank * part, (rank + 1) * part)
    codes, scales = unpack(
        pack_experts(loaded.w13_packed, loaded.w13_scale, interleave_gate_up=True)
    )
    assert torch.equal(codes, torch.cat((gate.codes[experts, mine], up.codes[experts, mine]), 1))
    assert torch.equal(scales, torch.cat((gate.scales[experts, mine], up.scales[experts, mine]), 1))
    codes, scales = unpack(pack_experts(loaded.w2_packed, loaded.w2_scale))
    assert torch.equal(codes, down.codes[experts, :, mine])
    groups = slice(mine.start // 32, mine.stop // 32)
    assert torch.equal(scales, down.scales[experts, :, groups])


# --- what is read -------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("family", NAMES)
def test_every_family_of_names(tmp_path: Path, family: str, sharded: bool) -> None:
    folder = write(tmp_path, family, sharded=sharded)
    for layer in (1, 11):
        loaded = load_moe_layer(folder, layer)
        assert loaded.experts == range(EXPERTS)
        assert loaded.group_size == 32
        check(loaded, layer)
    if not sharded:
        check(load_moe_layer(folder / "model.safetensors", 1), 1)


def test_only_the_layers_own_shards_are_opened(tmp_path: Path) -> None:
    folder = write(tmp_path, "kimi_k2")
    for file in folder.glob("model-11-*.safetensors"):
        file.write_bytes(b"not a tensor file")
    check(load_moe_layer(folder, 1), 1)
    with pytest.raises(InputError, match=r"model-11-\d.safetensors is not a readable"):
        load_moe_layer(folder, 11)


def test_expert_and_tensor_parallel_parts(tmp_path: Path) -> None:
    folder = write(tmp_path, "kimi_k2")
    loaded = load_moe_layer(folder, 1, experts=range(1, 3))
    assert loaded.experts == range(1, 3)
    check(loaded, 1, slice(1, 3))
    for size in (2, 4):
        for rank in range(size):
            loaded = load_moe_layer(folder, 1, tp_rank=rank, tp_size=size)
            check(loaded, 1, rank=rank, size=size)
    check(
        load_moe_layer(folder, 1, experts=range(3, 4), tp_rank=1, tp_size=2), 1, slice(3, 4), 1, 2
    )


def test_bits_agree_with_compressed_tensors(tmp_path: Path) -> None:
    """The library that writes these checkpoints packs and unpacks the same bits."""
    from compressed_tensors import compressors

    gate, up, down = layer_weights(1)
    change: dict[str, torch.Tensor | None] = {}
    pattern, projections = NAMES["kimi_k2"]
    for projection, weights in zip(projections, (gate, up, down), strict=True):
        for e in range(EXPERTS):
            values = weights.codes[e].to(torch.int8) - 8
            name = f"{pattern.format(1, e, projection)}.weight_packed"
            change[name] = compressors.pack_to_int32(values, 4)
    loaded = load_moe_layer(write(tmp_path, "kimi_k2", layers=(1,), change=change), 1)
    check(loaded, 1)
    values = compressors.unpack_from_int32(loaded.w2_packed[2], 4, down.codes[2].shape)
    assert torch.equal(values, down.codes[2].to(torch.int8) - 8)


def test_config_may_be_passed(tmp_path: Path) -> None:
    folder = write(tmp_path, "kimi_k2", model_config={"num_experts": EXPERTS})
    experts = range(EXPERTS)
    with pytest.raises(InputError, match=r"config.json has no quantization_config"):
        load_moe_layer(folder, 1)
    check(load_moe_layer(folder, 1, quantization_config=config()), 1)
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"config.json does not exist.*quantization_config="):
        load_moe_layer(folder, 1)
    check(load_moe_layer(folder, 1, experts=experts, quantization_config=config()), 1)


def test_one_scale_a_row(tmp_path: Path) -> None:
    change: dict[str, torch.Tensor | None] = {
        name: tensor[:, :1].contiguous()
        for name, tensor in tensors_of(1, "kimi_k2").items()
        if name.endswith("weight_scale")
    }
    channel = config(strategy="channel", group_size=None)
    model_config = {"n_routed_experts": EXPERTS, "quantization_config": channel}
    folder = write(tmp_path, "kimi_k2", layers=(1,), change=change, model_config=model_config)
    loaded = load_moe_layer(folder, 1, tp_rank=1, tp_size=2)
    assert loaded.group_size == -1
    scales = unpack(pack_experts(loaded.w2_packed, loaded.w2_scale, group_size=-1))[1]
    assert torch.equal(scales, layer_weights(1)[2].scales[..., :1].expand(-1, -1, 2))


def test_a_second_family_of_names_must_be_chosen(tmp_path: Path) -> None:
    extra = {
        "draft." + name: tensor
        for name, tensor in tensors_of(1, "kimi_k2").items()
        if ".experts." in name
    }
    folder = write(tmp_path, "kimi_k2", layers=(1,), change=dict(extra))
    with pytest.raises(InputError, match=r"prefixes 'draft.model.', 'model.'; choose one with"):
        load_moe_layer(folder, 1)
    check(load_moe_layer(folder, 1, prefix="draft.model."), 1)


# --- what is refused ----------------------------------------------------------------------------

DOWN = "model.layers.1.mlp.experts.2.down_proj"


@pytest.mark.parametrize("tensor", ["weight_packed", "weight_scale"])
@pytest.mark.parametrize(
    "module", [DOWN, DOWN.replace("down", "up"), DOWN.replace("2.down", "0.gate")]
)
def test_missing_tensor_is_named(tmp_path: Path, module: str, tensor: str) -> None:
    name = f"{module}.{tensor}"
    folder = write(tmp_path, "kimi_k2", layers=(1,), change={name: None})
    with pytest.raises(InputError, match=f"tensor {name} is missing"):
        load_moe_layer(folder, 1)


def test_missing_last_expert_is_named(tmp_path: Path) -> None:
    change = dict.fromkeys(n for n in tensors_of(1, "kimi_k2") if ".experts.3." in n)
    folder = write(tmp_path, "kimi_k2", layers=(1,), change=change)
    with pytest.raises(InputError, match=r"tensor .*experts\.3\.gate_proj.*is missing"):
        load_moe_layer(folder, 1)
    check(load_moe_layer(folder, 1, experts=range(3)), 1, slice(0, 3))


@pytest.mark.parametrize("count", [None, "4", 4.0, True])
def test_without_a_count_the_experts_are_asked_for(tmp_path: Path, count: object) -> None:
    """The names of a checkpoint that lacks its last experts look like a smaller layer."""
    change = dict.fromkeys(n for n in tensors_of(1, "kimi_k2") if ".experts.3." in n)
    model_config = {"n_routed_experts": count, "quantization_config": config()}
    folder = write(tmp_path, "kimi_k2", layers=(1,), change=change, model_config=model_config)
    with pytest.raises(InputError, match=r"states none of n_routed_experts, .*range\(3"):
        load_moe_layer(folder, 1)
    check(load_moe_layer(folder, 1, experts=range(3)), 1, slice(0, 3))
    with pytest.raises(InputError, match=r"experts=range\(0, 4\) .* within 0\.\.3"):
        load_moe_layer(folder, 1, experts=range(4))


def test_more_experts_than_the_config_counts(tmp_path: Path) -> None:
    model_config = {"n_routed_experts": 3, "quantization_config": config()}
    folder = write(tmp_path, "kimi_k2", layers=(1,), model_config=model_config)
    with pytest.raises(InputError, match=r"has an expert 3, but .*config.json counts 3 experts"):
        load_moe_layer(folder, 1)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"weight_map": ', "cannot be read as JSON"),
        (b"", "cannot be read as JSON"),
        (b"\xff\xfe{}", "cannot be read as JSON"),
        (b"[1, 2]", r"holds the list \[1, 2\]; it must hold an object"),
        (b"null", "holds None; it must hold an object"),
    ],
)
def test_broken_json_is_named(tmp_path: Path, file: str, content: bytes, words: str) -> None:
    folder = write(tmp_path, "kimi_k2", layers=(1,))
    (folder / file).write_bytes(content)
    with pytest.raises(InputError, match=rf"{file} {words}"):
        load_moe_layer(folder, 1)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}])
def test_an_index_without_its_map_is_named(tmp_path: Path, weight_map: object) -> None:
    folder = write(tmp_path, "kimi_k2", layers=(1,))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InputError, match=r"index\.json has no weight_map from tensors to files"):
        load_moe_layer(folder, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer": "1"}, "layer is the str '1'; it must be a whole number"),
        ({"path": None}, "path is None; it must be a str or a Path"),
        ({"experts": [0, 1]}, r"experts is the list \[0, 1\]; it must be a range, as range\(4\)"),
        ({"experts": 4}, "experts is the int 4; it must be a range"),
        ({"tp_rank": "0"}, "tp_rank is the str '0'"),
        ({"tp_size": 1.0}, r"tp_size is the float 1\.0"),
        ({"prefix": 3}, "prefix is the int 3; it must be a str"),
        ({"device": "gpu"}, "device is the str 'gpu', no device of PyTorch"),
        ({"device": None}, "device is None, no device of PyTorch"),
        ({"device": "meta"}, "device=meta holds no values"),
        ({"device": "cuda:99"}, r"device=cuda:99 is not here: PyTorch sees \d+ CUDA GPUs"),
        ({"quantization_config": "w4a16"}, "quantization_config is the str 'w4a16'"),
        ({"quantization_config": {"config_groups": []}}, "config_groups of the config is the list"),
        ({"quantization_config": config() | {"ignore": "lm_head"}}, "ignore of the config is the"),
        (
            {"quantization_config": config() | {"ignore": ["re:("]}},
            r"'re:\(' of the config is",
        ),
    ],
)
def test_odd_arguments_are_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    folder = write(tmp_path, "kimi_k2", layers=(1,))
    with pytest.raises(InputError, match=words):
        load_moe_layer(**({"path": folder, "layer": 1} | change))


def test_slices_of_ranks_that_do_not_exist() -> None:
    packed, scale = torch.zeros(4, 64, 16, dtype=torch.int32), torch.zeros(4, 64, 4)
    for cut in (slice_features, slice_reduction):
        for rank, size in ((2, 2), (-1, 2), (0, 0)):
            with pytest.raises(InputError, match=f"tp_rank={rank} with tp_size={size}"):
                cut(packed, scale, rank, size)
        with pytest.raises(InputError, match=r"packed is None, not a torch\.Tensor"):
            cut(None, scale, 0, 1)
        with pytest.raises(InputError, match=r"packed is torch.float32 \[4, 64, 4\]; .* int32"):
            cut(scale, scale, 0, 1)
        with pytest.raises(InputError, match=r"scale is \[4, 32, 4\], packed \[4, 64, 16\]"):
            cut(packed, scale[:, :32], 0, 1)
    with pytest.raises(UnsupportedError, match="group_size=0 is not supported"):
        slice_reduction(packed, scale, 0, 1, group_size=0)


def test_broken_downloads(tmp_path: Path) -> None:
    folder = write(tmp_path, "kimi_k2", layers=(1,))
    file = folder / "model-01-1.safetensors"
    save_file({"other": torch.ones(1)}, file)
    with pytest.raises(InputError, match=r"is missing in .*model-01-1.*where the index places it"):
        load_moe_layer(folder, 1)
    file.unlink()
    with pytest.raises(InputError, match=r"model-01-1.safetensors does not exist"):
        load_moe_layer(folder, 1)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(InputError, match=r"has 2 .safetensors files and no .*index"):
        load_moe_layer(folder, 1)
    with pytest.raises(InputError, match=r"path=.*nowhere does not exist"):
        load_moe_layer(folder / "nowhere", 1)


def test_no_such_layer(tmp_path: Path) -> None:
    folder = write(tmp_path, "kimi_k2")
    with pytest.raises(InputError, match=r"layer=0 has no expert tensors.*gate_proj.*w1"):
        load_moe_layer(folder, 0)
    with pytest.raises(InputError, match=r"layer=1 has no expert tensors with prefix='x\.'"):
        load_moe_layer(folder, 1, prefix="x.")


@pytest.mark.parametrize("experts", [range(0), range(2, 5), range(-1, 2), range(0, 4, 2)])
def test_expert_ranges(tmp_path: Path, experts: range) -> None:
    with pytest.raises(InputError, match=r"experts=range.* within 0\.\.4"):
        load_moe_layer(write(tmp_path, "kimi_k2", layers=(1,)), 1, experts=experts)


@pytest.mark.field_case(6)
def test_tensor_parallel_refusals(tmp_path: Path) -> None:
    """Field case 6 (c) on files: 128 columns over 8 ranks are half a group each."""
    folder = write(tmp_path, "kimi_k2", layers=(1,))
    with pytest.raises(
        UnsupportedError, match=r"K=128 over TP=8 is 16 .* 0\.5 groups of group_size=32"
    ):
        load_moe_layer(folder, 1, tp_rank=0, tp_size=8)
    with pytest.raises(UnsupportedError, match="N=128 does not divide into TP=3"):
        load_moe_layer(folder, 1, tp_rank=0, tp_size=3)
    for rank, size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(InputError, match=f"tp_rank={rank} with tp_size={size}"):
            load_moe_layer(folder, 1, tp_rank=rank, tp_size=size)


@pytest.mark.parametrize(
    ("tensor", "value", "message"),
    [
        (
            "weight_scale",
            torch.ones(HIDDEN, 8, dtype=torch.bfloat16),
            r"weight_scale BF16 \[96, 8\]",
        ),
        ("weight_scale", torch.ones(HIDDEN, 4), r"weight_scale F32.*BF16 \[96, 4\]"),
        ("weight_packed", torch.ones(HIDDEN, 8, dtype=torch.int32), r"weight_packed I32 \[96, 8\]"),
        ("weight_packed", torch.ones(HIDDEN, 16), r"weight_packed F32"),
        ("weight_shape", torch.tensor([HIDDEN, 120]), r"weight_shape is \[96, 120\]"),
        ("weight_packed", torch.ones(HIDDEN, dtype=torch.int32), r"weight_packed I32 \[96\]"),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, tensor: str, value: torch.Tensor, message: str
) -> None:
    folder = write(tmp_path, "kimi_k2", layers=(1,), change={f"{DOWN}.{tensor}": value})
    with pytest.raises(InputError, match=rf"down_proj.*{message}"):
        load_moe_layer(folder, 1)


def test_a_weight_of_one_dimension_is_named(tmp_path: Path) -> None:
    first = "model.layers.1.mlp.experts.0.gate_proj.weight_packed"
    change: dict[str, torch.Tensor | None] = {first: torch.ones(8, dtype=torch.int32)}
    folder = write(tmp_path, "kimi_k2", layers=(1,), change=change)
    with pytest.raises(InputError, match=rf"{first} has shape \[8\]; it must be \[N, K/8\]"):
        load_moe_layer(folder, 1)


def test_group_size_of_the_config_decides(tmp_path: Path) -> None:
    model_config = {"num_experts": EXPERTS, "quantization_config": config(group_size=64)}
    folder = write(tmp_path, "sparse", layers=(1,), model_config=model_config)
    with pytest.raises(InputError, match=r"experts\.0\.w1: .*group_size=64"):
        load_moe_layer(folder, 1)


def test_halves_that_do_not_agree(tmp_path: Path) -> None:
    change: dict[str, torch.Tensor | None] = {}
    for e in range(EXPERTS):
        module = f"model.layers.1.mlp.experts.{e}.down_proj"
        change[f"{module}.weight_packed"] = torch.zeros(HIDDEN, 8, dtype=torch.int32)
        change[f"{module}.weight_scale"] = torch.ones(HIDDEN, 2, dtype=torch.bfloat16)
        change[f"{module}.weight_shape"] = None
    folder = write(tmp_path, "kimi_k2", layers=(1,), change=change)
    with pytest.raises(InputError, match="do not agree in H and I"):
        load_moe_layer(folder, 1)


def test_zero_points_and_act_order_in_the_files(tmp_path: Path) -> None:
    plain = torch.arange(INTERMEDIATE, dtype=torch.int32) // 32
    folder = write(tmp_path, "kimi_k2", layers=(1,), change={f"{DOWN}.weight_g_idx": plain})
    check(load_moe_layer(folder, 1), 1)
    write(folder, "kimi_k2", layers=(1,), change={f"{DOWN}.weight_g_idx": plain.flip(0)})
    with pytest.raises(UnsupportedError, match=r"down_proj.weight_g_idx is not column"):
        load_moe_layer(folder, 1)
    zero = torch.zeros(12, 4, dtype=torch.int32)
    write(folder, "kimi_k2", layers=(1,), change={f"{DOWN}.weight_zero_point": zero})
    with pytest.raises(UnsupportedError, match=r"down_proj.weight_zero_point exists"):
        load_moe_layer(folder, 1)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"num_bits": 8}, r"num_bits=8, not 4"),
        ({"type": "float"}, r"type='float', not 'int'"),
        ({"symmetric": False}, r"symmetric=False"),
        ({"strategy": "tensor", "group_size": None}, r"strategy='tensor'"),
        ({"strategy": "block", "group_size": 128}, r"strategy='block'"),
        ({"group_size": 16}, r"group_size=16"),
        ({"group_size": None}, r"strategy='group' with group_size=None"),
        ({"strategy": "channel"}, r"strategy='channel' with group_size=32"),
        ({"actorder": "group"}, r"actorder='group' \(act-order groups\)"),
        ({"actorder": True}, r"actorder=True"),
        ({"dynamic": True}, r"dynamic=True"),
    ],
)
def test_weight_schemes_refused(weights: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"quantization_config: .*{message}.*Chord packs"):
        check_quantization_config(config(**weights))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method='gptq'"),
        ({"format": "nvfp4-pack-quantized"}, "format='nvfp4-pack-quantized'"),
        ({"ignore": [r"re:.*experts\.0.*"]}, r"leaves m.experts.0.up_proj unquantized"),
        ({"config_groups": {}}, "none of 0 config_groups targets m.experts.0.up_proj"),
    ],
)
def test_configs_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        check_quantization_config(config() | change, "m.experts.0.up_proj")


def test_quantized_activations_are_refused() -> None:
    wrong = config()
    wrong["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    with pytest.raises(UnsupportedError, match="input_activations are quantized"):
        check_quantization_config(wrong)


def rotation(location: str, *targets: str, ignore: tuple[str, ...] = ()) -> dict[str, Any]:
    applied = {"targets": list(targets), "location": location, "ignore": list(ignore)}
    return {"config_groups": {"R4": {"type": "hadamard", "apply": [applied]}}}


def test_rotated_activations_and_sparse_weights_are_refused() -> None:
    """Loaded as if nothing were said, such a checkpoint gives words of no sense and no error."""
    down = "model.layers.1.mlp.experts.0.down_proj"
    for targets in (("Linear",), ("re:.*down_proj$",), ("down_proj",)):
        with pytest.raises(UnsupportedError, match=r"rotates the input of .*down_proj \('R4'\)"):
            asked = config() | {"transform_config": rotation("input", *targets)}
            check_quantization_config(asked, down)
    for harmless in (
        rotation("weight_input", "Linear"),  # is in the weights
        rotation("input", "re:.*o_proj$"),
        rotation("output", "Linear", ignore=("re:.*experts.*",)),
        {},
    ):
        assert check_quantization_config(config() | {"transform_config": harmless}, down) == 32
    with pytest.raises(UnsupportedError, match=r"sparsity_config\.format='sparse-24-bitmask'"):
        check_quantization_config(config() | {"sparsity_config": {"format": "sparse-24-bitmask"}})
    dense = config() | {"sparsity_config": {"format": "dense"}}
    assert check_quantization_config(dense) == 32


def test_the_config_is_asked_for_all_three_projections(tmp_path: Path) -> None:
    def load(stated: dict[str, Any]) -> MoELayer:
        described = {"n_routed_experts": EXPERTS, "quantization_config": stated}
        (folder / "config.json").write_text(json.dumps(described))
        return load_moe_layer(folder, 1)

    folder = write(tmp_path, "kimi_k2")
    with pytest.raises(UnsupportedError, match=r"rotates the input of .*down_proj"):
        load(config() | {"transform_config": rotation("input", "re:.*down_proj$")})
    with pytest.raises(
        UnsupportedError, match=r"ignore='re:\.\*up_proj' leaves .*up_proj unquanti"
    ):
        load(config() | {"ignore": ["re:.*up_proj"]})
    two = config()
    coarse = {"targets": ["re:.*down_proj"], "weights": WEIGHTS | {"group_size": 64}}
    two["config_groups"]["down"] = coarse
    with pytest.raises(UnsupportedError, match=r"group sizes \[32, 32, 64\] of .*down_proj"):
        load(two)
    check(load(config()), 1)


def test_configs_accepted() -> None:
    for group_size in (32, 64, 128):
        assert check_quantization_config(config(group_size=group_size)) == group_size
    for actorder in (None, False, "weight", "static"):
        assert check_quantization_config(config(actorder=actorder)) == 32
    assert check_quantization_config(config(strategy="channel", group_size=None)) == -1
    two = config()
    two["config_groups"] = {
        "dense": {"targets": ["Linear"], "weights": WEIGHTS | {"num_bits": 8}},
        "experts": {"targets": [r"re:.*\.experts\..*"], "weights": WEIGHTS},
    }
    assert check_quantization_config(two, "model.layers.1.mlp.experts.0.gate_proj") == 32
    with pytest.raises(UnsupportedError, match="num_bits=8"):
        check_quantization_config(two, "model.layers.1.mlp.gate_proj")
