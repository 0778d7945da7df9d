// Asynchronous copies from global to shared memory.
#pragma once

#include <chord/kernels/common/types.cuh>

namespace chord::ptx {

// Which turn a line has to leave L2: the one it would have had, or before all others.
__forceinline__ u64 evict_unchanged() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__forceinline__ u64 evict_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Bulk copy of `bytes` (a multiple of 16, both addresses 16-byte aligned) whose lines have the turn
// `policy` to leave L2. Completion is counted in bytes on `barrier`.
__forceinline__ void bulk_load(SmemAddress target, const void* source, int bytes,
                               SmemAddress barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// The same for data that other blocks read too: activations stay in L2.
__forceinline__ void bulk_load(SmemAddress target, const void* source, int bytes,
                               SmemAddress barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// Copies the box of the map's tensor whose first element is (row, k), into shared memory as the map
// says: the bytes of a whole box arrive on `barrier`, and zeros stand for what lies outside.
__forceinline__ void tensor_load_2d(SmemAddress target, const TensorMap* map, int k, int row,
                                    SmemAddress barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(target),
      "l"(map), "r"(k), "r"(row), "r"(barrier)
      : "memory");
}

// Asks for the line of `address`: a later load finds it in L2.
__forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

// Copies 16 bytes through L2.
__forceinline__ void cp_async(SmemAddress target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

// The same; with `valid` false it reads nothing and writes 16 zero bytes.
__forceinline__ void cp_async_or_zero(SmemAddress target, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(valid ? 16 : 0)
               : "memory");
}

}  // namespace chord::ptx
