// Runs of tiles that the blocks of prefill take from a counter, and the sizes that they come from.
//
// A tile is tile_features() features x a row tile of the schedule. In the order segment > feature
// tile > row tile, neighbours in time share weights. A run is a block's feature tiles for the same
// rows, one after another: with a short K, finding the rows would cost more than multiplying one
// tile. Blocks of a cluster take a run together, each every kCluster-th feature tile of it.
#pragma once

#include <chord/kernels/common/math.cuh>
#include <chord/kernels/config.cuh>
#include <chord/kernels/params.cuh>
#include <chord/kernels/ptx/cluster.cuh>
#include <chord/kernels/ptx/ldst.cuh>
#include <chord/kernels/ptx/mbarrier.cuh>
#include <chord/kernels/schedule.cuh>
#include <chord/kernels/weight_layout.cuh>

namespace chord {

struct Tile {
  int expert;
  int feature_tile;
  int row_begin;
  int row_end;
};

template <PrefillConfig kConfig, int kCluster>
class Runs {
 public:
  static constexpr int kBarrierBytes = 16;

  // `numbers`: 8 bytes for the numbers of runs to come; `barriers`: for those of a cluster.
  Runs(const GemmParams& p, SegmentTable table, SmemAddress numbers, SmemAddress barriers)
      : p_(p), table_(table), numbers_(numbers), barriers_(barriers) {}

  // Sizes of the padded weight. Shifts of kernel parameters: cheaper to repeat than to keep.
  int k_units() const { return ceil_div(p_.k, kUnitK); }
  int k_stages() const { return ceil_div(k_units(), kConfig.units()); }
  int stripes() const { return ceil_div(p_.n, kUnitFeatures); }
  int feature_tiles() const { return ceil_div(stripes(), kConfig.stripes()); }

  // With an odd number of feature tiles the last block of a cluster repeats the last one, of which
  // nothing is stored then.
  int first_stripe(int feature_tile) const {
    const int last = kCluster > 1 ? feature_tiles() - 1 : feature_tile;
    return min_of(feature_tile, last) * kConfig.stripes();
  }
  int tile_stripes(int feature_tile) const {
    return min_of(kConfig.stripes(), stripes() - first_stripe(feature_tile));
  }

  static int first_index() { return ptx::block_idx() / kCluster; }
  int count() const { return table_.num_tiles() * per_row_tile(); }

  // The block's first tile of run `index`; the others follow kCluster feature tiles apart, before
  // `end_of_run`.
  Tile tile_at(int index) const {
    // A segment has per_row_tile() times its row tiles, so a row tile's number divides out the runs
    // wherever it stands in the segment.
    const Segment segment = table_.find(index / per_row_tile());
    const int inside = index - segment.first_tile * per_row_tile();
    const int rows_per_tile = segment.rows_per_tile();
    const int begin = segment.row_begin + inside % segment.num_tiles * rows_per_tile;
    return {.expert = segment.expert,
            .feature_tile = inside / segment.num_tiles * length() * kCluster + cluster_rank(),
            .row_begin = begin,
            .row_end = min_of(begin + rows_per_tile, segment.row_end)};
  }
  int end_of_run(int first_feature_tile) const {
    return min_of(first_feature_tile + kCluster * length(),
                  kCluster * ceil_div(feature_tiles(), kCluster));
  }

  // One thread calls it before the block's barriers are fenced.
  void init() {
    if constexpr (kCluster == 1) return;
    for (turn_ = 1; turn_ >= 0; --turn_) ptx::mbarrier_init(noted(), 1);
  }

  // The number of the run after this one, from the counter: one thread of each block asks and then
  // notes it, and each block that loads reads it once.
  u32 ask() const { return cluster_rank() == 0 ? ptx::take_number(next_run()) : 0; }
  void note(u32 number) const {
    const int index = ptx::grid_dim() / kCluster + static_cast<int>(number);
    if constexpr (kCluster == 1) {
      ptx::store_shared(this->number(), index);
    } else {
      ptx::mbarrier_arrive_expect_bytes(noted(), 4);
      if (cluster_rank() != 0) return;
      for (int rank = 0; rank < kCluster; ++rank) {
        ptx::cluster_store(ptx::cluster_address(this->number(), rank), index,
                           ptx::cluster_address(noted(), rank));
      }
    }
  }
  // With one block, threads synchronise between `note` and this.
  int next_index() {
    if constexpr (kCluster == 1) return ptx::load_shared(number());
    ptx::mbarrier_wait(noted(), turn_ / 2 % 2);
    const int index = ptx::load_shared(number());
    ++turn_;
    return index;
  }

  // One thread of each block calls it when there is no next run.
  void end() const {
    // The last block sets the counters back for the next launch.
    if (static_cast<int>(ptx::atomic_add(blocks_done(), 1)) != ptx::grid_dim() - 1) return;
    ptx::store_release(next_run(), 0);
    ptx::store_release(blocks_done(), 0);
  }

 private:
  static constexpr int kRunUnits = 32;

  static int cluster_rank() { return kCluster > 1 ? ptx::cluster_rank() : 0; }
  // Of a run.
  int length() const { return max_of(1, kRunUnits / k_units()); }
  int per_row_tile() const { return ceil_div(feature_tiles(), kCluster * length()); }

  // In global memory, zero between launches: runs taken beyond the first of each block or cluster,
  // and blocks that have no more.
  u32* next_run() const { return p_.counters; }
  u32* blocks_done() const { return p_.counters + 1; }

  // Two numbers may be under way: a block reads one before it tells the first block of the cluster
  // that a stage of the run before is empty, and that one does not ask for the next but one sooner.
  SmemAddress number() const { return numbers_ + 4 * (turn_ % 2); }
  SmemAddress noted() const { return barriers_ + 8 * (turn_ % 2); }

  const GemmParams& p_;
  const SegmentTable table_;
  const SmemAddress numbers_;
  const SmemAddress barriers_;
  int turn_ = 0;  // runs that a block of a cluster has behind it
};

}  // namespace chord
