"""chord.fused_moe without a GPU: what it computes, what it refuses, torch.compile, workspace."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo

import cases
import chord
import tolerance
from chord.errors import InputError, UnsupportedError
from chord.ops import layer
from chord.weights import PackedExperts

E, HIDDEN, MIDDLE, TOP_K = 6, 128, 64, 3


@functools.cache
def weights() -> tuple[cases.Weights, cases.Weights]:
    return (
        cases.random_weights(E, 2 * MIDDLE, HIDDEN, kind="real"),
        cases.random_weights(E, HIDDEN, MIDDLE, kind="real", seed=1),
    )


@functools.cache
def packed() -> tuple[PackedExperts, PackedExperts]:
    w13, w2 = weights()
    return w13.pack(interleave_gate_up=True), w2.pack()


def operands(tokens: int = 9, routing: str = "holes") -> dict[str, Any]:
    w13, w2 = packed()
    return {
        "hidden": cases.real_x(tokens, HIDDEN),
        "w13": w13,
        "w2": w2,
        "topk_weights": cases.topk_weights(tokens, TOP_K, kind="real"),
        "topk_ids": cases.topk_ids(tokens, TOP_K, E, routing),
    }


def expected(
    given: dict[str, Any],
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float = float("inf"),
    on_input: bool = False,
) -> torch.Tensor:
    """The layer in FP64 from the checkpoint's codes, with no rounding between."""
    w13, w2 = (w.dequantize(torch.float64) for w in weights())
    hidden, ids = given["hidden"].double(), given["topk_ids"]
    out = torch.zeros_like(hidden)
    for t in range(len(hidden)):
        for j in range(TOP_K):
            e, weight = int(ids[t, j]), given["topk_weights"][t, j].double()
            if e < 0:
                continue
            sums = w13[e] @ hidden[t] * (weight if on_input else 1.0)
            gate, up = sums.chunk(2)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            middle = gate * torch.sigmoid(alpha * gate) * (up + beta)
            out[t] += w2[e] @ middle * (1.0 if on_input else weight)
    return out


def test_what_it_computes() -> None:
    given = operands()
    given["topk_ids"][4] = -1
    out = chord.fused_moe(**given)
    tolerance.assert_rows_close(out, expected(given), tolerance.LAYER_LIMIT)
    assert not out[4].any()
    assert torch.equal(out, chord.reference.fused_moe(**given))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_router_weights_are_converted(dtype: torch.dtype) -> None:
    given = operands()
    given["topk_weights"] = given["topk_weights"].to(dtype)
    tolerance.assert_rows_close(chord.fused_moe(**given), expected(given), tolerance.LAYER_LIMIT)


@pytest.mark.parametrize("on_input", (False, True))
def test_constants_of_the_activation(on_input: bool) -> None:
    given = operands(routing="uniform")
    out = chord.fused_moe(
        **given,
        swiglu_alpha=1.702,
        swiglu_beta=1.0,
        swiglu_limit=0.5,
        apply_router_weight_on_input=on_input,
    )
    want = expected(given, 1.702, 1.0, 0.5, on_input)
    tolerance.assert_rows_close(out, want, tolerance.LAYER_LIMIT)
    for name, other in (("alpha", 1.0), ("beta", 0.0), ("limit", 2.0)):
        wrong = expected(given, **{"alpha": 1.702, "beta": 1.0, "limit": 0.5, name: other})
        assert (want - wrong).norm() > 0.1 * want.norm(), f"the inputs do not tell {name}"


@pytest.mark.parametrize("scale", (1.0, -2.827, 0.4, 0.0))
@pytest.mark.parametrize("is_shared", (False, True))
def test_the_sum_is_scaled_and_added_to_what_shared_experts_gave(
    scale: float, is_shared: bool
) -> None:
    given = operands()
    given["topk_ids"][4] = -1
    shared = cases.real_x(9, HIDDEN, seed=5) if is_shared else None
    plain = chord.fused_moe(**given)
    given |= {"routed_scaling_factor": scale, "shared_output": shared}
    out = chord.fused_moe(**given)
    assert torch.equal(out, plain * scale if shared is None else plain * scale + shared)
    want = expected(given) * scale + (0 if shared is None else shared.double())
    tolerance.assert_rows_close(out, want, tolerance.LAYER_LIMIT)
    assert torch.equal(out, chord.reference.fused_moe(**given))
    if shared is not None:
        with pytest.raises(InputError, match=r"shared_output is .*\[8, 128\].* like hidden"):
            chord.reference.fused_moe(**given | {"shared_output": shared[:8]})
        assert torch.equal(out[4], shared[4])
        place = shared.clone()
        assert chord.fused_moe(**given | {"shared_output": place}, out=place) is place
        assert torch.equal(place, out)
    else:
        assert not out[4].any()


