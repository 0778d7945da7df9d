"""chord.contiguous and chord.masked on the CPU: refusals, the reference, what would be launched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo

import cases
import chord
from chord import device as devices
from chord import reference
from chord.errors import InputError, UnsupportedError
from chord.jit.params import addressing_layout
from chord.ops import grouped_rows
from chord.plan.config import shipped_configs
from chord.plan.problem import GemmProblem
from on_card import OnCard

E, N, K, R, MAX_M = 4, 64, 128, 12, 5
BF16 = torch.bfloat16
COUNTS = (5, 0, 4, 1)


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.fixture(scope="module")
def experts() -> chord.PackedExperts:
    return cases.random_weights(E, N, K).pack()


@pytest.fixture
def sorted_rows(experts: chord.PackedExperts) -> dict[str, Any]:
    """Arguments of a legal call of chord.contiguous; two rows of nobody at the end."""
    x = cases.exact_x(R, K)
    return {"x": x, "experts": experts, "expert_offsets": ints(0, 5, 5, 9, 10)}


@pytest.fixture
def slots(experts: chord.PackedExperts) -> dict[str, Any]:
    """Arguments of a legal call of chord.masked."""
    x = cases.exact_x(E * MAX_M, K).view(E, MAX_M, K)
    return {"x": x, "experts": experts, "tokens_per_expert": ints(*COUNTS)}


def unaligned(*shape: int) -> torch.Tensor:
    size = torch.Size(shape).numel()
    return torch.zeros(size + 1, dtype=BF16)[1:].view(shape)


ROWS = cases.owners_of_counts(COUNTS, after=2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(R, K)}, r"x is torch\.float32 \[12, 128\]; it must be bf16 \[R, K\]"),
        ({"x": torch.zeros(1, R, K, dtype=BF16)}, r"must be bf16 \[R, K\]"),
        ({"x": torch.zeros(R, 96, dtype=BF16)}, r"x is \[12, 96\], the experts have K=128"),
        ({"x": torch.zeros(K, R, dtype=BF16).T}, r"x \[12, 128\] has strides \[1, 12\]"),
        ({"x": unaligned(R, K)}, r"x begins at address .* 16-byte aligned"),
        ({"expert_offsets": None}, "neither of expert_offsets and m_indices given"),
        ({"m_indices": ROWS}, "both of expert_offsets and m_indices given"),
        ({"expert_offsets": torch.zeros(5)}, r"torch\.float32 .* it must be int32 or int64"),
        ({"expert_offsets": torch.zeros(10, dtype=torch.int32)[::2]}, r"strides \[2\]"),
        ({"expert_offsets": ints(0, 3)}, r"expert_offsets has 2 elements; it must have 5, E \+ 1"),
        ({"expert_offsets": ints(0, 1, 2, 3, 4).to("meta")}, "expert_offsets is on meta"),
        ({"expert_offsets": ints(0, 5, 4, 9, 10)}, "expert_offsets decreases"),
        ({"expert_offsets": ints(0, 5, 5, 9, 13)}, r"from 0 to 13; x has rows 0\.\.12"),
        ({"expert_offsets": ints(-1, 5, 5, 9, 10)}, "from -1 to 10"),
        ({"expert_offsets": None, "m_indices": ROWS.bool()}, r"m_indices is torch\.bool"),
        ({"expert_offsets": None, "m_indices": ROWS[:-1]}, "m_indices has 11 elements; .* 12, an"),
        ({"expert_offsets": None, "m_indices": ROWS + 1}, "m_indices holds ids from 0 to 4"),
        ({"expert_offsets": None, "m_indices": ROWS - 1}, "m_indices holds ids from -2 to 2"),
        ({"expert_offsets": None, "m_indices": ROWS.flip(0).contiguous()}, "m_indices descends"),
        ({"x": None}, "^x is None, not a torch.Tensor"),
        ({"x": torch.zeros(R, K).to_sparse()}, "^x is a sparse_coo tensor"),
        ({"experts": torch.zeros(E, N, K)}, r"^experts is a torch.Tensor of .*, not PackedExperts"),
        ({"expert_offsets": [0, 5, 5, 9, 10]}, r"^expert_offsets is the list .*pass torch.tensor"),
        ({"expert_offsets": None, "m_indices": ROWS.numpy()}, "^m_indices is a numpy.ndarray of"),
        ({"out": np.zeros((R, N))}, "^out is a numpy.ndarray of float64"),
        ({"config": "prefill"}, "^config is the str 'prefill'"),
        ({"config": shipped_configs("sm_90a")[0]}, "^config=decode .* x is on cpu"),
        ({"out": torch.zeros(R, 32, dtype=BF16)}, r"it must be bf16 \[12, 64\], a row for each"),
        ({"out": torch.zeros(N, R, dtype=BF16).T}, r"out \[12, 64\] has strides"),
        ({"out": unaligned(R, N)}, "out begins at address"),
        ({"out": torch.zeros(R, N, dtype=BF16).requires_grad_()}, r"out .* requires grad.*no_grad"),
    ],
)
def test_contiguous_refuses_by_name_value_and_rule(
    sorted_rows: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        chord.contiguous(**(sorted_rows | change))
    chord.contiguous(**sorted_rows)  # still usable


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(R, K, dtype=BF16)}, r"must be bf16 \[E, max_m, K\]"),
        ({"x": torch.zeros(3, MAX_M, K, dtype=BF16)}, r"the experts are 4; the first dimension"),
        ({"x": unaligned(E, MAX_M, K)}, "16-byte aligned"),
        ({"tokens_per_expert": ints(1, 1, 1, 1, dtype=torch.int64)}, "it must be int32, of one"),
        ({"tokens_per_expert": ints(1, 1, 1)}, "has 3 elements; it must have 4, a count for each"),
        ({"tokens_per_expert": ints(5, 0, 6, 1)}, "runs from 0 to 6; x has 5 rows per expert"),
        ({"tokens_per_expert": ints(5, 0, -1, 1)}, "runs from -1 to 5"),
        ({"expected": -1}, "expected=-1 must not be negative"),
        ({"expected": 1.5}, r"expected is the float 1\.5; it must be a whole number"),
        ({"x": [[1.0]]}, r"^x is the list \[\[1\.0\]\], not a torch.Tensor"),
        ({"experts": None}, "^experts is None, not PackedExperts"),
        ({"tokens_per_expert": list(COUNTS)}, r"^tokens_per_expert is the list \[5, 0, 4, 1\]"),
        ({"tokens_per_expert": None}, "^tokens_per_expert is None"),
        ({"out": "out"}, "^out is the str 'out'"),
        ({"config": shipped_configs("sm_90a")[0]}, "^config=decode .* x is on cpu"),
        ({"out": torch.zeros(E * MAX_M, N, dtype=BF16)}, r"must be bf16 \[4, 5, 64\], a row for"),
        ({"out": unaligned(E, MAX_M, N)}, "out begins at address"),
    ],
)
def test_masked_refuses_by_name_value_and_rule(
    slots: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        chord.masked(**(slots | change))
    chord.masked(**slots)  # still usable


def test_an_out_that_overlaps_x_is_refused(
    sorted_rows: dict[str, Any], slots: dict[str, Any]
) -> None:
    for call, arguments in ((chord.contiguous, sorted_rows), (chord.masked, slots)):
        x = arguments["x"]
        out = x.view(-1)[: x.numel() // 2].view(*x.shape[:-1], N)
        with pytest.raises(InputError, match="overlaps x"):
            call(**arguments, out=out)


def test_an_out_in_the_way_of_a_table_or_the_weights_is_refused(
    sorted_rows: dict[str, Any], slots: dict[str, Any]
) -> None:
    by_row = {"x": sorted_rows["x"], "experts": sorted_rows["experts"], "m_indices": ROWS}
    for call, given, name in (
        (chord.contiguous, sorted_rows, "expert_offsets"),
        (chord.contiguous, by_row, "m_indices"),
        (chord.masked, slots, "tokens_per_expert"),
    ):
        table, shape = given[name], (*given["x"].shape[:-1], N)
        room = torch.zeros(torch.Size(shape).numel(), dtype=BF16)
        inside = room.view(torch.int32)[4:][: table.numel()].copy_(table)
        with pytest.raises(InputError, match=rf"out .* overlaps {name} \[{table.numel()}\] in mem"):
            call(**(given | {name: inside}), out=room.view(shape))
        assert torch.equal(inside, table)
        memory = given["experts"].data.view(-1).view(BF16)
        with pytest.raises(InputError, match=r"out .* overlaps experts .* in memory"):
            call(**given, out=memory[-room.numel() :].view(shape))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_cpu_runs_the_reference(
    sorted_rows: dict[str, Any], slots: dict[str, Any], dtype: torch.dtype
) -> None:
    x, experts = sorted_rows["x"], sorted_rows["experts"]
    by_offsets = chord.contiguous(x, experts, sorted_rows["expert_offsets"].to(dtype))
    by_indices = chord.contiguous(x, experts, m_indices=ROWS.to(dtype))
    assert torch.equal(by_offsets, reference.contiguous(**sorted_rows))
    assert torch.equal(by_offsets, by_indices) and not by_offsets[10:].any()
    assert torch.equal(chord.masked(**slots, expected=1), reference.masked(**slots))


@pytest.mark.field_case(2)
def test_no_rows_give_an_empty_result_and_rows_of_nobody_stay(
    sorted_rows: dict[str, Any], slots: dict[str, Any]
) -> None:
    """Parts (c) and (d)."""
    experts = slots["experts"]
    none = torch.zeros(0, K, dtype=BF16)
    assert chord.contiguous(none, experts, ints(0, 0, 0, 0, 0)).shape == (0, N)
    assert chord.contiguous(none, experts, m_indices=ints()).shape == (0, N)
    no_slots = slots | {"x": none.view(E, 0, K), "tokens_per_expert": ints(0, 0, 0, 0)}
    assert chord.masked(**no_slots).shape == (E, 0, N)
    out = cases.poisoned(R, N)
    assert chord.contiguous(sorted_rows["x"], experts, None, out, m_indices=ROWS * 0 - 1) is out
    assert cases.is_poison(out)
    out = cases.poisoned(E, MAX_M, N)
    chord.masked(**(slots | {"tokens_per_expert": ints(0, 0, 0, 0)}), out=out, expected=0)
    assert cases.is_poison(out)


def test_a_graph_of_torch_compile_ends_at_what_is_no_operator(
    sorted_rows: dict[str, Any], slots: dict[str, Any]
) -> None:
    ids = torch.tensor([[0], [2], [1], [-1]])
    where = chord.align(ids, num_experts=E, block_m=4)
    buffers = (where.sorted_token_ids, where.expert_ids, where.num_tokens_post_padded)
    x, experts = sorted_rows["x"][:4], sorted_rows["experts"]
    for name, call in (
        ("contiguous", lambda: chord.contiguous(**sorted_rows) + 1),
        ("masked", lambda: chord.masked(**slots, expected=1) + 1),
        ("indexed", lambda: chord.indexed(x, experts, *buffers, 1, block_m=4) + 1),
        ("align", lambda: chord.align(ids, num_experts=E, block_m=4).expert_ids + 1),
    ):
        torch.compiler.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=rf"chord\.{name} is no operator"):
            torch.compile(call, fullgraph=True, backend="aot_eager")()
        torch.compiler.reset()
        assert torch.equal(torch.compile(call, backend="aot_eager")(), call())


# --- what a card would get ------------------------------------------------------------------------


def on_card(arguments: dict[str, Any]) -> dict[str, Any]:
    moved = {
        name: value.as_subclass(OnCard) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    packed = arguments["experts"]
    return moved | {"experts": replace(packed, data=packed.data.as_subclass(OnCard))}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[GemmProblem, dict[str, Any]]]:
    """Note problems and the addressing's parameters by their names, instead of launching."""
    noted: list[tuple[GemmProblem, dict[str, Any]]] = []

    def run(problem, pointers, sizes, tables, counts) -> None:
        assert sizes == (problem.num_experts, problem.n, problem.k) and len(pointers) == 3
        fields = [name for name, _ in addressing_layout(problem.addressing).fields]
        noted.append((problem, dict(zip(fields, (*tables, *counts), strict=True))))

    monkeypatch.setattr(grouped_rows, "choose", lambda problem, index, config: problem)
    monkeypatch.setattr(grouped_rows, "run", run)
    monkeypatch.setattr(grouped_rows, "map_of_rows", lambda problem, *rows: rows)
    return noted


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("form", ["expert_offsets", "m_indices"])
def test_contiguous_launches_its_form(
    sorted_rows: dict[str, Any], launched: list[Any], form: str, dtype: torch.dtype
) -> None:
    table = (sorted_rows["expert_offsets"] if form == "expert_offsets" else ROWS).to(dtype)
    call = on_card(sorted_rows | {"expert_offsets": None, form: table})
    call["out"] = cases.poisoned(R, N).as_subclass(OnCard)
    assert chord.contiguous(**call) is call["out"]
    addressing = "ContiguousOffsets" if form == "expert_offsets" else "ContiguousIndices"
    assert launched == [
        (
            GemmProblem(E, N, K, R, addressing),
            {
                "x_map": (call["x"].data_ptr(), R, K),
                "table": table.data_ptr(),
                "is_64bit": int(dtype is torch.int64),
                "num_experts": E,
                "num_rows": R,
            },
        )
    ]


