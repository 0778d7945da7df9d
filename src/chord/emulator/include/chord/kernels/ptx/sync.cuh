// Host implementation of the header of the same name in chord/kernels/ptx, found before it on the
// include path. Same functions; the last argument is where the kernel calls from.
#pragma once

#include <chord/kernels/common/types.cuh>

#include "runtime/api.hpp"

namespace chord::ptx {

inline int thread_idx() { return emulator::thread_index(); }
inline int block_idx() { return emulator::block_index(); }
inline int grid_dim() { return emulator::block_count(); }

inline void sync_block(emulator::Where where = emulator::Where::current()) {
  emulator::sync_block(where);
}

inline bool sync_block_and(bool predicate, emulator::Where where = emulator::Where::current()) {
  return emulator::sync_block_and(predicate, where);
}

inline void sync_warp(emulator::Where where = emulator::Where::current()) {
  emulator::sync_warp(where);
}

inline void sync_named(int id, int threads, emulator::Where where = emulator::Where::current()) {
  emulator::sync_named(id, threads, where);
}

inline int opaque(int value) { return value; }

inline u32 ballot(bool predicate, emulator::Where where = emulator::Where::current()) {
  return emulator::ballot(predicate, where);
}

inline int shuffle(int value, int source_lane, emulator::Where where = emulator::Where::current()) {
  return emulator::shuffle(value, source_lane, where);
}

inline int shuffle_up(int value, int delta, emulator::Where where = emulator::Where::current()) {
  return emulator::shuffle_up(value, delta, where);
}

inline int sum_lanes(int value, emulator::Where where = emulator::Where::current()) {
  return emulator::sum_lanes(value, where);
}

inline u32 match(int value, emulator::Where where = emulator::Where::current()) {
  return emulator::match(value, where);
}

inline int count_bits(u32 mask) { return __builtin_popcount(mask); }

inline int highest_bit(u32 mask) { return mask == 0 ? -1 : 31 - __builtin_clz(mask); }

inline void fence_proxy_async(emulator::Where where = emulator::Where::current()) {
  emulator::fence_proxy_async(where);
}

inline void wait_for_kernel_before() { emulator::wait_for_kernel_before(); }

// A launch of the emulator is alone.
inline void let_kernel_after_begin() {}

template <int kRegisters>
inline void raise_registers(emulator::Where where = emulator::Where::current()) {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256,
                "setmaxnreg takes multiples of 8 from 24 to 256");
  emulator::set_registers(kRegisters, true, where);
}

template <int kRegisters>
inline void lower_registers(emulator::Where where = emulator::Where::current()) {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256,
                "setmaxnreg takes multiples of 8 from 24 to 256");
  emulator::set_registers(kRegisters, false, where);
}

inline void trap(emulator::Where where = emulator::Where::current()) { emulator::trap(where); }

}  // namespace chord::ptx
