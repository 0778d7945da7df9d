// Blocks of a cluster: neighbours that reach each other's shared memory.
#pragma once

#include <chord/kernels/common/types.cuh>

namespace chord::ptx {

// This block's number in its cluster.
__forceinline__ int cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// The two halves of a barrier of all threads of the cluster. It orders no memory accesses but the
// setting up of barriers before fence_mbarrier_init: a release would fence the whole card.
__forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Where `address` of this block's shared memory lies in that of block `rank`. Only functions of
// this header take such an address.
__forceinline__ ClusterAddress cluster_address(SmemAddress address, int rank) {
  ClusterAddress there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there.value) : "r"(address), "r"(rank));
  return there;
}

// Stores `value`, whose four bytes arrive on `barrier`, of the same block. Who has waited for the
// barrier may read it.
__forceinline__ void cluster_store(ClusterAddress address, int value, ClusterAddress barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
          address.value),
      "r"(value), "r"(barrier.value)
      : "memory");
}

// One arrival at a barrier of any block of the cluster. What it releases to other blocks is that
// this thread's earlier reads of shared memory are done: copies may follow. More would need a fence
// of the whole card.
__forceinline__ void cluster_mbarrier_arrive(ClusterAddress barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier.value) : "memory");
}

// tensor_load_2d (copy.cuh) to the same place in each block whose bit is set in `blocks`: the bytes
// arrive on the barrier at `barrier` of each.
__forceinline__ void cluster_tensor_load_2d(SmemAddress target, const TensorMap* map, int k,
                                            int row, SmemAddress barrier, u32 blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
      "l"(map), "r"(k), "r"(row), "r"(barrier), "h"(static_cast<u16>(blocks))
      : "memory");
}

}  // namespace chord::ptx
