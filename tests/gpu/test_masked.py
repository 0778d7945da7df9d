"""chord.masked on the card: any max_m, every shipped configuration, bit for bit."""

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


def slots_case(given: Layer, counts: tuple[int, ...], max_m: int, expected: int | None) -> Case:
    owners = cases.owners_of_slots(counts, max_m, device=DEVICE)
    tokens = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    where = {"tokens_per_expert": tokens, "expected": expected}
    name = f"{counts} of {max_m}, expected={expected}"
    return grouped.make_case(name, given, owners, (len(counts), max_m), where)


@functools.lru_cache(maxsize=2)
def exact_cases(n: int, k: int) -> tuple[Layer, list[Case]]:
    given = layer(n, k)
    made = []
    for counts in grouped.COUNTS:
        most = max(*counts, 1)
        made += [slots_case(given, counts, max_m, None) for max_m in (most, most + 13)]
    return given, made


@pytest.fixture(scope="module", params=grouped.SHAPES, ids=lambda shape: f"N{shape[0]}-K{shape[1]}")
def shape(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


@pytest.mark.field_case(4)
@each_config
def test_exact_inputs_match_bit_for_bit(shape: tuple[int, int], config: Config) -> None:
    """Slots not in use hold NaN and are not written, nor are guard rows."""
    given, todo = exact_cases(shape[0], cases.k_for(config, shape[1]))
    grouped.check_exact(chord.masked, given.packed, todo, config, validate=False)


@pytest.mark.field_case(4)
@pytest.mark.parametrize(("n", "k"), cases.RAGGED_SHAPES)
def test_shapes_that_are_not_tile_multiples(n: int, k: int) -> None:
    """All of case 4: each configuration and the planner's own choice."""
    for config in (None, *grouped.CONFIGS):
        given, todo = ragged_cases(n, cases.k_for(config, k))
        grouped.check_exact(chord.masked, given.packed, todo, config, validate=False)


@functools.lru_cache(maxsize=2)
def ragged_cases(n: int, k: int) -> tuple[Layer, list[Case]]:
    given = layer(n, k)
    counts_of_each = grouped.TOKENS_COUNTS
    return given, [slots_case(given, counts, max(counts), None) for counts in counts_of_each]


def test_the_planners_own_choice(shape: tuple[int, int]) -> None:
    """config=None, values validated as well."""
    given, todo = exact_cases(*shape)
    grouped.check_exact(chord.masked, given.packed, todo, None)


# --- field case 5 ---------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def small_slots(k: int) -> tuple[Layer, list[Case], Layer, Case]:
    """Return the cases of four experts, and the call that follows them with two."""
    given = layer(4096, k, num_experts=4)
    todo = [
        slots_case(given, (max_m, 0, 1, max_m // 2), max_m, expected)
        for max_m in grouped.SMALL_ROOMS
        for expected in (1, 64)
    ]
    other = layer(512, k, num_experts=2)
    return given, todo, other, slots_case(other, (128, 77), 128, None)


@pytest.mark.field_case(5)
@each_choice
def test_slots_smaller_than_a_tile(config: Config | None) -> None:
    given, todo, other, after = small_slots(cases.k_for(config, 7168))
    grouped.check_exact(chord.masked, given.packed, todo, config, repeats=50, validate=False)
    grouped.check_exact(chord.masked, other.packed, [after], config)


# --- single properties ----------------------------------------------------------------------------


@each_config
def test_real_inputs_stay_within_the_row_limit(config: Config) -> None:
    n, k, counts, max_m = 1856, cases.k_for(config, 2688), grouped.COUNTS[2], 203
    given = layer(n, k, kind="real")
    x = cases.real_x(grouped.E * max_m, k, device=DEVICE).view(grouped.E, max_m, k)
    tokens = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    out = chord.masked(x, given.packed, tokens, config=config)
    expected = x.double() @ given.weights.dequantize(torch.float64).transpose(1, 2)
    for expert, count in enumerate(counts):
        what = f"expert {expert}"
        tolerance.assert_rows_close(out[expert, :count], expected[expert, :count], what=what)
        assert not out[expert, count:].any()


@pytest.mark.parametrize("max_m", [17, 203])
@each_config
def test_repeats_and_replays_give_the_same_bits(config: Config, max_m: int) -> None:
    k = cases.k_for(config, 7168)
    given = layer(512, k, kind="real")
    counts = tuple(min(count, max_m) for count in grouped.COUNTS[2])
    case = slots_case(given, counts, max_m, None)
    x = cases.real_x(grouped.E * max_m, k, device=DEVICE).view(case.x.shape)
    real = Case(case.name, x, case.where, case.expected)
    grouped.check_bits(chord.masked, real, given.packed, config)


@pytest.mark.field_case(2)
@each_choice
def test_no_rows_in_use(config: Config | None) -> None:
    """Parts (c), (e) and (f): 48 experts with 64 slots each, none in use."""
    k = cases.k_for(config, 7168)
    given = layer(512, k, num_experts=48)
    x = torch.full((48, 64, k), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    tokens = torch.zeros(48, dtype=torch.int32, device=DEVICE)
    out = cases.poisoned(48, 64, 512, device=DEVICE)
    no_slots = torch.zeros(48, 0, k, dtype=torch.bfloat16, device=DEVICE)

    def calls(validate: bool) -> None:
        options = {"expected": 0, "validate": validate, "config": config}
        assert chord.masked(no_slots, given.packed, tokens, **options).shape == (48, 0, 512)
        chord.masked(x, given.packed, tokens, out, **options)

    calls(validate=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls(validate=False)
    graph.replay()
    assert cases.is_poison(out)
    usual = slots_case(given, tuple(cases.ragged_counts(48, 8)), 64, 8)
    grouped.check_exact(chord.masked, given.packed, [usual], config)


@pytest.mark.field_case(9)
@each_choice
def test_replays_follow_new_counts(config: Config | None) -> None:
    """Counts change between replays of one graph, a bigger batch runs in between."""
    max_m, n, k = 16, 512, cases.k_for(config, 7168)
    given, todo = exact_cases(n, k)
    x = cases.exact_x(grouped.E * max_m, k, device=DEVICE)
    buffer, rows = cases.guarded(grouped.E * max_m, n, device=DEVICE)
    tokens = torch.zeros(grouped.E, dtype=torch.int32, device=DEVICE)
    slots, out = x.view(grouped.E, max_m, -1), rows.view(grouped.E, max_m, n)

    def step() -> None:
        chord.masked(slots, given.packed, tokens, out, expected=4, validate=False, config=config)

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
    for counts in ((16,) * 8, (16, *[0] * 7), (0,) * 8, (*[0] * 7, 3), (1, 2, 3, 4, 5, 6, 7, 8)):
        tokens.copy_(torch.tensor(counts))
        owners = cases.owners_of_slots(counts, max_m, device=DEVICE)
        buffer.fill_(cases.POISON)
        graph.replay()
        expected = grouped.rows_of(given, owners, x).bfloat16()
        tolerance.assert_exact(rows, expected, what=str(counts))
        assert cases.is_poison(buffer[0]) and cases.is_poison(buffer[-1])
        grouped.check_exact(chord.masked, given.packed, todo[4:6], config, validate=False)


@pytest.mark.field_case(9)
def test_a_cold_call_inside_capture_says_warm_up_first() -> None:
    given, todo = exact_cases(512, 7168)
    grouped.check_cold_capture(chord.masked, todo[0], given.packed)


@pytest.mark.field_case(9)
def test_a_graph_survives_a_bigger_batch() -> None:
    """48 experts, 1,365 slots each between the replays of 16."""
    given = layer(512, 7168, num_experts=48)
    small = slots_case(given, tuple(cases.ragged_counts(48, 3)), 16, 3)
    x = cases.exact_x(48 * 1365, 7168, device=DEVICE).view(48, 1365, 7168)
    counts = [29 * expert for expert in range(48)]
    tokens = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    owners = cases.owners_of_slots(counts, 1365, device=DEVICE)
    big = (x, {"tokens_per_expert": tokens}, owners)
    grouped.check_bigger_batch(chord.masked, given, small, big)


@pytest.mark.field_case(3)
@each_choice
@pytest.mark.parametrize(("n", "k"), [(7168, 256), (512, 7168)])
def test_rows_past_two_to_the_31(config: Config | None, n: int, k: int) -> None:
    """4.3 GB of outputs, then of inputs: byte 2^31 lies in slot 149,796, element 2^31 in 299,593.

    Experts 3 and 7 have 37,450 slots each; those places lie in them.
    """
    given, max_m = layer(n, k), 37_450
    counts = (3, 0, 20, 37_450, 1, 0, 9, 37_449)
    slots = long_slots(k, max_m)
    out = cases.poisoned(grouped.E, max_m, n, device=DEVICE)
    tokens = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    if not cases.takes(config, k):
        # x of a K that it takes reaches so far in 4,194,304 rows only.
        with pytest.raises(InputError, match=f"K={k} is more than max_k"):
            chord.masked(slots, given.packed, tokens, out, validate=False, config=config)
        return
    chord.masked(slots, given.packed, tokens, out, validate=False, config=config)
    named = [0, 2, 3, *range(149_790, 149_802), 299_593, 299_594, 299_598, 299_599]
    owners = cases.owners_of_slots(counts, max_m, device=DEVICE)
    expected = grouped.rows_of(given, owners[named], slots.view(-1, k)[named]).bfloat16()
    tolerance.assert_exact(out.view(-1, n)[named], expected)


@functools.lru_cache(maxsize=1)
def long_slots(k: int, max_m: int) -> torch.Tensor:
    return cases.exact_x(grouped.E * max_m, k, device=DEVICE).view(grouped.E, max_m, k)
