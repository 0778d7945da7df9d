// Loads and stores of shared and global memory, and the matrix forms of the shared ones.
#pragma once

#include <chord/kernels/common/types.cuh>

namespace chord::ptx {

extern "C" {
extern __shared__ __align__(1024) unsigned char chord_dynamic_smem[];
}

// Address of the first byte of the block's dynamic shared memory (aligned to 1,024 bytes). A plain
// move: the generic conversion adds the block's rank in its cluster at run time.
__forceinline__ SmemAddress dynamic_smem() {
  SmemAddress address;
  asm("mov.u32 %0, chord_dynamic_smem;" : "=r"(address) : "l"(&chord_dynamic_smem));
  return address;
}

__forceinline__ u32 load_shared(SmemAddress address) {
  u32 value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__forceinline__ U32x2 load_shared_x2(SmemAddress address) {
  U32x2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}

__forceinline__ U32x4 load_shared_x4(SmemAddress address) {
  U32x4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__forceinline__ void store_shared(SmemAddress address, u32 value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__forceinline__ void store_shared_x4(SmemAddress address, U32x4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// Adds for all threads at once, in any order: what it gives is to be read after a barrier.
__forceinline__ void add_shared(SmemAddress address, u32 value) {
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lanes 8 i to 8 i + 7 pass the row addresses of matrix i.
// Lane l receives elements (row l / 4, columns 2 (l % 4) and + 1) of matrix i in register i.
__forceinline__ void load_matrix_x4(u32 (&r)[4], SmemAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// The reverse with a transposition: lane l holds elements (row l / 4, columns 2 (l % 4) and + 1) of
// matrix i in register i; column c of matrix i becomes the 16 bytes at the address of lane 8 i + c.
__forceinline__ void store_matrix_x4_transposed(SmemAddress row, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Global loads of values that no one writes during the launch.
__forceinline__ int load_global(const int* address) {
  int value;
  asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(value) : "l"(address));
  return value;
}

__forceinline__ i64 load_global(const i64* address) {
  i64 value;
  asm volatile("ld.global.nc.s64 %0, [%1];" : "=l"(value) : "l"(address));
  return value;
}

__forceinline__ float load_global(const float* address) {
  float value;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(address));
  return value;
}

__forceinline__ u16 load_global(const u16* address) {
  u16 value;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(value) : "l"(address));
  return value;
}

// Weights, which nobody reads again: they stay out of L1, and their lines have the turn `policy`
// (copy.cuh) to leave L2.
__forceinline__ U32x4 load_weights_x4(const void* address, u64 policy) {
  U32x4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address), "l"(policy));
  return v;
}

__forceinline__ U32x2 load_weights_x2(const void* address, u64 policy) {
  U32x2 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
               : "=r"(v.x), "=r"(v.y)
               : "l"(address), "l"(policy));
  return v;
}

// A value that the kernel before this one may have written: after `wait_for_kernel_before`, or in a
// kernel that begins when all before it have ended.
__forceinline__ int load_written(const int* address) {
  int value;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// The same of 16 bytes that nobody reads again: they do not stay in L1.
__forceinline__ U32x4 load_written_once_x4(const void* address) {
  U32x4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

__forceinline__ void store_global(int* address, int value) {
  asm volatile("st.global.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__forceinline__ void store_global_x4(void* address, U32x4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// A store with a condition, which leaves no branch: what follows can be issued meanwhile.
__forceinline__ void store_global_x4_if(bool condition, void* address, U32x4 v) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %0, 0;\n"
      "@p st.global.v4.u32 [%1], {%2, %3, %4, %5};\n"
      "}\n" ::"r"(static_cast<u32>(condition)),
      "l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
      : "memory");
}

// For what the next kernel reads: it stays in L2 while a stream passes through. Written out to
// memory in the middle of one, a few MB cost the stream 1 to 2 %.
__forceinline__ void store_global_x4_evict_last(void* address, U32x4 v) {
  asm volatile(
      "{\n"
      ".reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_last.b64 policy, 1.0;\n"
      "st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, policy;\n"
      "}\n" ::"l"(address),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
      : "memory");
}

__forceinline__ void store_global_x4_evict_last_if(bool condition, void* address, U32x4 v) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b64 policy;\n"
      "setp.ne.u32 p, %0, 0;\n"
      "createpolicy.fractional.L2::evict_last.b64 policy, 1.0;\n"
      "@p st.global.L2::cache_hint.v4.u32 [%1], {%2, %3, %4, %5}, policy;\n"
      "}\n" ::"r"(static_cast<u32>(condition)),
      "l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
      : "memory");
}

// Partial sums that another block reads, each word for itself as soon as it is there.
__forceinline__ void store_partial(void* address, F32x4 v) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(v.x),
               "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

__forceinline__ F32x4 load_partial(const void* address) {
  F32x4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

// Releases what the storing thread wrote before, and what it knows of others.
__forceinline__ void store_release(u32* address, u32 value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Counts a counter that all blocks share up by one; returns what it held before. Orders nothing,
// and so does not hold the thread up.
__forceinline__ u32 take_number(u32* counter) {
  u32 before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}

// Adds to a counter that all blocks share; returns what it held before.
__forceinline__ u32 atomic_add(u32* address, u32 value) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(value)
               : "memory");
  return before;
}

}  // namespace chord::ptx
