"""What chord.fused_moe hands to its kernels on a GPU: addresses, part by part.

Tensors that say they are on CUDA, and launchers that note their parameters, stand in for the card.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cases
import chord
from chord import device as devices
from chord.errors import InputError
from chord.jit import launch as launching
from chord.jit.params import COMBINE, COUNT, ROUTE
from chord.ops import layer, route
from chord.plan.config import NO_SUM
from on_card import OnCard

E, HIDDEN, MIDDLE, TOP_K, TOKENS = 6, 128, 64, 2, 10
BF16 = torch.bfloat16


def on_card(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnCard)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """Note the parameters of every launch, by the kernel's name."""
    noted: list[tuple[str, tuple[Any, ...]]] = []

    def noting(name: str) -> SimpleNamespace:
        return SimpleNamespace(
            launch=lambda stream, *rest: noted.append((name, rest[-1])),
            scratch_values=lambda stream: (1, 2, 3),
        )

    facts = SimpleNamespace(**vars(devices.known("h200")))
    monkeypatch.setattr(devices, "facts_of", lambda index: facts)
    names = {COUNT: "count", ROUTE: "route", COMBINE: "combine"}
    for module in (layer, route):
        monkeypatch.setattr(module, "fixed_launcher", lambda kernel, index: noting(names[kernel]))
    monkeypatch.setattr(launching, "launcher", lambda key: noting(key.addressing))
    monkeypatch.setattr(launching, "map_of_rows", lambda key, address, rows, k: (address, rows, k))
    monkeypatch.setattr(launching, "is_capturing", lambda: False)
    monkeypatch.setattr(launching, "current_device", lambda: 0)
    monkeypatch.setattr(launching, "current_stream", lambda index: 5)
    monkeypatch.setattr(layer, "_calls", {})
    return noted


@pytest.fixture
def call() -> dict[str, Any]:
    w13 = cases.random_weights(E, 2 * MIDDLE, HIDDEN).pack(interleave_gate_up=True)
    w2 = cases.random_weights(E, HIDDEN, MIDDLE).pack()
    size = chord.fused_moe_workspace(TOKENS, w13, w2, TOP_K)
    return {
        "hidden": on_card(torch.zeros(TOKENS, HIDDEN, dtype=BF16)),
        "w13": replace(w13, data=on_card(w13.data)),
        "w2": replace(w2, data=on_card(w2.data)),
        "topk_weights": on_card(torch.zeros(TOKENS, TOP_K, dtype=torch.float16)),
        "topk_ids": on_card(torch.zeros(TOKENS, TOP_K, dtype=torch.int64)),
        "expert_map": on_card(torch.arange(E)),
        "out": on_card(torch.zeros(TOKENS, HIDDEN, dtype=BF16)),
        "workspace": on_card(torch.zeros(size, dtype=torch.uint8)),
    }


@pytest.mark.parametrize("routes_at_once", [layer.MAX_ROUTES, 8])
@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("is_shared", [False, True])
def test_every_part_gets_its_own_tokens(
    launched: list[tuple[str, tuple[Any, ...]]],
    call: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    routes_at_once: int,
    on_input: bool,
    is_shared: bool,
) -> None:
    monkeypatch.setattr(layer, "MAX_ROUTES", routes_at_once)
    if is_shared:
        call["shared_output"] = on_card(torch.zeros(TOKENS, HIDDEN, dtype=BF16))
    scale = {"routed_scaling_factor": 2.5} if is_shared else {}
    for _ in range(2):  # the second time from what is remembered
        chord.fused_moe(**call, **scale, apply_router_weight_on_input=on_input)
    parts = [(0, 10)] if routes_at_once > 8 else [(0, 4), (4, 8), (8, 10)]
    gate_up_kernel = "RoutedGateUpWeighted" if on_input else "RoutedGateUp"
    names = ["route", gate_up_kernel, "RoutedDown", "combine"]
    assert [name for name, _ in launched] == names * len(parts) * 2
    at = {name: value.data.data_ptr() for name, value in call.items()}
    space = layer.space_for(TOKENS, TOP_K, E, HIDDEN, MIDDLE)
    middle, rows = at["workspace"] + space.middle, at["workspace"] + space.rows
    for number, (first, last) in enumerate(parts):
        sort, gate_up, down, combine = (values for _, values in launched[4 * number :][:4])
        assert sort[:2] == (at["topk_ids"] + 8 * TOP_K * first, at["expert_map"])
        assert sort[4] == (last - first) * TOP_K
        assert gate_up[:3] == (at["hidden"] + 2 * HIDDEN * first, at["w13"], middle)
        assert down[:3] == (middle, at["w2"], rows)
        weights = at["topk_weights"] + 2 * TOP_K * first
        assert gate_up[11] == (weights if on_input else 0)
        assert combine[:3] == (rows, at["workspace"] + space.positions, 0 if on_input else weights)
        shared = at["shared_output"] + 2 * HIDDEN * first if is_shared else 0
        assert combine[4:] == (
            shared,
            at["out"] + 2 * HIDDEN * first,
            2.5 if is_shared else 1.0,
            TOP_K,
            HIDDEN,
        )
    assert launched[: 4 * len(parts)] == launched[4 * len(parts) :]


