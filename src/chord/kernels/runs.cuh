// Runs of tiles that the blocks of prefill take from a counter, and the sizes that they come from.
//
// A tile is tile_features() features x a row tile of the schedule. In the order segment > feature
// tile > row tile, neighbours in time share weights. A run is a block's feature tiles for the same
// rows, one after another: with a short K, finding the rows would cost more than multiplying one
// tile.
#pragma once

#include <chord/kernels/common/math.cuh>
#include <chord/kernels/config.cuh>
#include <chord/kernels/params.cuh>
#include <chord/kernels/ptx/ldst.cuh>
#include <chord/kernels/schedule.cuh>
#include <chord/kernels/weight_layout.cuh>

namespace chord {

struct Tile {
  int expert;
  int feature_tile;
  int row_begin;
  int row_end;
};

template <PrefillConfig kConfig>
class Runs {
 public:
  // `number`: 4 bytes for the number of the run to come.
  Runs(const GemmParams& p, SegmentTable table, SmemAddress number)
      : p_(p), table_(table), number_(number) {}

  // Sizes of the padded weight. Shifts of kernel parameters: cheaper to repeat than to keep.
  int k_units() const { return ceil_div(p_.k, kUnitK); }
  int k_stages() const { return ceil_div(k_units(), kConfig.units()); }
  int stripes() const { return ceil_div(p_.n, kUnitFeatures); }
  int feature_tiles() const { return ceil_div(stripes(), kConfig.stripes()); }
  int tile_stripes(int feature_tile) const {
    return min_of(kConfig.stripes(), stripes() - feature_tile * kConfig.stripes());
  }

  int count() const { return table_.num_tiles() * per_row_tile(); }

  // The first tile of run `index`; the others follow one feature tile apart, before `end_of_run`.
  Tile tile_at(int index) const {
    // A segment has per_row_tile() times its row tiles, so a row tile's number divides out the runs
    // wherever it stands in the segment.
    const Segment segment = table_.find(index / per_row_tile());
    const int inside = index - segment.first_tile * per_row_tile();
    const int rows_per_tile = segment.rows_per_tile();
    const int begin = segment.row_begin + inside % segment.num_tiles * rows_per_tile;
    return {.expert = segment.expert,
            .feature_tile = inside / segment.num_tiles * length(),
            .row_begin = begin,
            .row_end = min_of(begin + rows_per_tile, segment.row_end)};
  }
  int end_of_run(int first_feature_tile) const {
    return min_of(first_feature_tile + length(), feature_tiles());
  }

  // A block begins with run `first_index`. The number of the run after it comes from the counter:
  // one thread asks and then notes it, and when threads have synchronised all may read it.
  static int first_index() { return ptx::block_idx(); }
  u32 ask() const { return ptx::take_number(next_run()); }
  void note(u32 number) const {
    ptx::store_shared(number_, ptx::grid_dim() + static_cast<int>(number));
  }
  int next_index() const { return ptx::load_shared(number_); }

  // One thread of each block calls it when there is no next run.
  void end() const {
    // The last block sets the counters back for the next launch.
    if (static_cast<int>(ptx::atomic_add(blocks_done(), 1)) != ptx::grid_dim() - 1) return;
    ptx::store_release(next_run(), 0);
    ptx::store_release(blocks_done(), 0);
  }

 private:
  static constexpr int kRunUnits = 32;

  // Of a run.
  int length() const { return max_of(1, kRunUnits / k_units()); }
  int per_row_tile() const { return ceil_div(feature_tiles(), length()); }

  // In global memory, zero between launches: runs taken beyond the first of each block, and blocks
  // that have no more.
  u32* next_run() const { return p_.counters; }
  u32* blocks_done() const { return p_.counters + 1; }

  const GemmParams& p_;
  const SegmentTable table_;
  const SmemAddress number_;
};

}  // namespace chord
