"""Routing: `align` against a plain loop and without the host, and what `validate` finds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cases
from chord.errors import InputError
from chord.routing import Contiguous, Indexed, Masked, align, local_experts


def align_by_loop(
    ids: list[list[int]], num_experts: int, block_m: int, expert_map: list[int] | None
) -> tuple[list[int], list[int], int]:
    """The definition, route by route."""
    routes_of: dict[int, list[int]] = {e: [] for e in range(num_experts)}
    flat = [i for row in ids for i in row]
    for route, i in enumerate(flat):
        if not 0 <= i < num_experts:
            continue
        local = i if expert_map is None else expert_map[i]
        if local >= 0:
            routes_of[local].append(route)
    slots: list[int] = []
    experts: list[int] = []
    for e, routes in routes_of.items():
        padded = -(-len(routes) // block_m) * block_m
        slots += routes + [len(flat)] * (padded - len(routes))
        experts += [e] * (padded // block_m)
    used = len(slots)
    capacity = len(flat) + num_experts * (block_m - 1)
    slots += [len(flat)] * (capacity - used)
    experts += [-1] * (-(-capacity // block_m) - len(experts))
    return slots, experts, used


@st.composite
def routings(draw: st.DrawFn) -> tuple[list[list[int]], int, int, list[int] | None]:
    num_experts = draw(st.integers(1, 12))
    top_k = draw(st.integers(1, 4))
    row = st.lists(st.integers(-1, num_experts), min_size=top_k, max_size=top_k)
    ids = draw(st.lists(row, min_size=1, max_size=20))
    expert_map = None
    if draw(st.booleans()):
        here = draw(st.sets(st.integers(0, num_experts - 1)))
        expert_map = [-1] * num_experts
        for local, e in enumerate(sorted(here, reverse=draw(st.booleans()))):
            expert_map[e] = local
    return ids, num_experts, draw(st.integers(1, 9)), expert_map


@settings(max_examples=60, deadline=None)
@given(routing=routings(), wide=st.booleans())
def test_align_is_the_plain_loop(
    routing: tuple[list[list[int]], int, int, list[int] | None], wide: bool
) -> None:
    ids, num_experts, block_m, expert_map = routing
    dtype = torch.int64 if wide else torch.int32
    result = align(
        torch.tensor(ids, dtype=dtype),
        num_experts=num_experts,
        block_m=block_m,
        expert_map=None if expert_map is None else torch.tensor(expert_map, dtype=dtype),
        validate=False,
    )
    slots, experts, used = align_by_loop(ids, num_experts, block_m, expert_map)
    assert result.sorted_token_ids.tolist() == slots
    assert result.expert_ids.tolist() == experts
    assert result.num_tokens_post_padded.tolist() == [used]
    assert (result.top_k, result.block_m) == (len(ids[0]), block_m)
    result.validate(len(ids), num_experts)


@pytest.mark.field_case(2)
@pytest.mark.parametrize("tokens", [0, 16])
def test_no_work(tokens: int) -> None:
    """Field case 2 (a), (b): no tokens, or tokens that go nowhere."""
    ids = cases.topk_ids(tokens, 8, 48, "none")
    result = align(ids, num_experts=48, block_m=16)
    assert result.num_tokens_post_padded.item() == 0
    assert (result.expert_ids == -1).all()
    assert (result.sorted_token_ids == tokens * 8).all()
    result.validate(tokens, 48)
    empty = align(ids[:0], num_experts=48, block_m=1)
    assert empty.sorted_token_ids.numel() == 0
    empty.validate(0, 48)


@pytest.mark.field_case(1)
def test_partial_expert_map() -> None:
    """Field case 1: through the map and with local ids the same blocks come out."""
    case = cases.partial_routing()
    mapped = align(case.topk_ids, num_experts=384, block_m=16, expert_map=case.expert_map)
    local = align(case.local_ids, num_experts=48, block_m=16)
    used = int(mapped.num_tokens_post_padded)
    assert used == int(local.num_tokens_post_padded)
    assert torch.equal(mapped.sorted_token_ids[:used], local.sorted_token_ids[:used])
    assert torch.equal(mapped.expert_ids[: used // 16], local.expert_ids[: used // 16])
    mapped.validate(33, 48)
    routed = mapped.sorted_token_ids[mapped.sorted_token_ids < 33 * 8].tolist()
    assert sorted(routed) == (case.local_ids.flatten() >= 0).nonzero().flatten().tolist()
    assert not {r // 8 for r in routed} & set(case.silent_rows)


@pytest.mark.field_case(1)
def test_minus_one_does_not_read_the_last_map_entry() -> None:
    expert_map = torch.tensor([-1, -1, 0])
    ids = torch.tensor([[-1, 2], [3, -7]])
    assert local_experts(ids, 3, expert_map).tolist() == [[-1, 0], [-1, -1]]
    assert local_experts(ids, 3).tolist() == [[-1, 2], [-1, -1]]


def test_align_does_not_wait_for_the_device() -> None:
    """On a meta tensor there are no values to read, so any wait for one would raise."""
    ids = torch.empty(33, 8, dtype=torch.int32, device="meta")
    expert_map = torch.empty(384, dtype=torch.int32, device="meta")
    result = align(ids, num_experts=384, block_m=16, expert_map=expert_map)
    assert result.sorted_token_ids.shape == (33 * 8 + 384 * 15,)
    assert result.expert_ids.shape == (-(-(33 * 8 + 384 * 15) // 16),)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(2, 2), r"topk_ids is torch.float32"),
        (torch.zeros(4, dtype=torch.int32), r"topk_ids is torch.int32 \[4\]"),
        (torch.zeros(4, 0, dtype=torch.int32), r"topk_ids is torch.int32 \[4, 0\]"),
    ],
)
def test_align_refuses_other_ids(ids: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        align(ids, num_experts=4, block_m=8)


def test_align_refuses_other_arguments() -> None:
    ids = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(InputError, match="num_experts=0, block_m=8"):
        align(ids, num_experts=0, block_m=8)
    with pytest.raises(InputError, match="num_experts=4, block_m=0"):
        align(ids, num_experts=4, block_m=0)
    with pytest.raises(InputError, match="expert_map has 3 elements; num_experts=4"):
        align(ids, num_experts=4, block_m=8, expert_map=torch.zeros(3, dtype=torch.int32))
    with pytest.raises(InputError, match=r"expert_map is torch.float32"):
        align(ids, num_experts=4, block_m=8, expert_map=torch.zeros(4))
    with pytest.raises(InputError, match="expert_map is on meta"):
        align(
            ids,
            num_experts=4,
            block_m=8,
            expert_map=torch.zeros(4, dtype=torch.int32, device="meta"),
        )


def test_align_refuses_ids_of_no_expert_where_it_need_not_wait() -> None:
    """As chord.reference.fused_moe does; on request also where it waits; else they are dropped."""
    ids = torch.tensor([[0, 4], [-1, 3]])
    for validate in (None, True):
        with pytest.raises(InputError, match=r"topk_ids holds ids from -1 to 4; .*0\.\.3, or -1"):
            align(ids, num_experts=4, block_m=2, validate=validate)
    dropped = align(ids, num_experts=4, block_m=2, validate=False)
    assert dropped.sorted_token_ids[:4].tolist() == [0, 4, 3, 4]
    far = torch.tensor([0, -1, 9, 1])
    with pytest.raises(InputError, match="expert_map holds ids from -1 to 9"):
        align(ids.clamp(max=3), num_experts=4, block_m=2, expert_map=far)
    with pytest.raises(InputError, match=r"topk_ids \[2, 2\] is on the meta device"):
        align(ids.to("meta"), num_experts=4, block_m=2, validate=True)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "topk_ids is None, not a torch.Tensor"),
        ([[0, 1]], r"topk_ids is the list \[\[0, 1\]\], not a torch.Tensor; pass torch.tensor"),
        (np.zeros((1, 2), np.int32), r"a numpy.ndarray of int32 \[1, 2\].*torch.from_numpy"),
        (torch.zeros(1, 2, dtype=torch.int32).to_sparse(), r"is a sparse_coo tensor \[1, 2\]"),
    ],
)
def test_what_is_not_a_dense_tensor_is_named(value: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        align(value, num_experts=4, block_m=2)
    good = torch.zeros(1, dtype=torch.int32)
    for call in (
        lambda: Indexed(value, good, good, 1, 1),
        lambda: Indexed(good, value, good, 1, 1),
        lambda: Contiguous(m_indices=value) if value is not None else Masked(value),
        lambda: Masked(value),
    ):
        with pytest.raises(InputError, match=words.removeprefix("topk_ids ")):
            call()


@pytest.mark.parametrize("number", ["2", 2.0, None])
def test_what_counts_is_a_whole_number(number: Any) -> None:
    ids = torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(InputError, match=r"block_m is .*; it must be a whole number"):
        align(ids, num_experts=4, block_m=number)
    with pytest.raises(InputError, match=r"num_experts is .*; it must be a whole number"):
        align(ids, num_experts=number, block_m=4)
    with pytest.raises(InputError, match=r"top_k is .*; it must be a whole number"):
        Indexed(ids[0], ids[0], ids[0, :1], number, 1)


# --- Indexed ------------------------------------------------------------------------------------


def indexed(
    slots: list[int], experts: list[int], used: int, top_k: int = 1, block_m: int = 2
) -> Indexed:
    ints = (torch.tensor(v, dtype=torch.int32) for v in (slots, experts, [used]))
    return Indexed(*ints, top_k=top_k, block_m=block_m)


def test_indexed_reads_only_the_valid_prefix() -> None:
    """Over-allocated buffers may hold anything behind the prefix, and in skipped blocks."""
    indexed([0, 1, 77, 77, 2, 3, -5, 99], [0, -1, 1, 42], used=6).validate(3, 2)


@pytest.mark.parametrize(
    ("slots", "experts", "used", "message"),
    [
        ([0, 1], [0], 1, "num_tokens_post_padded=1 must be a multiple of block_m=2"),
        ([0, 1], [0], 4, r"num_tokens_post_padded=4 .* 0\.\.2"),
        ([0, 1], [0], -2, "num_tokens_post_padded=-2"),
        ([0, 1, 2, 3], [0], 4, "expert_ids has 1 entries; .* needs 2"),
        ([0, 1], [2], 2, r"expert_ids holds ids from 2 to 2; they must be 0\.\.1, or -1"),
        ([0, 1], [-2], 2, "expert_ids holds ids from -2"),
        ([-1, 1], [0], 2, "sorted_token_ids holds ids from -1 to 1"),
        ([0, 4], [0], 2, r"sorted_token_ids holds ids from 0 to 4; .* 0\.\.2.*pad id is 3"),
        ([0, 1, 1, 3], [0, 1], 4, "holds the id 1 2 times; .* pad id of 3 rows with top_k=1 is 3"),
    ],
)
def test_indexed_values(slots: list[int], experts: list[int], used: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        indexed(slots, experts, used).validate(3, 2)


def test_a_route_of_no_rows_is_refused_in_words() -> None:
    with pytest.raises(InputError, match=r"there are no routes \(0 rows, top_k=1\).* pad id is 0"):
        indexed([0, 1], [0], 2).validate(0, 1)
    indexed([0, 0], [0], 2).validate(0, 1)


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.lists(st.integers(-1, 7), min_size=2, max_size=2), min_size=1, max_size=24),
    block_m=st.sampled_from([2, 4, 8, 16]),
    claimed=st.sampled_from([1, 2, 4, 8, 16, 32]),
    filling=st.sampled_from([-1, 0]),
    extra=st.integers(0, 3),
)
def test_another_block_m_gives_the_same_experts_or_is_refused(
    ids: list[list[int]], block_m: int, claimed: int, filling: int, extra: int
) -> None:
    """num_tokens_post_padded may well divide; what lies behind the blocks in use is not read."""
    where = align(torch.tensor(ids), num_experts=8, block_m=block_m)
    used = int(where.num_tokens_post_padded)
    experts = where.expert_ids.clone()
    experts[used // block_m :] = filling
    where = replace(
        where,
        expert_ids=torch.cat((experts, experts.new_full((extra,), filling))),
        sorted_token_ids=torch.cat(
            (where.sorted_token_ids, where.sorted_token_ids.new_zeros(extra * block_m))
        ),
    )
    where.validate(len(ids), 8)
    other = replace(where, block_m=claimed)
    try:
        other.validate(len(ids), 8)
    except InputError:
        assert claimed != block_m
        return
    assert experts_of_routes(other, 2 * len(ids)) == experts_of_routes(where, 2 * len(ids))


def experts_of_routes(where: Indexed, num_routes: int) -> dict[int, int]:
    """The meaning of the buffers, route by route."""
    slots = where.sorted_token_ids[: int(where.num_tokens_post_padded)].tolist()
    blocks = [where.expert_ids[slot // where.block_m].item() for slot in range(len(slots))]
    return {r: e for r, e in zip(slots, blocks, strict=True) if e >= 0 and r < num_routes}


def test_longer_buffers_and_blocks_of_padding_are_legal() -> None:
    """Each buffer may be longer alone, and a caller may give an expert blocks that hold nothing."""
    indexed([0, 3, 3, 3, 1, 2], [0, 0, 1], used=6).validate(3, 2)
    indexed([0, 3, 3, 3, 1, 2, 9, 9, 9, 9, 9], [0, 0, 1], used=6).validate(3, 2)
    for tail in ([-1] * 3, [0] * 3, [7, 0, 99], [5, 5, 5, 5, 5, 5, 5, 5]):
        indexed([0, 3, 3, 3, 1, 2], [0, 0, 1, *tail], used=6).validate(3, 2)
    with pytest.raises(InputError, match=r"after padding in block 2 \(slots 4\.\.5, block_m=2"):
        indexed([0, 1, 7, 0, 3, 2], [0, -1, 1], used=6).validate(3, 2)
    with pytest.raises(InputError, match=r"block_m=2 makes 2 blocks .*fit block_m=1, .* 4 blocks"):
        indexed([0, 1, 2, 3], [0, 1, 2, 3], used=4).validate(4, 4)


def test_indexed_construction() -> None:
    good = torch.zeros(4, dtype=torch.int32)
    one = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(InputError, match=r"sorted_token_ids is torch.int64.*must be torch.int32"):
        Indexed(good.long(), good, one, 1, 2)
    with pytest.raises(InputError, match=r"expert_ids is torch.int32 \[2, 2\]"):
        Indexed(good, good.view(2, 2), one, 1, 2)
    with pytest.raises(InputError, match=r"strides \[2\]"):
        Indexed(good, good[::2], one, 1, 2)
    with pytest.raises(InputError, match="num_tokens_post_padded has 4 elements"):
        Indexed(good, good, good, 1, 2)
    with pytest.raises(InputError, match="num_tokens_post_padded is on meta"):
        Indexed(good, good, one.to("meta"), 1, 2)
    with pytest.raises(InputError, match="top_k=0, block_m=2"):
        Indexed(good, good, one, 0, 2)
    with pytest.raises(InputError, match="top_k=1, block_m=0"):
        Indexed(good, good, one, 1, 0)


# --- Contiguous ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_contiguous_offsets(dtype: torch.dtype) -> None:
    def offsets(*values: int) -> Contiguous:
        return Contiguous(torch.tensor(values, dtype=dtype))

    offsets(0, 3, 3, 8).validate(8, 3)
    offsets(2, 3, 3, 5).validate(8, 3)
    offsets(0, 0, 0, 0).validate(0, 3)
    with pytest.raises(InputError, match="has 4 elements; 2 experts need 3"):
        offsets(0, 3, 3, 8).validate(8, 2)
    with pytest.raises(InputError, match="expert_offsets decreases"):
        offsets(0, 3, 2, 8).validate(8, 3)
    with pytest.raises(InputError, match=r"runs from 0 to 9; x has rows 0\.\.8"):
        offsets(0, 3, 3, 9).validate(8, 3)
    with pytest.raises(InputError, match="runs from -1 to 8"):
        offsets(-1, 3, 3, 8).validate(8, 3)


def test_contiguous_indices() -> None:
    def indices(*values: int) -> Contiguous:
        return Contiguous(m_indices=torch.tensor(values, dtype=torch.int32))

    indices(-1, 0, 0, -1, 2, -1).validate(6, 3)
    indices(-1, -1).validate(2, 3)
    indices().validate(0, 3)
    with pytest.raises(InputError, match="m_indices has 2 elements; x has 3 rows"):
        indices(0, 0).validate(3, 3)
    with pytest.raises(InputError, match="m_indices holds ids from 0 to 3"):
        indices(0, 3).validate(2, 3)
    with pytest.raises(InputError, match="m_indices descends"):
        indices(1, -1, 0).validate(3, 3)


def test_contiguous_construction() -> None:
    offsets = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(InputError, match="neither of expert_offsets and m_indices"):
        Contiguous()
    with pytest.raises(InputError, match="both of expert_offsets and m_indices"):
        Contiguous(offsets, offsets)
    with pytest.raises(InputError, match="expert_offsets has 1 elements"):
        Contiguous(offsets[:1])
    with pytest.raises(InputError, match=r"m_indices is torch.float32"):
        Contiguous(m_indices=offsets.float())


# --- Masked -------------------------------------------------------------------------------------


def test_masked() -> None:
    def masked(*values: int, expected: int | None = None) -> Masked:
        return Masked(torch.tensor(values, dtype=torch.int32), expected)

    masked(0, 4, 2).validate(4, 3)
    masked(0, 0, 0, expected=0).validate(64, 3)
    with pytest.raises(InputError, match="has 2 elements; the weight has 3 experts"):
        masked(0, 4).validate(4, 3)
    with pytest.raises(InputError, match="runs from 0 to 5; x has 4 rows"):
        masked(0, 5, 2).validate(4, 3)
    with pytest.raises(InputError, match="runs from -1 to 4"):
        masked(-1, 4, 2).validate(4, 3)
    with pytest.raises(InputError, match="expected=-1"):
        masked(0, expected=-1)
    with pytest.raises(InputError, match=r"tokens_per_expert is torch.int64"):
        Masked(torch.zeros(3, dtype=torch.int64))
