// Host implementation of the header of the same name in chord/kernels/ptx, found before it on the
// include path. Same functions.
#pragma once

#include <chord/kernels/common/types.cuh>

#include "runtime/api.hpp"

namespace chord::ptx {

inline float exp2(float x) { return __builtin_exp2f(x); }

inline float reciprocal(float x) { return 1.f / x; }

inline float minimum(float a, float b) { return a != a || a < b ? a : b; }

inline float maximum(float a, float b) { return a != a || a > b ? a : b; }

inline float half_to_float(u16 bits) { return emulator::half_to_float(bits); }

}  // namespace chord::ptx