@pytest.mark.parametrize("routes_at_once", [layer.MAX_ROUTES, 8])
def test_only_the_first_sum_waits_for_another_stream(
    launched: list[tuple[str, tuple[Any, ...]]],
    call: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    routes_at_once: int,
) -> None:
    class Event:
        def wait(self) -> None:
            launched.append(("wait", ()))

    monkeypatch.setattr(layer, "MAX_ROUTES", routes_at_once)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    call["shared_output"] = on_card(torch.zeros(TOKENS, HIDDEN, dtype=BF16))
    part = ["route", "RoutedGateUp", "RoutedDown", "combine"]
    for _ in range(2):
        launched.clear()
        chord.fused_moe(**call, shared_ready=Event())
        first = [*part[:3], "wait", part[3]]
        assert [name for name, _ in launched] == first + part * (routes_at_once == 8) * 2
    launched.clear()
    no_tokens = {name: call[name][:0] for name in ("hidden", "topk_weights", "topk_ids", "out")}
    empty = {name: on_card(tensor.as_subclass(torch.Tensor)) for name, tensor in no_tokens.items()}
    shared = on_card(torch.zeros(0, HIDDEN, dtype=BF16))
    chord.fused_moe(**call | empty | {"shared_output": shared}, shared_ready=Event())
    assert launched == [("wait", ())], "the other stream would stay unjoined in a capture"
    launched.clear()
    monkeypatch.setattr(launching, "current_device", iter([1, 0, 0]).__next__)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    chord.fused_moe(**call, shared_ready=Event())
    assert ("wait", ()) in launched, "on another device than the current one"
    monkeypatch.setattr(launching, "current_device", lambda: 0)
    with pytest.raises(InputError, match="shared_output is there, which is None"):
        chord.fused_moe(**call | {"shared_output": None}, shared_ready=Event())
    call["hidden"] = torch.zeros(TOKENS, HIDDEN, dtype=BF16)
    with pytest.raises(InputError, match="shared_ready is an event of CUDA, hidden is on cpu"):
        chord.fused_moe(**call, shared_ready=Event())


def test_a_remembered_call_looks_at_what_is_added(
    launched: list[tuple[str, tuple[Any, ...]]], call: dict[str, Any]
) -> None:
    """Each of these comes behind a good call that is the same but for shared_output."""
    good = torch.zeros(TOKENS, HIDDEN, dtype=BF16)
    for wrong, words in (
        (good.float(), "shared_output is torch.float32"),
        (good[:-1], r"shared_output is .*\[9, 128\]"),
        (torch.zeros(HIDDEN, TOKENS, dtype=BF16).T, "shared_output .* must be contiguous"),
    ):
        chord.fused_moe(**call, shared_output=on_card(good))
        with pytest.raises(InputError, match=words):
            chord.fused_moe(**call, shared_output=on_card(wrong))
    with pytest.raises(InputError, match="shared_output is on cpu"):
        chord.fused_moe(**call, shared_output=good)
    assert len(launched) == 3 * 4


def test_a_clean_l2_is_not_cleaned(
    launched: list[tuple[str, tuple[Any, ...]]], call: dict[str, Any]
) -> None:
    for l2_is_clean, l2_share in ((False, 3), (True, 0), (False, 3)):
        launched.clear()
        chord.fused_moe(**call, l2_is_clean=l2_is_clean)
        _, gate_up, down, _ = (values for _, values in launched)
        assert gate_up[3:6] == (1, 2, l2_share)
        assert down[3:6] == (1, 2, 3)


