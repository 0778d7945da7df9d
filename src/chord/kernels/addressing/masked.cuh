// A fixed number of rows an expert, of which the first few count: expert e owns rows e * max_rows
// to e * max_rows + counts[e] - 1 of x and of the result. Items are experts.
#pragma once

#include <chord/kernels/common/math.cuh>
#include <chord/kernels/common/types.cuh>
#include <chord/kernels/ptx/ldst.cuh>

namespace chord {

struct Masked {
  struct Params {
    TensorMap x_map;    // rows of x, for prefill
    const int* counts;  // rows in use of each expert
    int num_experts;
    int max_rows;
  };

  static constexpr bool kSortedRows = true;

  const Params& p;

  int max_items() const { return p.num_experts; }
  int load_end() const { return p.num_experts; }
  bool is_item(int item, int end) const { return item < end; }
  int expert(int item) const { return row_begin(item) < row_end(item) ? item : -1; }
  int row_begin(int item) const { return item * p.max_rows; }
  // A wrong count never reaches the next expert's rows.
  int row_end(int item) const {
    return row_begin(item) + min_of(ptx::load_global(p.counts + item), p.max_rows);
  }

  int output_row(int position) const { return position; }
  int input_row(int output_row) const { return output_row; }
};
static_assert(sizeof(Masked::Params) == 192, "Masked::Params must match jit/params.py");

}  // namespace chord
