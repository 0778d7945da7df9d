// Rows named by index: the buffers of vLLM's moe_align_block_size. Items are routing blocks.
#pragma once

#include <chord/kernels/common/math.cuh>
#include <chord/kernels/ptx/ldst.cuh>

namespace chord {

struct Indexed {
  struct Params {
    const int* row_ids;          // route of each sorted position; padding holds num_routes or more
    const int* expert_ids;       // expert of each block, -1 for a block of another rank
    const int* num_rows_padded;  // sorted positions in use, a multiple of block_m
    int num_routes;              // rows of the output
    int top_k;                   // routes that share a row of x
    int block_m;
    int num_blocks;     // blocks that expert_ids has room for
    int num_positions;  // positions that row_ids has room for
  };

  static constexpr bool kSortedRows = false;

  const Params& p;

  // Known to the host. Which of them exist is to be asked with what load_end() gives, a
  // position, which comes from memory.
  int max_items() const { return p.num_blocks; }
  int load_end() const { return ptx::load_global(p.num_rows_padded); }
  bool is_item(int item, int end) const { return row_end(item) <= end; }
  int expert(int item) const { return ptx::load_global(p.expert_ids + item); }
  int row_begin(int item) const { return item * p.block_m; }
  int row_end(int item) const { return (item + 1) * p.block_m; }

  // Row of the output that sorted position `position` stands for, -1 for padding.
  int output_row(int position) const {
    const int route = ptx::load_global(p.row_ids + position);
    return static_cast<unsigned>(route) < static_cast<unsigned>(p.num_routes) ? route : -1;
  }
  int input_row(int output_row) const { return output_row / p.top_k; }

  // Known to the host too: output rows of so many positions may be asked for, whether or not they
  // are in use, and x has so many rows.
  int num_positions() const { return p.num_positions; }
  const int* rows_from(int position) const { return p.row_ids + position; }
  int num_inputs() const { return ceil_div(p.num_routes, p.top_k); }
};
static_assert(sizeof(Indexed::Params) == 48, "Indexed::Params must match jit/params.py");

}  // namespace chord
