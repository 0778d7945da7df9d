// Host implementation of the header of the same name in chord/kernels/ptx, found before it on the
// include path. Same functions; the last argument is where the kernel calls from.
#pragma once

#include <chord/kernels/common/types.cuh>

#include "runtime/api.hpp"

namespace chord::ptx {

inline u64 evict_unchanged() { return 0; }
inline u64 evict_first() { return 1; }

inline void bulk_load(SmemAddress target, const void* source, int bytes, SmemAddress barrier,
                      u64 policy, emulator::Where where = emulator::Where::current()) {
  (void)policy;
  emulator::bulk_load(target, source, bytes, barrier, where);
}

inline void bulk_load(SmemAddress target, const void* source, int bytes, SmemAddress barrier,
                      emulator::Where where = emulator::Where::current()) {
  emulator::bulk_load(target, source, bytes, barrier, where);
}

inline void tensor_load_2d(SmemAddress target, const TensorMap* map, int k, int row,
                           SmemAddress barrier,
                           emulator::Where where = emulator::Where::current()) {
  emulator::tensor_load_2d(target, map, k, row, barrier, where);
}

inline void prefetch(const void* address, emulator::Where where = emulator::Where::current()) {
  emulator::prefetch(address, where);
}

inline void cp_async(SmemAddress target, const void* source,
                     emulator::Where where = emulator::Where::current()) {
  emulator::cp_async(target, source, true, where);
}

inline void cp_async_or_zero(SmemAddress target, const void* source, bool valid,
                             emulator::Where where = emulator::Where::current()) {
  emulator::cp_async(target, source, valid, where);
}

}  // namespace chord::ptx