@pytest.mark.field_case(1)
def test_an_expert_map_makes_ids_global() -> None:
    given = operands()
    mine = torch.tensor([4, 1, 7, 0, 9, 3])  # global ids of the local experts
    expert_map = torch.full((10,), -1)
    expert_map[mine] = torch.arange(E)
    known = given["topk_ids"]
    remote = dict(given, topk_ids=torch.where(known >= 0, mine[known.clamp(min=0).long()], 2))
    for dtype in (torch.int32, torch.int64):
        out = chord.fused_moe(**remote, expert_map=expert_map.to(dtype))
        assert torch.equal(out, chord.fused_moe(**given))


def test_into_out_and_into_hidden_itself() -> None:
    given = operands()
    want = chord.fused_moe(**given)
    out = cases.poisoned(9, HIDDEN)
    size = chord.fused_moe_workspace(9, given["w13"], given["w2"], TOP_K)
    space = torch.empty(size, dtype=torch.uint8)
    assert chord.fused_moe(**given, out=out, workspace=space) is out
    assert torch.equal(out, want)
    hidden = given["hidden"].clone()
    chord.fused_moe(**dict(given, hidden=hidden), out=hidden)
    assert torch.equal(hidden, want)


@pytest.mark.field_case(2)
def test_no_tokens() -> None:
    given = operands()
    for name in ("hidden", "topk_weights", "topk_ids"):
        given[name] = given[name][:0]
    assert chord.fused_moe(**given).shape == (0, HIDDEN)


REFUSED = (
    ({"hidden": cases.real_x(9, 64)}, r"hidden is torch.bfloat16 \[9, 64\]; .* H=128"),
    ({"hidden": torch.zeros(9, HIDDEN)}, r"hidden is torch.float32"),
    ({"hidden": cases.real_x(HIDDEN, 9).T}, r"hidden \[9, 128\] has strides \[1, 9\]"),
    ({"hidden": None}, "hidden is None"),
    ({"topk_ids": torch.zeros(8, TOP_K, dtype=torch.int32)}, r"agree in T"),
    ({"topk_ids": torch.zeros(9, TOP_K)}, r"topk_ids is torch.float32"),
    ({"topk_ids": torch.zeros(9, dtype=torch.int32)}, r"topk_ids is torch.int32 \[9\]"),
    ({"topk_weights": torch.zeros(9, 2)}, r"topk_weights is torch.float32 \[9, 2\]"),
    ({"topk_weights": torch.zeros(9, TOP_K, dtype=torch.float64)}, "topk_weights is torch.float64"),
    ({"topk_weights": torch.zeros(TOP_K, 9).T}, "topk_weights .* must be contiguous"),
    ({"expert_map": torch.zeros(6)}, "expert_map is torch.float32"),
    ({"expert_map": torch.zeros(0, dtype=torch.int32)}, "expert_map has no elements"),
    ({"out": torch.zeros(9, HIDDEN)}, r"out is torch.float32 \[9, 128\]; .*the shape of hidden"),
    ({"out": torch.zeros(8, HIDDEN, dtype=torch.bfloat16)}, r"out is torch.bfloat16 \[8, 128\]"),
    ({"out": cases.real_x(9, HIDDEN).requires_grad_()}, r"out \[9, 128\] requires grad"),
    ({"workspace": torch.zeros(8)}, r"workspace has 32 bytes, 9 tokens need \d+"),
    ({"shared_output": torch.zeros(9, HIDDEN)}, r"shared_output is torch.float32 \[9, 128\]; it"),
    ({"shared_output": cases.real_x(8, HIDDEN)}, r"shared_output .*\[8, 128\]; .* \[9, 128\]"),
    ({"shared_output": cases.real_x(HIDDEN, 9).T}, "shared_output .* must be contiguous"),
    ({"shared_output": cases.real_x(9, HIDDEN).requires_grad_()}, "shared_output .* requires grad"),
    ({"shared_ready": 3}, "shared_ready is the int 3, not a torch.cuda.Event"),
    ({"shared_output": 3}, "shared_output is the int 3"),
    (
        {"routed_scaling_factor": float("nan")},
        "routed_scaling_factor is .*; it must be a finite number",
    ),
    ({"routed_scaling_factor": 1e39}, r"routed_scaling_factor=1e\+39 is beyond"),
    ({"routed_scaling_factor": "2"}, "routed_scaling_factor is the str"),
    ({"activation": "gelu"}, "activation='gelu' is not supported"),
    ({"swiglu_limit": -1.0}, "swiglu_limit=-1.0 must be positive"),
    (
        {"swiglu_limit": 1e60},
        r"swiglu_limit=1e\+60 is beyond 1e\+38, .* in FP32; .*swiglu_limit=None",
    ),
    ({"swiglu_alpha": -3e38}, r"swiglu_alpha=-3e\+38 is beyond"),
    ({"swiglu_beta": 1e60}, r"swiglu_beta=1e\+60 is beyond"),
    ({"w13": torch.zeros(3)}, r"w13 is a torch.Tensor of torch.float32 \[3\], not PackedExperts"),
    ({"w2": None}, "w2 is None, not PackedExperts"),
)


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_refusals(change: dict[str, Any], words: str) -> None:
    with pytest.raises((InputError, UnsupportedError), match=words):
        chord.fused_moe(**operands() | change)


