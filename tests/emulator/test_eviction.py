"""How much of a stream leaves L2 in ordinary turn: no result of a kernel depends on it."""

from __future__ import annotations

import struct

import pytest
import torch

from chord import device as devices
from chord.emulator.build import build_source
from chord.emulator.runner import OUTPUT, Launch, run_launch

pytestmark = pytest.mark.emulator

UNIT = """\
#include <chord/kernels/addressing/indexed.cuh>
#include <chord/kernels/addressing/routed.cuh>
#include <chord/kernels/eviction.cuh>
#include "runtime/launch.hpp"

using namespace chord;

struct Params {
  int* out;
  i64 stages;
  int stage_bytes;
  int share;
};

static void enter(const void* params) {
  const Params p = *static_cast<const Params*>(params);
  if (ptx::thread_idx() > 0) return;
  ptx::store_global(p.out, ordinary_stages<Indexed>(p.stages, p.stage_bytes, p.share));
  ptx::store_global(p.out + 1, ordinary_stages<RoutedGateUp>(p.stages, p.stage_bytes, p.share));
  ptx::store_global(p.out + 2, ordinary_stages<RoutedDown>(p.stages, p.stage_bytes, p.share));
}

const ChordUnit chord_unit{enter, 32, 1024};
"""
H200 = devices.known("h200")
H200_SHARE = H200.l2_bytes // H200.num_sms


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
    library = build_source(UNIT, "probe")
    out = torch.full((3,), -1, dtype=torch.int32)
    params = struct.pack("@Pqii", out.data_ptr(), stages, stage_bytes, share)
    run_launch(library, Launch(params, [("out", out, OUTPUT)]), num_blocks=1, seed=0)
    assert out.tolist() == [ordinary, ordinary, 0]
