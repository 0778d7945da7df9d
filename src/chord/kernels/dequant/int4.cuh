// INT4 codes with BF16 group scales -> BF16 fragments of operand A.
//
// The low 8 bits of a BF16 pattern count linearly: patterns 0 to 127 are the subnormals v * 2^-133,
// and at 128 the exponent becomes 1, whose spacing is the same. So a nibble in bits 0-3 is the
// exact value code * 2^-133 and one in bits 4-7 is code * 2^-129; no magic exponent has to be or-ed
// in and none subtracted. One fma gives the weight: code * 2^-133 * (s * 2^119) - 8 s * 2^-14.
// Product and addend are exact, so (code - 8) * s is rounded once, to BF16, and carries the factor
// 2^-14, which the epilogue takes out of the FP32 sums. Per 8 weights: 4 and, 1 shift, 4 fma; the
// usual 128 + code with a subtraction and a multiplication takes 15 instructions. The packed weight
// has s * 2^119 and s * 2^115 in place of s: where a group's scales cost one product instead of
// two, tiles of 32 tokens and more take up to 1.7 % less time.
#pragma once

#include <chord/kernels/common/types.cuh>
#include <chord/kernels/ptx/bf16.cuh>

namespace chord {

// Sums carry 2^-14; multiply by this before they leave.
inline constexpr float kUnscaleSum = 16384.f;

// What the weights of rows g and g + 8 of one group are made with, in both halves of a register.
struct GroupScale {
  u32 multiplier[2];
  u32 addend[2];
};

// `multipliers`: the stored scales, s * 2^119 of row g (low half; its nibbles are in bits 0-3) and
// s * 2^115 of row g + 8 (high half; bits 4-7).
__forceinline__ GroupScale prepare_scale(u32 multipliers) {
  constexpr u32 kMinusTwoToMinus130 = 0x8008u, kMinusTwoToMinus126 = 0x8080u;
  const u32 addends =
      ptx::mul_bf16x2(multipliers, (kMinusTwoToMinus126 << 16) | kMinusTwoToMinus130);
  return {{ptx::broadcast_low(multipliers), ptx::broadcast_high(multipliers)},
          {ptx::broadcast_low(addends), ptx::broadcast_high(addends)}};
}

// `word`: the eight codes of one lane and k16 step (weight_layout.cuh); `a`: operand A of mma and
// wgmma, times 2^-14.
__forceinline__ void dequantize(u32 (&a)[4], u32 word, const GroupScale& scale) {
  constexpr u32 kLowNibbles = 0x000f000fu;
  constexpr u32 kHighNibbles = 0x00f000f0u;
  const u32 upper = word >> 8;
  a[0] = ptx::fma_bf16x2(word & kLowNibbles, scale.multiplier[0], scale.addend[0]);
  a[1] = ptx::fma_bf16x2(word & kHighNibbles, scale.multiplier[1], scale.addend[1]);
  a[2] = ptx::fma_bf16x2(upper & kLowNibbles, scale.multiplier[0], scale.addend[0]);
  a[3] = ptx::fma_bf16x2(upper & kHighNibbles, scale.multiplier[1], scale.addend[1]);
}

}  // namespace chord