def test_many_routes_are_counted_first(
    launched: list[tuple[str, tuple[Any, ...]]],
    call: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(route, "_ALONE", 4)
    monkeypatch.setattr(route, "_SHARE", 7)
    chord.fused_moe(**call)
    (first, count), (second, sort) = launched[:2]
    assert (first, second) == ("count", "route")
    assert count[:8] == sort[:8]
    assert count[7] == 7  # 20 routes, three blocks
    rows = layer.space_for(TOKENS, TOP_K, E, HIDDEN, MIDDLE).rows
    assert count[8] == sort[8] == call["workspace"].data.data_ptr() + rows


def test_the_first_sort_clears_the_scratch_of_a_new_graph(
    launched: list[tuple[str, tuple[Any, ...]]],
    call: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer, "MAX_ROUTES", 8)
    uncleared = launching.Uncleared(4096, 64)
    scratch = ((1, 2, 3), (1, 4, 3), uncleared)
    monkeypatch.setattr(launching, "stages_scratch", lambda stages, stream: scratch)
    chord.fused_moe(**call)
    sorts = [values[-4:] for name, values in launched if name == "route"]
    nothing = (1, 0, 0, NO_SUM)
    assert sorts == [(1, *uncleared, NO_SUM), nothing, nothing]


def test_scratch_that_a_failed_sort_has_not_cleared_is_forgotten(
    launched: list[tuple[str, tuple[Any, ...]]],
    call: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise chord.CompileError("the driver cannot launch the route kernel")

    forgotten: list[tuple[int, int]] = []
    monkeypatch.setattr(route, "launch", refuse)
    monkeypatch.setattr(launching, "forget_captured", lambda *key: forgotten.append(key))
    for words, expected in ((0, []), (64, [(0, 5)])):
        scratch = ((1, 2, 3), (1, 4, 3), launching.Uncleared(4096, words))
        monkeypatch.setattr(launching, "stages_scratch", lambda *_, scratch=scratch: scratch)
        with pytest.raises(chord.CompileError):
            chord.fused_moe(**call)
        assert forgotten == expected


def test_no_scratch_is_taken_before_all_kernels_are_loaded(
    launched: list[tuple[str, tuple[Any, ...]]],
    call: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(kernel: object, index: int) -> None:
        if kernel is ROUTE:
            raise chord.CaptureError("the route kernel is not loaded")

    def take(*_: object) -> None:
        raise AssertionError("scratch was taken, and nobody will clear it")

    monkeypatch.setattr(route, "fixed_launcher", refuse)
    monkeypatch.setattr(launching, "stages_scratch", take)
    with pytest.raises(chord.CaptureError):
        chord.fused_moe(**call)
    assert launched == []


@pytest.mark.parametrize(
    ("words", "blocks"), [(0, 1), (4, 2), (8192, 2), (8196, 3), (1 << 22, 132)]
)
def test_blocks_of_their_own_clear_scratch(
    monkeypatch: pytest.MonkeyPatch, words: int, blocks: int
) -> None:
    grids: list[int] = []
    noting = SimpleNamespace(launch=lambda stream, grid, values: grids.append(grid))
    monkeypatch.setattr(route, "fixed_launcher", lambda kernel, index: noting)
    buffers = route.Buffers(0, 0, 0, 0, 0, 1, 0, 0)
    ids = route.RouteIds(0, 0, 0, 0, 64, 8, 8)
    route.launch(0, 5, ids, 132, 0, buffers, launching.Uncleared(4096, words))
    assert grids == [blocks]


@pytest.mark.parametrize("num_experts", [1, 48, 1024])
@pytest.mark.parametrize("hidden", [32, 7168])
def test_counts_fit_where_rows_will_lie(num_experts: int, hidden: int) -> None:
    for num_routes in (1, 1024, 1025, 1026, 5000, 67_584, layer.MAX_ROUTES):
        blocks, share = route.grid(num_routes, 132)
        assert blocks * share >= num_routes > (blocks - 1) * share
        assert blocks <= 132
        assert 4 * route.num_counts(num_routes, num_experts, 132) <= 2 * num_routes * hidden
    assert route.grid(0, 132) == (1, 0)


def test_what_lies_in_the_way_is_seen_in_a_warm_call_too(
    launched: list[tuple[str, tuple[Any, ...]]], call: dict[str, Any]
) -> None:
    chord.fused_moe(**call)
    out = on_card(call["w2"].data.as_subclass(torch.Tensor).view(-1)[: call["out"].nbytes])
    weights = on_card(call["out"].view(-1)[: TOKENS * TOP_K].view(torch.float16).view(TOKENS, -1))
    for change, words in (
        ({"out": on_card(out.view(BF16).view(TOKENS, HIDDEN))}, "out .* overlaps w2 in memory"),
        ({"topk_weights": weights}, "out .* overlaps topk_weights in memory"),
        ({"workspace": on_card(call["w13"].data.view(-1))}, "workspace, .* overlaps w13 in memory"),
    ):
        with pytest.raises(chord.InputError, match=words):
            chord.fused_moe(**call | change)
    assert len(launched) == 4
