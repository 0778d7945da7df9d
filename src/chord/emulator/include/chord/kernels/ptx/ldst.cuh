// Host implementation of the header of the same name in chord/kernels/ptx, found before it on the
// include path. Same functions; the last argument is where the kernel calls from.
#pragma once

#include <chord/kernels/common/types.cuh>

#include "runtime/api.hpp"

namespace chord::ptx {

// The card's own KiB lies below; addresses and offsets cannot be mixed up unnoticed.
inline SmemAddress dynamic_smem() { return 1024; }

template <class T>
T read_shared(SmemAddress address, emulator::Where where) {
  T value;
  emulator::read_shared(address, &value, sizeof value, where);
  return value;
}

template <class T>
T read_global(const void* address, emulator::Where where) {
  T value;
  emulator::read_global(address, &value, sizeof value, where);
  return value;
}

inline u32 load_shared(SmemAddress address, emulator::Where where = emulator::Where::current()) {
  return read_shared<u32>(address, where);
}

inline U32x2 load_shared_x2(SmemAddress address,
                            emulator::Where where = emulator::Where::current()) {
  return read_shared<U32x2>(address, where);
}

inline U32x4 load_shared_x4(SmemAddress address,
                            emulator::Where where = emulator::Where::current()) {
  return read_shared<U32x4>(address, where);
}

inline void store_shared(SmemAddress address, u32 value,
                         emulator::Where where = emulator::Where::current()) {
  emulator::write_shared(address, &value, 4, where);
}

inline void store_shared_x4(SmemAddress address, U32x4 v,
                            emulator::Where where = emulator::Where::current()) {
  emulator::write_shared(address, &v, 16, where);
}

inline void add_shared(SmemAddress address, u32 value,
                       emulator::Where where = emulator::Where::current()) {
  emulator::add_shared(address, value, where);
}

inline void load_matrix_x4(u32 (&r)[4], SmemAddress row,
                           emulator::Where where = emulator::Where::current()) {
  emulator::load_matrix_x4(r, row, where);
}

inline void store_matrix_x4_transposed(SmemAddress row, const u32 (&r)[4],
                                       emulator::Where where = emulator::Where::current()) {
  emulator::store_matrix_x4_transposed(row, r, where);
}

inline int load_global(const int* address, emulator::Where where = emulator::Where::current()) {
  return read_global<int>(address, where);
}

inline i64 load_global(const i64* address, emulator::Where where = emulator::Where::current()) {
  return read_global<i64>(address, where);
}

inline float load_global(const float* address, emulator::Where where = emulator::Where::current()) {
  return read_global<float>(address, where);
}

inline u16 load_global(const u16* address, emulator::Where where = emulator::Where::current()) {
  return read_global<u16>(address, where);
}

inline U32x4 load_weights_x4(const void* address, u64 policy,
                             emulator::Where where = emulator::Where::current()) {
  (void)policy;
  return read_global<U32x4>(address, where);
}

inline U32x2 load_weights_x2(const void* address, u64 policy,
                             emulator::Where where = emulator::Where::current()) {
  (void)policy;
  return read_global<U32x2>(address, where);
}

inline int load_written(const int* address, emulator::Where where = emulator::Where::current()) {
  return read_global<int>(address, where);
}

inline U32x4 load_written_once_x4(const void* address,
                                  emulator::Where where = emulator::Where::current()) {
  return read_global<U32x4>(address, where);
}

inline void store_global(int* address, int value,
                         emulator::Where where = emulator::Where::current()) {
  emulator::write_global(address, &value, 4, where);
}

inline void store_global_x4(void* address, U32x4 v,
                            emulator::Where where = emulator::Where::current()) {
  emulator::write_global(address, &v, 16, where);
}

inline void store_global_x4_if(bool condition, void* address, U32x4 v,
                               emulator::Where where = emulator::Where::current()) {
  if (condition) emulator::write_global(address, &v, 16, where);
}

inline void store_global_x4_evict_last(void* address, U32x4 v,
                                       emulator::Where where = emulator::Where::current()) {
  store_global_x4(address, v, where);
}

inline void store_global_x4_evict_last_if(bool condition, void* address, U32x4 v,
                                          emulator::Where where = emulator::Where::current()) {
  store_global_x4_if(condition, address, v, where);
}

inline void store_partial(void* address, F32x4 v,
                          emulator::Where where = emulator::Where::current()) {
  emulator::write_partial(address, &v, 16, where);
}

inline F32x4 load_partial(const void* address, emulator::Where where = emulator::Where::current()) {
  F32x4 v;
  emulator::read_partial(address, &v, 16, where);
  return v;
}

inline void store_release(u32* address, u32 value,
                          emulator::Where where = emulator::Where::current()) {
  emulator::write_counter(address, value, where);
}

inline u32 take_number(u32* counter, emulator::Where where = emulator::Where::current()) {
  return emulator::atomic_add(counter, 1, where);
}

inline u32 atomic_add(u32* address, u32 value, emulator::Where where = emulator::Where::current()) {
  return emulator::atomic_add(address, value, where);
}

}  // namespace chord::ptx
