"""CUDA graphs, streams and threads: field cases 2 (e) and 9."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import scratch
import torch

import chord
from cases import exact_x, expected_rows, poisoned, random_weights, topk_ids
from chord import device as devices
from chord.errors import CaptureError
from chord.jit import launch

pytestmark = pytest.mark.gpu

E, N, K, TOP_K, BLOCK_M = 48, 512, 7168, 8, 16


@pytest.fixture(scope="module")
def weights():
    return random_weights(E, N, K, device="cuda")


@pytest.fixture(scope="module")
def experts(weights):
    return weights.pack()


@pytest.fixture
def cold() -> Iterator[None]:
    """Forget loaded kernels, as a fresh process would."""
    kept, prepared = dict(launch._loaded), dict(launch._thread.launchers)
    launch._loaded.clear()
    launch._thread.launchers.clear()
    yield
    launch._loaded.update(kept)
    launch._thread.launchers.update(prepared)


class Step:
    """Static buffers of M tokens, as an engine keeps them for a graph."""

    def __init__(self, tokens: int, experts, weights) -> None:
        self.experts, self.weights = experts, weights
        self.x = exact_x(tokens, K, device="cuda")
        self.ids = torch.zeros(tokens, TOP_K, dtype=torch.int32, device="cuda")
        self.out = poisoned(tokens * TOP_K, N, device="cuda")
        self.route(topk_ids(tokens, TOP_K, E, device="cuda"))

    def route(self, ids: torch.Tensor) -> None:
        self.ids.copy_(ids)
        self.out.fill_(12345.0)

    def run(self) -> None:
        where = chord.routing.align(self.ids, num_experts=E, block_m=BLOCK_M)
        chord.indexed(
            self.x,
            self.experts,
            where.sorted_token_ids,
            where.expert_ids,
            where.num_tokens_post_padded,
            TOP_K,
            block_m=BLOCK_M,
            out=self.out,
            validate=False,
        )

    def check(self) -> None:
        want = expected_rows(self.x, self.weights, self.ids, TOP_K)
        want = torch.where(want.isnan(), 12345.0, want).bfloat16()
        torch.testing.assert_close(self.out, want, rtol=0, atol=0)


def routings(tokens: int) -> Iterator[torch.Tensor]:
    for routing in ("uniform", "one_each", "skewed", "holes"):
        yield topk_ids(tokens, TOP_K, E, routing=routing, seed=5, device="cuda")
    yield torch.zeros(tokens, TOP_K, dtype=torch.int32, device="cuda")
    yield torch.full((tokens, TOP_K), -1, dtype=torch.int32, device="cuda")


@pytest.mark.field_case(9)
def test_a_cold_call_inside_capture_says_warm_up_first(cold, experts, weights) -> None:
    step = Step(24, experts, weights)
    where = chord.routing.align(step.ids, num_experts=E, block_m=BLOCK_M)
    buffers = (where.sorted_token_ids, where.expert_ids, where.num_tokens_post_padded)

    def call() -> None:
        chord.indexed(
            step.x, experts, *buffers, TOP_K, block_m=BLOCK_M, out=step.out, validate=False
        )

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError, match="warm up first"), torch.cuda.graph(graph):
        call()
    call()
    step.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    step.out.fill_(12345.0)
    graph.replay()
    step.check()


def test_checks_that_would_wait_inside_capture_say_so(experts, weights) -> None:
    """The capture fails, and neither the stream nor the process does."""
    step = Step(16, experts, weights)
    step.run()
    where = chord.routing.align(step.ids, num_experts=E, block_m=BLOCK_M)
    buffers = (where.sorted_token_ids, where.expert_ids, where.num_tokens_post_padded)
    torch.cuda.synchronize()
    for call in (
        lambda: chord.indexed(step.x, experts, *buffers, TOP_K, block_m=BLOCK_M, out=step.out),
        lambda: chord.routing.align(step.ids, num_experts=E, block_m=BLOCK_M, validate=True),
    ):
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(CaptureError, match="pass validate=False"), torch.cuda.graph(graph):
            call()
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    step.out.fill_(12345.0)
    graph.replay()
    step.check()


@pytest.mark.field_case(9)
def test_replays_follow_new_routing_and_survive_bigger_batches(experts, weights) -> None:
    step = Step(16, experts, weights)
    step.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    for ids in routings(16):
        step.route(ids)
        graph.replay()
        step.check()
    big = Step(8192, experts, weights)
    big.run()
    kept = [torch.randn(1 << 20, device="cuda") for _ in range(8)]
    for ids in (*routings(16), *routings(16)):
        step.route(ids)
        graph.replay()
        step.check()
    big.check()
    assert all(bool(t.isfinite().all()) for t in kept)


@pytest.mark.field_case(2)
def test_no_work_inside_capture(experts, weights) -> None:
    step = Step(16, experts, weights)
    step.run()
    none = torch.zeros(0, dtype=torch.int32, device="cuda")
    zero = torch.zeros(1, dtype=torch.int32, device="cuda")
    empty = torch.zeros(0, K, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chord.indexed(empty, experts, none, none, zero, TOP_K, block_m=16, validate=False)
        step.run()
    assert y.shape == (0, N)
    step.route(torch.full_like(step.ids, -1))
    graph.replay()
    step.check()


def test_two_graphs_of_one_capture_stream_replay_side_by_side(experts, weights) -> None:
    steps = [Step(tokens, experts, weights) for tokens in (16, 32)]
    for step in steps:
        step.run()
    graphs = []
    for step in steps:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step.run()
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        for step in steps:
            step.out.fill_(12345.0)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for step in steps:
            step.check()


def test_streams_do_not_share_scratch(experts, weights) -> None:
    steps = [Step(16, experts, weights) for _ in range(4)]
    streams = [torch.cuda.Stream() for _ in steps]
    torch.cuda.synchronize()
    for _ in range(20):
        for step, stream in zip(steps, streams, strict=True):
            with torch.cuda.stream(stream):
                step.run()
    torch.cuda.synchronize()
    for step in steps:
        step.check()
    places = {launch._scratch[0, stream.cuda_stream].values for stream in streams}
    assert len(places) == len(streams)
    facts = devices.facts_of(0)
    shares = {l2_share for place in places for _, _, l2_share in place}
    assert shares == {facts.l2_bytes // facts.num_sms}


def test_scratch_is_clean_between_launches(experts, weights) -> None:
    step = Step(16, experts, weights)
    for ids in routings(16):
        step.route(ids)
        step.run()
    torch.cuda.synchronize()
    scratch.assert_clean()


def test_threads_launch_side_by_side(experts, weights) -> None:
    steps = [Step(tokens, experts, weights) for tokens in (1, 8, 16, 64)]
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work(step: Step) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    step.run()
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for step in steps:
        step.check()


@pytest.mark.field_case(9)
def test_a_call_without_validation_never_waits(experts, weights) -> None:
    step = Step(16, experts, weights)
    step.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    step.check()
