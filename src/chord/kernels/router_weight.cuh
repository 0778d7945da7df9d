// The router's weights as callers have them, read as FP32.
#pragma once

#include <chord/kernels/common/types.cuh>
#include <chord/kernels/ptx/float.cuh>
#include <chord/kernels/ptx/ldst.cuh>

namespace chord {

// Counted as in jit/params.py.
enum class WeightType : int { kFloat32, kBfloat16, kFloat16 };

struct RouterWeights {
  const void* data;  // one a route; null: none, all count 1
  WeightType type;

  bool exist() const { return data != nullptr; }
  float load(i64 route) const {
    if (type == WeightType::kFloat32) {
      return ptx::load_global(static_cast<const float*>(data) + route);
    }
    const u16 bits = ptx::load_global(static_cast<const u16*>(data) + route);
    if (type == WeightType::kFloat16) return ptx::half_to_float(bits);
    return __builtin_bit_cast(float, static_cast<u32>(bits) << 16);
  }
};
static_assert(sizeof(RouterWeights) == 16, "RouterWeights must match jit/params.py");

}  // namespace chord
