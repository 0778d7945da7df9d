// Arithmetic on single FP32 values, and FP16 on its way there.
#pragma once

#include <chord/kernels/common/types.cuh>

namespace chord::ptx {

// 2^x to about 2 ulp; 0 and infinity beyond the range.
__forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to 1 ulp; 0 for infinity.
__forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// NaN if one of them is: a fault upstream stays visible.
__forceinline__ float minimum(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

__forceinline__ float maximum(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// `bits`: an FP16 value.
__forceinline__ float half_to_float(u16 bits) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
  return y;
}

}  // namespace chord::ptx
