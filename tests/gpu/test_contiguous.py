"""chord.contiguous on the card: both forms, every shipped configuration, bit for bit."""

from __future__ import annotations

import functools

import grouped
import pytest
import torch
from grouped import DEVICE, Case, Layer, each_choice, each_config, layer

import cases
import chord
import tolerance
from chord.errors import InputError
from chord.plan.config import Config

pytestmark = pytest.mark.gpu

BEFORE, AFTER = 3, 5  # rows of nobody at the ends


def offsets_of(counts: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor((BEFORE, *counts), device=DEVICE).cumsum(0).to(dtype)


def forms(given: Layer, counts: tuple[int, ...]) -> list[Case]:
    """Return a case for each way to describe the same rows."""
    owners = cases.owners_of_counts(counts, before=BEFORE, after=AFTER, device=DEVICE)
    made = []
    for dtype in (torch.int32, torch.int64):
        for where in (
            {"expert_offsets": offsets_of(counts, dtype)},
            {"m_indices": owners.to(dtype)},
        ):
            name = f"{counts} {next(iter(where))} {dtype}"
            made.append(grouped.make_case(name, given, owners, (len(owners),), where))
    return made


def with_holes(given: Layer, counts: tuple[int, ...]) -> Case:
    """Return a case of m_indices in which every seventh row is nobody's."""
    owners = cases.owners_of_counts(counts, before=BEFORE, after=AFTER, device=DEVICE)
    owners[::7] = -1
    name = f"{counts} with holes"
    return grouped.make_case(name, given, owners, (len(owners),), {"m_indices": owners})


@functools.lru_cache(maxsize=2)
def exact_cases(n: int, k: int) -> tuple[Layer, list[Case]]:
    given = layer(n, k)
    made = [case for counts in grouped.COUNTS for case in forms(given, counts)]
    return given, [*made, *(with_holes(given, counts) for counts in grouped.COUNTS[:3])]


@pytest.fixture(scope="module", params=grouped.SHAPES, ids=lambda shape: f"N{shape[0]}-K{shape[1]}")
def shape(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


@pytest.mark.field_case(4)
@each_config
def test_exact_inputs_match_bit_for_bit(shape: tuple[int, int], config: Config) -> None:
    """Rows of nobody hold NaN and are not written, nor are guard rows."""
    given, todo = exact_cases(shape[0], cases.k_for(config, shape[1]))
    grouped.check_exact(chord.contiguous, given.packed, todo, config, validate=False)


@pytest.mark.field_case(4)
@pytest.mark.parametrize(("n", "k"), cases.RAGGED_SHAPES)
def test_shapes_that_are_not_tile_multiples(n: int, k: int) -> None:
    """All of case 4: each configuration and the planner's own choice, both ways to say it."""
    for config in (None, *grouped.CONFIGS):
        given, todo = ragged_cases(n, cases.k_for(config, k))
        grouped.check_exact(chord.contiguous, given.packed, todo, config, validate=False)


@functools.lru_cache(maxsize=2)
def ragged_cases(n: int, k: int) -> tuple[Layer, list[Case]]:
    given = layer(n, k)
    todo = []
    for counts in grouped.TOKENS_COUNTS:
        owners = cases.owners_of_counts(counts, device=DEVICE)
        for where in (
            {"expert_offsets": offsets_of(counts, torch.int64) - BEFORE},
            {"m_indices": owners},
        ):
            name = f"{counts} {next(iter(where))}"
            todo.append(grouped.make_case(name, given, owners, (len(owners),), where))
    return given, todo


def test_the_planners_own_choice(shape: tuple[int, int]) -> None:
    """config=None, values validated as well."""
    given, todo = exact_cases(*shape)
    grouped.check_exact(chord.contiguous, given.packed, todo, None)


@each_config
def test_real_inputs_stay_within_the_row_limit(config: Config) -> None:
    n, k, counts = 1856, cases.k_for(config, 2688), grouped.COUNTS[2]
    given = layer(n, k, kind="real")
    owners = cases.owners_of_counts(counts, device=DEVICE)
    x = cases.real_x(len(owners), k, device=DEVICE)
    offsets = offsets_of(counts, torch.int64) - BEFORE
    out = chord.contiguous(x, given.packed, offsets, config=config)
    expected = torch.empty(len(owners), n, dtype=torch.float64, device=DEVICE)
    for expert, weight in enumerate(given.weights.dequantize(torch.float64)):
        expected[owners == expert] = x[owners == expert].double() @ weight.T
    tolerance.assert_rows_close(out, expected)


@pytest.mark.parametrize("counts", grouped.COUNTS[:3], ids=str)
@each_config
def test_repeats_and_replays_give_the_same_bits(config: Config, counts: tuple[int, ...]) -> None:
    k = cases.k_for(config, 7168)
    given = layer(512, k, kind="real")
    for case in forms(given, counts)[:2]:
        x = cases.real_x(len(case.x), k, device=DEVICE)
        real = Case(case.name, x, case.where, case.expected)
        grouped.check_bits(chord.contiguous, real, given.packed, config)


# --- field case 5, for rows without gaps ----------------------------------------------------------


@functools.lru_cache(maxsize=1)
def small_groups(k: int) -> tuple[Layer, list[Case], Layer, Case]:
    """Return the cases of four experts, and the call that follows them with two."""
    given = layer(4096, k, num_experts=4)
    todo = [
        case for room in grouped.SMALL_ROOMS for case in forms(given, (room, 0, 1, room // 2))[:2]
    ]
    other = layer(512, k, num_experts=2)
    return given, todo, other, forms(other, (128, 77))[0]


@pytest.mark.field_case(5)
@each_choice
def test_groups_smaller_than_a_tile(config: Config | None) -> None:
    """A tile of one expert lies over the rows of the next, whoever finishes last."""
    given, todo, other, after = small_groups(cases.k_for(config, 7168))
    grouped.check_exact(chord.contiguous, given.packed, todo, config, repeats=50, validate=False)
    grouped.check_exact(chord.contiguous, other.packed, [after], config)


# --- no work at all, graphs, long offsets ---------------------------------------------------------


@pytest.mark.field_case(2)
@each_choice
def test_no_rows_and_rows_of_nobody(config: Config | None) -> None:
    """Parts (d), (e) and (f)."""
    k = cases.k_for(config, 7168)
    given, todo = exact_cases(512, k)
    none = torch.zeros(0, k, dtype=torch.bfloat16, device=DEVICE)
    no_ids = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    zeros = torch.zeros(grouped.E + 1, dtype=torch.int64, device=DEVICE)
    x = torch.full((40, k), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    nobody = torch.full((40,), -1, dtype=torch.int32, device=DEVICE)
    out = cases.poisoned(40, 512, device=DEVICE)

    def calls(validate: bool) -> None:
        options = {"validate": validate, "config": config}
        assert chord.contiguous(none, given.packed, zeros, **options).shape == (0, 512)
        assert chord.contiguous(none, given.packed, m_indices=no_ids, **options).shape == (0, 512)
        chord.contiguous(x, given.packed, zeros, out, **options)
        chord.contiguous(x, given.packed, None, out, m_indices=nobody, **options)

    calls(validate=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls(validate=False)
    graph.replay()
    assert cases.is_poison(out)
    grouped.check_exact(chord.contiguous, given.packed, todo[:2], config)


@pytest.mark.field_case(9)
@pytest.mark.parametrize("form", ["expert_offsets", "m_indices"])
@each_choice
def test_replays_follow_new_counts(config: Config | None, form: str) -> None:
    """Counts change between replays of one graph, a bigger batch runs in between."""
    rows, n, k = 128, 512, cases.k_for(config, 7168)
    given, todo = exact_cases(n, k)
    x = cases.exact_x(rows, k, device=DEVICE)
    buffer, out = cases.guarded(rows, n, device=DEVICE)
    length = grouped.E + 1 if form == "expert_offsets" else rows
    table = torch.zeros(length, dtype=torch.int32, device=DEVICE)

    def step() -> None:
        chord.contiguous(x, given.packed, **{form: table}, out=out, validate=False, config=config)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    one_each = (16,) * grouped.E
    for counts in (one_each, (128, *[0] * 7), (0,) * 8, (*[0] * 7, 100), (1, 2, 3, 4, 5, 6, 7, 8)):
        owners = cases.owners_of_counts(counts, after=rows - sum(counts), device=DEVICE)
        offsets = torch.tensor((0, *counts), device=DEVICE).cumsum(0)
        table.copy_(offsets if form == "expert_offsets" else owners)
        buffer.fill_(cases.POISON)
        graph.replay()
        tolerance.assert_exact(out, grouped.rows_of(given, owners, x).bfloat16(), what=str(counts))
        assert cases.is_poison(buffer[0]) and cases.is_poison(buffer[-1])
        grouped.check_exact(chord.contiguous, given.packed, todo[8:10], config, validate=False)


@pytest.mark.field_case(9)
@pytest.mark.parametrize("form", [0, 1], ids=["expert_offsets", "m_indices"])
def test_a_cold_call_inside_capture_says_warm_up_first(form: int) -> None:
    given, todo = exact_cases(512, 7168)
    grouped.check_cold_capture(chord.contiguous, todo[form], given.packed)


@pytest.mark.field_case(9)
def test_a_graph_survives_a_bigger_batch() -> None:
    """48 experts, 65,536 rows between the replays of 128."""
    given = layer(512, 7168, num_experts=48)
    small = forms(given, tuple(cases.ragged_counts(48, 2)))[0]
    x = cases.exact_x(65_536, 7168, device=DEVICE)
    ends = torch.arange(49, device=DEVICE) * 65_536 // 48
    owners = cases.owners_of_counts(ends.diff().tolist(), device=DEVICE)
    big = (x, {"expert_offsets": ends}, owners)
    grouped.check_bigger_batch(chord.contiguous, given, small, big)


@pytest.mark.field_case(3)
@each_choice
@pytest.mark.parametrize(("n", "k"), [(7168, 256), (512, 7168)])
def test_rows_past_two_to_the_31(config: Config | None, n: int, k: int) -> None:
    """4.3 GB of outputs, then of inputs: byte 2^31 lies in row 149,796, element 2^31 in 299,593."""
    given, rows = layer(n, k), 299_600
    counts = (100, 149_690, 0, 20, 149_700, 80, 0, 10)
    assert sum(counts) == rows
    x, owners = long_rows(k, counts)
    out = cases.poisoned(rows, n, device=DEVICE)
    offsets = torch.tensor((0, *counts), device=DEVICE).cumsum(0)
    if not cases.takes(config, k):
        # x of a K that it takes reaches so far in 4,194,304 rows only.
        with pytest.raises(InputError, match=f"K={k} is more than max_k"):
            chord.contiguous(x, given.packed, offsets, out, validate=False, config=config)
        return
    chord.contiguous(x, given.packed, offsets, out, validate=False, config=config)
    named = [0, 99, 100, 149_789, *range(149_790, 149_811), 299_509, 299_593, 299_594, rows - 1]
    expected = grouped.rows_of(given, owners[named], x[named]).bfloat16()
    tolerance.assert_exact(out[named], expected)


@functools.lru_cache(maxsize=1)
def long_rows(k: int, counts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    x = cases.exact_x(sum(counts), k, device=DEVICE)
    return x, cases.owners_of_counts(counts, device=DEVICE)
