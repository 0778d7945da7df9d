// A packed unit (64 features x 64 K) in the registers of a warp.
#pragma once

#include <chord/kernels/dequant/int4.cuh>
#include <chord/kernels/ptx/ldst.cuh>
#include <chord/kernels/ptx/mma.cuh>
#include <chord/kernels/weight_layout.cuh>

namespace chord {

// Codes and scales of some of the unit's row tiles, as a lane multiplies them.
template <int kRowTiles>
struct UnitCodes {
  u32 words[kRowTiles][4];   // one a k16 step
  u32 scales[kRowTiles][2];  // one a group, of rows g and g + 8

  __forceinline__ void set(int i, const U32x4& codes, const U32x2& pairs) {
    words[i][0] = codes.x, words[i][1] = codes.y, words[i][2] = codes.z, words[i][3] = codes.w;
    scales[i][0] = pairs.x, scales[i][1] = pairs.y;
  }
};

// Row tiles from `row_tile` on of the unit that lies at `unit`.
template <int kRowTiles>
__forceinline__ UnitCodes<kRowTiles> load_unit(SmemAddress unit, int row_tile, int lane) {
  UnitCodes<kRowTiles> codes;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    codes.set(i, ptx::load_shared_x4(unit + code_offset(row_tile + i, lane)),
              ptx::load_shared_x2(unit + scale_offset(row_tile + i, lane)));
  }
  return codes;
}

// Adds the product of group `group` with kEights times 8 tokens by mma.sync. `x_of(eight)`: what
// ldmatrix takes of this lane for the 32 K of the group: lanes 8 m to 8 m + 7 address 16 bytes of K
// block m of the eight tokens.
template <int kRowTiles, int kEights, class XOf>
__forceinline__ void mma_group(float (&sums)[kRowTiles][kEights][4],
                               const UnitCodes<kRowTiles>& unit, int group, XOf&& x_of) {
  u32 a[kRowTiles][2][4];
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    const GroupScale scale = prepare_scale(unit.scales[i][group]);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      dequantize(a[i][step], unit.words[i][2 * group + step], scale);
    }
  }
#pragma unroll
  for (int eight = 0; eight < kEights; ++eight) {
    u32 b[4];
    ptx::load_matrix_x4(b, x_of(eight));
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        ptx::mma_m16n8k16(sums[i][eight], a[i][step], b[2 * step], b[2 * step + 1]);
      }
    }
  }
}

}  // namespace chord
