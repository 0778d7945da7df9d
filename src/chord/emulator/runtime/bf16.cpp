#include "bf16.hpp"

#include <cmath>

#include "api.hpp"
#include "machine.hpp"

namespace chord::emulator {

namespace {

// Rounds a double to float so that a second rounding to BF16 is right: to odd, which keeps the mark
// of what was cut off. `error` is what `value` itself lacks.
float round_to_odd(double value, double error) {
  if (error != 0) {
    const std::uint64_t bits = std::bit_cast<std::uint64_t>(value);
    if ((bits & 1) == 0) {
      const bool away = (error > 0) == (value > 0);
      value = std::bit_cast<double>(away ? bits + 1 : bits - 1);
    }
  }
  const float rounded = static_cast<float>(value);
  if (static_cast<double>(rounded) == value || !std::isfinite(rounded)) return rounded;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(rounded);
  if ((bits & 1) != 0) return rounded;
  const bool away = std::fabs(value) > std::fabs(static_cast<double>(rounded));
  return std::bit_cast<float>(away ? bits + 1 : bits - 1);
}

std::uint32_t fma_bf16(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  // The product of two BF16 values is exact in double; the sum's error follows by Knuth's two-sum.
  const double product = static_cast<double>(bf16_to_float(a)) * bf16_to_float(b);
  const double addend = bf16_to_float(c);
  const double sum = product + addend;
  if (!std::isfinite(sum)) return float_to_bf16(static_cast<float>(sum));
  const double part = sum - product;
  const double error = (product - (sum - part)) + (addend - part);
  return float_to_bf16(round_to_odd(sum, error));
}

}  // namespace

std::uint32_t fma_bf16x2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  return fma_bf16(a & 0xffff, b & 0xffff, c & 0xffff) | fma_bf16(a >> 16, b >> 16, c >> 16) << 16;
}

std::uint32_t mul_bf16x2(std::uint32_t a, std::uint32_t b) {
  constexpr std::uint32_t kMinusZero = 0x80008000u;  // keeps the sign of a product that is zero
  return fma_bf16x2(a, b, kMinusZero);
}

std::uint32_t pack_bf16x2(float low, float high, Where where) {
  if (is_poison(low) || is_poison(high)) {
    fail(where, "uses an accumulator that wgmma still owns: it was read before wgmma_wait");
  }
  return float_to_bf16(low) | float_to_bf16(high) << 16;
}

float half_to_float(std::uint16_t bits) {
  const int exponent = bits >> 10 & 0x1f;
  const float mantissa = static_cast<float>(bits & 0x3ff);
  float size;
  if (exponent == 0) {
    size = std::ldexp(mantissa, -24);
  } else if (exponent == 31) {
    size = mantissa == 0 ? INFINITY : NAN;
  } else {
    size = std::ldexp(mantissa + 1024, exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -size : size;
}

}  // namespace chord::emulator
