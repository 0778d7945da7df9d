// Rows sorted by expert: row r of x makes row r of the result. Where each expert's rows lie is said
// in one of two ways, offsets or an expert a row; rows of nobody are neither read nor written.
#pragma once

#include <chord/kernels/common/types.cuh>
#include <chord/kernels/ptx/ldst.cuh>

namespace chord {

struct ContiguousParams {
  TensorMap x_map;    // rows of x, for prefill
  const void* table;  // offsets or experts of rows: int or i64
  int is_64bit;
  int num_experts;
  int num_rows;  // rows of x and of the result

  i64 load(int index) const {
    return is_64bit ? ptx::load_global(static_cast<const i64*>(table) + index)
                    : ptx::load_global(static_cast<const int*>(table) + index);
  }
};
static_assert(sizeof(ContiguousParams) == 192, "ContiguousParams must match jit/params.py");

// num_experts + 1 offsets: expert e owns rows offsets[e] to offsets[e + 1] - 1. Items are experts.
struct ContiguousOffsets {
  using Params = ContiguousParams;
  static constexpr bool kSortedRows = true;

  const Params& p;

  int max_items() const { return p.num_experts; }
  int load_end() const { return p.num_experts; }
  bool is_item(int item, int end) const { return item < end; }
  int expert(int item) const { return row_begin(item) < row_end(item) ? item : -1; }
  int row_begin(int item) const { return row_at(item); }
  int row_end(int item) const { return row_at(item + 1); }

  int output_row(int position) const { return position; }
  int input_row(int output_row) const { return output_row; }

 private:
  // Wrong offsets may give wrong rows, but never ones outside x.
  int row_at(int index) const {
    const i64 row = p.load(index);
    if (row < 0) return 0;
    return row < p.num_rows ? static_cast<int>(row) : p.num_rows;
  }
};

// num_rows experts, ascending, -1 for a row of nobody. Items are rows: every block reads all of
// them, most twice, which costs more than offsets do. A row of nobody parts its neighbours, so a
// launch holds kMaxSegments stretches of rows.
struct ContiguousIndices {
  using Params = ContiguousParams;
  static constexpr bool kSortedRows = true;

  const Params& p;

  int max_items() const { return p.num_rows; }
  int load_end() const { return p.num_rows; }
  bool is_item(int item, int end) const { return item < end; }
  int expert(int item) const {
    const i64 expert = p.load(item);
    return expert >= 0 && expert < p.num_experts ? static_cast<int>(expert) : -1;
  }
  int row_begin(int item) const { return item; }
  int row_end(int item) const { return item + 1; }

  int output_row(int position) const { return position; }
  int input_row(int output_row) const { return output_row; }
};

}  // namespace chord
