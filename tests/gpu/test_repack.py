"""On the GPU: packing gives the CPU's bytes within case 10's memory; `align` can be captured."""

from __future__ import annotations

import time

import pytest
import torch

import cases
from chord.routing import align
from chord.weights import pack_experts, unpack

pytestmark = pytest.mark.gpu
GIB = 1 << 30


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("shape", [(3, 64, 64), (2, 208, 352), (5, 4096, 1024)])
def test_same_bytes_as_on_the_cpu(shape: tuple[int, int, int], interleave: bool) -> None:
    weights = cases.random_weights(*shape, kind="real")
    expected = weights.pack(interleave_gate_up=interleave)
    words, scales = weights.words.cuda(), weights.scales.cuda()
    packed = pack_experts(words, scales, interleave_gate_up=interleave)
    assert torch.equal(packed.data.cpu(), expected.data)
    codes = pack_experts(weights.codes.cuda(), scales, interleave_gate_up=interleave)
    assert torch.equal(codes.data, packed.data)
    unpacked, unpacked_scales = unpack(packed)
    assert torch.equal(unpacked.cpu(), weights.codes)
    assert torch.equal(unpacked_scales.cpu(), weights.scales)


@pytest.mark.field_case(10)
@pytest.mark.parametrize("projection", ["w13", "w2"])
def test_memory_and_time_of_a_kimi_layer(projection: str) -> None:
    """Peak at most input + output + 0.5 GiB, three layers in a row, only outputs alive after."""
    n, k = getattr(cases.KIMI_K2, projection)()
    num_experts, interleave = cases.KIMI_K2.experts, projection == "w13"
    generator = cases.generator(0, "cuda")
    words = torch.empty(num_experts, n, k // 8, dtype=torch.int32, device="cuda")
    words.random_(-(1 << 31), (1 << 31) - 1, generator=generator)
    scales = torch.full((num_experts, n, k // 32), 0.5, dtype=torch.bfloat16, device="cuda")
    layers = []
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        reserved = torch.cuda.memory_reserved()
        start = time.perf_counter()
        layers.append(pack_experts(words, scales, interleave_gate_up=interleave))
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        nbytes = layers[-1].nbytes
        assert torch.cuda.memory_allocated() - before == nbytes
        assert torch.cuda.max_memory_allocated() - before <= nbytes + GIB // 2
        assert torch.cuda.max_memory_reserved() - reserved <= nbytes + GIB // 2
        print(f"packed {projection}, {nbytes / GIB:.2f} GiB, in {seconds:.3f} s")
    assert seconds < 2
    for expert in (0, 191, 383):
        one = slice(expert, expert + 1)
        alone = pack_experts(words[one], scales[one], interleave_gate_up=interleave)
        assert torch.equal(alone.data[0], layers[0].data[expert])
        assert torch.equal(layers[2].data[expert], layers[0].data[expert])


@pytest.mark.parametrize("routing", cases.ROUTINGS)
def test_align_is_captured_and_equals_the_cpu(routing: str) -> None:
    """A graph is captured with one routing and replayed with another: nothing is frozen."""
    case = cases.partial_routing()
    expert_map = case.expert_map.cuda()
    ids = case.topk_ids.cuda()
    align(ids, num_experts=384, block_m=16, expert_map=expert_map)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = align(ids, num_experts=384, block_m=16, expert_map=expert_map)
    for replayed in (case.topk_ids, cases.topk_ids(33, 8, 384, routing)):
        ids.copy_(replayed)
        graph.replay()
        expected = align(replayed, num_experts=384, block_m=16, expert_map=case.expert_map)
        assert torch.equal(result.sorted_token_ids.cpu(), expected.sorted_token_ids)
        assert torch.equal(result.expert_ids.cpu(), expected.expert_ids)
        assert torch.equal(result.num_tokens_post_padded.cpu(), expected.num_tokens_post_padded)
        result.validate(33, 48)
