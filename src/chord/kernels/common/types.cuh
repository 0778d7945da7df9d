// Fixed-width integers and small vectors. Kernels include no system header, so that the NVRTC of
// PyTorch's wheels is all that a host needs.
#pragma once

namespace chord {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// A byte address in the block's shared memory, as the shared state space counts it.
using SmemAddress = u32;

struct alignas(8) U32x2 {
  u32 x, y;
};
struct alignas(16) U32x4 {
  u32 x, y, z, w;
};
struct alignas(16) F32x4 {
  float x, y, z, w;
};

// What the driver writes about a tensor (CUtensorMap), for copies of boxes of it. A kernel reads it
// from where its parameters lie.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

static_assert(sizeof(u32) == 4 && sizeof(u64) == 8, "kernels assume 32-bit int, 64-bit long long");

}  // namespace chord
