"""Which kernels are compiled before vLLM captures: as many as any batch may need."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from layers import all_to_all, config_of, make_layer, moe_config

from chord import device as devices
from chord.errors import CompileError
from chord.integrations.vllm import warmup
from chord.integrations.vllm.config import ChordConfig
from chord.integrations.vllm.experts import ChordBatchedExperts, ChordExperts, LayerShape
from chord.jit import cache, launch
from chord.jit.launch import KernelKey, kernel_key
from chord.ops import grouped_gemm, layer
from chord.plan.config import shipped_configs
from chord.plan.problem import GemmProblem
from chord.weights.layout import buffer_shape
from chord.weights.packed import PackedExperts


@pytest.mark.parametrize("largest", [0, 1, 2, 64, 65, 8192])
def test_counts_are_dense_and_reach_the_largest(largest: int) -> None:
    counts = list(warmup.token_counts(largest))
    assert counts == sorted(set(counts))
    assert counts[:1] == [1][: len(counts)]
    assert counts[-1:] == [largest][: len(counts)]
    assert set(range(1, min(largest, 64) + 1)) <= set(counts)
    assert all(b <= a + max(1, a // 8) for a, b in itertools.pairwise(counts))


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan for an H200 that is not there."""
    monkeypatch.setattr(devices, "facts_of", lambda index: devices.known("h200"))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    monkeypatch.setattr("torch.cuda.device", _NoDevice)


class _NoDevice:
    def __init__(self, index: int) -> None:
        assert index == 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass


def weights(experts: int, hidden: int, inner: int) -> tuple[PackedExperts, PackedExperts]:
    """Make weights without memory behind them."""
    made = []
    for n, k, interleaved in ((2 * inner, hidden, True), (hidden, inner, False)):
        whole = torch.empty(1, dtype=torch.uint8).expand(buffer_shape(experts, n, k))
        packed = object.__new__(PackedExperts)
        for name, value in (
            ("data", whole),
            ("n", n),
            ("k", k),
            ("group_size", 32),
            ("gate_up_interleaved", interleaved),
        ):
            object.__setattr__(packed, name, value)
        made.append(packed)
    return made[0], made[1]


@pytest.mark.usefixtures("h200", "platform")
def test_every_batch_of_tp8_finds_its_kernels() -> None:
    moe = moe_config(experts=384, hidden=7168, inner=256, experts_per_token=8, max_num_tokens=8192)
    w13, w2 = weights(384, 7168, 256)
    loaded = set(ChordExperts._kernels(LayerShape(moe, w13, w2, 0)))
    for tokens in (1, 7, 8, 33, 64, 100, 128, 777, 1024, 4096, 5000, 8192):
        needed = layer.choose_kernels(layer.Layer(w13, w2), tokens * 8, 384, 0)
        assert set(needed) <= loaded, tokens
    assert len(loaded) < 24


@pytest.mark.usefixtures("h200", "platform")
def test_batched() -> None:
    parallel = all_to_all("deepep_low_latency")
    moe = moe_config(parallel, experts=96, hidden=7168, inner=2048, experts_per_token=8)
    w13, w2 = weights(48, 7168, 4096 // 2)
    loaded = set(ChordBatchedExperts._kernels(LayerShape(moe, w13, w2, 0, 128 * 8)))
    for expected in (1, 2, 16, 1024):
        for w in (w13, w2):
            problem = GemmProblem(48, w.n, w.k, 48 * 1024, "Masked", 48 * expected)
            assert grouped_gemm.choose(problem, 0) in loaded


@pytest.mark.usefixtures("h200")
def test_each_is_compiled_once_and_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, loaded = [], []
    monkeypatch.setattr(cache, "cubin_for", lambda *key: compiled.append(key))
    monkeypatch.setattr(launch, "load", lambda *key: loaded.append(key))
    problem = GemmProblem(8, 512, 256, 64)
    key = grouped_gemm.choose(problem, 0)
    other = KernelKey(key.config, "Masked", 0)
    warmup.load_kernels([key, other, key])
    assert sorted(k[2] for k in compiled) == ["Indexed", "Masked"]
    assert [k[1:] for k in loaded] == [("Indexed", 0), ("Masked", 0)]
    assert {k[1] for k in compiled} == {"sm_90a"}


@pytest.fixture
def nothing_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "_begun", {})


