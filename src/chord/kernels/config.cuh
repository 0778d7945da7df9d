// The compile-time choices of the kernels and the sizes that follow from them. plan/config.py
// is the host's half; a rendered unit asserts that both agree.
#pragma once

#include <chord/kernels/common/math.cuh>
#include <chord/kernels/weight_layout.cuh>

namespace chord {

// Runs of one expert that a launch can hold: at least the number of local experts with rows.
inline constexpr int kMaxSegments = 512;
inline constexpr int kSegmentTableBytes = 3 * kMaxSegments * 4 + 16;
// Of schedule.cuh: two counts a warp; where tiles are sorted by their length, at most 24 times 8
// rows, a count of each length in each 32 segments.
inline constexpr int kScheduleScratchBytes = 160;
inline constexpr int kMaxTileEights = 24;
inline constexpr int kSegmentChunks = ceil_div(kMaxSegments, 32);
inline constexpr int kSortScratchBytes = 4 * kMaxTileEights * kSegmentChunks;
inline constexpr int kBarrierBytes = 256;

// Features that a warp stores at a time.
inline constexpr int kWarpFeatures = 32;
// Transposing buffer of the epilogue: 8 tokens x 32 features; two, so that one may still be read.
inline constexpr int kStoreBufferBytes = 8 * 2 * kWarpFeatures;
inline constexpr int kStoreBytesPerWarp = 2 * kStoreBufferBytes;

struct DecodeConfig {
  int max_tokens;  // rows of one expert that share one pass over its weights
  int warps;       // multiplying warps; two more load
  int block_k;     // K of a pipeline stage
  int stages;
  int warp_features;  // features that a multiplying warp owns: 32 or 64

  constexpr int tile_features() const { return warps * warp_features; }
  constexpr int stripes() const { return tile_features() / kUnitFeatures; }
  constexpr int units() const { return block_k / kUnitK; }
  constexpr int threads() const { return 32 * (warps + 2); }
  // Rows of x are 16 bytes longer than their data: eight rows lie in different banks for ldmatrix.
  constexpr int x_row_bytes() const { return 2 * block_k + 16; }
  constexpr int weight_stage_bytes() const { return stripes() * units() * kUnitBytes; }
  constexpr int x_stage_bytes() const { return max_tokens * x_row_bytes(); }
  constexpr int note_bytes() const { return 16 + 4 * max_tokens; }
  constexpr int stage_bytes() const {
    return weight_stage_bytes() + x_stage_bytes() + note_bytes();
  }
  constexpr int smem_bytes() const {
    return stages * stage_bytes() + warps * kStoreBytesPerWarp + kSegmentTableBytes +
           kScheduleScratchBytes + kBarrierBytes;
  }
  constexpr int partial_floats() const { return tile_features() * max_tokens; }
};

struct DirectConfig {
  int max_tokens;  // rows of one expert that share one pass over its weights: 8 or 16
  int warps;
  int max_k;  // longest K, which a warp's registers hold

  constexpr int units() const { return max_k / kUnitK; }
  constexpr int threads() const { return 32 * warps; }
  // Rows of x are 16 bytes longer than their data: eight rows lie in different banks for ldmatrix.
  constexpr int x_row_bytes() const { return 2 * max_k + 16; }
  constexpr int x_tile_bytes() const { return max_tokens * x_row_bytes(); }
  constexpr int note_bytes() const { return 4 + 8 * max_tokens; }
  constexpr int smem_bytes() const {
    return warps * (x_tile_bytes() + kStoreBytesPerWarp + 8 + note_bytes()) + kSegmentTableBytes +
           kScheduleScratchBytes;
  }
};

struct PrefillConfig {
  int block_m;     // most tokens of a tile
  int min_width;   // a tile is multiplied at the smallest of the widths min_width,
  int width_step;  // min_width + width_step, ..., block_m that holds its rows
  int block_k;     // K of a pipeline stage
  int stages;
  int store_eights;  // eights of tokens that two warps store at a time

  constexpr int warps() const { return 8; }
  constexpr int tile_features() const { return warps() * kWarpFeatures; }
  constexpr int stripes() const { return tile_features() / kUnitFeatures; }
  constexpr int units() const { return block_k / kUnitK; }
  constexpr int threads() const { return 32 * warps() + 128; }
  constexpr int x_unit_bytes() const { return block_m * 2 * kUnitK; }
  constexpr int x_stage_bytes() const { return units() * x_unit_bytes(); }
  constexpr int weight_stage_bytes() const { return stripes() * units() * kUnitBytes; }
  constexpr int note_bytes() const { return 16 + 4 * block_m; }
  constexpr int stage_bytes() const {
    return x_stage_bytes() + weight_stage_bytes() + note_bytes();
  }
  constexpr int warp_store_bytes() const { return store_eights * kStoreBytesPerWarp; }
  constexpr int store_bytes() const { return warps() * warp_store_bytes(); }
  constexpr int row_table_bytes() const { return 8 * block_m; }
  constexpr int smem_bytes() const {
    return stages * stage_bytes() + store_bytes() + row_table_bytes() + 16 + kSegmentTableBytes +
           kSortScratchBytes + kBarrierBytes;
  }
};

}  // namespace chord
