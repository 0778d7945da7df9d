"""The direct kernel on the CPU, bit for bit against exact results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from launches import (
    DIRECT_16,
    FORMS,
    Shape,
    check,
    foreign_blocks,
    grouped_inputs,
    inputs,
    owned_inputs,
    padding_first,
)

import cases
from chord.emulator import EmulatorError, run
from chord.plan.config import DirectConfig
from chord.routing import Contiguous

pytestmark = pytest.mark.emulator

HALF = DirectConfig(max_tokens=8, warps=2, max_k=128)
TWO_WARPS = DirectConfig(max_tokens=16, warps=2, max_k=64)
WIDE = DirectConfig(max_tokens=8, warps=16, max_k=256)
CONFIGS = (HALF, DIRECT_16, TWO_WARPS, WIDE)

SHAPES = (
    # Every K that fills registers, units and groups in part; then tails of N (a stripe has 64
    # features, a task 32).
    *(Shape(3, 136, k, 9, top_k=2) for k in range(32, 257, 32)),
    *(Shape(3, n, 160, 5, top_k=2) for n in (8, 24, 32, 40, 72, 264)),
    Shape(1, 7168, 256, 1, num_blocks=5),
    Shape(1, 7168, 64, 9, num_blocks=2),
    # Rows: ragged, several routing blocks an expert, tiles of several widths, 32 and more blocks.
    Shape(4, 256, 128, 37, top_k=2, block_m=16),
    Shape(2, 256, 128, 70, block_m=16),
    Shape(2, 264, 96, 130, block_m=64, num_blocks=4),
    Shape(3, 256, 128, 33, block_m=32, routing="skewed"),
    Shape(5, 256, 64, 40, top_k=2, block_m=1),
    Shape(5, 64, 64, 31, block_m=1),
    Shape(5, 64, 64, 32, block_m=1),
    Shape(5, 64, 64, 33, block_m=1),
    Shape(90, 128, 64, 200, top_k=2, block_m=1, num_blocks=4),
    Shape(7, 64, 160, 300, block_m=8),
    # Experts: none, one for all, more than rows, a row each, holes.
    Shape(4, 256, 128, 6, routing="none"),
    Shape(6, 256, 128, 21, routing="one_expert", num_blocks=4),
    Shape(40, 256, 64, 12, top_k=2, num_blocks=4),
    Shape(6, 256, 128, 24, top_k=3, routing="holes", num_blocks=4),
    Shape(24, 40, 96, 24, routing="one_each", num_blocks=2),
    # Runs that begin and end anywhere: more blocks than tasks, more tiles in a run than warps.
    Shape(1, 32, 32, 1, num_blocks=3),
    Shape(20, 32, 96, 40, num_blocks=1),
    Shape(90, 8, 64, 90, routing="one_each", num_blocks=1),
    Shape(30, 96, 64, 50, num_blocks=1),
    Shape(30, 200, 64, 60, top_k=2, num_blocks=3, block_m=16),
)

each_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.label())
each_form = pytest.mark.parametrize("form", FORMS)


@pytest.mark.parametrize(
    ("config", "shape"),
    [(config, shape) for config in CONFIGS for shape in SHAPES if cases.takes(config, shape.k)],
    ids=str,
)
def test_every_shape(config: DirectConfig, shape: Shape) -> None:
    check(config, inputs(shape), shape.num_blocks, seed=len(str(shape)))


@pytest.mark.parametrize("max_k", (64, 128, 192, 256))
@pytest.mark.parametrize("max_tokens", (8, 16))
def test_every_length_of_registers(max_tokens: int, max_k: int) -> None:
    config = DirectConfig(max_tokens, 6, max_k)
    for k in (32, max_k - 32, max_k):
        check(config, inputs(Shape(4, 104, k, 21, top_k=2)), 3, seed=k)


@pytest.mark.parametrize("config", (HALF, DIRECT_16), ids=lambda c: c.label())
@pytest.mark.parametrize("tokens", (1, 7, 8, 9, 15, 16, 17, 31, 33, 65))
def test_every_width(config: DirectConfig, tokens: int) -> None:
    check(config, inputs(Shape(1, 136, 128, tokens, block_m=16)), 2, seed=tokens)


@pytest.mark.parametrize("seed", range(6))
@each_config
def test_every_interleaving(config: DirectConfig, seed: int) -> None:
    """Several groups of row tiles a block."""
    check(config, inputs(Shape(40, 72, 64, 60, top_k=2)), 2, seed=seed)


@each_config
def test_same_bits_in_every_interleaving(config: DirectConfig) -> None:
    k = config.max_k
    shape = Shape(4, 136, k, 21)
    x, weights = cases.real_x(21, k), cases.random_weights(4, 136, k, kind="real")
    results = []
    for seed, num_blocks in enumerate((1, 3, 5)):
        out = torch.zeros(21, 136, dtype=torch.bfloat16)
        routing = inputs(shape).routing
        run(config, x, weights.pack(), routing, out, num_blocks=num_blocks, seed=seed)
        results.append(out)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    exact = cases.expected_rows(x, weights, cases.topk_ids(21, 1, 4))
    assert (results[0].float() - exact).norm() <= 0.01 * exact.norm()


@pytest.mark.parametrize("config", (HALF, DIRECT_16), ids=lambda c: c.label())
@pytest.mark.parametrize("k", (96, 128))
def test_every_code_and_place_of_k(config: DirectConfig, k: int) -> None:
    """One-hot rows: each output is one weight, so a code in a wrong place shows."""
    given = inputs(Shape(1, 64, k, k, block_m=8))
    x = cases.one_hot_x(torch.arange(k), k)
    expected = cases.expected_rows(x, given.weights, torch.zeros(k))
    check(config, replace(given, x=x, expected=expected), 3)


@pytest.mark.parametrize("expert", (-1, 4, 1 << 30))
@pytest.mark.parametrize("tokens", (10, 200))
def test_blocks_of_no_expert_here_are_skipped(tokens: int, expert: int) -> None:
    """In a warp's own table, and in one of the block."""
    given = inputs(Shape(4, 72, 128, tokens, top_k=2))
    check(DIRECT_16, foreign_blocks(given, 3, expert), 3)


