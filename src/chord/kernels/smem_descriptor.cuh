// The 64-bit name that wgmma takes for a tokens x 64 K tile of BF16 in shared memory: rows of 128
// bytes, 16-byte chunks of row r exchanged by r mod 8 (128-byte swizzle), tile aligned to 1,024.
#pragma once

#include <chord/kernels/common/types.cuh>

namespace chord {

// PTX ISA, "Matrix descriptor": bits 0-13 address / 16, 32-45 bytes between groups of eight rows
// / 16, 62-63 swizzle (1 = 128 bytes). The leading offset (16-29) is not used with a swizzle. What
// changes from tile to tile is the lower half.
constexpr u32 x_tile_descriptor_low(SmemAddress tile) {
  constexpr u32 kLeadingUnused = 1u << 16;
  return kLeadingUnused | ((tile & 0x3ffffu) >> 4);
}
constexpr u64 x_tile_descriptor(u32 low) {
  constexpr u64 kSwizzle128 = 1ull << 62;
  constexpr u64 kRowGroupStride = static_cast<u64>(1024 / 16) << 32;
  return kSwizzle128 | kRowGroupStride | low;
}

// What the lower half grows by from tile to tile of `bytes`, and from 16 K to 16 K inside a tile.
constexpr u32 descriptor_step(int bytes) { return static_cast<u32>(bytes) / 16; }
inline constexpr u32 kDescriptorK16 = descriptor_step(32);

// Where 16-byte chunk `chunk` (0 to 7) of row `row` lies in such a tile.
constexpr int x_tile_offset(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// Rows of x that one copy through a tensor map brings, 64 K each; the host encodes the map with
// this swizzle and these sizes (jit/driver.py).
inline constexpr int kBoxRows = 16;
inline constexpr int kBoxBytes = kBoxRows * 128;

}  // namespace chord
