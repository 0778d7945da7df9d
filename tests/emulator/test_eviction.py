"""How much of a stream leaves L2 in ordinary turn: no result of a kernel depends on it."""

from __future__ import annotations

import pytest
import torch

from chord.emulator.build import build_source
from chord.emulator.runner import OUTPUT, Launch, run_launch

pytestmark = pytest.mark.emulator

UNIT = """\
#include <chord/kernels/addressing/indexed.cuh>
#include <chord/kernels/addressing/routed.cuh>
#include <chord/kernels/eviction.cuh>
#include "runtime/launch.hpp"

using namespace chord;

static void enter(const void* params) {
  int* out = *static_cast<int* const*>(params);
  if (ptx::thread_idx() > 0) return;
  ptx::store_global(out, ordinary_stages<Indexed>(STAGES, BYTES, SHARE));
  ptx::store_global(out + 1, ordinary_stages<RoutedGateUp>(STAGES, BYTES, SHARE));
  ptx::store_global(out + 2, ordinary_stages<RoutedDown>(STAGES, BYTES, SHARE));
}

const ChordUnit chord_unit{enter, 32, 1024};
"""
H200_SHARE = (60 << 20) // 132


@pytest.mark.parametrize(
    ("stages", "stage_bytes", "share", "ordinary"),
    [
        (149, 36864, H200_SHARE, 25),  # EP8 gate_up, 20 tokens: twice L2
        (25, 36864, H200_SHARE, 0),  # TP8 gate_up, 8 tokens: short
        (51, 36864, H200_SHARE, 0),
        (52, 36864, H200_SHARE, 25),
        (1 << 33, 73728, H200_SHARE, 12),
        (1 << 33, 73728, 0, 0),
        (0, 36864, H200_SHARE, 0),
    ],
)
def test_long_streams_begin_in_ordinary_turn(
    stages: int, stage_bytes: int, share: int, ordinary: int
) -> None:
    unit = UNIT.replace("STAGES", f"{stages}ll").replace("BYTES", str(stage_bytes))
    library = build_source(unit.replace("SHARE", str(share)), "probe")
    out = torch.full((3,), -1, dtype=torch.int32)
    params = out.data_ptr().to_bytes(8, "little")
    run_launch(library, Launch(params, [("out", out, OUTPUT)]), num_blocks=1, seed=0)
    assert out.tolist() == [ordinary, ordinary, 0]
