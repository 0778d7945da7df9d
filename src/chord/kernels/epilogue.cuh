// FP32 sums of one warp -> rows of BF16 output.
#pragma once

#include <chord/kernels/config.cuh>
#include <chord/kernels/dequant/int4.cuh>
#include <chord/kernels/ptx/bf16.cuh>
#include <chord/kernels/ptx/ldst.cuh>
#include <chord/kernels/ptx/sync.cuh>

namespace chord {

// Transposes four 8 x 8 matrices of BF16 through `buffer` (kStoreBufferBytes): register i of the
// lanes is matrix i, features x tokens as the mma sums lie; lane 4 r + i receives the 8 features of
// matrix i for token r. The caller alternates two buffers, which leaves one sync_warp a call.
__forceinline__ U32x4 transpose_matrices(SmemAddress buffer, const u32 (&matrices)[4]) {
  const int lane = ptx::thread_idx() % 32;
  ptx::store_matrix_x4_transposed(buffer + (lane % 8) * kStoreRowBytes + (lane / 8) * 16, matrices);
  ptx::sync_warp();
  return ptx::load_shared_x4(buffer + (lane / 4) * kStoreRowBytes + (lane % 4) * 16);
}

// Stores 8 features of one row of `n`, none for row -1 and behind the last feature.
__forceinline__ void store_piece(U32x4 piece, void* out, int output_row, int feature, int n) {
  if (output_row >= 0 && feature < n) {
    const i64 offset = (static_cast<i64>(output_row) * n + feature) * 2;
    ptx::store_global_x4(static_cast<char*>(out) + offset, piece);
  }
}

// Stores 8 tokens x 32 features. `low` and `high` are the mma sums of features 0-15 and 16-31;
// lanes 4 i to 4 i + 3 pass token i's output row (-1 for none), of which they write 64 bytes in a
// piece.
__forceinline__ void store_eight_tokens(SmemAddress buffer, const float (&low)[4],
                                        const float (&high)[4], void* out, int output_row,
                                        int first_feature, int n) {
  const int lane = ptx::thread_idx() % 32;
  const u32 sums[4] = {
      ptx::pack_bf16x2(low[0] * kUnscaleSum, low[1] * kUnscaleSum),
      ptx::pack_bf16x2(low[2] * kUnscaleSum, low[3] * kUnscaleSum),
      ptx::pack_bf16x2(high[0] * kUnscaleSum, high[1] * kUnscaleSum),
      ptx::pack_bf16x2(high[2] * kUnscaleSum, high[3] * kUnscaleSum),
  };
  const U32x4 piece = transpose_matrices(buffer, sums);
  store_piece(piece, out, output_row, first_feature + (lane % 4) * 8, n);
}

}  // namespace chord
