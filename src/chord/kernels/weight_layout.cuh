// Offsets inside the packed weight: the device half of weights/layout.py, which draws the picture.
#pragma once

#include <chord/kernels/common/math.cuh>
#include <chord/kernels/common/types.cuh>

namespace chord {

inline constexpr int kUnitFeatures = 64;
inline constexpr int kUnitK = 64;
inline constexpr int kGroupK = 32;
inline constexpr int kRowTileFeatures = 16;
inline constexpr int kRowTileCodeBytes = 512;  // 32 lanes x 16 bytes: one word a k16 step
inline constexpr int kUnitCodeBytes = 2048;
inline constexpr int kRowTileScaleBytes = 64;
inline constexpr int kUnitBytes = 2304;

// Byte offset of unit (expert, stripe, k_unit); `stripes` and `k_units` cover the padded N and K.
constexpr i64 unit_offset(int expert, int stripe, int k_unit, int stripes, int k_units) {
  return ((static_cast<i64>(expert) * stripes + stripe) * k_units + k_unit) * kUnitBytes;
}

// Inside a unit: where lane `lane` finds its four code words of row tile `row_tile`.
constexpr int code_offset(int row_tile, int lane) {
  return row_tile * kRowTileCodeBytes + lane * 16;
}

// Inside a unit: where a lane finds the stored scales (rows g, g + 8) of both groups.
constexpr int scale_offset(int row_tile, int lane) {
  return kUnitCodeBytes + row_tile * kRowTileScaleBytes + (lane / 4) * 8;
}

}  // namespace chord
