// SwiGLU as models have it, in the registers of gate_up's sums, and the store that follows.
//
//   gate' = min(gate, limit)    up' = max(min(up, limit), -limit)
//   out = gate' * sigmoid(alpha * gate') * (up' + beta)
//
// The weight was packed with gate and up interleaved by eights (weights/layout.py), so of the four
// sums that a lane holds of a row tile the first two are gate and the last two up, of one feature
// and two tokens.
#pragma once

#include <chord/kernels/dequant/int4.cuh>
#include <chord/kernels/epilogue.cuh>
#include <chord/kernels/ptx/bf16.cuh>
#include <chord/kernels/ptx/float.cuh>
#include <chord/kernels/ptx/sync.cuh>
#include <chord/kernels/stage.cuh>

namespace chord {

struct SwigluParams {
  float power_scale;  // -alpha * log2(e)
  float beta;
  float limit;  // infinity for none
};

__forceinline__ float swiglu(float gate, float up, const SwigluParams& p) {
  gate = ptx::minimum(gate, p.limit);
  up = ptx::maximum(ptx::minimum(up, p.limit), -p.limit);
  const float power = ptx::exp2(gate * p.power_scale);  // infinity is right: sigmoid is 0
  return gate * ptx::reciprocal(1.f + power) * (up + p.beta);
}

// The activated features of one row tile: token 2 t in the low half, 2 t + 1 in the high one.
// `scales`: what the two tokens' sums are multiplied with first.
__forceinline__ u32 activate(const float (&sums)[4], const float (&scales)[2],
                             const SwigluParams& p) {
  return ptx::pack_bf16x2(swiglu(sums[0] * scales[0], sums[2] * scales[0], p),
                          swiglu(sums[1] * scales[1], sums[3] * scales[1], p));
}

// The scales of a lane's two tokens of eight. Lanes 4 i to 4 i + 3 pass token i's position, -1 for
// none.
template <class Addressing>
__forceinline__ void load_scales(float (&scales)[2], const Addressing& addressing, int position,
                                 int lane) {
  scales[0] = scales[1] = kUnscaleSum;
  if constexpr (!Addressing::kRowWeights) return;
  const float own = position >= 0 ? addressing.row_weight(position) : 0.f;
  const int first = 8 * (lane % 4);  // of the lanes that hold token 2 t
  const int bits = __builtin_bit_cast(int, own);
  scales[0] *= __builtin_bit_cast(float, ptx::shuffle(bits, first));
  scales[1] *= __builtin_bit_cast(float, ptx::shuffle(bits, first + 4));
}

// Activates and stores 16 tokens x 16 features: tokens 0-7 in `low` and `high`, the sums of two row
// tiles, 8-15 in `low8` and `high8`. Lanes 4 i to 4 i + 3 pass the output rows of tokens i and
// 8 + i, -1 for none. `n`: features of the output.
template <class Addressing>
__forceinline__ void store_activated(SmemAddress buffer, const float (&low)[4],
                                     const float (&high)[4], const float (&low8)[4],
                                     const float (&high8)[4], const Addressing& addressing,
                                     void* out, const int (&output_row)[2], int first_feature,
                                     int n) {
  // Worked out here: kept from further up, it makes prefill's widest tiles spill.
  const int lane = ptx::opaque(ptx::thread_idx()) % 32;
  const SwigluParams& p = addressing.p.swiglu;
  float scales[2], scales8[2];
  load_scales(scales, addressing, output_row[0], lane);
  load_scales(scales8, addressing, output_row[1], lane);
  const u32 matrices[4] = {activate(low, scales, p), activate(high, scales, p),
                           activate(low8, scales8, p), activate(high8, scales8, p)};
  const U32x4 piece = transpose_matrices(buffer, matrices, lane);
  const int row = lane % 4 < 2 ? output_row[0] : output_row[1];
  store_piece(piece, out, row, first_feature + (lane % 2) * 8, n);
}

// Stores what a warp holds of a tile: kRowTiles times 16 features from `first_feature` on, of the
// weight's `n`, and kEights times 8 tokens. `buffers`: kStoreBytesPerWarp; the caller calls
// sync_warp before it uses them again.
template <int kRowTiles, int kEights, class Addressing>
__forceinline__ void store_sums(const float (&sums)[kRowTiles][kEights][4],
                                const int (&output_row)[kEights], SmemAddress buffers,
                                const Addressing& addressing, void* out, int first_feature, int n) {
  constexpr int kStep = kHasSwiglu<Addressing> ? 2 : 1;  // halved rows: two eights fill a piece
  int buffer = 0;
#pragma unroll
  for (int eight = 0; eight < kEights; eight += kStep) {
#pragma unroll
    for (int i = 0; i < kRowTiles; i += 2) {
      const SmemAddress own = buffers + buffer * kStoreBufferBytes;
      const int feature = first_feature + i * kRowTileFeatures;
      const float (&low)[4] = sums[i][eight];
      const float (&high)[4] = sums[i + 1][eight];
      if constexpr (kHasSwiglu<Addressing>) {
        const bool is_last = eight + 1 == kEights;
        const int other = is_last ? eight : eight + 1;
        const int rows[2] = {output_row[eight], is_last ? -1 : output_row[other]};
        store_activated(own, low, high, sums[i][other], sums[i + 1][other], addressing, out, rows,
                        feature / 2, n / 2);
      } else {
        store_eight_tokens(own, low, high, out, output_row[eight], feature, n);
      }
      buffer ^= 1;
    }
  }
}

}  // namespace chord
