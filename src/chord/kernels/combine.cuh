// The last stage of the whole layer: out[t] is shared[t] plus scale times the sum over slots j of
// weight[t, j] times the row at position[t, j], in FP32 and in the order of the slots. The sum of a
// token without a row is zero. Sum, product and result are rounded to BF16 as if a kernel of its
// own had written each: whether this one scales and adds changes no bit, but for the sign of zeros.
//
// A thread sums 8 features of one token: it asks for the rows of 8 slots at once, 16 bytes each,
// and every row is read once. Blocks are small and many, so that loads of one overlap sums of
// another.
#pragma once

#include <chord/kernels/common/math.cuh>
#include <chord/kernels/ptx/bf16.cuh>
#include <chord/kernels/ptx/ldst.cuh>
#include <chord/kernels/ptx/sync.cuh>
#include <chord/kernels/router_weight.cuh>

namespace chord {

struct CombineParams {
  const void* rows;       // BF16, rows of n, by position
  const int* positions;   // of each route, -1 for none
  RouterWeights weights;  // by route; none: already applied
  const void* shared;     // BF16, a row of n for each token; null: nothing is added
  void* out;              // BF16, a row of n for each token; may be `shared`
  float scale;
  int top_k;
  int n;  // a multiple of 8
};
static_assert(sizeof(CombineParams) == 64, "CombineParams must match jit/params.py");

class Combine {
 public:
  static constexpr int kThreads = 128;
  static constexpr int kSmemBytes = 0;

  explicit Combine(const CombineParams& params) : p(params) {}

  // Blocks that share a token.
  static constexpr int parts(int n) { return ceil_div(n, 8 * kThreads); }

  void run() {
    const int token = ptx::block_idx() / parts(p.n);
    const int feature = 8 * (ptx::block_idx() % parts(p.n) * kThreads + ptx::thread_idx());
    float sums[8] = {};
    // Where the first rows are is known before down has ended; the routing is older. `shared` may
    // come from another stream that has been joined only now.
    Slots slots = load_slots(token, 0);
    ptx::wait_for_kernel_before();
    if (feature >= p.n) return;
    U32x4 shared = {0, 0, 0, 0};
    if (p.shared != nullptr) {
      shared =
          ptx::load_written_once_x4(static_cast<const char*>(p.shared) + offset(token, feature));
    }
    add_slots(sums, slots, feature);
#pragma unroll 1
    for (int first = kSlots; first < p.top_k; first += kSlots) {
      add_slots(sums, load_slots(token, first), feature);
    }
    U32x4 piece = rounded(sums);
    if (p.scale != 1.f) piece = rounded_sum(p.scale, piece, {0, 0, 0, 0});
    if (p.shared != nullptr) piece = rounded_sum(1.f, piece, shared);
    ptx::store_global_x4(static_cast<char*>(p.out) + offset(token, feature), piece);
  }

 private:
  static constexpr int kSlots = 8;  // rows that are on their way at a time

  struct Slots {
    int position[kSlots];  // -1 for none
    float weight[kSlots];
  };

  i64 offset(int row, int feature) const { return (static_cast<i64>(row) * p.n + feature) * 2; }

  Slots load_slots(int token, int first) const {
    const i64 route = static_cast<i64>(token) * p.top_k + first;
    Slots slots;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const bool exists = first + i < p.top_k;
      slots.position[i] = exists ? ptx::load_written(p.positions + route + i) : -1;
      slots.weight[i] = exists && p.weights.exist() ? p.weights.load(route + i) : 1.f;
    }
    return slots;
  }

  void add_slots(float (&sums)[8], const Slots& slots, int feature) const {
    U32x4 pieces[kSlots];
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      pieces[i] = {0, 0, 0, 0};
      if (slots.position[i] < 0) continue;
      const char* row = static_cast<const char*>(p.rows) + offset(slots.position[i], feature);
      pieces[i] = ptx::load_written_once_x4(row);
    }
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (slots.position[i] >= 0) add_piece(sums, slots.weight[i], pieces[i]);
    }
  }

  static U32x4 rounded(const float (&sums)[8]) {
    return {ptx::pack_bf16x2(sums[0], sums[1]), ptx::pack_bf16x2(sums[2], sums[3]),
            ptx::pack_bf16x2(sums[4], sums[5]), ptx::pack_bf16x2(sums[6], sums[7])};
  }

  // factor * piece + addend; one of both leaves its operand as it is, so this rounds once.
  static U32x4 rounded_sum(float factor, const U32x4& piece, const U32x4& addend) {
    float sums[8] = {};
    add_piece(sums, 1.f, addend);
    add_piece(sums, factor, piece);
    return rounded(sums);
  }

  // Adds weight times the 8 features of a piece.
  static void add_piece(float (&sums)[8], float weight, const U32x4& piece) {
    const u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const float low = __builtin_bit_cast(float, words[word] << 16);
      const float high = __builtin_bit_cast(float, words[word] & 0xffff0000u);
      sums[2 * word] += weight * low;
      sums[2 * word + 1] += weight * high;
    }
  }

  const CombineParams& p;
};

__forceinline__ void combine(const CombineParams& p) { Combine(p).run(); }

}  // namespace chord