@pytest.mark.parametrize("config", (HALF, DIRECT_16), ids=lambda c: c.label())
@pytest.mark.parametrize("tokens", (11, 150))
def test_padding_may_stand_between_rows(config: DirectConfig, tokens: int) -> None:
    """Tokens without a row come before those with one, and read the x of another."""
    check(config, padding_first(inputs(Shape(2, 72, 96, tokens, block_m=16))), 3)


@pytest.mark.parametrize("bits", (0x7FC0, 0x7F80), ids=("nan", "inf"))
def test_nan_and_infinity_stay_in_their_rows(bits: int) -> None:
    """Also in a place that a row without either takes after it."""
    given = inputs(Shape(30, 40, 96, 90, block_m=8))
    x = given.x.clone()
    x.view(torch.int16)[::7] = bits
    out = torch.zeros_like(given.expected, dtype=torch.bfloat16)
    run(DIRECT_16, x, given.weights.pack(), given.routing, out, num_blocks=1)
    spoilt = torch.zeros(90, dtype=torch.bool)
    spoilt[::7] = True
    assert torch.equal(out[~spoilt], given.expected[~spoilt].bfloat16())
    assert not out[spoilt].isfinite().any()


# --- rows grouped by expert -----------------------------------------------------------------------

COUNTS = (
    (5, 0, 17, 1),
    (0, 33, 0, 0, 8, 0),
    (1,),
    (70, 2),
    (1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1),
    tuple(cases.ragged_counts(31, 3, seed=2)),
    tuple(cases.ragged_counts(32, 3, seed=2)),
    tuple(cases.ragged_counts(33, 3, seed=2)),
    tuple(cases.ragged_counts(75, 2, seed=3)),
)


@pytest.mark.parametrize("counts", COUNTS, ids=lambda counts: f"{len(counts)}-{sum(counts)}")
@each_form
@each_config
def test_every_count(config: DirectConfig, form: str, counts: tuple[int, ...]) -> None:
    k = cases.k_for(config, 160)
    check(config, grouped_inputs(counts, 104, k, form), 3, seed=len(counts))


@each_form
def test_no_rows_at_all(form: str) -> None:
    check(DIRECT_16, grouped_inputs((0, 0, 0), 264, 160, form, max_m=4), 3)


@pytest.mark.field_case(5)
@pytest.mark.parametrize("form", ("offsets32", "masked"))
@pytest.mark.parametrize("room", (1, 4, 8, 17, 32, 63))
def test_groups_smaller_than_a_tile(room: int, form: str) -> None:
    given = grouped_inputs((room, 0, 1, room // 2), 136, 96, form)
    for config in (HALF, DIRECT_16):
        check(config, given, 3, seed=room)


def test_rows_of_nobody_between_those_of_an_expert() -> None:
    owners = cases.owners_of_counts((9, 0, 20, 3), before=2, after=7)
    owners[[5, 6, 12, 13, 20, 33]] = -1
    for dtype in (torch.int32, torch.int64):
        given = owned_inputs(owners, 72, 96, Contiguous(m_indices=owners.to(dtype)), 4)
        check(DIRECT_16, given, 3)


def test_more_stretches_than_a_launch_holds_stop_it() -> None:
    owners = torch.zeros(1026, dtype=torch.int32)
    owners[1::2] = -1
    given = owned_inputs(owners, 8, 32, Contiguous(m_indices=owners), 1)
    with pytest.raises(EmulatorError, match="trap"):
        check(DIRECT_16, given, 1)


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_wrong_values_stay_inside_x_and_out(dtype: torch.dtype) -> None:
    far = torch.iinfo(dtype).max
    owners = torch.tensor([0, 0, 1, 1, 1], dtype=torch.int32)
    offsets = torch.tensor([-7, 2, far], dtype=dtype)
    check(DIRECT_16, owned_inputs(owners, 72, 96, Contiguous(offsets), 2), 2)


# --- what else may go wrong -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", (Shape(2, 136, 160, 19, block_m=16), Shape(20, 8, 96, 60)), ids=str
)
def test_under_sanitizers(shape: Shape) -> None:
    check(DIRECT_16, inputs(shape), 2, flavour="sanitize")


@pytest.mark.parametrize("form", ("offsets64", "indices32", "masked"))
def test_grouped_under_sanitizers(form: str) -> None:
    check(DIRECT_16, grouped_inputs((5, 0, 19), 264, 96, form), 2, flavour="sanitize")
