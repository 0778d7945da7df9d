// Thread coordinates, barriers of the block and of the warp, votes, shuffles, fences.
#pragma once

#include <chord/kernels/common/types.cuh>

namespace chord::ptx {

__forceinline__ int thread_idx() { return static_cast<int>(threadIdx.x); }
__forceinline__ int block_idx() { return static_cast<int>(blockIdx.x); }
__forceinline__ int grid_dim() { return static_cast<int>(gridDim.x); }

// Waits for all threads of the block; orders their shared and global accesses.
__forceinline__ void sync_block() { asm volatile("barrier.sync 0;" ::: "memory"); }

// The same; says whether all of them pass true.
__forceinline__ bool sync_block_and(bool predicate) {
  u32 all;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.u32 p, %1, 0;\n"
      "barrier.red.and.pred q, 0, p;\n"
      "selp.u32 %0, 1, 0, q;\n"
      "}\n"
      : "=r"(all)
      : "r"(static_cast<u32>(predicate))
      : "memory");
  return all != 0;
}

// Waits for all 32 lanes; orders their memory accesses among each other.
__forceinline__ void sync_warp() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }

// Waits until `threads` threads of the block have reached named barrier `id` (1 to 15).
__forceinline__ void sync_named(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same value, of which the compiler knows nothing: what is computed from it is computed here
// and not kept in a register from further up.
__forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// One bit a lane: lane i's predicate in bit i. All 32 lanes take part.
__forceinline__ u32 ballot(bool predicate) {
  u32 mask;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %1, 0;\n"
      "vote.sync.ballot.b32 %0, p, 0xffffffff;\n"
      "}\n"
      : "=r"(mask)
      : "r"(static_cast<u32>(predicate)));
  return mask;
}

// The value that lane `source_lane` passes. All 32 lanes take part.
__forceinline__ int shuffle(int value, int source_lane) {
  int result;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, 0xffffffff;"
               : "=r"(result)
               : "r"(value), "r"(source_lane));
  return result;
}

// The value of the lane `delta` below, or the own value in the lowest `delta` lanes.
__forceinline__ int shuffle_up(int value, int delta) {
  int result;
  asm volatile("shfl.sync.up.b32 %0, %1, %2, 0, 0xffffffff;"
               : "=r"(result)
               : "r"(value), "r"(delta));
  return result;
}

// The sum of what the 32 lanes pass. All of them take part.
__forceinline__ int sum_lanes(int value) {
  int sum;
  asm volatile("redux.sync.add.s32 %0, %1, 0xffffffff;" : "=r"(sum) : "r"(value));
  return sum;
}

// The lanes that pass the same value, this one among them. All 32 lanes take part.
__forceinline__ u32 match(int value) {
  u32 mask;
  asm volatile("match.any.sync.b32 %0, %1, 0xffffffff;" : "=r"(mask) : "r"(value));
  return mask;
}

__forceinline__ int count_bits(u32 mask) {
  int count;
  asm("popc.b32 %0, %1;" : "=r"(count) : "r"(mask));
  return count;
}

// Index of the highest set bit, or -1 for zero.
__forceinline__ int highest_bit(u32 mask) {
  u32 position;
  asm("bfind.u32 %0, %1;" : "=r"(position) : "r"(mask));
  return static_cast<int>(position);
}

// Makes this thread's ordinary shared-memory accesses (and those it has synchronised with) visible
// to later accesses of the async proxy: bulk copies and wgmma operands.
__forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Waits until the kernel before this one on the stream has ended and what it wrote can be read;
// at once if this one was not launched as dependent. Ordinary loads and copies may follow.
__forceinline__ void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Says that the kernel after this one may begin once all blocks have said so, if it was launched as
// dependent. It sees nothing of what this kernel writes before it waits itself.
__forceinline__ void let_kernel_after_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Raises the calling warpgroup's register budget; blocks until the pool has them.
template <int kRegisters>
__forceinline__ void raise_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256,
                "setmaxnreg takes multiples of 8 from 24 to 256");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Gives registers of the calling warpgroup back to the pool.
template <int kRegisters>
__forceinline__ void lower_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256,
                "setmaxnreg takes multiples of 8 from 24 to 256");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Stops the whole launch with an error: for inputs that would give a wrong answer in silence.
__forceinline__ void trap() { asm volatile("trap;"); }

}  // namespace chord::ptx
