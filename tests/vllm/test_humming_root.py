"""The import root `humming`: Chord's where humming-kernels is absent, never where it is installed.

With Chord's plugin switched off, vLLM's own Humming experts then run on Chord's kernels.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm.model_executor.layers.fused_moe.experts.fused_humming_moe as fused_humming_moe
import vllm.utils.humming
from layers import (
    EXPERTS,
    TOP_K,
    config_of,
    expected,
    expert_parallel,
    load,
    make_checkpoint,
    make_layer,
    moe_config,
)
from test_layer import apply, make_inputs
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.humming import HummingConfig
from vllm.utils.import_utils import has_humming

import chord
from chord import routing
from tolerance import assert_rows_close

ROOT = Path(__file__).parents[2]
HUMMING = "humming-kernels==0.1.20"

# --- the names --------------------------------------------------------------------------------


def test_root_is_chords_where_humming_kernels_is_absent() -> None:
    import humming

    assert Path(humming.__file__) == ROOT / "src" / "humming.py"
    assert has_humming()


@pytest.mark.parametrize("name", sorted(vllm.utils.humming._EXPORTS))
def test_every_name_that_vllm_resolves_is_there(name: str) -> None:
    module, _, attribute = vllm.utils.humming._EXPORTS[name].partition(":")
    found = importlib.import_module(module)
    assert not attribute or hasattr(found, attribute)


def test_import_is_light() -> None:
    code = (
        "import sys, humming, humming.config, humming.dtypes, humming.schema\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized(), 'import humming initialised CUDA'\n"
        "late = {'cuda.core', 'triton', 'vllm', 'typer'} & set(sys.modules)\n"
        "assert not late, f'import humming imported {late}'\n"
        "from humming.config import GemmType\n"
        "from chord.compat.humming.config import GemmType as other\n"
        "assert GemmType is other\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# --- what Chord does not do -------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {"quant_method": "fp8"},
        {"quant_method": "humming", "dtype": "int4", "group_size": 128},
        {"quant_method": "compressed-tensors", "num_bits": 8, "strategy": "group"},
        {"quant_method": "compressed-tensors", "symmetric": False, "strategy": "group"},
        {"quant_method": "compressed-tensors", "strategy": "group", "group_size": 16},
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        {"quant_method": "compressed-tensors", "actorder": "group", "strategy": "group"},
    ],
    ids=lambda config: "-".join(f"{k}={v}" for k, v in config.items() if k != "quant_method"),
)
def test_other_weights_are_refused_with_the_way_out(config: dict[str, Any]) -> None:
    from humming.schema import BaseWeightSchema

    with pytest.raises(chord.UnsupportedError, match=r"--moe-backend marlin.*HummingLinearKernel"):
        BaseWeightSchema.from_config(config)


@pytest.mark.parametrize("name", ["AWQWeightSchema", "Fp8InputSchema", "Mxfp4WeightSchema"])
def test_other_schemas_are_refused(name: str) -> None:
    made = getattr(importlib.import_module("humming.schema"), name)
    with pytest.raises(chord.UnsupportedError, match=f"humming's {name}"):
        made(b_dtype="uint4")


def test_other_functions_are_refused() -> None:
    from humming.forward import may_quant_input
    from humming.ops import process_input
    from humming.utils.weight import quantize_weight

    for function in (may_quant_input, process_input, quantize_weight):
        with pytest.raises(chord.UnsupportedError, match="is not what Chord does"):
            function(torch.zeros(1))


def test_quantized_activations_are_refused() -> None:
    from humming.dtypes import int8
    from humming.schema import BaseInputSchema, HummingInputSchema

    assert BaseInputSchema.from_config({}) == HummingInputSchema()
    for make in (
        lambda: BaseInputSchema.from_config({"a_dtype": "int8"}),
        lambda: HummingInputSchema(a_dtype=int8),
        lambda: HummingInputSchema().to_humming_schema(torch.float16),
    ):
        with pytest.raises(chord.UnsupportedError, match="activations"):
            make()


def test_dense_layers_and_biases_are_refused() -> None:
    from humming.schema import CompressedTensorsWeightSchema, HummingInputSchema
    from humming.transform import prepare_and_transform_humming_tensors

    schema = CompressedTensorsWeightSchema(group_size=32)
    arguments = {"shape_n": 64, "shape_k": 64, "param_dtype": torch.bfloat16}
    with pytest.raises(chord.UnsupportedError, match="dense W4A16 layer, N=64, K=64"):
        schema.get_padded_tensors_attrs(**arguments)
    with pytest.raises(chord.UnsupportedError, match="biases"):
        schema.get_padded_tensors_attrs(**arguments, num_experts=2, has_bias=True)
    with pytest.raises(chord.UnsupportedError, match="a dense layer, N=64, K=64"):
        prepare_and_transform_humming_tensors(
            {}, 64, 64, schema.to_humming_schema(), HummingInputSchema()
        )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("VLLM_HUMMING_USE_F16_ACCUM", "accumulating in FP16"),
        ("VLLM_BATCH_INVARIANT", "does not depend on the batch"),
    ],
)
@pytest.mark.usefixtures("platform")
def test_settings_that_chord_has_not(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    layer = make_layer(config_of(CompressedTensorsConfig), moe_config(moe_backend="humming"))
    with pytest.raises(chord.UnsupportedError, match=rf"{words} \({name}\)"):
        load(layer, make_checkpoint())


def test_other_activations_are_refused() -> None:
    from humming.config import LayerConfig
    from humming.forward import may_process_input

    config = LayerConfig(64, 64, 2)
    rows, out = torch.zeros(2, 128).bfloat16(), torch.zeros(2, 64).bfloat16()
    for kind, formula in (("unary", "a"), ("binary_split", "fmaxf(a, 0.f) * b")):
        with pytest.raises(chord.UnsupportedError, match="the activation"):
            may_process_input(config, rows, out, activation_type=kind, activation_impl=formula)
    with pytest.raises(chord.UnsupportedError, match="the layout 'gather' of inputs"):
        may_process_input(config, rows, out, layout="gather")
    with pytest.raises(chord.UnsupportedError, match="hadamard_block_size=32"):
        may_process_input(config, rows, out, hadamard_block_size=32)


# --- vLLM's Humming experts on Chord ----------------------------------------------------------


@pytest.fixture
def operators(platform: Any, workspaces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for vLLM's compiled operators around the GEMMs, in plain PyTorch."""

    def align(topk_ids, block_size, num_experts, expert_map=None, **_):
        made = routing.align(
            topk_ids, num_experts=num_experts, block_m=block_size, expert_map=expert_map
        )
        return made.sorted_token_ids, made.expert_ids, made.num_tokens_post_padded

    def mul_sum(inputs, topk_weights, topk_ids, expert_map, outputs, num_valid_tokens):
        here = routing.local_experts(topk_ids, EXPERTS, expert_map) >= 0
        weights = torch.where(here, topk_weights, 0.0).unsqueeze(-1)
        outputs.copy_((inputs.nan_to_num().float() * weights).sum(dim=1))

    def scatter(topk_ids, expert_map, scratch):
        local = routing.local_experts(topk_ids, EXPERTS, expert_map).flatten()
        count = EXPERTS if expert_map is None else int(expert_map.max()) + 1
        order = torch.where(local < 0, count, local).argsort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order))
        offsets = torch.stack([(local[local >= 0] < e).sum() for e in range(count + 1)])
        return offsets, places.int().view(topk_ids.shape)

    def unpermute(
        out, permuted_hidden_states, topk_weights, inv_permuted_idx, expert_first_token_offset
    ):
        places = inv_permuted_idx.view(topk_weights.shape).long()
        here = (places < expert_first_token_offset[-1]).unsqueeze(-1)
        rows = permuted_hidden_states.flatten(0, 1)[places].float()
        out.copy_((torch.where(here, rows, 0.0) * topk_weights.unsqueeze(-1)).sum(dim=1))

    for name, stand_in in (
        ("moe_align_block_size", align),
        ("moe_fused_mul_sum", mul_sum),
        ("moe_prepare_scatter", scatter),
        ("moe_unpermute", unpermute),
        ("moe_permute_unpermute_supported", lambda: True),
        ("get_moe_permute_scratch", lambda **_: object()),
    ):
        monkeypatch.setattr(fused_humming_moe, name, stand_in)


