// Sums across the lanes of a warp.
#pragma once

#include <chord/kernels/ptx/sync.cuh>

namespace chord {

// The sum of what the lanes below pass, in all 32 lanes; `all` becomes the sum of all.
__forceinline__ int sum_below(int lane, int own, int& all) {
  int inclusive = own;
  for (int delta = 1; delta < 32; delta *= 2) {
    const int other = ptx::shuffle_up(inclusive, delta);
    if (lane >= delta) inclusive += other;
  }
  all = ptx::shuffle(inclusive, 31);
  return inclusive - own;
}

}  // namespace chord
