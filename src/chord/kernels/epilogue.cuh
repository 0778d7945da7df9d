// FP32 sums of one warp, or of two -> rows of BF16 output.
#pragma once

#include <chord/kernels/config.cuh>
#include <chord/kernels/dequant/int4.cuh>
#include <chord/kernels/ptx/bf16.cuh>
#include <chord/kernels/ptx/ldst.cuh>
#include <chord/kernels/ptx/sync.cuh>

namespace chord {

// Where 16 bytes of a token lie in a transposing buffer whose tokens have kChunks times as much: in
// lines of 128 bytes, in an order that puts the same chunk of eight tokens, as well as eight
// neighbours of a line, into different banks.
template <int kChunks>
__forceinline__ int store_offset(int token, int chunk) {
  constexpr int kTokensPerLine = 8 / kChunks;
  const int line = token / kTokensPerLine;
  return line * 128 + ((token % kTokensPerLine * kChunks + chunk) ^ line) * 16;
}

// Transposes four 8 x 8 matrices of BF16 through `buffer` (kStoreBufferBytes): register i of the
// lanes is matrix i, features x tokens as the mma sums lie; lane 4 r + i receives the 8 features of
// matrix i for token r. The caller alternates two buffers, which leaves one sync_warp a call.
__forceinline__ U32x4 transpose_matrices(SmemAddress buffer, const u32 (&matrices)[4], int lane) {
  ptx::store_matrix_x4_transposed(buffer + store_offset<4>(lane % 8, lane / 8), matrices);
  ptx::sync_warp();
  return ptx::load_shared_x4(buffer + store_offset<4>(lane / 4, lane % 4));
}

// Where a feature of a row of `n` lies; of a row -1 nowhere.
__forceinline__ char* output_address(void* out, int output_row, int feature, int n) {
  const u64 row = static_cast<u64>(static_cast<u32>(output_row)) * static_cast<u32>(2 * n);
  return static_cast<char*>(out) + 2 * feature + row;
}

// Stores 8 features of one row of `n`, none for row -1 and behind the last feature.
__forceinline__ void store_piece(U32x4 piece, void* out, int output_row, int feature, int n) {
  if (output_row >= 0 && feature < n) {
    ptx::store_global_x4_evict_last(output_address(out, output_row, feature, n), piece);
  }
}

// The sums of 8 tokens and 32 features as matrices: `low` and `high` are those of features 0-15 and
// 16-31.
__forceinline__ void pack_sums(u32 (&matrices)[4], const float (&low)[4], const float (&high)[4]) {
  matrices[0] = ptx::pack_bf16x2(low[0] * kUnscaleSum, low[1] * kUnscaleSum);
  matrices[1] = ptx::pack_bf16x2(low[2] * kUnscaleSum, low[3] * kUnscaleSum);
  matrices[2] = ptx::pack_bf16x2(high[0] * kUnscaleSum, high[1] * kUnscaleSum);
  matrices[3] = ptx::pack_bf16x2(high[2] * kUnscaleSum, high[3] * kUnscaleSum);
}

// Stores 8 tokens x 32 features. Lanes 4 i to 4 i + 3 pass token i's output row (-1 for none), of
// which they write 64 bytes in a piece.
__forceinline__ void store_eight_tokens(SmemAddress buffer, const float (&low)[4],
                                        const float (&high)[4], void* out, int output_row,
                                        int first_feature, int n) {
  const int lane = ptx::thread_idx() % 32;
  u32 matrices[4];
  pack_sums(matrices, low, high);
  const U32x4 piece = transpose_matrices(buffer, matrices, lane);
  store_piece(piece, out, output_row, first_feature + (lane % 4) * 8, n);
}

inline constexpr int kPairBufferBytes = 2 * kStoreBufferBytes;

// Two neighbouring warps store what they hold of a tile together: 32 features each from
// `first_feature` on (the first warp's), kEights times 8 tokens. Rows leave in whole lines of 128
// bytes, kBatch eights at a time, while the next matrices are on their way. Lanes 8 i to 8 i + 7 of
// the first (second) warp pass the output rows of tokens i (4 + i) of each eight. `buffers`: twice
// kBatch * kPairBufferBytes, free again when the function returns; `barrier`: a named one of 64.
// kStays: the output is small enough to stay in L2 for the kernel that reads it.
template <int kBatch, bool kStays, int kEights>
__forceinline__ void store_lines(const float (&sums)[2][kEights][4],
                                 const int (&output_row)[kEights], SmemAddress buffers, int barrier,
                                 void* out, int first_feature, int n) {
  // Worked out here: kept from further up, it makes prefill's widest tiles spill.
  const int thread = ptx::opaque(ptx::thread_idx()), lane = thread % 32, half = thread / 32 % 2;
  const SmemAddress to = buffers + store_offset<8>(lane % 8, 4 * half + lane / 8);
  const SmemAddress from = buffers + store_offset<8>(4 * half + lane / 8, lane % 8);
  const int feature = first_feature + (lane % 8) * 8;
  const auto leave_batch = [&](int first) {
#pragma unroll
    for (int eight = first; eight < min_of(first + kBatch, kEights); ++eight) {
      u32 matrices[4];
      pack_sums(matrices, sums[0][eight], sums[1][eight]);
      ptx::store_matrix_x4_transposed(to + eight % (2 * kBatch) * kPairBufferBytes, matrices);
    }
  };
  leave_batch(0);
  ptx::sync_named(barrier, 64);
#pragma unroll
  for (int first = 0; first < kEights; first += kBatch) {
    U32x4 pieces[kBatch];
#pragma unroll
    for (int i = 0; i < min_of(kBatch, kEights - first); ++i) {
      pieces[i] = ptx::load_shared_x4(from + (first + i) % (2 * kBatch) * kPairBufferBytes);
    }
    leave_batch(first + kBatch);
    ptx::sync_named(barrier, 64);
#pragma unroll
    for (int i = 0; i < min_of(kBatch, kEights - first); ++i) {
      const int row = output_row[first + i];
      const bool exists = row >= 0 && feature < n;
      if constexpr (kStays) {
        ptx::store_global_x4_evict_last_if(exists, output_address(out, row, feature, n), pieces[i]);
      } else {
        ptx::store_global_x4_if(exists, output_address(out, row, feature, n), pieces[i]);
      }
    }
  }
}

}  // namespace chord
