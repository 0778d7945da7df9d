"""The emulator notices: every check is proven by a fault that is planted in a kernel's source."""

from __future__ import annotations

import pytest
from faults import DECODE, PREFILL, Fault
from launches import Shape, check, inputs

from chord.emulator import EmulatorError
from chord.plan.config import Config, DecodeConfig, PrefillConfig

pytestmark = pytest.mark.emulator

# Tiles that blocks share, more stages of K than the ring has, several tiles a block.
SHAPE = Shape(3, 264, 672, 40, top_k=2, num_blocks=5)
CASES = [
    *((DecodeConfig(max_tokens=16, warps=8, block_k=128, stages=2), fault) for fault in DECODE),
    *(
        (PrefillConfig(block_m=16, min_width=8, width_step=8, block_k=128, stages=2), fault)
        for fault in PREFILL
    ),
]


@pytest.mark.parametrize(
    ("config", "fault"), CASES, ids=[f"{config.kernel}-{fault.name}" for config, fault in CASES]
)
def test_planted_fault_is_noticed(config: Config, fault: Fault) -> None:
    replaced = fault.replaced()
    with pytest.raises((EmulatorError, AssertionError), match=fault.message):
        check(
            config,
            inputs(SHAPE),
            SHAPE.num_blocks,
            seed=1,
            flavour=fault.flavour,
            replaced=replaced,
        )


@pytest.mark.parametrize("config", {config for config, _ in CASES}, ids=lambda c: c.kernel)
def test_no_fault_is_noticed_without_one(config: Config) -> None:
    check(config, inputs(SHAPE), SHAPE.num_blocks, seed=1)
