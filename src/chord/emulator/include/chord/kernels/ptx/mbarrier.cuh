// Host implementation of the header of the same name in chord/kernels/ptx, found before it on the
// include path. Same functions; the last argument is where the kernel calls from.
#pragma once

#include <chord/kernels/common/types.cuh>

#include "runtime/api.hpp"

namespace chord::ptx {

inline void mbarrier_init(SmemAddress barrier, int arrivals,
                          emulator::Where where = emulator::Where::current()) {
  emulator::mbarrier_init(barrier, arrivals, where);
}

inline void fence_mbarrier_init(emulator::Where where = emulator::Where::current()) {
  emulator::fence_mbarrier_init(where);
}

inline void mbarrier_arrive(SmemAddress barrier,
                            emulator::Where where = emulator::Where::current()) {
  emulator::mbarrier_arrive(barrier, where);
}

inline void mbarrier_arrive_expect_bytes(SmemAddress barrier, int bytes,
                                         emulator::Where where = emulator::Where::current()) {
  emulator::mbarrier_arrive_expect_bytes(barrier, bytes, where);
}

inline void mbarrier_arrive_after_cp_async(SmemAddress barrier,
                                           emulator::Where where = emulator::Where::current()) {
  emulator::mbarrier_arrive_after_cp_async(barrier, where);
}

inline void mbarrier_wait(SmemAddress barrier, u32 parity,
                          emulator::Where where = emulator::Where::current()) {
  emulator::mbarrier_wait(barrier, parity, where);
}

}  // namespace chord::ptx
