"""The end of an expert layer: scaled and added to by Chord's sum, through vLLM's own runner."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from layers import (
    EXPERTS,
    HIDDEN,
    PREFIX,
    TOP_K,
    config_of,
    expected,
    expert_parallel,
    load,
    make_checkpoint,
    make_layer,
    moe_config,
)
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.lora.layers.fused_moe import FusedMoEWithLoRA
from vllm.model_executor import custom_op
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts

import chord
from chord.integrations.vllm import register
from chord.integrations.vllm import runner as chord_runner
from chord.integrations.vllm.config import ChordConfig
from chord.integrations.vllm.runner import ChordMoERunner
from tolerance import assert_rows_close

pytestmark = pytest.mark.usefixtures("platform", "workspaces")

SCALE = 2.827
NAME = "MoERunner"


@pytest.fixture(autouse=True)
def around(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register the runner, and take it out again; no streams where there is no card."""
    monkeypatch.setenv("VLLM_DISABLE_SHARED_EXPERTS_STREAM", "1")
    chord_runner.register()
    yield
    custom_op.op_registry_oot.pop(NAME, None)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Note what chord.fused_moe is given."""
    noted: list[dict[str, Any]] = []
    shipped = chord.fused_moe

    def noting(*operands: Any, **given: Any) -> torch.Tensor:
        noted.append(given)
        return shipped(*operands, **given | {"shared_ready": None})  # there are no events

    monkeypatch.setattr(chord, "fused_moe", noting)
    return noted


class Router:
    """Sends tokens where the logits are highest; keeps the ids of words, which some models use."""

    eplb_state = None
    input_ids: torch.Tensor | None = None

    def select_experts(
        self, *, router_logits: torch.Tensor, input_ids: torch.Tensor | None, **_: Any
    ) -> Any:
        self.input_ids = input_ids
        weights, ids = router_logits.float().topk(TOP_K)
        return weights, ids.int()


class Shared(torch.nn.Module):
    """Shared experts: a matrix, [H, H]; `change` says what becomes of the output."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor] = lambda out: out) -> None:
        super().__init__()
        self.change = change
        generator = torch.Generator().manual_seed(3)
        self.weight = (torch.randn(HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(x @ self.weight)


def in_fp32(out: torch.Tensor) -> torch.Tensor:
    return out.float()


def of_one_column(out: torch.Tensor) -> torch.Tensor:
    return out[:, :1]


def transposed(out: torch.Tensor) -> torch.Tensor:
    return out.T.contiguous().T


def at_an_odd_address(out: torch.Tensor) -> torch.Tensor:
    place = torch.empty(out.numel() + 8, dtype=out.dtype)
    first = 1 + -(place.data_ptr() // 2) % 8
    return place[first : first + out.numel()].view(out.shape).copy_(out)


class Layer:
    """An expert layer of vLLM with its runner, and its expected output."""

    def __init__(self, shared: Shared | None = None, moe: Any = None, **options: Any) -> None:
        self.config, self.shared = VllmConfig(), shared
        self.checkpoint = make_checkpoint()
        moe = moe or moe_config()
        experts = load(make_layer(config_of(ChordConfig), moe), self.checkpoint)
        with set_current_vllm_config(self.config):
            self.runner = MoERunner(
                PREFIX,
                moe,
                Router(),
                experts,
                shared_experts=shared,
                routed_scaling_factor=SCALE,
                **options,
            )
        generator = torch.Generator().manual_seed(4)
        self.x = torch.randn(7, HIDDEN, generator=generator).bfloat16()
        self.logits = torch.rand(7, EXPERTS, generator=generator)

    def run(
        self, call: Callable[..., torch.Tensor] | None = None, *more: torch.Tensor
    ) -> torch.Tensor:
        config = self.config
        with set_current_vllm_config(config), set_forward_context(None, config, num_tokens=7):
            return (call or self.runner)(self.x, self.logits, *more)

    def wanted(self, **part: Any) -> torch.Tensor:
        weights, ids = self.logits.topk(TOP_K)
        routed = expected(self.checkpoint, self.x, weights, ids, **part) * SCALE
        return routed if self.shared is None else routed + self.shared(self.x).float()


def test_one_kernel_sums_scales_and_adds(calls: list[dict[str, Any]]) -> None:
    layer = Layer(Shared())
    assert type(layer.runner) is ChordMoERunner
    out = layer.run()
    assert out.dtype == torch.bfloat16
    assert_rows_close(out, layer.wanted(), 8e-3)
    (call,) = calls
    assert call["routed_scaling_factor"] == SCALE
    assert torch.equal(call["shared_output"], layer.shared(layer.x))
    assert torch.equal(out, call["out"]), "something was done to the layer's output afterwards"
    assert torch.equal(layer.run(), out)


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_bits_are_those_of_vllms_own_end(is_shared: bool) -> None:
    shared = Shared() if is_shared else None
    out = Layer(shared).run()
    del custom_op.op_registry_oot[NAME]
    stock = Layer(shared)
    assert type(stock.runner) is MoERunner
    assert torch.equal(out, stock.run())


def test_compiled_code_is_that_of_vllm(calls: list[dict[str, Any]]) -> None:
    """It may come from a process without Chord, or go to one: vLLM's cache does not tell."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    layer = Layer(Shared())
    want = layer.run()
    forward = torch.compile(layer.runner.forward, backend=keep, fullgraph=True)
    assert torch.equal(layer.run(forward), want)
    assert calls[1]["routed_scaling_factor"] == 1.0 and calls[1]["shared_output"] is None
    del custom_op.op_registry_oot[NAME]
    stock = Layer(Shared())
    stock.run(torch.compile(stock.runner.forward, backend=keep, fullgraph=True))
    ours, vllms = (
        [(node.name, node.op, str(node.target)) for node in graph.graph.nodes] for graph in graphs
    )
    assert ours == vllms
    assert torch.equal(layer.run(), want), "eager calls end the layer as before"


def test_without_shared_experts(calls: list[dict[str, Any]]) -> None:
    layer = Layer()
    assert_rows_close(layer.run(), layer.wanted(), 8e-3)
    assert calls[0]["routed_scaling_factor"] == SCALE and calls[0]["shared_output"] is None


def test_expert_parallel_without_a_dispatch(calls: list[dict[str, Any]]) -> None:
    layer = Layer(Shared(), moe_config(expert_parallel(2)))
    layer.runner.moe_config.skip_final_all_reduce = True  # no other rank is there
    assert_rows_close(layer.run(), layer.wanted(experts=range(EXPERTS // 2)), 8e-3)
    assert calls[0]["shared_output"] is not None


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, calls: list[dict[str, Any]]) -> list[str]:
    """Let shared experts run as if on a stream of their own; note when it begins and is joined."""
    noted: list[str] = []

    def begin(self: SharedExperts, x: torch.Tensor) -> bool:
        noted.append("begin")
        self._output[0] = self._layer(x)
        return True

    def wait(self: SharedExperts) -> None:
        noted.append(f"wait, {len(calls)} calls")

    monkeypatch.setattr(SharedExperts, "maybe_forward_async", begin)
    monkeypatch.setattr(SharedExperts, "wait", wait)
    monkeypatch.setattr(SharedExperts, "forward", lambda *_: None)
    return noted


def test_shared_experts_on_a_stream_of_their_own_are_awaited_by_the_sum(
    events: list[str], calls: list[dict[str, Any]]
) -> None:
    layer = Layer(Shared())
    ready = object()
    layer.runner.shared_experts._output_ready_event = [ready, None]
    assert_rows_close(layer.run(), layer.wanted(), 8e-3)
    assert calls[0]["shared_ready"] is ready
    assert events == ["begin"], "the stream was joined twice"


@pytest.mark.parametrize("change", [transposed, at_an_odd_address])
def test_an_output_that_has_to_be_copied_is_awaited_first(
    change: Callable[[torch.Tensor], torch.Tensor], events: list[str], calls: list[dict[str, Any]]
) -> None:
    layer = Layer(Shared(change))
    layer.runner.shared_experts._output_ready_event = [object(), None]
    assert_rows_close(layer.run(), layer.wanted(), 8e-3)
    assert calls[0]["shared_ready"] is None and calls[0]["shared_output"].is_contiguous()
    assert events == ["begin", "wait, 0 calls"]


@pytest.mark.parametrize("tokens", [0, 7])
def test_a_stream_that_no_sum_joins_is_joined_behind(
    tokens: int, events: list[str], calls: list[dict[str, Any]]
) -> None:
    layer = Layer(Shared(in_fp32))
    layer.runner.shared_experts._output_ready_event = [object(), None]
    layer.x, layer.logits = layer.x[:tokens], layer.logits[:tokens]
    out = layer.run()
    assert out.shape == (tokens, HIDDEN)
    if tokens:
        assert_rows_close(out, layer.wanted(), 8e-3)
    assert events == ["begin", f"wait, {len(calls)} calls"] and len(calls) == bool(tokens)


@pytest.mark.parametrize("how", ["two batches by turns", "compiled"])
def test_a_layer_that_vllm_ends_joins_the_stream_itself(
    how: str, events: list[str], calls: list[dict[str, Any]]
) -> None:
    layer = Layer(Shared(), enable_dbo=how != "compiled")
    forward = torch.compile(layer.runner.forward, backend="aot_eager", fullgraph=True)
    out = layer.run(forward if how == "compiled" else None)
    assert_rows_close(out, layer.wanted(), 8e-3)
    assert events == ["begin", "wait, 1 calls"]


@pytest.mark.parametrize("change", [in_fp32, of_one_column])
def test_shared_experts_of_another_kind_are_added_behind(
    change: Callable[[torch.Tensor], torch.Tensor], calls: list[dict[str, Any]]
) -> None:
    layer = Layer(Shared(change))
    out = layer.run()
    assert out.dtype == layer.shared(layer.x).dtype, "as without Chord's runner"
    assert_rows_close(out, layer.wanted(), 8e-3)
    assert calls[0]["routed_scaling_factor"] == SCALE and calls[0]["shared_output"] is None


@pytest.mark.parametrize(
    "options",
    [
        {"routed_input_transform": torch.nn.Identity()},
        {"routed_output_transform": torch.nn.Identity()},
        {"enable_dbo": True},
    ],
    ids=["input transform", "output transform", "two batches by turns"],
)
def test_what_stands_in_between_is_left_to_vllm(
    options: dict[str, Any], calls: list[dict[str, Any]]
) -> None:
    layer = Layer(Shared(), **options)
    assert layer.runner._ending_experts() is None
    assert_rows_close(layer.run(), layer.wanted(), 8e-3)
    assert calls[0]["routed_scaling_factor"] == 1.0 and calls[0]["shared_output"] is None


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        ("moe_config", "hidden_dim_unpadded", HIDDEN - 8),
        ("moe_parallel_config", "pcp_size", 2),
        ("moe_parallel_config", "sp_size", 2),
    ],
)
def test_batches_that_are_changed_on_the_way_are_left_to_vllm(
    owner: str, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Layer(Shared()).runner
    assert runner._ending is None and runner._ending_experts() is not None
    holder = runner.moe_config if owner == "moe_config" else runner.moe_config.moe_parallel_config
    monkeypatch.setattr(holder, name, value)
    assert runner._ending_experts() is None


@pytest.mark.parametrize("name", ["prepare_finalize", "fused_experts"])
def test_other_parts_of_a_kernel_are_left_to_vllm(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dispatch of tokens, which is followed by a combine; experts of another format."""
    runner = Layer(Shared()).runner
    monkeypatch.setattr(runner.routed_experts.quant_method.moe_kernel.impl, name, object())
    assert runner._ending_experts() is None


@pytest.mark.parametrize("how", ["ended by Chord", "ended by vLLM", "compiled"])
def test_all_operands_reach_the_layer(how: str) -> None:
    layer = Layer(Shared(), enable_dbo=how == "ended by vLLM")
    words, x = torch.arange(7), layer.x.flip(0)
    call = layer.runner.forward
    if how == "compiled":
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    out = layer.run(call, words, x)
    routed = layer.wanted() - layer.shared(layer.x).float()
    assert_rows_close(out, routed + layer.shared(x).float(), 8e-3)
    assert torch.equal(layer.runner.router.input_ids, words)


def test_other_kernels_are_left_to_vllm() -> None:
    layer = Layer(Shared())
    layer.runner.routed_experts.quant_method = object()
    assert layer.runner._ending_experts() is None
    out = torch.ones(3, HIDDEN)
    shared, scaled = layer.runner._maybe_apply_routed_scale_to_output(None, out)
    assert shared is None and scaled[0, 0] == pytest.approx(SCALE)


def test_a_layer_that_failed_leaves_no_end_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(Shared())
    with monkeypatch.context() as patch:
        patch.setattr(chord, "fused_moe", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            layer.run()
    layer.runner.shared_experts._output[0] = None
    assert layer.runner._ending is None
    experts = layer.runner.routed_experts.quant_method.moe_kernel.fused_experts
    assert experts._end.scale == 1.0 and experts._end.shared() == (None, None)
    assert pickle.loads(pickle.dumps(experts._end)) == experts._end
    assert_rows_close(layer.run(), layer.wanted(), 8e-3)


# --- registration ---------------------------------------------------------------------------------


def test_registering_again_changes_nothing() -> None:
    chord_runner.register()
    assert custom_op.op_registry_oot[NAME] is ChordMoERunner
    assert ChordMoERunner.name == NAME


def test_a_runner_of_another_plugin_stays() -> None:
    class Other(MoERunner):
        pass

    custom_op.op_registry_oot[NAME] = Other
    chord_runner.register()
    assert custom_op.op_registry_oot[NAME] is Other
    assert chord_runner._decline() == f"{__name__}.{Other.__qualname__} runs them"


def test_a_runner_that_is_built_otherwise_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    del custom_op.op_registry_oot[NAME]
    with monkeypatch.context() as patch:
        patch.setattr(MoERunner, "_apply_quant_method", lambda self, x: x)
        assert "_apply_quant_method takes ['x'], Chord knows" in chord_runner._decline()
        chord_runner.register()
        assert NAME not in custom_op.op_registry_oot
    with monkeypatch.context() as patch:
        patch.delattr(SharedExperts, "wait")
        assert chord_runner._decline() == "SharedExperts has no wait"
    with monkeypatch.context() as patch:
        patch.setattr(SharedExperts, "__init__", lambda self: None)
        assert chord_runner._decline() == "SharedExperts sets no _output"
    assert chord_runner._decline() is None


def test_a_vllm_that_has_no_such_runner_keeps_the_rest_of_the_plugin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    del custom_op.op_registry_oot[NAME]
    registered: list[str] = []
    note = "vllm.model_executor.layers.quantization.register_quantization_config"
    monkeypatch.setattr(note, lambda name: registered.append(name) or (lambda cls: cls))
    monkeypatch.setitem(sys.modules, "chord.integrations.vllm.runner", None)
    monkeypatch.delattr("chord.integrations.vllm.runner")
    register()
    assert sorted(registered) == ["chord", "compressed-tensors", "humming"]
    assert NAME not in custom_op.op_registry_oot


@pytest.mark.parametrize("with_chord", [True, False])
def test_lora_finds_the_runners_of_other_models(with_chord: bool) -> None:
    """It asks the registered class whether a layer is one of it, and ignores the others."""

    class OtherRunner(MoERunner):
        pass

    if not with_chord:
        del custom_op.op_registry_oot[NAME]
    other, none = OtherRunner.__new__(OtherRunner), torch.nn.Linear(1, 1)
    torch.nn.Module.__init__(other)
    assert FusedMoEWithLoRA.can_replace_layer(other, None, ["gate_up", "down"])
    assert not FusedMoEWithLoRA.can_replace_layer(none, None, ["gate_up", "down"])