def test_weights_that_are_not_of_one_layer_are_refused() -> None:
    given = operands()
    w13, w2 = weights()
    with pytest.raises(UnsupportedError, match=r"pack it with .*interleave_gate_up=True"):
        chord.fused_moe(**given | {"w13": w13.pack()})
    with pytest.raises(UnsupportedError, match="w2 was packed with interleave_gate_up=True"):
        chord.fused_moe(**given | {"w2": w2.pack(interleave_gate_up=True)})
    with pytest.raises(InputError, match=r"w2 is \[E=5, H=128, I=64\]; they must agree"):
        chord.fused_moe(**given | {"w2": given["w2"].expert_range(0, 5)})


# --- workspace ------------------------------------------------------------------------------------


def test_the_workspace_never_falls_and_is_bounded() -> None:
    w13, w2 = packed()
    tokens = (0, 1, 2, 7, 64, 1000, 43690, 43691, 300_000)
    sizes = [chord.fused_moe_workspace(t, w13, w2, TOP_K) for t in tokens]
    assert sizes == sorted(sizes)
    assert sizes[-1] == sizes[-2] <= layer.MAX_ROUTES * 2 * (HIDDEN + MIDDLE + 4) + 4096
    with pytest.raises(InputError, match="num_tokens"):
        chord.fused_moe_workspace(-1, w13, w2, TOP_K)


@pytest.mark.parametrize("tokens", (1, 33, 4096, 300_000))
def test_buffers_of_the_workspace_lie_apart(tokens: int) -> None:
    space = layer.space_for(tokens, 8, 384, 7168, 256)
    routes = min(8 * tokens, layer.MAX_ROUTES)
    ends = (
        space.offsets + 4 * 385,
        space.routes + 4 * routes,
        space.positions + 4 * routes,
        space.middle + 2 * 256 * routes,
        space.rows + 2 * 7168 * routes,
    )
    starts = (space.routes, space.positions, space.middle, space.rows, space.num_bytes)
    assert all(end <= start for end, start in zip(ends, starts, strict=True))
    assert all(start % 256 == 0 for start in starts)


