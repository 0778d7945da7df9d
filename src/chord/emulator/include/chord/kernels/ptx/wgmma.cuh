// Host implementation of the header of the same name in chord/kernels/ptx, found before it on the
// include path. Same functions; the last argument is where the kernel calls from.
#pragma once

#include <chord/kernels/common/types.cuh>

#include "runtime/api.hpp"

namespace chord::ptx {

inline void wgmma_fence(emulator::Where where = emulator::Where::current()) {
  emulator::wgmma_fence(where);
}

inline void wgmma_commit(emulator::Where where = emulator::Where::current()) {
  emulator::wgmma_commit(where);
}

template <int kPending>
inline void wgmma_wait(emulator::Where where = emulator::Where::current()) {
  emulator::wgmma_wait(kPending, where);
}

template <int kEights>
inline void wgmma_pin(float (&d)[kEights][4], emulator::Where where = emulator::Where::current()) {
  emulator::wgmma_pin(&d[0][0], where);
}

template <int kEights>
inline void wgmma_m64k16(float (&d)[kEights][4], const u32 (&a)[4], u64 b_descriptor,
                         emulator::Where where = emulator::Where::current()) {
  static_assert(kEights >= 1 && kEights <= 32, "wgmma takes 8 to 256 tokens in steps of 8");
  emulator::wgmma(&d[0][0], kEights, a, b_descriptor, where);
}

}  // namespace chord::ptx