def ask(config: type) -> dict[str, str]:
    return {} if config is HummingConfig else {"moe_backend": "humming"}


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("config", [CompressedTensorsConfig, HummingConfig])
@pytest.mark.parametrize("group", [32, 64])
def test_indexed(config: type, group: int) -> None:
    checkpoint = make_checkpoint(group=group)
    layer = make_layer(config_of(config, group_size=group), moe_config(**ask(config)))
    load(layer, checkpoint)
    experts = layer.quant_method.moe_kernel.fused_experts
    assert type(experts).__name__ == "HummingIndexedExperts"
    inputs = make_inputs(17)
    assert_rows_close(apply(layer, *inputs), expected(checkpoint, *inputs), 1e-2)


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("config", [CompressedTensorsConfig, HummingConfig])
@pytest.mark.parametrize("rank", [0, 1])
def test_grouped_contiguous(config: type, rank: int) -> None:
    checkpoint = make_checkpoint()
    moe = moe_config(expert_parallel(2, rank), **ask(config))
    layer = load(make_layer(config_of(config), moe), checkpoint)
    experts = layer.quant_method.moe_kernel.fused_experts
    assert type(experts).__name__ == "HummingGroupedExperts"
    inputs = make_inputs(17)
    local = range(rank * EXPERTS // 2, (rank + 1) * EXPERTS // 2)
    assert_rows_close(apply(layer, *inputs), expected(checkpoint, *inputs, experts=local), 1e-2)


def test_grouped_masked() -> None:
    """Not reachable in vLLM 0.33 for W4A16 (its prepare steps refuse), so called as it would be."""
    from humming.config import GemmType, LayerConfig
    from humming.forward import humming_forward
    from humming.schema import CompressedTensorsWeightSchema, HummingInputSchema
    from humming.transform import prepare_and_transform_humming_tensors
    from humming.tune import get_heuristics_config

    words = torch.randint(-(2**31), 2**31 - 1, (3, 64, 16), dtype=torch.int32)
    scales = torch.full((3, 64, 4), 0.01).bfloat16()
    schema, tensors = CompressedTensorsWeightSchema(group_size=32).convert_humming(
        {"weight_packed": words, "weight_scale": scales}
    )
    config, packed = prepare_and_transform_humming_tensors(
        tensors, 64, 128, schema, HummingInputSchema(), num_experts=3
    )
    assert config == LayerConfig(64, 128, 3)
    get_heuristics_config(config, gemm_type=GemmType.GROUPED_MASKED)
    x = torch.randn(3 * 8, 128).bfloat16()
    out = torch.full((3 * 8, 64), 7.0).bfloat16()
    counts = torch.tensor([8, 0, 3], dtype=torch.int32)
    humming_forward(
        config,
        x,
        packed["weight"],
        outputs=out,
        compute_config='{"gemm_type": "grouped_masked"}',
        expert_layout=counts,
        valid_shape_m=11,
    )
    wanted = chord.reference.masked(x.view(3, 8, 128), chord.pack_experts(words, scales), counts)
    out = out.view(3, 8, 64)
    assert torch.equal(out[0], wanted[0])
    assert torch.equal(out[2, :3], wanted[2, :3])
    assert (out[1] == 7).all() and (out[2, 3:] == 7).all()


def test_what_is_missing_or_unknown_is_named() -> None:
    from humming.config import LayerConfig
    from humming.forward import humming_forward, may_process_input
    from humming.schema import HummingInputSchema, HummingWeightSchema
    from humming.transform import prepare_and_transform_humming_tensors
    from humming.tune import get_heuristics_config

    from humming import dtypes

    config = LayerConfig(64, 64, 2)
    packed = chord.pack_experts(
        torch.zeros(2, 64, 8, dtype=torch.int32), torch.ones(2, 64, 2).bfloat16()
    )
    x = torch.zeros(2, 64).bfloat16()
    for kind, name in (("indexed", "sorted_ids"), ("grouped_contiguous", "expert_layout")):
        with pytest.raises(chord.InputError, match=f"{name} is missing: .* rows come with"):
            humming_forward(
                config,
                x,
                packed.data,
                outputs=x.clone(),
                compute_config=f'{{"gemm_type": "{kind}"}}',
            )
    with pytest.raises(chord.UnsupportedError, match="the GEMM type 'ragged'"):
        humming_forward(
            config, x, packed.data, outputs=x.clone(), compute_config='{"gemm_type": "ragged"}'
        )
    with pytest.raises(chord.UnsupportedError, match="the GEMM type 'ragged'"):
        get_heuristics_config(config, gemm_type="ragged")
    with pytest.raises(chord.InputError, match="scatter_idx is missing"):
        may_process_input(config, x, x.clone(), layout="scatter")
    with pytest.raises(chord.InputError, match=r"weight_scale is missing: .* got weight"):
        prepare_and_transform_humming_tensors(
            {"weight": packed.data},
            64,
            64,
            HummingWeightSchema(weight_scale_group_size=32),
            HummingInputSchema(),
            num_experts=2,
        )
    with pytest.raises(chord.InputError, match="number type 'nibble' is not known"):
        dtypes.DataType.from_str("nibble")


def test_tables_are_json_and_cover_all_rows() -> None:
    import json

    from humming.config import LayerConfig
    from humming.tune import get_heuristics_config

    table = json.loads(json.dumps(get_heuristics_config(LayerConfig(64, 128, 3))))
    assert table[0][0] == 0
    assert all(a[1] == b[0] for a, b in itertools.pairwise(table))
    assert table[-1][1] >= 300_000 * TOP_K


# --- beside humming-kernels -------------------------------------------------------------------


def files_of(folder: Path) -> dict[str, str]:
    paths = [p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source")  # building leaves nothing in the checkout
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(["cp", "-r", str(ROOT / "src"), str(source / "src")], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder)]
    result = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.parametrize("first", ["humming-kernels", "chord"])
def test_installed_beside_humming_kernels(first: str, wheel: Path, tmp_path: Path) -> None:
    """Both orders: no file of humming-kernels changes, and `humming` is humming-kernels."""
    alone, both = tmp_path / "alone", tmp_path / "both"
    pip("--target", str(alone), HUMMING)
    order = [HUMMING, str(wheel)] if first == "humming-kernels" else [str(wheel), HUMMING]
    for what in order:
        pip("--target", str(both), "--upgrade", what)
    theirs = files_of(alone / "humming")
    assert theirs and files_of(both / "humming") == theirs
    assert (both / "humming.py").is_file()
    code = "import importlib.util; print(importlib.util.find_spec('humming').origin)"
    found = where(code, both)
    assert found == str(both / "humming" / "__init__.py")


def where(code: str, *path: Path) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        cwd="/",
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_steps_aside_where_its_file_comes_first(tmp_path: Path) -> None:
    """PYTHONPATH=src puts Chord's root before site-packages."""
    package = tmp_path / "humming"
    (package / "config").mkdir(parents=True)
    (package / "__init__.py").write_text("from humming import config\nwho = 'kernels'\n")
    (package / "config" / "__init__.py").write_text("value = 7\n")
    code = "import humming, humming.config; print(humming.who, humming.config.value)"
    assert where(code, ROOT / "src", tmp_path) == "kernels 7"
