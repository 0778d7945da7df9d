"""The public operations on the CPU: each refusal before a launch, and the way to the reference."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import numpy as np
import pytest
import torch

import chord
from chord import reference
from chord.errors import InputError, UnsupportedError
from chord.ops import checks, grouped_gemm
from chord.plan.config import shipped_configs
from chord.weights.packed import PackedExperts

E, N, K, M, TOP_K, BLOCK_M = 4, 64, 128, 6, 2, 8
BF16 = torch.bfloat16


@pytest.fixture
def call() -> dict[str, Any]:
    """Arguments of a legal call of chord.indexed."""
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (E, N, K), dtype=torch.uint8)
    experts = chord.pack_experts(codes, torch.ones(E, N, K // 32, dtype=BF16))
    where = chord.routing.align(torch.randint(0, E, (M, TOP_K)), num_experts=E, block_m=BLOCK_M)
    return {
        "x": torch.randn(M, K).to(BF16),
        "experts": experts,
        "sorted_token_ids": where.sorted_token_ids,
        "expert_ids": where.expert_ids,
        "num_tokens_post_padded": where.num_tokens_post_padded,
        "top_k": TOP_K,
        "block_m": BLOCK_M,
    }


def unaligned(rows: int, columns: int) -> torch.Tensor:
    return torch.zeros(rows * columns + 1, dtype=BF16)[1:].view(rows, columns)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("x", torch.zeros(M, K), r"x is torch\.float32 \[6, 128\]; it must be bf16 \[M, K\]"),
        ("x", torch.zeros(M, 1, K, dtype=BF16), r"x is torch\.bfloat16 \[6, 1, 128\]"),
        ("x", torch.zeros(M, 96, dtype=BF16), r"x is \[6, 96\], the experts have K=128"),
        ("x", torch.zeros(K, M, dtype=BF16).T, r"x \[6, 128\] has strides \[1, 6\]"),
        ("x", unaligned(M, K), r"x begins at address .* 16-byte aligned"),
        ("x", torch.zeros(M, K, dtype=BF16, device="meta"), r"experts are on cpu, x is on meta"),
        ("sorted_token_ids", torch.zeros(40), r"sorted_token_ids is torch\.float32 \[40\]"),
        ("sorted_token_ids", torch.zeros(80, dtype=torch.int32)[::2], r"strides \[2\]"),
        ("expert_ids", torch.zeros(5, dtype=torch.int64), r"expert_ids is torch\.int64"),
        ("expert_ids", torch.zeros(5, dtype=torch.int32, device="meta"), "expert_ids is on meta"),
        ("num_tokens_post_padded", torch.zeros(2, dtype=torch.int32), "has 2 elements"),
        ("num_tokens_post_padded", torch.tensor([12], dtype=torch.int32), "multiple of block_m=8"),
        ("num_tokens_post_padded", torch.tensor([-8], dtype=torch.int32), "padded=-8"),
        ("num_tokens_post_padded", torch.tensor([4000], dtype=torch.int32), r"within 0\.\.40"),
        ("top_k", 0, "top_k=0 must be at least 1"),
        ("block_m", 0, r"block_m=0 is not in 1\.\.1024"),
        ("block_m", 2048, r"block_m=2048"),
        (
            "out",
            torch.zeros(12, 32, dtype=BF16),
            r"out is .*\[12, 32\]; it must be bf16 \[12, 64\]",
        ),
        ("out", torch.zeros(12, 64), r"out is torch\.float32"),
        ("out", torch.zeros(64, 12, dtype=BF16).T, r"out \[12, 64\] has strides"),
        ("out", unaligned(12, 64), r"out begins at address"),
    ],
)
def test_bad_arguments_are_refused_by_name_value_and_rule(
    call: dict[str, Any], name: str, value: object, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        chord.indexed(**(call | {name: value}))
    chord.indexed(**call)  # still usable


@pytest.mark.parametrize("expert", [E, -2])
def test_an_expert_id_out_of_range_is_refused(call: dict[str, Any], expert: int) -> None:
    call["expert_ids"] = call["expert_ids"].clone()
    call["expert_ids"][0] = expert
    with pytest.raises(InputError, match="expert_ids holds ids from"):
        chord.indexed(**call)


@pytest.mark.parametrize("route", [M * TOP_K + 1, -1])
def test_a_route_out_of_range_is_refused(call: dict[str, Any], route: int) -> None:
    call["sorted_token_ids"] = call["sorted_token_ids"].clone()
    call["sorted_token_ids"][0] = route
    with pytest.raises(InputError, match="sorted_token_ids holds ids"):
        chord.indexed(**call)


def test_an_out_that_overlaps_x_is_refused(call: dict[str, Any]) -> None:
    buffer = torch.zeros(M * K + 12 * N, dtype=BF16)
    x = buffer[: M * K].view(M, K)
    chord.indexed(**(call | {"x": x, "out": buffer[M * K :].view(12, N)}))
    with pytest.raises(InputError, match="overlaps x"):
        chord.indexed(**(call | {"x": x, "out": buffer[: 12 * N].view(12, N)}))


def test_slots_that_kernels_cannot_count_are_refused() -> None:
    ids = torch.tensor([[0]])
    for block_m in (2**31 - 1, 2**31 - 2**16 + 1):
        with pytest.raises(InputError, match=rf"makes {block_m} slots; at most 2147418112"):
            chord.align(ids, num_experts=1, block_m=block_m)


def test_rows_beyond_thirty_two_bits_are_refused(call: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"below 2\^31"):
        chord.indexed(**(call | {"top_k": 1 << 30}))


def test_scattered_blocks_of_an_expert_are_counted() -> None:
    blocks = 1200
    experts = torch.arange(blocks, dtype=torch.int32) % 2
    routes = torch.arange(blocks, dtype=torch.int32)
    used = torch.tensor([blocks], dtype=torch.int32)
    scattered = chord.routing.Indexed(routes, experts, used, 1, 1)
    with pytest.raises(InputError, match=r"1200 times; blocks of one expert must lie together"):
        grouped_gemm._validate_values(scattered, blocks, 2)
    together = chord.routing.Indexed(routes, experts.sort().values, used, 1, 1)
    grouped_gemm._validate_values(together, blocks, 2)


@pytest.mark.parametrize(
    ("slots", "blocks", "block_m"),
    [(40, 5, 8), (12 + 4 * 15, 5, 16), (1 << 16, 1 << 10, 64), (0, 0, 1), (48, 48, 1)],
)
def test_block_m_is_told_from_the_buffers(slots: int, blocks: int, block_m: int) -> None:
    assert grouped_gemm.infer_block_m(slots, blocks) == block_m


@pytest.mark.parametrize(
    ("slots", "blocks", "words"),
    [(16, 1, r"blocks of \[16, 32, .*\] fit"), (100, 3, "no power of two fits|fit"), (9, 5, "fit")],
)
def test_block_m_that_cannot_be_told_is_asked_for(slots: int, blocks: int, words: str) -> None:
    fitting = [1 << b for b in range(11) if -(-slots // (1 << b)) == blocks]
    if len(fitting) == 1:
        assert grouped_gemm.infer_block_m(slots, blocks) == fitting[0]
        return
    with pytest.raises(InputError, match=words):
        grouped_gemm.infer_block_m(slots, blocks)


def test_no_rows_or_no_blocks_give_an_empty_or_zero_result(call: dict[str, Any]) -> None:
    none = torch.zeros(0, dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    call |= {"sorted_token_ids": none, "expert_ids": none, "num_tokens_post_padded": zero}
    assert chord.indexed(**(call | {"x": torch.zeros(0, K, dtype=BF16)})).shape == (0, N)
    assert not chord.indexed(**call).any()
    out = torch.full((M * TOP_K, N), 12345.0, dtype=BF16)
    assert chord.indexed(**(call | {"out": out})) is out
    assert (out == 12345.0).all()


def test_the_cpu_runs_the_reference_and_says_so_once(
    call: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    checks.say_reference_once.cache_clear()
    with caplog.at_level(logging.WARNING, "chord"):
        first, second = chord.indexed(**call), chord.indexed(**call)
    assert torch.equal(first, reference.indexed(**call)) and torch.equal(first, second)
    assert [record.message for record in caplog.records if "reference" in record.message] != []
    assert len(caplog.records) == 1


def test_unrouted_rows_of_out_are_left_alone(call: dict[str, Any]) -> None:
    call["expert_ids"] = call["expert_ids"].clone()
    skipped = call["sorted_token_ids"][:BLOCK_M].long()
    call["expert_ids"][0] = -1
    out = torch.full((M * TOP_K, N), 12345.0, dtype=BF16)
    chord.indexed(**call, out=out)
    rows = skipped[skipped < M * TOP_K]
    assert len(rows) and (out[rows] == 12345.0).all()
    assert not chord.indexed(**call)[rows].any()


def test_a_config_that_cannot_run_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from chord import device as devices
    from chord.plan.config import DecodeConfig
    from chord.plan.problem import GemmProblem

    monkeypatch.setattr(devices, "facts_of", lambda index: devices.known("h200"))
    config = DecodeConfig(max_tokens=64, warps=8, block_k=256, stages=8)
    with pytest.raises(InputError, match=r"config=decode .* cannot run on NVIDIA H200: .*bytes"):
        grouped_gemm.choose(GemmProblem(48, 4096, 7168, 64), 0, config)


def test_an_old_card_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from chord import device as devices

    card = SimpleNamespace(name="NVIDIA A100", major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    with pytest.raises(UnsupportedError, match=r"NVIDIA A100 has compute capability 8\.0"):
        devices.facts_of(987)


def test_public_names_resolve() -> None:
    for name in chord.__all__:
        assert getattr(chord, name) is not None
    assert set(chord.__all__) <= set(dir(chord))
    with pytest.raises(AttributeError, match="has no attribute 'grouped'"):
        chord.grouped  # noqa: B018


def test_experts_are_frozen(call: dict[str, Any]) -> None:
    experts: PackedExperts = call["experts"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        experts.n = 1  # type: ignore[misc]


RAGGED = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
TENSORS = ("x", "sorted_token_ids", "expert_ids", "num_tokens_post_padded", "out")


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "None, not a torch.Tensor"),
        ([1, 2], r"the list \[1, 2\], not a torch.Tensor; pass torch.tensor"),
        ([torch.zeros(1)], r"the list \[tensor.*\], not a torch.Tensor; pass torch.stack"),
        (np.zeros(5, np.int32), r"a numpy.ndarray of int32 \[5\], not .*; pass torch.from_numpy"),
        ("y", "the str 'y', not a torch.Tensor"),
        (torch.zeros(4, 4).to_sparse(), r"a sparse_coo tensor \[4, 4\]; it must be dense"),
        (RAGGED, "a nested tensor"),
    ],
)
def test_what_is_no_dense_tensor_is_named(
    call: dict[str, Any], name: str, value: object, words: str
) -> None:
    if name == "out" and value is None:
        return
    with pytest.raises(InputError, match=rf"^{name} is {words}") as refused:
        chord.indexed(**(call | {name: value}))
    assert refused.value.__context__ is None, "the user sees two tracebacks"
    chord.indexed(**call)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("top_k", None, "top_k is None; it must be a whole number"),
        ("top_k", 2.0, r"top_k is the float 2\.0"),
        ("top_k", [2], r"top_k is the list \[2\]"),
        ("block_m", "8", "block_m is the str '8'"),
        ("block_m", 8.0, r"block_m is the float 8\.0"),
        ("experts", None, "experts is None, not PackedExperts; pack it with chord.pack_experts"),
        ("experts", "w13", "experts is the str 'w13', not PackedExperts"),
        ("config", "decode", "config is the str 'decode'; it must be a DecodeConfig, Direct"),
        ("config", {"warps": 8}, "config is the dict "),
    ],
)
def test_arguments_of_another_kind_are_named(
    call: dict[str, Any], name: str, value: object, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        chord.indexed(**(call | {name: value}))
    chord.indexed(**call)


def test_whole_numbers_of_other_packages_will_do(call: dict[str, Any]) -> None:
    expected = chord.indexed(**call)
    for top_k in (np.int64(TOP_K), np.array(TOP_K), torch.tensor(TOP_K)):
        assert torch.equal(chord.indexed(**(call | {"top_k": top_k})), expected)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"topk_ids": torch.zeros(2, 4, dtype=torch.int32).t()}, r"strides \[1, 4\]"),
        ({"num_experts": 1025}, r"num_experts=1025 must be in 1\.\.1024"),
        ({"block_m": 0}, "block_m=0 at least 1"),
        ({"expert_map": torch.zeros(3, dtype=torch.int32)}, "num_experts=4 needs one for each"),
        ({"topk_ids": torch.full((1, 1), 4)}, "ids from 4 to 4"),
    ],
)
def test_align_refuses_on_the_cpu_what_the_kernel_refuses(
    changed: dict[str, Any], words: str
) -> None:
    call = {"topk_ids": torch.zeros(2, 2, dtype=torch.int32), "num_experts": 4, "block_m": 8}
    chord.align(**call)
    with pytest.raises(InputError, match=words):
        chord.align(**(call | changed))


ODD = (
    *(None, True, 0, -1, 1.5, 2**70, float("nan"), "a", (), [1], {}, object(), len),
    *(np.zeros(3), np.int32(2), torch.tensor(1), torch.zeros(0), torch.zeros(6, 128)),
    *(torch.zeros(6, 128, dtype=BF16).to_sparse(), torch.zeros(6, 128, dtype=BF16, device="meta")),
    *(torch.zeros(5, dtype=torch.int32, device="meta"), torch.tensor([2**40])),
    *(torch.zeros(5, 5, 5, dtype=torch.int32), torch.full((3, 2), 7), RAGGED),
)


def public_calls() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Legal arguments, all that there are, of each public function."""
    x, words = torch.zeros(M, K, dtype=BF16), torch.zeros(E, N, K // 8, dtype=torch.int32)
    scales = torch.ones(E, N, K // 32, dtype=BF16)
    experts = chord.pack_experts(words, scales)
    ids = torch.arange(M * TOP_K).view(M, TOP_K) % E
    where = chord.routing.align(ids, num_experts=E, block_m=BLOCK_M)
    buffers = {
        "sorted_token_ids": where.sorted_token_ids,
        "expert_ids": where.expert_ids,
        "num_tokens_post_padded": where.num_tokens_post_padded,
        "top_k": TOP_K,
        "block_m": BLOCK_M,
    }
    rows = {"x": x, "experts": experts, "out": None, "validate": True}
    offsets = {"expert_offsets": torch.tensor([0, 1, 2, 3, M]), "m_indices": None}
    slots = rows | {"x": torch.zeros(E, 2, K, dtype=BF16)}
    slots |= {"tokens_per_expert": torch.tensor([1, 0, 1, 1], dtype=torch.int32), "expected": 1}
    on_kernels, in_torch = {"config": None}, {"dtype": torch.float32}
    pack = dict.fromkeys(("group_size", "out", "actorder", "weight_zero_point", "weight_g_idx"))
    pack |= {"weight": words, "weight_scale": scales, "interleave_gate_up": False, "num_bits": 4}
    align = {"topk_ids": ids, "num_experts": E, "expert_map": None}
    layer = {
        "w13": chord.pack_experts(words, scales, interleave_gate_up=True),
        "w2": chord.pack_experts(
            words[..., : N // 16].repeat(1, 2, 1), scales[..., :1].repeat(1, 2, 1)
        ),
    }
    tokens = {"hidden": x, "topk_weights": torch.ones(M, TOP_K), "topk_ids": ids}
    tokens |= {"apply_router_weight_on_input": False, "out": None, "expert_map": None}
    swiglu = {"swiglu_alpha": 1.0, "swiglu_beta": 0.0, "swiglu_limit": 7.0, "activation": "silu"}
    return {
        "fused_moe": (
            chord.fused_moe,
            layer | tokens | swiglu | {"workspace": None, "configs": None},
        ),
        "fused_moe_workspace": (
            chord.fused_moe_workspace,
            layer | {"num_tokens": M, "top_k": TOP_K},
        ),
        "chord.align": (chord.align, align | {"block_m": BLOCK_M}),
        "indexed": (chord.indexed, rows | buffers | on_kernels),
        "contiguous": (chord.contiguous, rows | offsets | on_kernels),
        "masked": (chord.masked, slots | on_kernels),
        "reference.indexed": (reference.indexed, rows | buffers | in_torch),
        "reference.contiguous": (reference.contiguous, rows | offsets | in_torch),
        "reference.masked": (reference.masked, slots | in_torch),
        "reference.dequantize": (reference.dequantize, {"experts": experts} | in_torch),
        "pack_experts": (chord.pack_experts, pack),
        "unpack": (chord.unpack, {"experts": experts}),
        "align": (chord.routing.align, align | {"block_m": BLOCK_M, "validate": None}),
        "local_experts": (chord.routing.local_experts, align),
        "Indexed": (chord.routing.Indexed, buffers),
    }


@pytest.mark.parametrize("name", sorted(public_calls()))
def test_no_odd_argument_ends_in_a_raw_traceback(name: str) -> None:
    """Whatever is passed for one argument is taken, or refused by Chord itself."""
    function, arguments = public_calls()[name]
    raw = []
    for argument in arguments:
        for value in ODD:
            try:
                function(**(arguments | {argument: value}))
            except chord.ChordError as error:
                assert any(known in str(error) for known in arguments), f"{error}: of what?"
            except Exception as error:
                raw.append(f"{argument}={value!r:.60}: {type(error).__name__}: {error}")
    assert not raw, "\n".join(raw)
    function(**arguments)


def test_gradients_are_refused_and_not_dropped(call: dict[str, Any]) -> None:
    function, layer = public_calls()["fused_moe"]
    layer["hidden"].requires_grad_()
    with pytest.raises(InputError, match=r"hidden \[6, 128\] requires grad, .*hidden\.detach"):
        function(**layer)
    layer["hidden"].requires_grad_(False)
    layer["topk_weights"].requires_grad_()
    with pytest.raises(InputError, match=r"topk_weights \[6, 2\] requires grad, .*no_grad\(\)"):
        function(**layer)
    with torch.no_grad():
        assert not function(**layer).requires_grad
    call["x"].requires_grad_()
    with pytest.raises(InputError, match=r"x \[6, 128\] requires grad, .*no_grad\(\) or pass"):
        chord.indexed(**call)
    with torch.no_grad():
        assert not chord.indexed(**call).requires_grad


def test_a_config_needs_a_gpu(call: dict[str, Any]) -> None:
    """On the CPU the reference computes: a configuration would be named and not run."""
    config = shipped_configs("sm_90a")[0]
    with pytest.raises(InputError, match=r"config=decode .* names a kernel, and x is on cpu"):
        chord.indexed(**call, config=config)


def test_a_raw_tensor_is_not_experts() -> None:
    rows = torch.zeros(2, 64, dtype=torch.bfloat16)
    ids = torch.zeros(16, dtype=torch.int32)
    with pytest.raises(
        InputError,
        match=r"experts is a torch.Tensor of torch.bfloat16 \[2, 64\], not PackedExperts",
    ):
        chord.indexed(rows, rows, ids, ids[:1], ids[:1], 1, block_m=16)  # type: ignore[arg-type]
