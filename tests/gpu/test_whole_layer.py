"""The whole layer on the card: field cases 1, 2 and 9, accuracy, bits, streams, graphs, parts."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import scratch
import torch
from moe import Operands, call, expected, operands, workspace

import cases
import chord
import tolerance
from chord.errors import CaptureError
from chord.jit import fixed, launch
from chord.ops import layer
from chord.plan.config import Config, shipped_configs

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
CONFIGS = shipped_configs("sm_90a")
# Where K of gate_up is longer than a configuration takes, another one runs it.
PAIRS = (
    None,
    *((config if cases.takes(config, 7168) else CONFIGS[0], config) for config in CONFIGS),
)
each_pair = pytest.mark.parametrize(
    "configs", PAIRS, ids=lambda pair: pair[1].label() if pair else "planned"
)

Configs = tuple[Config, Config] | None


@dataclass(frozen=True)
class Shape:
    """E local experts, hidden H, intermediate I, top_k."""

    experts: int
    hidden: int
    middle: int
    top_k: int


RAGGED = (
    Shape(6, 352, 160, 2),
    Shape(8, 2880, 1440, 4),
    Shape(4, 2048, 704, 2),
    Shape(16, 512, 32, 3),
)
SHORT = Shape(8, 224, 160, 4)  # both K
EP8 = Shape(48, 7168, 2048, 8)
TP8 = Shape(384, 7168, 256, 8)


def made(shape: Shape, tokens: int, routing: str = "uniform", seed: int = 0) -> Operands:
    return operands(
        shape.experts, shape.hidden, shape.middle, shape.top_k, tokens, routing, seed=seed
    )


# --- accuracy -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", (1, 2, 17, 64, 130, 700))
@pytest.mark.parametrize("shape", RAGGED, ids=str)
def test_rows_against_fp64(shape: Shape, tokens: int) -> None:
    given = made(shape, tokens, "holes")
    tolerance.assert_rows_close(call(given), expected(given), tolerance.LAYER_LIMIT)


@each_pair
def test_every_configuration(configs: Configs) -> None:
    for tokens, routing in ((3, "uniform"), (150, "skewed"), (400, "one_expert")):
        given = made(RAGGED[0], tokens, routing)
        out = call(given, configs=configs)
        tolerance.assert_rows_close(out, expected(given), tolerance.LAYER_LIMIT, routing)


@pytest.mark.parametrize("tokens", (3, 150))
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.label())
def test_every_configuration_for_both_gemms(config: Config, tokens: int) -> None:
    given = made(SHORT, tokens, "skewed")
    for on_input in (False, True):
        options = {"apply_router_weight_on_input": on_input, "swiglu_limit": 7.0}
        out = call(given, configs=(config, config), **options)
        want = expected(given, on_input=on_input, swiglu=(1.0, 0.0, 7.0))
        tolerance.assert_rows_close(out, want, tolerance.LAYER_LIMIT)


@pytest.mark.parametrize("shape", (RAGGED[1], SHORT), ids=str)
def test_any_two_configurations(shape: Shape) -> None:
    """Partial sums and counters live side by side while the stages overlap."""
    given = made(shape, 40)
    want = expected(given)
    for first in (config for config in CONFIGS if cases.takes(config, shape.hidden)):
        for second in (config for config in CONFIGS if cases.takes(config, shape.middle)):
            for _ in range(3):
                out = call(given, configs=(first, second))
            tolerance.assert_rows_close(out, want, tolerance.LAYER_LIMIT)


@pytest.mark.parametrize(("shape", "tokens"), ((EP8, 20), (EP8, 256), (TP8, 8), (TP8, 512)))
def test_shapes_of_the_model(shape: Shape, tokens: int) -> None:
    given = made(shape, tokens)
    tolerance.assert_rows_close(call(given), expected(given), tolerance.LAYER_LIMIT)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_router_weights_are_converted(dtype: torch.dtype) -> None:
    given = made(RAGGED[0], 33)
    given.weights.copy_(given.weights.to(dtype))  # exact in either type now
    out = call(given, topk_weights=given.weights.to(dtype))
    assert torch.equal(out, call(given))


@pytest.mark.parametrize("tokens", (5, 300))
def test_constants_of_the_activation(tokens: int) -> None:
    given = made(RAGGED[0], tokens)
    out = call(given, swiglu_alpha=1.702, swiglu_beta=1.0, swiglu_limit=0.5)
    want = expected(given, swiglu=(1.702, 1.0, 0.5))
    tolerance.assert_rows_close(out, want, tolerance.LAYER_LIMIT)


@pytest.mark.parametrize("tokens", (1, 40, 700))
def test_the_sum_is_scaled_and_added_to_what_shared_experts_gave(tokens: int) -> None:
    given = made(RAGGED[0], tokens, "holes")
    shared = cases.real_x(tokens, 352, seed=5, device=DEVICE)
    plain = call(given)
    for scale, added in ((2.827, None), (1.0, shared), (-2.827, shared), (2.827, given.hidden)):
        options = {"routed_scaling_factor": scale, "shared_output": added}
        out = call(given, **options)
        assert torch.equal(out, plain * scale if added is None else plain * scale + added)
        if added is not None:
            place = added.clone()
            call(given, **options | {"shared_output": place}, out=place)
            assert torch.equal(place, out)


@pytest.mark.parametrize("beside", (False, True))
@pytest.mark.parametrize("tokens", (3, 50, 700))
def test_what_shared_experts_give_is_awaited(tokens: int, beside: bool) -> None:
    """It may be written last before the layer, or long after it began, on a stream of its own."""
    given = made(Shape(8, 1024, 256, 2), tokens)
    routed = call(given)
    fresh, shared, out = (torch.empty_like(given.hidden) for _ in range(3))
    space = workspace(given, tokens)
    other, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    begin, ready = torch.cuda.Event(), torch.cuda.Event()

    def write() -> None:
        for _ in range(100):  # longer than the layer
            fresh.cos_().mul_(3)
        shared.copy_(fresh)

    def run() -> None:
        if not beside:
            write()
            call(given, out=out, workspace=space, shared_output=shared)
            return
        begin.record()
        with torch.cuda.stream(other):
            begin.wait()
            write()
            ready.record()
        call(given, out=out, workspace=space, shared_output=shared, shared_ready=ready)

    for capture in (False, True):
        if capture:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                run()
        for seed in range(5):
            fresh.copy_(cases.real_x(tokens, 1024, seed=seed, device=DEVICE))
            for tensor in (shared, out):
                tensor.fill_(cases.POISON)
            space.fill_(0xFF)  # NaN in every row that down has not written
            graph.replay() if capture else run()
            torch.cuda.synchronize()
            assert torch.equal(out, routed + shared)


@pytest.mark.parametrize("tokens", (5, 300))
def test_router_weights_on_the_input(tokens: int) -> None:
    given = made(RAGGED[0], tokens, "holes")
    out = call(given, apply_router_weight_on_input=True)
    tolerance.assert_rows_close(out, expected(given, on_input=True), tolerance.LAYER_LIMIT)


def test_more_routes_than_a_part_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    given = made(RAGGED[0], 1000, "holes")
    want = expected(given)
    monkeypatch.setattr(layer, "MAX_ROUTES", 300)
    layer._calls.clear()
    for out in (None, given.hidden.clone()):
        hidden = given.hidden if out is None else out
        got = call(given, hidden=hidden, out=out)  # also into hidden itself, part by part
        tolerance.assert_rows_close(got, want, tolerance.LAYER_LIMIT)
    layer._calls.clear()


@pytest.mark.field_case(3)
def test_rows_far_beyond_32_bits() -> None:
    """300,000 routes of 7,168 features: the parts keep every offset in its buffer."""
    shape = Shape(8, 7168, 64, 8)
    few = made(shape, 5)
    tokens = 37_450
    repeats = -(-tokens // 5)
    big = Operands(
        hidden=few.hidden.repeat(repeats, 1)[:tokens],
        w13=few.w13,
        w2=few.w2,
        packed13=few.packed13,
        packed2=few.packed2,
        weights=few.weights.repeat(repeats, 1)[:tokens].contiguous(),
        ids=few.ids.repeat(repeats, 1)[:tokens].contiguous(),
    )
    out = call(big)
    want = expected(few)
    for part in out.view(-1, 5, 7168).split(256):
        tolerance.assert_rows_close(part, want.expand_as(part), tolerance.LAYER_LIMIT)


# --- field case 1 ---------------------------------------------------------------------------------


@pytest.mark.field_case(1)
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
@each_pair
def test_remote_and_missing_experts(configs: Configs, dtype: torch.dtype) -> None:
    case = cases.partial_routing(device=DEVICE)
    given = made(Shape(48, 7168, 256, 8), 33)
    local = Operands(**{**given.__dict__, "ids": case.local_ids})
    want = expected(local)
    space = workspace(given, 33)
    runs = (
        functools.partial(call, local, configs=configs),
        functools.partial(
            call,
            local,
            topk_ids=case.topk_ids.to(dtype),
            expert_map=case.expert_map.to(dtype),
            configs=configs,
        ),
    )
    results = []
    for run in runs:
        run()
        out = cases.poisoned(33, 7168, device=DEVICE)
        space.fill_(0xFF)  # NaN wherever a stage would read what no stage wrote
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(out=out, workspace=space)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        silent = list(case.silent_rows)
        assert not out[silent].any() and bool(out.isfinite().all())
        tolerance.assert_rows_close(out, want, tolerance.LAYER_LIMIT)
        results.append(out)
    if configs is not None:  # planned, the map makes it expect fewer rows: other kernels may run
        assert torch.equal(*results)


# --- field case 2 ---------------------------------------------------------------------------------


@pytest.mark.field_case(2)
@each_pair
def test_no_work_at_all(configs: Configs) -> None:
    given = made(RAGGED[0], 16)
    want = expected(given)
    empty = {
        "hidden": given.hidden[:0],
        "topk_ids": given.ids[:0],
        "topk_weights": given.weights[:0],
    }
    assert call(given, **empty, configs=configs).shape == (0, 352)
    nobody = call(given, topk_ids=torch.full_like(given.ids, -1), configs=configs)
    assert nobody.shape == (16, 352) and not nobody.any()
    tolerance.assert_rows_close(call(given, configs=configs), want, tolerance.LAYER_LIMIT)
    graph = torch.cuda.CUDAGraph()
    out = cases.poisoned(16, 352, device=DEVICE)
    ids = given.ids.clone()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        none = call(given, **empty, configs=configs)
        call(given, topk_ids=ids, out=out, configs=configs)
    assert none.shape == (0, 352)
    ids.fill_(-1)
    graph.replay()
    assert not out.any()
    ids.copy_(given.ids)
    graph.replay()
    tolerance.assert_rows_close(out, want, tolerance.LAYER_LIMIT)


# --- field case 9, bits, streams ------------------------------------------------------------------


@pytest.fixture
def cold() -> Iterator[None]:
    """Forget loaded kernels, as a fresh process would."""
    tables = (launch._loaded, launch._thread.launchers, fixed._loaded, fixed._thread.launchers)
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    yield
    for table, entries in zip(tables, kept, strict=True):
        table.update(entries)


@pytest.mark.field_case(9)
def test_a_cold_call_inside_capture_says_warm_up_first(cold: None) -> None:
    given = made(RAGGED[0], 24)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError, match="warm up first"), torch.cuda.graph(graph):
        call(given)
    out = call(given)
    graph = torch.cuda.CUDAGraph()
    again = torch.empty_like(out)
    with torch.cuda.graph(graph):
        call(given, out=again)
    graph.replay()
    assert torch.equal(out, again)


@pytest.mark.field_case(9)
@pytest.mark.parametrize("tokens", (16, 256))
def test_replays_follow_new_routing_and_survive_bigger_batches(tokens: int) -> None:
    shape = Shape(48, 7168, 256, 8)
    given = made(shape, tokens)
    ids, out = given.ids.clone(), torch.empty_like(given.hidden)
    call(given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(given, topk_ids=ids, out=out)

    def check() -> None:
        for routing in ("uniform", "one_expert", "one_each", "none", "skewed"):
            ids.copy_(cases.topk_ids(tokens, 8, 48, routing, seed=5, device=DEVICE))
            out.fill_(cases.POISON)
            graph.replay()
            now = Operands(**{**given.__dict__, "ids": ids})
            assert torch.equal(out, call(now)), routing

    check()
    big = made(shape, 8192)
    call(big)
    kept = [torch.randn(1 << 20, device=DEVICE) for _ in range(8)]
    for _ in range(2):
        check()
    assert all(bool(tensor.isfinite().all()) for tensor in kept)


@pytest.mark.field_case(9)
@pytest.mark.parametrize(("shape", "tokens"), ((EP8, 20), (EP8, 300), (TP8, 64), (TP8, 1000)))
def test_the_same_bits_every_time(shape: Shape, tokens: int) -> None:
    given = made(shape, tokens)
    first = call(given)
    space = workspace(given, tokens)
    for _ in range(20):
        space.fill_(0xFF)
        assert torch.equal(call(given, workspace=space), first)
    graph = torch.cuda.CUDAGraph()
    out = torch.empty_like(first)
    with torch.cuda.graph(graph):
        call(given, out=out, workspace=space)
    for _ in range(5):
        space.fill_(0xFF)
        out.fill_(cases.POISON)
        graph.replay()
        assert torch.equal(out, first)


def test_layers_follow_each_other_without_a_gap() -> None:
    """Stages of the next layer begin while the last one drains: nothing may mix."""
    layers = [made(Shape(8, 1024, 256, 2), 50, seed=seed) for seed in range(4)]
    space = workspace(layers[0], 50)
    wanted = [call(given) for given in layers]
    outs = [torch.empty_like(given.hidden) for given in layers]
    torch.cuda.synchronize()
    for _ in range(20):
        for given, out in zip(layers, outs, strict=True):
            call(given, out=out, workspace=space)
    for out, want in zip(outs, wanted, strict=True):
        assert torch.equal(out, want)


def test_two_streams_do_not_meet() -> None:
    pair = [made(Shape(8, 1024, 256, 2), tokens, seed=tokens) for tokens in (7, 200)]
    wanted = [call(given) for given in pair]
    outs = [torch.empty_like(given.hidden) for given in pair]
    streams = [torch.cuda.Stream() for _ in pair]
    torch.cuda.synchronize()
    for _ in range(30):
        for given, out, stream in zip(pair, outs, streams, strict=True):
            with torch.cuda.stream(stream):
                call(given, out=out)
    torch.cuda.synchronize()
    for out, want in zip(outs, wanted, strict=True):
        assert torch.equal(out, want)
    scratch.assert_clean()


def test_nothing_is_allocated_with_out_and_workspace() -> None:
    given = made(RAGGED[0], 64)
    out, space = torch.empty_like(given.hidden), workspace(given, 64)
    call(given, out=out, workspace=space)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    call(given, out=out, workspace=space)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_compiled_code_gives_the_same() -> None:
    given = made(RAGGED[0], 40)

    @functools.partial(torch.compile, fullgraph=True, dynamic=True)
    def model(hidden: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return chord.fused_moe(hidden, given.packed13, given.packed2, scores, ids)

    for tokens in (40, 17):
        rows = (given.hidden[:tokens], given.weights[:tokens], given.ids[:tokens])
        want = call(given, hidden=rows[0], topk_weights=rows[1], topk_ids=rows[2])
        assert torch.equal(model(*rows), want)


def test_weights_packed_again_reach_a_captured_graph() -> None:
    given = made(RAGGED[0], 40)
    out = torch.empty_like(given.hidden)
    call(given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(given, out=out)
    other = made(RAGGED[0], 40, seed=9)
    for new, packed, interleave in (
        (other.w13, given.packed13, True),
        (other.w2, given.packed2, False),
    ):
        chord.pack_experts(new.words, new.scales, interleave_gate_up=interleave, out=packed)
    graph.replay()
    now = Operands(**{**given.__dict__, "w13": other.w13, "w2": other.w2})
    tolerance.assert_rows_close(out, expected(now), tolerance.LAYER_LIMIT)


# --- route sort -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", (0, 1, 300, 5000, 40_000, 300_000))
@pytest.mark.parametrize("routing", ("uniform", "one_expert", "holes"))
def test_align_on_the_card_is_that_of_torch(tokens: int, routing: str) -> None:
    ids = cases.topk_ids(tokens, 8, 384, routing, device=DEVICE)
    for block_m in (8, 64):
        got = chord.align(ids, num_experts=384, block_m=block_m)
        want = chord.routing.align(ids, num_experts=384, block_m=block_m)
        assert torch.equal(got.sorted_token_ids, want.sorted_token_ids)
        assert torch.equal(got.expert_ids, want.expert_ids)
        assert torch.equal(got.num_tokens_post_padded, want.num_tokens_post_padded)
