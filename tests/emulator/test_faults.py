"""The emulator notices: every check is proven by a fault that is planted in a kernel's source."""

from __future__ import annotations

import pytest
from faults import (
    BATCHES,
    DECODE,
    DIRECT,
    DIRECT_EIGHTS,
    DIRECT_ITEMS,
    EARLY,
    PREFILL,
    SORTED,
    Fault,
)
from launches import (
    DIRECT_8,
    DIRECT_16,
    PREFILL_32,
    PREFILL_LONG,
    Inputs,
    Shape,
    check,
    grouped_inputs,
    inputs,
)

from chord.emulator import EmulatorError
from chord.plan.config import Config, DecodeConfig, DirectConfig, PrefillConfig

pytestmark = pytest.mark.emulator

# Tiles that blocks share, more stages of K than the ring has, several tiles a block.
SHAPE = Shape(3, 264, 672, 40, top_k=2, num_blocks=5)
# A short K that leaves registers empty, several groups of tiles a block, experts with a tile and
# with two, and more positions than threads ask for.
SHORT = Shape(14, 72, 160, 55, top_k=2, num_blocks=2)
DECODE_16 = DecodeConfig(max_tokens=16, warps=8, block_k=128, stages=2)
PREFILL_16 = PrefillConfig(block_m=16, min_width=8, width_step=8, block_k=128, stages=2)
PREFILL_EARLY = PrefillConfig(block_m=16, min_width=8, width_step=8, block_k=128, stages=4)
CASES = [
    *((DECODE_16, fault) for fault in DECODE),
    *((DIRECT_8, fault) for fault in DIRECT),
    *((DIRECT_16, fault) for fault in DIRECT_EIGHTS),
    *((PREFILL_16, fault) for fault in PREFILL),
    *((PREFILL_EARLY, fault) for fault in EARLY),
    *((PREFILL_LONG, fault) for fault in BATCHES),
]


def shape_for(config: Config) -> Shape:
    return SHORT if isinstance(config, DirectConfig) else SHAPE


def sorted_rows() -> Inputs:
    """The same for rows that lie sorted, with tiles of one box and of two."""
    return grouped_inputs((5, 0, 29, 40), 264, 672, "offsets32")


@pytest.mark.parametrize(
    ("config", "fault"), CASES, ids=[f"{config.kernel}-{fault.name}" for config, fault in CASES]
)
def test_planted_fault_is_noticed(config: Config, fault: Fault) -> None:
    shape, replaced = shape_for(config), fault.replaced()
    with pytest.raises((EmulatorError, AssertionError), match=fault.message):
        check(
            config,
            inputs(shape),
            shape.num_blocks,
            seed=1,
            flavour=fault.flavour,
            replaced=replaced,
        )


@pytest.mark.parametrize("fault", SORTED, ids=lambda fault: fault.name)
def test_planted_fault_in_sorted_rows_is_noticed(fault: Fault) -> None:
    replaced = fault.replaced()
    with pytest.raises((EmulatorError, AssertionError), match=fault.message):
        check(PREFILL_32, sorted_rows(), SHAPE.num_blocks, seed=1, replaced=replaced)


@pytest.mark.parametrize("fault", DIRECT_ITEMS, ids=lambda fault: fault.name)
def test_planted_fault_in_tiles_that_are_items_is_noticed(fault: Fault) -> None:
    """One of the two inputs shows it; without the fault both are right."""
    few = [grouped_inputs(counts, 72, 160, "offsets32") for counts in ((3, 5, 8), (3, 0, 5, 8))]
    for made in few:
        check(DIRECT_8, made, 2, seed=1)
    with pytest.raises((EmulatorError, AssertionError), match=fault.message):
        for made in few:
            check(DIRECT_8, made, 2, seed=1, replaced=fault.replaced())


@pytest.mark.parametrize(
    "config", dict.fromkeys(config for config, _ in CASES), ids=lambda c: c.label()
)
def test_no_fault_is_noticed_without_one(config: Config) -> None:
    shape = shape_for(config)
    check(config, inputs(shape), shape.num_blocks, seed=1)


def test_no_fault_is_noticed_in_sorted_rows_without_one() -> None:
    check(PREFILL_32, sorted_rows(), SHAPE.num_blocks, seed=1)
