// Host implementation of the header of the same name in chord/kernels/ptx, found before it on the
// include path. Same functions; the last argument is where the kernel calls from.
#pragma once

#include <chord/kernels/common/types.cuh>

#include "runtime/api.hpp"

namespace chord::ptx {

inline int cluster_rank() { return emulator::cluster_rank(); }

inline void cluster_arrive(emulator::Where where = emulator::Where::current()) {
  emulator::cluster_arrive(where);
}

inline void cluster_wait(emulator::Where where = emulator::Where::current()) {
  emulator::cluster_wait(where);
}

inline ClusterAddress cluster_address(SmemAddress address, int rank,
                                      emulator::Where where = emulator::Where::current()) {
  return {emulator::cluster_address(address, rank, where)};
}

inline void cluster_store(ClusterAddress address, int value, ClusterAddress barrier,
                          emulator::Where where = emulator::Where::current()) {
  emulator::cluster_store(address.value, value, barrier.value, where);
}

inline void cluster_mbarrier_arrive(ClusterAddress barrier,
                                    emulator::Where where = emulator::Where::current()) {
  emulator::cluster_mbarrier_arrive(barrier.value, where);
}

inline void cluster_tensor_load_2d(SmemAddress target, const TensorMap* map, int k, int row,
                                   SmemAddress barrier, u32 blocks,
                                   emulator::Where where = emulator::Where::current()) {
  emulator::cluster_tensor_load_2d(target, map, k, row, barrier, blocks, where);
}

}  // namespace chord::ptx
