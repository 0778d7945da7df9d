// The rows of the whole layer, between its stages. `route.cuh` has sorted the routes by expert;
// position p of that order is row p of every buffer in between, so down finds the rows of an expert
// side by side, and only gate_up gathers, from the tokens. Items are experts.
#pragma once

#include <chord/kernels/common/math.cuh>
#include <chord/kernels/common/types.cuh>
#include <chord/kernels/ptx/ldst.cuh>
#include <chord/kernels/router_weight.cuh>
#include <chord/kernels/stage.cuh>
#include <chord/kernels/swiglu.cuh>

namespace chord {

// Expert e owns positions offsets[e] to offsets[e + 1] - 1.
template <class OwnParams>
struct RoutedRows {
  using Params = OwnParams;

  const Params& p;

  int max_items() const { return p.num_experts; }
  int load_end() const { return p.num_experts; }
  bool is_item(int item, int end) const { return item < end; }
  int expert(int item) const { return row_begin(item) < row_end(item) ? item : -1; }
  int row_begin(int item) const { return ptx::load_written(p.offsets + item); }
  int row_end(int item) const { return ptx::load_written(p.offsets + item + 1); }
  int output_row(int position) const { return position; }
};

struct RoutedGateUpParams {
  const int* offsets;
  const int* routes;             // route of each position: token * top_k + slot
  RouterWeights router_weights;  // by route; of RoutedGateUpWeighted
  SwigluParams swiglu;
  int num_experts;
  int top_k;
};
static_assert(sizeof(RoutedGateUpParams) == 56, "RoutedGateUpParams must match jit/params.py");

// gate_up: out has half as many features as the weight. `kWeighted`: gate and up are multiplied
// with the router's weight first. Few models want that, and its code is a fifth of the kernel's.
template <bool kWeighted>
struct RoutedGateUpRows : RoutedRows<RoutedGateUpParams> {
  static constexpr Awaits kAwaits = Awaits::kRouting;
  static constexpr bool kSwiglu = true;
  static constexpr bool kRowWeights = kWeighted;
  static constexpr bool kSortedRows = false;

  int input_row(int position) const { return ptx::load_written(p.routes + position) / p.top_k; }

  float row_weight(int position) const {
    return p.router_weights.load(ptx::load_written(p.routes + position));
  }
};
using RoutedGateUp = RoutedGateUpRows<false>;
using RoutedGateUpWeighted = RoutedGateUpRows<true>;

struct RoutedDownParams {
  TensorMap x_map;  // rows of x, for prefill
  const int* offsets;
  int num_experts;
};
static_assert(sizeof(RoutedDownParams) == 192, "RoutedDownParams must match jit/params.py");

struct RoutedDown : RoutedRows<RoutedDownParams> {
  static constexpr Awaits kAwaits = Awaits::kRows;
  static constexpr bool kSortedRows = true;

  int input_row(int position) const { return position; }
};

}  // namespace chord
