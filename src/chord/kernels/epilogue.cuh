// FP32 sums of one warp -> rows of BF16 output.
#pragma once

#include <chord/kernels/config.cuh>
#include <chord/kernels/dequant/int4.cuh>
#include <chord/kernels/ptx/bf16.cuh>
#include <chord/kernels/ptx/ldst.cuh>
#include <chord/kernels/ptx/sync.cuh>

namespace chord {

// Stores 8 tokens x 32 features. `low` and `high` are the mma sums of features 0-15 and 16-31;
// lanes 4 i to 4 i + 3 pass token i's output row (-1 for none). Transposed through `buffer`
// (kStoreBufferBytes), so that a lane writes 16 bytes of one row and four lanes 64 in a piece. The
// caller alternates two buffers, which leaves one sync_warp a call.
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
  ptx::store_matrix_x4_transposed(buffer + (lane % 8) * kStoreRowBytes + (lane / 8) * 16, sums);
  ptx::sync_warp();
  const U32x4 piece = ptx::load_shared_x4(buffer + (lane / 4) * kStoreRowBytes + (lane % 4) * 16);
  const int feature = first_feature + (lane % 4) * 8;
  if (output_row >= 0 && feature < n) {
    const i64 offset = (static_cast<i64>(output_row) * n + feature) * 2;
    ptx::store_global_x4(static_cast<char*>(out) + offset, piece);
  }
}

}  // namespace chord