@pytest.mark.parametrize(("expected", "rows"), [(None, None), (0, 0), (2, 2 * E), (64, 64 * E)])
def test_masked_launches_with_its_hint(
    slots: dict[str, Any], launched: list[Any], expected: int | None, rows: int | None
) -> None:
    call = on_card(slots | {"out": cases.poisoned(E, MAX_M, N)})
    chord.masked(**call, expected=expected)
    counts = slots["tokens_per_expert"].data_ptr()
    x_map = (slots["x"].data_ptr(), E * MAX_M, K)
    assert launched == [
        (
            GemmProblem(E, N, K, E * MAX_M, "Masked", rows),
            {"x_map": x_map, "counts": counts, "num_experts": E, "max_rows": MAX_M},
        )
    ]


def test_a_hint_of_another_package_becomes_a_number(
    slots: dict[str, Any], launched: list[Any]
) -> None:
    """What is planned is remembered by the problem: a tensor in it would be new every time."""
    call = on_card(slots | {"out": cases.poisoned(E * MAX_M, N).view(E, MAX_M, N)})
    for hint in (np.int64(2), torch.tensor(2)):
        chord.masked(**call, expected=hint)
        assert type(launched[-1][0].expected_rows) is int
    assert launched[0] == launched[1]


def test_scattered_rows_of_an_expert_are_counted(
    experts: chord.PackedExperts, launched: list[Any]
) -> None:
    rows = 1026
    owners = torch.zeros(rows, dtype=torch.int32)
    owners[1::2] = -1
    call = on_card(
        {
            "x": torch.zeros(rows, K, dtype=BF16),
            "experts": experts,
            "m_indices": owners,
            "out": cases.poisoned(rows, N),
        }
    )
    with pytest.raises(InputError, match=r"513 times; rows of one expert must lie together"):
        chord.contiguous(**call)
    assert not launched
    owners[1] = 0
    chord.contiguous(**call)
    assert len(launched) == 1