def placed(tensor: torch.Tensor, buffer: torch.Tensor, start: int) -> torch.Tensor:
    """Copy a tensor to a byte of a buffer, uint8, [bytes]."""
    place = buffer[start:][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return place.copy_(tensor)


def test_a_workspace_in_the_way_of_other_tensors_is_refused() -> None:
    """On the CPU as on a GPU, where it would be written while they are read."""
    given = operands()
    want = chord.fused_moe(**given)
    size = chord.fused_moe_workspace(9, given["w13"], given["w2"], TOP_K)
    given["shared_output"] = torch.zeros_like(given["hidden"])
    for name in ("hidden", "topk_weights", "topk_ids", "shared_output", "out"):
        tensor = torch.empty_like(given["hidden"]) if name == "out" else given[name]
        room = tensor.nbytes + -tensor.nbytes % 16
        buffer = torch.zeros(room + size + 16, dtype=torch.uint8)
        for start, space in ((0, 0), (0, room - 16), (size - 16, 0)):
            call = given | {name: placed(tensor, buffer, start)}
            with pytest.raises(InputError, match=rf"workspace, .* overlaps {name} in memory"):
                chord.fused_moe(**call, workspace=buffer[space:][:size])
        for start, space in ((0, room), (size, 0)):
            call = given | {name: placed(tensor, buffer, start)}
            assert torch.equal(chord.fused_moe(**call, workspace=buffer[space:]), want)


def test_an_out_or_a_workspace_in_the_way_of_what_is_read_is_refused() -> None:
    """The kernels read router weights, ids and experts while they write: a race on a GPU."""
    given = operands() | {"expert_map": torch.arange(E)}
    want = chord.fused_moe(**given)
    rows = want.nbytes
    for name in ("topk_weights", "topk_ids", "expert_map"):
        buffer = torch.zeros(2 * rows, dtype=torch.uint8)
        for start in (0, rows - 16):
            call = given | {name: placed(given[name], buffer, start)}
            out = buffer[:rows].view(torch.bfloat16).view(9, HIDDEN)
            with pytest.raises(InputError, match=rf"out \[9, 128\] overlaps {name} in memory"):
                chord.fused_moe(**call, out=out)
        call = given | {name: placed(given[name], buffer, rows)}
        assert torch.equal(chord.fused_moe(**call, out=out), want)
    for name in ("w13", "w2"):
        memory = given[name].data.view(-1)
        out = memory[-rows:].view(torch.bfloat16).view(9, HIDDEN)
        with pytest.raises(InputError, match=rf"out .* overlaps {name} in memory"):
            chord.fused_moe(**given, out=out)
        with pytest.raises(InputError, match=rf"workspace, .* overlaps {name} in memory"):
            chord.fused_moe(**given, workspace=memory)
    assert torch.equal(chord.fused_moe(**given), want)


def test_addresses_are_checked_without_a_gpu_too() -> None:
    given = operands()
    size = chord.fused_moe_workspace(9, given["w13"], given["w2"], TOP_K)
    odd = torch.zeros(9 * HIDDEN + 1, dtype=torch.bfloat16)[1:].view(9, HIDDEN)
    for name, value in (
        ("workspace", torch.empty(size + 4, dtype=torch.uint8)[4:]),
        ("hidden", odd),
        ("shared_output", odd),
        ("out", odd),
    ):
        with pytest.raises(InputError, match=rf"{name} begins at address .* 16-byte aligned"):
            chord.fused_moe(**given | {name: value})
    rows = torch.zeros(10, HIDDEN, dtype=torch.bfloat16)
    for name in ("hidden", "shared_output"):
        with pytest.raises(InputError, match=f"overlaps a part of {name} .* pass {name} itself"):
            chord.fused_moe(**given | {name: rows[:9], "out": rows[1:]})


def test_more_experts_than_a_kernel_takes_are_refused_here_too() -> None:
    space = torch.zeros(513, 64, 64, dtype=torch.uint8), torch.ones(513, 64, 2).bfloat16()
    w13 = chord.pack_experts(*space, interleave_gate_up=True)
    w2 = chord.pack_experts(space[0][:, :, :32], space[1][:, :, :1])
    rows, ids = torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="num_experts=513 is more than 512"):
        chord.fused_moe(rows, w13, w2, torch.ones(1, 1), ids)
    parts = w13.expert_range(0, 512), w2.expert_range(0, 512)
    assert chord.fused_moe(rows, *parts, torch.ones(1, 1), ids).shape == (1, 64)


# --- torch.compile --------------------------------------------------------------------------------


