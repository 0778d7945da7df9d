// A ring of stages in shared memory between one loader and several multiplying warps.
#pragma once

#include <chord/kernels/ptx/mbarrier.cuh>

namespace chord {

// Where a role stands in the ring. `phase` flips each time around.
template <int kStages>
struct RingPosition {
  int stage = 0;
  u32 phase = 0;

  void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Barrier pairs of the ring: `full` when a stage's bytes have arrived, `empty` when all multiplying
// warps have released it.
template <int kStages>
struct Ring {
  SmemAddress base;

  SmemAddress full(int stage) const { return base + 16 * stage; }
  SmemAddress empty(int stage) const { return base + 16 * stage + 8; }

  // One thread calls it; the block synchronises afterwards.
  void init(int full_arrivals, int empty_arrivals) const {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(full(stage), full_arrivals);
      ptx::mbarrier_init(empty(stage), empty_arrivals);
    }
    ptx::fence_mbarrier_init();
  }
  void wait_full(RingPosition<kStages> at) const { ptx::mbarrier_wait(full(at.stage), at.phase); }
  // The first time around every stage is empty: the phase before the first counts as ended.
  void wait_empty(RingPosition<kStages> at) const {
    ptx::mbarrier_wait(empty(at.stage), at.phase ^ 1);
  }
};

}  // namespace chord