def some_keys() -> list[KernelKey]:
    """Name kernels of both GEMMs of the layer, the smallest configuration first."""
    configs = sorted(shipped_configs("sm_90a"), key=lambda config: config.tile_rows)
    return [kernel_key(c, name, 0) for c in configs for name in ("RoutedDown", "RoutedGateUp")]


@pytest.mark.usefixtures("h200", "nothing_begun")
def test_the_background_compiles_all_once_and_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled, loaded = [], []
    may_end = threading.Event()

    def slowly(config: Any, arch: str, addressing: str) -> None:
        if threading.current_thread().name.startswith("chord-compile"):
            assert may_end.wait(60)
            compiled.append((config.label(), arch, addressing))
            raise CompileError("no compiler")  # which load_kernels is to find again

    monkeypatch.setattr(cache, "cubin_for", slowly)
    monkeypatch.setattr(launch, "load", lambda *key: loaded.append(key))
    keys = some_keys()
    warmup.begin(keys[:-1])
    warmup.begin(keys)  # the next layer, which needs one more
    assert compiled == []
    waiting = threading.Thread(target=warmup.load_kernels, args=(keys[:1],))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive() and loaded == []
    may_end.set()
    waiting.join(60)
    assert [k[1:] for k in loaded] == [("RoutedDown", 0)]
    for done in warmup._begun.values():
        assert done.wait(60)
    wanted = {(key.config.label(), "sm_90a", key.addressing) for key in keys}
    assert set(compiled) == wanted and len(compiled) == len(wanted)


@pytest.mark.usefixtures("h200", "nothing_begun")
def test_the_largest_are_compiled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(cache, "cubin_for", lambda *key: compiled.append(key))
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    warmup.begin(some_keys())
    assert all(done.wait(30) for done in warmup._begun.values())
    rows = [config.tile_rows for config, _, _ in compiled]
    assert rows == sorted(rows, reverse=True)
    assert [name for _, _, name in compiled[:2]] == ["RoutedGateUp", "RoutedDown"]


@pytest.mark.usefixtures("h200", "nothing_begun")
def test_an_error_of_any_kind_in_the_background_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full disk, a broken library: every thread meets it at its first kernel."""

    def broken(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(cache, "cubin_for", broken)
    keys = some_keys()
    warmup.begin(keys)
    assert all(done.wait(30) for done in warmup._begun.values())
    with pytest.raises(OSError, match="no space left"):
        warmup.load_kernels(keys[:1])


@pytest.mark.usefixtures("h200", "platform")
@pytest.mark.parametrize("kind", [ChordExperts, ChordBatchedExperts])
def test_a_layer_begins_with_what_it_loads(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is compiled, and of slots nothing more than their number is known later."""
    begun = []
    monkeypatch.setattr(warmup, "begin", lambda keys: begun.extend(keys))
    moe = moe_config(experts=384, hidden=7168, inner=256, experts_per_token=8, max_num_tokens=1024)
    kind.begin_kernels(moe, 384, 0)
    w13, w2 = weights(384, 7168, 256)
    slots = 1024 if kind is ChordBatchedExperts else None
    assert set(begun) == set(kind._kernels(LayerShape(moe, w13, w2, 0, slots)))
    assert 4 <= len(set(begun)) < 24


@pytest.mark.usefixtures("h200", "platform")
def test_a_shape_that_nothing_runs_is_left_for_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "begin", lambda keys: list(keys))
    ChordExperts.begin_kernels(moe_config(experts=8, hidden=100, inner=256), 8, 0)


@pytest.mark.usefixtures("platform")
def test_layers_begin_when_they_are_created(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    monkeypatch.setattr(ChordExperts, "begin_kernels", lambda *what: begun.append(what))
    make_layer(config_of(ChordConfig), moe_config())
    assert begun == []  # on the CPU there is nothing to compile
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 3)
    made = make_layer(config_of(ChordConfig), moe_config())
    assert begun == [(made.quant_method.moe, made.local_num_experts, 3)]
