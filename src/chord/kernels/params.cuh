// What a launch passes to a kernel: one struct by value. The host mirrors it (jit/params.py) and
// the rendered unit asserts the size.
#pragma once

#include <chord/kernels/common/types.cuh>

namespace chord {

struct GemmParams {
  const void* x;       // BF16 activations, rows of k elements
  const void* weight;  // packed units (weight_layout.cuh)
  void* out;           // BF16 result, rows of n elements
  float* partial;      // decode: partial sums of split tiles, kNoSum between launches
  u32* counters;       // prefill: two, zero between launches
  int l2_share;        // bytes of L2 for each multiprocessor; 0: L2 is clean
  int num_experts;
  int n;
  int k;
};
static_assert(sizeof(GemmParams) == 56, "GemmParams must match jit/params.py");

template <class Addressing>
struct Params {
  GemmParams gemm;
  typename Addressing::Params addressing;
};

}  // namespace chord
