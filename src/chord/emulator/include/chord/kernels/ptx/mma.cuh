// Host implementation of the header of the same name in chord/kernels/ptx, found before it on the
// include path. Same functions; the last argument is where the kernel calls from.
#pragma once

#include <chord/kernels/common/types.cuh>

#include "runtime/api.hpp"

namespace chord::ptx {

inline void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                         emulator::Where where = emulator::Where::current()) {
  emulator::mma_m16n8k16(d, a, b0, b1, where);
}

}  // namespace chord::ptx
