"""The kernel sources, run on the CPU with every check of the emulator, against exact results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from launches import (
    PREFILL_32,
    PREFILL_LONG,
    Inputs,
    Shape,
    check,
    foreign_blocks,
    inputs,
    padding_first,
)

import cases
from chord.emulator import run
from chord.plan.config import Config, DecodeConfig, DirectConfig, PrefillConfig, shipped_configs
from chord.routing import Indexed

pytestmark = pytest.mark.emulator

DECODE_8 = DecodeConfig(max_tokens=8, warps=8, block_k=256, stages=2)
DECODE_16 = DecodeConfig(max_tokens=16, warps=8, block_k=128, stages=3)
DECODE_WIDE = DecodeConfig(max_tokens=24, warps=4, block_k=128, stages=2, warp_features=64)
DECODE_64 = DecodeConfig(max_tokens=64, warps=4, block_k=128, stages=2)
PREFILL_WIDE = PrefillConfig(
    block_m=112, min_width=80, width_step=8, block_k=128, stages=3, store_eights=3
)
PREFILL_64 = PrefillConfig(block_m=64, min_width=32, width_step=16, block_k=128, stages=3)

SHAPES = (
    # One of everything, then tails of K (32 more than a unit, fewer than a stage), then of N (a
    # feature tile has 256, a stripe 64, a row tile 16).
    Shape(4, 256, 256, 5),
    Shape(1, 256, 512, 1, num_blocks=1),
    Shape(3, 256, 32, 9, top_k=2),
    Shape(3, 256, 64, 9, top_k=2),
    Shape(3, 256, 96, 9, top_k=2),
    Shape(2, 256, 288, 6, top_k=2),
    Shape(2, 256, 1056, 3, top_k=2, num_blocks=4),
    Shape(3, 8, 64, 5, top_k=2),
    Shape(3, 72, 160, 5, top_k=2),
    Shape(2, 264, 128, 7, top_k=1),
    Shape(2, 520, 192, 7, top_k=2),
    # Split tiles: more blocks than tiles, runs that begin and end anywhere.
    Shape(1, 256, 2048, 3, num_blocks=5),
    Shape(2, 512, 1024, 4, num_blocks=5),
    Shape(2, 256, 544, 4, top_k=2, num_blocks=5),
    Shape(1, 64, 96, 1, num_blocks=5),
    # Rows: ragged, several routing blocks an expert, tiles of several widths.
    Shape(4, 256, 128, 37, top_k=2, block_m=16),
    Shape(2, 256, 128, 70, block_m=16),
    Shape(2, 264, 96, 130, block_m=64, num_blocks=4),
    Shape(3, 256, 128, 33, block_m=32, routing="skewed"),
    Shape(2, 256, 128, 17, block_m=64),
    Shape(5, 256, 64, 40, top_k=2, block_m=1),
    # Experts: none, one for all, empty ones between, more than rows, holes.
    Shape(4, 256, 128, 6, routing="none"),
    Shape(6, 256, 128, 21, routing="one_expert", num_blocks=4),
    Shape(40, 256, 64, 12, top_k=2, num_blocks=4),
    Shape(6, 256, 128, 24, top_k=3, routing="holes", num_blocks=4),
    Shape(5, 256, 64, 5, routing="one_each", num_blocks=2),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "config", (DECODE_8, DECODE_16, DECODE_WIDE, PREFILL_32, PREFILL_LONG), ids=lambda c: c.label()
)
def test_every_shape(config: Config, shape: Shape) -> None:
    check(config, inputs(shape), shape.num_blocks, seed=len(str(shape)))


@pytest.mark.parametrize("config", (DECODE_64, DECODE_WIDE, PREFILL_64), ids=lambda c: c.label())
@pytest.mark.parametrize("tokens", (1, 8, 9, 31, 33, 48, 49, 64, 65, 130))
def test_every_width(config: Config, tokens: int) -> None:
    shape = Shape(1, 136, 160, tokens, block_m=16)
    check(config, inputs(shape), 2, seed=tokens)


@pytest.mark.parametrize("config", shipped_configs("sm_90a"), ids=lambda c: c.label())
def test_every_shipped_configuration(config: Config) -> None:
    k, tokens = cases.k_for(config, 672), 3 * config.tile_rows + 5
    shape = Shape(3, 320, k, tokens, top_k=1, block_m=16, num_blocks=4)
    check(config, inputs(shape), shape.num_blocks)


@pytest.mark.parametrize("experts", (2, 24))
def test_numbers_of_rows_are_kept_or_asked_for(experts: int) -> None:
    """Large blocks of direct keep those of 256 positions; with 24 experts there are more."""
    config = DirectConfig(max_tokens=16, warps=16, max_k=256)
    shape = Shape(experts, 64, 160, experts, block_m=16, routing="one_each", num_blocks=4)
    check(config, inputs(shape), shape.num_blocks, seed=experts)


@pytest.mark.parametrize("k", (32, 96, 160, 192, 256))
@pytest.mark.parametrize("tokens", (130, 200))
def test_wide_tiles_of_a_short_k(k: int, tokens: int) -> None:
    """Several in a row for one block; K fills stages in part, and the last batch is a short one."""
    check(PREFILL_WIDE, inputs(Shape(3, 776, k, tokens, top_k=2, block_m=16)), 2, seed=k + tokens)


@pytest.mark.parametrize("config", (DECODE_16, PREFILL_32), ids=lambda c: c.label())
@pytest.mark.parametrize("seed", range(6))
def test_every_interleaving(config: Config, seed: int) -> None:
    check(config, inputs(Shape(3, 512, 416, 30, top_k=2)), 5, seed=seed)


@pytest.mark.parametrize("config", (DECODE_16, PREFILL_32), ids=lambda c: c.label())
@pytest.mark.parametrize("expert", (-1, 4, 1 << 30))
def test_blocks_of_no_expert_here_are_skipped(config: Config, expert: int) -> None:
    """Those of another rank, and what unchecked routing may hold beyond the last expert."""
    check(config, foreign_blocks(inputs(Shape(4, 256, 128, 40, top_k=2)), 3, expert), 3)


@pytest.mark.parametrize("config", (DECODE_16, PREFILL_32), ids=lambda c: c.label())
def test_padding_may_stand_between_rows(config: Config) -> None:
    """A routing block may hold pad slots anywhere, not only at its end."""
    check(config, padding_first(inputs(Shape(2, 256, 96, 11, block_m=16))), 3)


@pytest.mark.parametrize("config", (DECODE_8, PREFILL_32), ids=lambda c: c.label())
def test_every_code_and_place_of_k(config: Config) -> None:
    """One-hot rows: each output is one weight, so a code in a wrong place shows."""
    k = 96
    given = inputs(Shape(1, 64, k, k, block_m=8))
    x = cases.one_hot_x(torch.arange(k), k)
    expected = cases.expected_rows(x, given.weights, torch.zeros(k))
    check(config, replace(given, x=x, expected=expected), 3)


@pytest.mark.parametrize("config", (DECODE_16, PREFILL_32), ids=lambda c: c.label())
def test_under_sanitizers(config: Config) -> None:
    shape = Shape(2, 264, 160, 19, block_m=16, num_blocks=2)
    check(config, inputs(shape), shape.num_blocks, flavour="sanitize")


@pytest.mark.parametrize("config", (DECODE_16, PREFILL_32), ids=lambda c: c.label())
def test_same_bits_in_every_interleaving(config: Config) -> None:
    """REAL inputs: sums are rounded, so a changed order would show."""
    shape = Shape(2, 256, 1056, 9, block_m=8)
    given = inputs(shape)
    weights = cases.random_weights(2, 256, 1056, kind="real")
    x = cases.real_x(9, 1056)
    results = []
    for seed in range(3):
        out = torch.zeros(9, 256, dtype=torch.bfloat16)
        run(config, x, weights.pack(), given.routing, out, num_blocks=5, seed=seed)
        results.append(out)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    exact = cases.expected_rows(x, weights, cases.topk_ids(9, 1, 2))
    assert (results[0].float() - exact).norm() <= 0.01 * exact.norm()


def test_inputs_are_as_intended() -> None:
    """The routing of `inputs` is the one that `expected` was made for."""
    given: Inputs = inputs(SHAPES[0])
    routing: Indexed = given.routing
    routing.validate(SHAPES[0].tokens, SHAPES[0].num_experts)
