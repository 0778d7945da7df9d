// When the lines of the weight stream leave L2.
//
// Before all others, once L2 is clean: a stream that takes the places of its own lines is 2 to 3 %
// faster than one that pushes out everybody's. Not before: what other kernels have written stays in
// L2 then, and as long as much of it lies there the stream is 3 % slower. So the first bytes of a
// long stream, twice as many as L2 has, leave in ordinary turn and take all that with them. A short
// stream has no time for it, and gains more (7 % at 130 MB) if nothing is written back for it.
#pragma once

#include <chord/kernels/common/types.cuh>
#include <chord/kernels/ptx/copy.cuh>
#include <chord/kernels/stage.cuh>

namespace chord {

// How many of the `stages` of `stage_bytes` that a block loads leave L2 in ordinary turn, the first
// ones. `l2_share`: bytes of L2 for each multiprocessor, and so for each block; 0 where the caller
// says that L2 is clean: none then. None in the layer's second stage either: a long first one has
// cleaned L2, and behind a short one it is short itself.
template <class Addressing>
__forceinline__ int ordinary_stages(i64 stages, int stage_bytes, int l2_share) {
  if constexpr (awaits<Addressing, Awaits::kRows>()) return 0;
  return stages * stage_bytes <= 4ll * l2_share ? 0 : 2 * l2_share / stage_bytes;
}

}  // namespace chord
