"""Expert layers from a compressed-tensors checkpoint to their output, through vLLM's own code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from layers import (
    EXPERTS,
    HIDDEN,
    INNER,
    TOP_K,
    all_to_all,
    config_of,
    expected,
    expert_parallel,
    load,
    make_checkpoint,
    make_layer,
    moe_config,
    tensor_parallel,
)
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

import chord
from chord.integrations.vllm import method as chord_method
from chord.integrations.vllm.config import (
    ChordCompressedTensorsConfig,
    ChordConfig,
    ChordHummingConfig,
)
from tolerance import assert_rows_close

pytestmark = pytest.mark.usefixtures("platform", "workspaces")


def make_inputs(tokens: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    weights, ids = scores.topk(TOP_K)
    return x, weights / weights.sum(dim=-1, keepdim=True), ids.int()


def apply(
    layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, config: Any = None
) -> torch.Tensor:
    config = config or VllmConfig()
    with set_current_vllm_config(config), set_forward_context(None, config, num_tokens=len(x)):
        return layer.quant_method.apply(layer, x, weights, ids, None, None)


@pytest.mark.parametrize("config", [ChordCompressedTensorsConfig, ChordConfig, ChordHummingConfig])
@pytest.mark.parametrize("tokens", [1, 17])
def test_whole_layer(config: type, tokens: int) -> None:
    checkpoint = make_checkpoint()
    layer = load(make_layer(config_of(config), moe_config()), checkpoint)
    inputs = make_inputs(tokens)
    assert_rows_close(apply(layer, *inputs), expected(checkpoint, *inputs), 8e-3)


def test_the_layer_is_told_that_l2_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = load(make_layer(config_of(ChordConfig), moe_config()), make_checkpoint())
    told: list[bool] = []
    shipped = chord.fused_moe

    def noting(*operands: Any, **given: Any) -> torch.Tensor:
        told.append(given["l2_is_clean"])
        return shipped(*operands, **given)

    monkeypatch.setattr(chord, "fused_moe", noting)
    apply(layer, *make_inputs(3))
    assert told == [True]


@pytest.mark.parametrize("group", [64, -1])
def test_larger_groups(group: int) -> None:
    checkpoint = make_checkpoint(group=group)
    weights = {"group_size": None, "strategy": "channel"} if group == -1 else {"group_size": group}
    layer = load(make_layer(config_of(ChordConfig, **weights), moe_config()), checkpoint)
    inputs = make_inputs(9)
    assert_rows_close(apply(layer, *inputs), expected(checkpoint, *inputs), 8e-3)


@pytest.mark.parametrize("rank", [0, 1])
def test_tensor_parallel(rank: int) -> None:
    checkpoint = make_checkpoint()
    layer = load(
        make_layer(config_of(ChordConfig), moe_config(tensor_parallel(2, rank))), checkpoint
    )
    inputs = make_inputs(9)
    part = slice(rank * INNER // 2, (rank + 1) * INNER // 2)
    assert_rows_close(apply(layer, *inputs), expected(checkpoint, *inputs, inner=part), 8e-3)


@pytest.mark.parametrize("rank", [0, 1])
def test_expert_parallel(rank: int) -> None:
    """Ids are global, a map says which are here; -1 pads; rows without a local expert are zero."""
    checkpoint = make_checkpoint()
    layer = load(
        make_layer(config_of(ChordConfig), moe_config(expert_parallel(2, rank))), checkpoint
    )
    assert layer.expert_map is not None
    x, weights, ids = make_inputs(9)
    ids[3] = -1
    local = range(rank * EXPERTS // 2, (rank + 1) * EXPERTS // 2)
    ids[5] = (local.stop + torch.arange(TOP_K)) % EXPERTS
    out = apply(layer, x, weights, ids)
    assert_rows_close(out, expected(checkpoint, x, weights, ids, experts=local), 8e-3)
    assert not out[[3, 5]].any()


def test_router_weight_on_input() -> None:
    """The prepare step has weighted the tokens already: the layer must not do it again."""
    checkpoint = make_checkpoint()
    layer = make_layer(
        config_of(ChordConfig),
        moe_config(experts_per_token=1),
        apply_router_weight_on_input=True,
    )
    load(layer, checkpoint)
    x, weights, ids = make_inputs(5)
    weights, ids = weights[:, :1].contiguous(), ids[:, :1].contiguous()
    out = apply(layer, x, weights, ids)
    weighted = x * weights.bfloat16()  # as vLLM's prepare step rounds
    assert_rows_close(out, expected(checkpoint, weighted, torch.ones_like(weights), ids), 8e-3)


def test_swiglu_limit() -> None:
    checkpoint = make_checkpoint()
    layer = make_layer(config_of(ChordConfig), moe_config(), swiglu_limit=0.25)
    load(layer, checkpoint)
    inputs = make_inputs(5)
    wanted = expected(checkpoint, *inputs, limit=0.25)
    assert_rows_close(apply(layer, *inputs), wanted, 8e-3)
    assert not torch.allclose(wanted, expected(checkpoint, *inputs), rtol=0.05)


def test_workspaces_never_shrink() -> None:
    """The first, largest call reserves what all others use."""
    layer = load(make_layer(config_of(ChordConfig), moe_config()), make_checkpoint())
    experts = layer.quant_method.moe_kernel.fused_experts
    sizes = []
    for tokens in (1, 2, 63, 64, 1000, 65536, 65537, 300000):
        first, second, out = experts.workspace_shapes(
            tokens, 2 * INNER, HIDDEN, TOP_K, EXPERTS, EXPERTS, None, layer.activation
        )
        assert first == (0,), "the first workspace shares memory with the output"
        assert out == (tokens, HIDDEN)
        sizes.append(second[0])
    assert sizes == sorted(sizes)


class _Slots(mk.FusedMoEPrepareAndFinalizeModular):  # type: ignore[misc]
    """What a low-latency all-to-all does to one rank's tokens: each expert's rows in its slots."""

    slots = 16

    @property
    def activation_format(self) -> Any:
        return mk.FusedMoEActivationFormat.BatchedExperts

    def topk_indices_dtype(self) -> torch.dtype | None:
        return torch.int32

    def max_num_tokens_per_rank(self) -> int | None:
        return self.slots

    def num_dispatchers(self) -> int:
        return 1

    def output_is_reduced(self) -> bool:
        return False

    def prepare(
        self, a1: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *_: Any, **more: Any
    ) -> Any:
        assert more["defer_input_quant"] is False, "such prepare steps cannot defer quantization"
        rows = torch.full((EXPERTS // 2, self.slots, HIDDEN), float("nan"), dtype=a1.dtype)
        counts = torch.zeros(EXPERTS // 2, dtype=torch.int32)
        self.places = {}
        for token, slot in ((t, s) for t in range(len(ids)) for s in range(TOP_K)):
            e = int(ids[token, slot])
            if 0 <= e < EXPERTS // 2:
                rows[e, counts[e]] = a1[token]
                self.places[token, slot] = e, int(counts[e])
                counts[e] += 1
        return rows, None, mk.ExpertTokensMetadata(counts, None), None, None

    def finalize(
        self,
        output: torch.Tensor,
        fused: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        on_input: bool,
        reduce: Any,
    ) -> None:
        total = torch.zeros(output.shape, dtype=torch.float32)
        for (token, slot), place in self.places.items():
            total[token] += weights[token, slot] * fused[place].float()
        output.copy_(total)


def test_batched(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepEP low-latency: slots with counts, unused rows full of NaN."""
    monkeypatch.setattr(chord_method, "maybe_make_prepare_finalize", lambda **_: _Slots())
    monkeypatch.setattr(
        "vllm.model_executor.layers.fused_moe.fused_moe_method_base.FusedMoEMethodBase"
        ".maybe_roundup_sizes",
        lambda self, hidden, inner, *_: (hidden, inner),
    )
    experts = chord_method.ChordExpertsBase
    monkeypatch.setattr(experts, "activation", masked_swiglu)
    checkpoint = make_checkpoint()
    layer = make_layer(config_of(ChordConfig), moe_config(all_to_all("deepep_low_latency")))
    load(layer, checkpoint)
    assert not layer.quant_method.moe_kernel.fused_experts.expects_unquantized_inputs
    x, weights, ids = make_inputs(9)
    out = apply(layer, x, weights, ids)
    wanted = expected(checkpoint, x, weights, ids, experts=range(EXPERTS // 2))
    assert_rows_close(out, wanted, 8e-3)


def masked_swiglu(
    self: Any, activation: Any, output: torch.Tensor, x: torch.Tensor, **more: Any
) -> None:
    """Stand in for vLLM's compiled operator, which a machine without a GPU has not."""
    assert activation.value == "silu"
    for e, count in enumerate(more["valid_token_counts"].tolist()):
        gate, up = x[e, :count].float().chunk(2, dim=-1)
        output[e, :count] = (torch.nn.functional.silu(gate) * up).bfloat16()


def test_only_the_packed_weights_stay() -> None:
    layer = load(make_layer(config_of(ChordConfig), moe_config()), make_checkpoint())
    kept = {name: tensor.nbytes for name, tensor in layer.named_parameters()}
    assert kept.keys() == {"w13_weight", "w2_weight"}
    units = EXPERTS * (2 * INNER // 64 * HIDDEN // 64 + HIDDEN // 64 * INNER // 64)
    assert sum(kept.values()) == units * 2304


def test_one_projection_at_a_time_is_there_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Field case 10 in an engine: the checkpoint form is gone before the next one is packed."""
    layer = make_layer(config_of(ChordConfig), moe_config())
    for _ in layer.load_weights(make_checkpoint().tensors()):
        pass
    pack, seen = chord.pack_experts, []

    def watch(*arguments: Any, **more: Any) -> Any:
        seen.append({name for name, _ in layer.named_parameters() if name.endswith("_packed")})
        return pack(*arguments, **more)

    monkeypatch.setattr(chord, "pack_experts", watch)
    layer.quant_method.process_weights_after_loading(layer)
    assert seen == [{"w13_weight_packed", "w2_weight_packed"}, {"w2_weight_packed"}]


# --- reload -----------------------------------------------------------------------------------


def reload(layer: Any, tensors: Any) -> None:
    """Load anew as `LLM.collective_rpc("reload_weights")` does."""
    model = torch.nn.Module()
    model.experts = layer
    initialize_layerwise_reload(model)
    for _ in layer.load_weights(tensors):
        pass
    finalize_layerwise_reload(model, None)


def reloadable(parallel: Any = None) -> Any:
    moe = moe_config() if parallel is None else moe_config(parallel)
    layer = make_layer(config_of(ChordConfig), moe)
    record_metadata_for_reloading(layer)
    return load(layer, make_checkpoint())


@pytest.mark.parametrize("rank", [None, 1])
def test_reload(rank: int | None) -> None:
    """New weights, old addresses: what CUDA graphs were captured with stays valid."""
    layer = reloadable(None if rank is None else expert_parallel(2, rank))
    inputs = make_inputs(9)
    apply(layer, *inputs)
    kernel = layer.quant_method.moe_kernel
    places = [layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr()]
    fresh = make_checkpoint(seed=5)
    reload(layer, fresh.tensors())
    assert [layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr()] == places
    assert layer.quant_method.moe_kernel is kernel
    local = range(EXPERTS) if rank is None else range(EXPERTS // 2, EXPERTS)
    assert_rows_close(apply(layer, *inputs), expected(fresh, *inputs, experts=local), 8e-3)
    assert {name for name, _ in layer.named_parameters()} == {"w13_weight", "w2_weight"}


def test_reload_of_a_part_is_refused() -> None:
    layer = reloadable()
    tensors = [t for t in make_checkpoint(seed=5).tensors() if not t[0].startswith("4.up_proj")]
    with pytest.raises(ValueError, match=r"brought 34 of the 36 weights and scales of .*\.experts"):
        reload(layer, tensors)


def test_weights_may_move() -> None:
    """Parameters that come back elsewhere (sleep without vLLM's allocator) are found."""
    checkpoint = make_checkpoint()
    layer = load(make_layer(config_of(ChordConfig), moe_config()), checkpoint)
    inputs = make_inputs(9)
    before = apply(layer, *inputs)
    for parameter in layer.parameters():
        kept = parameter.data
        parameter.data = kept.clone()
        kept.zero_()
    assert torch.equal(apply(layer, *inputs), before)