def test_interleaved_weights_are_refused_with_and_without_a_card(
    slots: dict[str, Any], sorted_rows: dict[str, Any], launched: list[Any]
) -> None:
    packed = cases.random_weights(E, N, K).pack(interleave_gate_up=True)
    for call, arguments in ((chord.contiguous, sorted_rows), (chord.masked, slots)):
        for given in (arguments | {"experts": packed}, on_card(arguments | {"experts": packed})):
            with pytest.raises(UnsupportedError, match="interleave_gate_up=True"):
                call(**given)
    assert not launched


def test_more_experts_than_a_kernel_takes_are_refused_with_and_without_a_card(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "facts_of", lambda index: devices.known("h200"))
    num = 513
    weight = torch.zeros(num, 16, 32, dtype=torch.uint8)
    experts = chord.pack_experts(weight, torch.ones(num, 16, 1, dtype=BF16))
    x, none = torch.zeros(2, 32, dtype=BF16), torch.zeros(num, dtype=torch.int32)
    ids, used = ints(0, 1), ints(2)
    calls = (
        (chord.contiguous, {"x": x, "expert_offsets": ints(0, *none.tolist())}),
        (chord.contiguous, {"x": x, "m_indices": ids}),
        (chord.masked, {"x": torch.zeros(num, 1, 32, dtype=BF16), "tokens_per_expert": none}),
        (
            chord.indexed,
            {"x": x, "sorted_token_ids": ids, "expert_ids": ids, "num_tokens_post_padded": used}
            | {"top_k": 1, "block_m": 1},
        ),
    )
    for call, arguments in calls:
        out = torch.zeros(*arguments["x"].shape[:-1], 16, dtype=BF16)
        arguments |= {"experts": experts, "out": out}
        for given in (arguments, on_card(arguments)):
            with pytest.raises(UnsupportedError, match=r"num_experts=513 .*expert_range"):
                call(**given)
