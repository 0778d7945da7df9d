// Host implementation of the header of the same name in chord/kernels/ptx, found before it on the
// include path. Same functions; the last argument is where the kernel calls from.
#pragma once

#include <chord/kernels/common/types.cuh>

#include "runtime/api.hpp"

namespace chord::ptx {

inline u32 fma_bf16x2(u32 a, u32 b, u32 c) { return emulator::fma_bf16x2(a, b, c); }

inline u32 mul_bf16x2(u32 a, u32 b) { return emulator::mul_bf16x2(a, b); }

inline u32 pack_bf16x2(float low, float high, emulator::Where where = emulator::Where::current()) {
  return emulator::pack_bf16x2(low, high, where);
}

inline u32 broadcast_low(u32 pair) { return (pair & 0xffffu) * 0x10001u; }

inline u32 broadcast_high(u32 pair) { return (pair >> 16) * 0x10001u; }

}  // namespace chord::ptx
