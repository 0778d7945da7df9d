// BF16 as the tensor cores and the paired instructions see it: subnormals count.
#pragma once

#include <bit>
#include <cstdint>

namespace chord::emulator {

inline float bf16_to_float(std::uint32_t bits) { return std::bit_cast<float>(bits << 16); }

// To nearest even; NaN becomes the card's 0x7fff.
inline std::uint32_t float_to_bf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// What accumulators hold while wgmma own them: a NaN whose payload survives arithmetic.
inline constexpr std::uint32_t kPoisonTag = 0x7fd5a000u;

inline bool is_poison(float value) {
  return (std::bit_cast<std::uint32_t>(value) & 0x7ffff000u) == kPoisonTag;
}

}  // namespace chord::emulator
