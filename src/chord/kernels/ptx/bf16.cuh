// Arithmetic on pairs of BF16 values in one 32-bit register (low half = first element).
#pragma once

#include <chord/kernels/common/types.cuh>

namespace chord::ptx {

// a * b + c with one rounding; subnormal values count.
__forceinline__ u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

__forceinline__ u32 mul_bf16x2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// Rounds two FP32 values to BF16, to nearest even.
__forceinline__ u32 pack_bf16x2(float low, float high) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

// Both halves of the result are the low (high) half of the argument.
__forceinline__ u32 broadcast_low(u32 pair) {
  u32 d;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low}; }"
      : "=r"(d)
      : "r"(pair));
  return d;
}

__forceinline__ u32 broadcast_high(u32 pair) {
  u32 d;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high}; }"
      : "=r"(d)
      : "r"(pair));
  return d;
}

}  // namespace chord::ptx