def test_compiles_whole_and_with_a_dynamic_number_of_tokens() -> None:
    w13, w2 = packed()

    @functools.partial(torch.compile, fullgraph=True, backend="aot_eager", dynamic=True)
    def model(hidden: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
        scores, ids = (hidden @ router).float().softmax(-1).topk(TOP_K)
        return chord.fused_moe(
            hidden, w13, w2, scores, ids, routed_scaling_factor=2.5, shared_output=hidden
        )

    router = cases.real_x(HIDDEN, E, seed=3)
    for tokens in (5, 9, 33):
        hidden = cases.real_x(tokens, HIDDEN)
        scores, ids = (hidden @ router).float().softmax(-1).topk(TOP_K)
        more = {"routed_scaling_factor": 2.5, "shared_output": hidden}
        want = chord.fused_moe(hidden, w13, w2, scores, ids, **more)
        torch.testing.assert_close(model(hidden, router), want, rtol=0, atol=0)


def test_compiles_with_out_and_workspace() -> None:
    given = operands()
    w13, w2 = given["w13"], given["w2"]
    space = torch.empty(chord.fused_moe_workspace(9, w13, w2, TOP_K), dtype=torch.uint8)

    @functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    def model(
        hidden: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        given = {"out": out, "workspace": space, "l2_is_clean": True, **options}
        chord.fused_moe(hidden, w13, w2, scores, ids, **given)
        return out * 2

    options = {
        "swiglu_limit": 0.5,
        "routed_scaling_factor": 2.5,
        "shared_output": cases.real_x(9, HIDDEN, seed=5),
    }
    want = chord.fused_moe(**given, **options)
    arguments = (given["hidden"], given["topk_weights"], given["topk_ids"])
    for out in (cases.poisoned(9, HIDDEN), options["shared_output"]):
        twice = model(*arguments, out)
        assert torch.equal(out, want) and torch.equal(twice, want * 2)


@pytest.mark.parametrize("l2_is_clean", [False, True])
@pytest.mark.parametrize("with_out", [False, True])
def test_compiled_code_hands_the_hint_on(
    monkeypatch: pytest.MonkeyPatch, with_out: bool, l2_is_clean: bool
) -> None:
    given, told = operands(), []
    shipped = layer.run

    def noting(operands: layer.Layer, *rest: Any) -> torch.Tensor:
        told.append(operands.l2_is_clean)
        return shipped(operands, *rest)

    monkeypatch.setattr(layer, "run", noting)
    torch.compiler.reset()
    whole = torch.compile(chord.fused_moe, fullgraph=True, backend="aot_eager")
    out = {"out": torch.empty_like(given["hidden"])} if with_out else {}
    whole(**given, **out, l2_is_clean=l2_is_clean)
    assert told == [l2_is_clean]
    chord.fused_moe(**given, l2_is_clean=l2_is_clean)
    assert told == [l2_is_clean] * 2


def test_compiled_code_takes_shared_outputs_of_any_strides_and_no_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = operands()
    shared = cases.real_x(HIDDEN, 9, seed=5)
    torch.compiler.reset()
    whole = torch.compile(chord.fused_moe, fullgraph=True, backend="aot_eager")
    want = chord.fused_moe(**given, shared_output=shared.T.contiguous())
    assert torch.equal(whole(**given, shared_output=shared.T), want)
    monkeypatch.setattr("chord.ops.fused_moe._check_event", lambda *_: None)
    torch.compiler.reset()
    whole = torch.compile(chord.fused_moe, fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="shared_ready cannot be given under"):
        whole(**given, shared_output=shared.T, shared_ready=3)


def test_compiled_code_refuses_gradients_and_constants_that_are_no_numbers() -> None:
    given = operands()
    hidden, scores = given["hidden"], given["topk_weights"]
    for change, words in (
        ({"hidden": hidden.clone().requires_grad_()}, r"hidden .* requires grad.*torch.no_grad"),
        ({"topk_weights": scores.clone().requires_grad_()}, "topk_weights .* requires grad"),
        ({"swiglu_alpha": float("nan")}, "swiglu_alpha=nan is beyond"),
        ({"swiglu_limit": float("inf")}, "swiglu_limit=inf is beyond"),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor=nan is beyond"),
        ({"shared_output": hidden.clone().requires_grad_()}, "shared_output .* requires grad"),
    ):
        torch.compiler.reset()
        whole = torch.compile(chord.fused_moe, fullgraph=True, backend="aot_eager")
        with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
            whole(**given | change)
    with torch.no_grad():
        given["hidden"] = hidden.clone().requires_grad_()
        assert torch.equal(whole(**given), chord.fused_moe(**given))


class ExportedLayer(torch.nn.Module):
    def forward(
        self, hidden: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        return chord.fused_moe(hidden, *packed(), scores, ids)


def test_an_exported_layer_runs_in_a_process_that_names_fused_moe(tmp_path: Path) -> None:
    given = operands()
    inputs = (given["hidden"], given["topk_weights"], given["topk_ids"])
    tokens = {0: torch.export.Dim("T", min=1, max=4096)}
    packed()  # not while tracing
    exported = torch.export.export(ExportedLayer(), inputs, dynamic_shapes=(tokens,) * 3)
    torch.export.save(exported, tmp_path / "layer.pt2")
    torch.save([*(tensor[:5] for tensor in inputs), chord.fused_moe(**given)[:5]], tmp_path / "io")
    code = (
        "import chord, torch; chord.fused_moe\n"
        "*inputs, want = torch.load('io')\n"
        "assert torch.equal(torch.export.load('layer.pt2').module()(*inputs), want)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-2000:]


def test_operators_keep_the_rules_of_torch_library() -> None:
    given = operands()
    arguments = (
        given["hidden"],
        given["w13"].data,
        given["w2"].data,
        MIDDLE,
        given["topk_weights"],
        given["topk_ids"],
        None,
        False,
        1.0,
        0.0,
        None,
        2.5,
        cases.real_x(9, HIDDEN, seed=5),
        False,
    )
    chord.fused_moe(**given)  # the operators are defined at the first use of the function
    torch.library.opcheck(torch.ops.chord.fused_moe.default, arguments)
    out = torch.zeros_like(given["hidden"])
    torch.library.opcheck(torch.ops.chord.fused_moe_out.default, (*arguments, out, None))


# --- reload ---------------------------------------------------------------------------------------


def test_packing_again_keeps_addresses_and_updates_parts() -> None:
    w13, w2 = (w.pack(interleave_gate_up=i == 0) for i, w in enumerate(weights()))
    given = operands() | {"w13": w13, "w2": w2}
    before = chord.fused_moe(**given)
    new = cases.random_weights(E, 2 * MIDDLE, HIDDEN, kind="real", seed=7)
    address = w13.data.data_ptr()
    part = w13.expert_range(2, 4)
    chord.pack_experts(new.words[2:4], new.scales[2:4], interleave_gate_up=True, out=part)
    assert w13.data.data_ptr() == address
    changed = (chord.fused_moe(**given) != before).any(dim=1)
    visits = ((given["topk_ids"] == 2) | (given["topk_ids"] == 3)).any(dim=1)
    assert torch.equal(changed, visits)
    old = weights()[0]
    chord.pack_experts(old.words, old.scales, interleave_gate_up=True, out=w13)
    assert torch.equal(chord.fused_moe(**given), before)


def test_packed_bytes_are_not_packed_again() -> None:
    """The same tensor twice: as codes, as words, or in place of itself."""
    w13, _ = packed()
    scales = weights()[0].scales
    with pytest.raises(InputError):
        chord.pack_experts(w13.data, scales, interleave_gate_up=True)
    with pytest.raises(InputError, match="is the memory of a packed weight"):
        flat = w13.data.view(torch.int32).flatten()[: E * 2 * MIDDLE * HIDDEN // 8]
        words = flat.view(E, 2 * MIDDLE, HIDDEN // 8)
        chord.pack_experts(words, scales, interleave_gate_up=True, out=w13)


def test_memory_that_packed_bytes_have_left_can_hold_a_checkpoint() -> None:
    """A buffer that an engine offloads or swaps: the tensor object lives on, somewhere else."""
    words, scales = weights()[1].words.clone(), weights()[1].scales
    memory = torch.zeros(2**20, dtype=torch.uint8)
    want = chord.pack_experts(words, scales)
    data = memory[: want.nbytes].view(want.data.shape).copy_(want.data)
    experts = chord.PackedExperts(data, n=want.n, k=want.k)
    inside = memory[: words.nbytes].view(torch.int32).view(words.shape)
    with pytest.raises(InputError, match="is the memory of a packed weight"):
        chord.pack_experts(inside, scales)
    data.set_(want.data.clone())
    inside.copy_(words)
    assert torch.equal(chord.pack_experts(inside, scales).data, experts.data)
