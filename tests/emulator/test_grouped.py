"""Rows grouped by expert, sorted or in slots, through the kernels on the CPU, bit for bit."""

from __future__ import annotations

import pytest
import torch
from launches import FORMS, PREFILL_32, PREFILL_LONG, check, grouped_inputs, owned_inputs

import cases
from chord import reference
from chord.emulator import EmulatorError
from chord.plan.config import Config, DecodeConfig, shipped_configs
from chord.routing import Contiguous, Masked

pytestmark = pytest.mark.emulator

DECODE = DecodeConfig(max_tokens=16, warps=8, block_k=128, stages=2)

each_config = pytest.mark.parametrize(
    "config", (DECODE, PREFILL_32, PREFILL_LONG), ids=("decode", "prefill", "prefill-long")
)
each_form = pytest.mark.parametrize("form", FORMS)

# Ragged, empty experts at both ends and in between, one row, none, several tiles an expert.
COUNTS = (
    (5, 0, 17, 1),
    (0, 33, 0, 0, 8, 0),
    (1,),
    (0, 0, 0),
    (70, 2),
    (1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1),
)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@each_form
@each_config
def test_every_count(config: Config, form: str, counts: tuple[int, ...]) -> None:
    if form == "masked" and not any(counts):
        check(config, grouped_inputs(counts, 264, 160, form, max_m=4), 3)
    else:
        check(config, grouped_inputs(counts, 264, 160, form), 3, seed=len(counts))


@each_form
@each_config
def test_many_experts(config: Config, form: str) -> None:
    """More experts than the lanes of a warp, most of them in other warps' part of the scan."""
    counts = tuple(cases.ragged_counts(75, 2, seed=3))
    check(config, grouped_inputs(counts, 64, 64, form), 4)


@each_form
@each_config
def test_split_tiles(config: Config, form: str) -> None:
    """More blocks than tiles: decode hands partial sums over."""
    check(config, grouped_inputs((3, 0, 20), 256, 1056, form), 7, seed=2)


@pytest.mark.field_case(5)
@pytest.mark.parametrize("max_m", (1, 4, 8, 17, 32, 63))
@each_config
def test_slots_smaller_than_a_tile(config: Config, max_m: int) -> None:
    """Counts of case 5: rows from a count on stay as they were, whoever finishes last."""
    counts = (max_m, 0, 1, max_m // 2)
    given = grouped_inputs(counts, 136, 96, "masked", max_m=max_m)
    for seed in range(3):
        check(config, given, 3, seed=seed)


@pytest.mark.field_case(5)
@pytest.mark.parametrize("room", (1, 8, 17, 63))
@each_config
def test_groups_smaller_than_a_tile(config: Config, room: int) -> None:
    """The same without gaps: a tile of one expert lies over the rows of the next."""
    given = grouped_inputs((room, 0, 1, room // 2), 136, 96, "offsets32")
    for seed in range(3):
        check(config, given, 3, seed=seed)


@each_form
@pytest.mark.parametrize("config", shipped_configs("sm_90a"), ids=lambda c: c.label())
def test_every_shipped_configuration(config: Config, form: str) -> None:
    """Ragged groups over several tiles, tails of N and K, more blocks than the narrow ones need."""
    k = cases.k_for(config, 352)
    check(config, grouped_inputs((5, 0, 17, 1, 190), 264, k, form), 3, seed=4)


@each_config
def test_rows_of_nobody_between_those_of_an_expert(config: Config) -> None:
    owners = cases.owners_of_counts((9, 0, 20, 3), before=2, after=7)
    owners[[5, 6, 12, 13, 20, 33]] = -1
    for dtype in (torch.int32, torch.int64):
        check(config, owned_inputs(owners, 72, 96, Contiguous(m_indices=owners.to(dtype)), 4), 3)


@each_config
def test_more_stretches_than_a_launch_holds_stop_it(config: Config) -> None:
    owners = torch.zeros(1026, dtype=torch.int32)
    owners[1::2] = -1
    given = owned_inputs(owners, 8, 32, Contiguous(m_indices=owners), 1)
    with pytest.raises(EmulatorError, match="trap"):
        check(config, given, 1)
    owners[:4] = -1
    check(config, owned_inputs(owners, 8, 32, Contiguous(m_indices=owners), 1), 1)


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
@each_config
def test_wrong_values_stay_inside_x_and_out(config: Config, dtype: torch.dtype) -> None:
    """Unchecked values may give wrong rows, but no access elsewhere: the emulator would see one."""
    far = torch.iinfo(dtype).max
    owners = torch.tensor([0, 0, 1, 1, 1], dtype=torch.int32)
    offsets = torch.tensor([-7, 2, far], dtype=dtype)
    check(config, owned_inputs(owners, 72, 96, Contiguous(offsets), 2), 2)
    indices = torch.tensor([0, -2, 1, far, 2], dtype=dtype)
    seen = torch.tensor([0, -1, 1, -1, -1], dtype=torch.int32)
    check(config, owned_inputs(seen, 72, 96, Contiguous(m_indices=indices), 2), 2)
    if dtype is torch.int32:
        counts = torch.tensor([far, -5, 3], dtype=dtype)
        check(config, owned_inputs(cases.owners_of_slots((4, 0, 3), 4), 72, 96, Masked(counts)), 2)


@pytest.mark.parametrize("form", ("offsets64", "indices32", "masked"))
@each_config
def test_under_sanitizers(config: Config, form: str) -> None:
    check(config, grouped_inputs((5, 0, 19), 264, 96, form), 2, flavour="sanitize")


@each_form
def test_inputs_are_as_intended(form: str) -> None:
    """`expected` is what the reference gives, and the routing is valid."""
    given = grouped_inputs((5, 0, 17, 1), 72, 96, form, max_m=19)
    packed = given.weights.pack()
    given.routing.validate(given.x.shape[-2], packed.num_experts)
    out = torch.full((len(given.expected), 72), float("nan"), dtype=torch.bfloat16)
    if isinstance(given.routing, Masked):
        shaped = out.view(4, 19, 72)
        reference.masked(given.x, packed, given.routing.tokens_per_expert, shaped)
    else:
        where = given.routing
        reference.contiguous(given.x, packed, where.expert_offsets, out, m_indices=where.m_indices)
    expected = given.expected.bfloat16()
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
