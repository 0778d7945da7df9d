// From routing items to tiles of rows, worked out by every block for itself at its start.
//
// A segment is a longest run of items of one expert. Its rows are cut into the fewest tiles of at
// most `max_rows`, all about equally long and a multiple of 8, so that 130 rows at a limit of 64
// become 48 + 48 + 34 and not 64 + 64 + 2. Where blocks take tiles of more than 32 rows from a
// counter, segments with the longest tiles come first (kLongestFirst): the last tiles, which some
// wait for, are short.
#pragma once

#include <chord/kernels/common/math.cuh>
#include <chord/kernels/config.cuh>
#include <chord/kernels/ptx/ldst.cuh>
#include <chord/kernels/ptx/sync.cuh>
#include <chord/kernels/warp_sum.cuh>

namespace chord {

// How long the tiles are that `rows` are cut into.
constexpr int tile_rows(int rows, int num_tiles) { return round_up(ceil_div(rows, num_tiles), 8); }

struct Segment {
  int expert;
  int row_begin;
  int row_end;
  int first_tile;
  int num_tiles;

  int rows_per_tile() const { return tile_rows(row_end - row_begin, num_tiles); }
};

// Three words a segment in shared memory: first row, end row, first tile with the expert above it;
// behind them the two counts. Nothing of it lives in registers.
class SegmentTable {
 public:
  explicit SegmentTable(SmemAddress base) : SegmentTable(base, base + kSegmentTableBytes - 8) {}

  // Part `part` of a table that warps share, of 32 segments, with its own place for the counts.
  SegmentTable(SmemAddress base, int part, SmemAddress counts)
      : SegmentTable(base + 4 * 32 * part, counts + 8 * part) {}

  int num_segments() const { return ptx::load_shared(counts_); }
  int num_tiles() const { return ptx::load_shared(counts_ + 4); }
  void write_counts(int num_segments, int num_tiles) {
    ptx::store_shared(counts_, num_segments);
    ptx::store_shared(counts_ + 4, num_tiles);
  }

  // The first tile is the segment's own number: right where every segment is one tile.
  void write_begin(int segment, int row, int expert) {
    ptx::store_shared(row_begin(segment), row);
    ptx::store_shared(expert_and_tile(segment), expert << kExpertShift | segment);
  }
  void write_end(int segment, int row) { ptx::store_shared(row_end(segment), row); }
  int rows(int segment) const {
    return static_cast<int>(ptx::load_shared(row_end(segment)) -
                            ptx::load_shared(row_begin(segment)));
  }
  void write_first_tile(int segment, int tile) {
    const SmemAddress word = expert_and_tile(segment);
    ptx::store_shared(word, (ptx::load_shared(word) & ~kTileMask) | tile);
  }
  // A segment's entry without its first tile, to be put in another place.
  struct Entry {
    u32 row_begin;
    u32 row_end;
    u32 expert;
  };
  Entry entry(int segment) const {
    return {ptx::load_shared(row_begin(segment)), ptx::load_shared(row_end(segment)),
            ptx::load_shared(expert_and_tile(segment)) >> kExpertShift};
  }
  void write_entry(int segment, const Entry& entry) {
    ptx::store_shared(row_begin(segment), entry.row_begin);
    ptx::store_shared(row_end(segment), entry.row_end);
    ptx::store_shared(expert_and_tile(segment), entry.expert << kExpertShift | segment);
  }
  int first_tile(int segment) const {
    return ptx::load_shared(expert_and_tile(segment)) & kTileMask;
  }

  // The segment that owns tile `tile` (0 to num_tiles - 1).
  Segment find(int tile) const {
    int low = 0, high = num_segments();
    if (high == num_tiles()) low = tile, high = tile + 1;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first_tile(middle) <= tile) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const u32 word = ptx::load_shared(expert_and_tile(low));
    const int first = word & kTileMask;
    const int next = low + 1 < num_segments() ? first_tile(low + 1) : num_tiles();
    return {.expert = static_cast<int>(word >> kExpertShift),
            .row_begin = static_cast<int>(ptx::load_shared(row_begin(low))),
            .row_end = static_cast<int>(ptx::load_shared(row_end(low))),
            .first_tile = first,
            .num_tiles = next - first};
  }

 private:
  SegmentTable(SmemAddress base, SmemAddress counts) : base_(base), counts_(counts) {}

  static constexpr int kExpertShift = 20;
  static constexpr u32 kTileMask = (1u << kExpertShift) - 1;
  static_assert(kMaxSegments <= 1 << (32 - kExpertShift), "an expert id must fit in 12 bits");

  SmemAddress row_begin(int segment) const { return base_ + 4 * segment; }
  SmemAddress row_end(int segment) const { return row_begin(kMaxSegments + segment); }
  SmemAddress expert_and_tile(int segment) const { return row_begin(2 * kMaxSegments + segment); }

  SmemAddress base_;
  SmemAddress counts_;
};

// Turns 32 * kWords words of shared memory into the sums of those before each. One warp calls it.
template <int kWords>
__forceinline__ void sum_words(SmemAddress words, int lane) {
  const SmemAddress first = words + 4 * kWords * lane;
  int values[kWords], own = 0, all;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    values[i] = static_cast<int>(ptx::load_shared(first + 4 * i));
    own += values[i];
  }
  int before = sum_below(lane, own, all);
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    ptx::store_shared(first + 4 * i, before);
    before += values[i];
  }
}

// Puts segments with longer tiles first, others in the order they have: all blocks have to agree.
// All threads of the block call it, between two synchronisations of the block.
template <int kThreads>
void sort_by_tile_rows(SegmentTable table, SmemAddress counts, int num_segments, int max_rows) {
  constexpr int kWarps = kThreads / 32;
  constexpr int kPasses = ceil_div(kSegmentChunks, kWarps);
  constexpr int kCounts = kMaxTileEights * kSegmentChunks;
  const int thread = ptx::opaque(ptx::thread_idx()), warp = thread / 32, lane = thread % 32;
  for (int i = thread; i < kCounts; i += kThreads) ptx::store_shared(counts + 4 * i, 0);
  ptx::sync_block();
  SegmentTable::Entry entries[kPasses];
  SmemAddress count[kPasses];  // of the segment's length and 32 segments
  int rank[kPasses];           // among these
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int chunk = pass * kWarps + warp, segment = 32 * chunk + lane;
    if (32 * chunk >= num_segments) break;
    const bool exists = segment < num_segments;
    int shorter = -1;  // than the longest possible, in eights
    if (exists) {
      entries[pass] = table.entry(segment);
      const int rows = table.rows(segment);
      const int eights = tile_rows(rows, max_of(ceil_div(rows, max_rows), 1)) / 8;
      shorter = kMaxTileEights - max_of(eights, 1);
    }
    const u32 same = ptx::match(shorter);
    count[pass] = counts + 4 * (shorter * kSegmentChunks + chunk);
    rank[pass] = ptx::count_bits(same & ((1u << lane) - 1));
    if (exists && lane == ptx::highest_bit(same)) {
      ptx::store_shared(count[pass], ptx::count_bits(same));
    }
  }
  ptx::sync_block();
  static_assert(kCounts % 32 == 0, "the lanes of a warp have equally many");
  if (warp == 0) sum_words<kCounts / 32>(counts, lane);
  ptx::sync_block();
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int segment = 32 * (pass * kWarps + warp) + lane;
    if (segment >= num_segments) continue;
    table.write_entry(static_cast<int>(ptx::load_shared(count[pass])) + rank[pass], entries[pass]);
  }
}

// What both builders do with an item: experts of it and of its neighbours, -1 for none.
struct Item {
  int before;
  int own;
  int after;

  bool begins() const { return own >= 0 && before != own; }
  bool ends() const { return own >= 0 && after != own; }
};

// Reads items and writes segments, a lane an item. Experts that are none of `num_experts` have no
// weights to be read: their rows are left out.
template <class Addressing>
class SegmentWriter {
 public:
  SegmentWriter(const Addressing& addressing, int num_experts, int lane)
      : addressing_(addressing), num_experts_(num_experts), lane_(lane) {}

  const Addressing& addressing() const { return addressing_; }

  // Items that do not exist may be read (the buffer has room for them).
  Item load(int index) const {
    const auto expert = [&](int item) {
      return item >= 0 && item < addressing_.max_items() ? addressing_.expert(item) : -1;
    };
    return {expert(index - 1), expert(index), expert(index + 1)};
  }

  // The item with those left out that count for nothing; `end`: Addressing::load_end().
  Item valid(int index, const Item& item, int end) const {
    const auto counted = [&](int at, int expert) {
      const bool counts = expert >= 0 && expert < num_experts_;
      return counts && addressing_.is_item(at, end) ? expert : -1;
    };
    return {counted(index - 1, item.before), counted(index, item.own),
            counted(index + 1, item.after)};
  }

  // Writes the first and last rows of the segments that begin and end among the warp's 32 items,
  // behind `begins` and `ends` others. Says whether the lane's item needs no second tile.
  bool write(SegmentTable table, int index, const Item& item, int max_rows, int& begins,
             int& ends) const {
    const u32 below = (1u << lane_) - 1;
    const u32 begin_mask = ptx::ballot(item.begins()), end_mask = ptx::ballot(item.ends());
    const int row_begin = item.begins() ? addressing_.row_begin(index) : 0;
    const int row_end = item.ends() ? addressing_.row_end(index) : 0;
    if (item.begins()) {
      const int segment = begins + ptx::count_bits(begin_mask & below);
      table.write_begin(segment, row_begin, item.own);
    }
    if (item.ends()) table.write_end(ends + ptx::count_bits(end_mask & below), row_end);
    begins += ptx::count_bits(begin_mask);
    ends += ptx::count_bits(end_mask);
    // A segment of several items counts as one that may need several tiles.
    return item.begins() == item.ends() && row_end - row_begin <= max_rows;
  }

  // One warp calls it; a lane has neighbouring segments.
  void number_tiles(SegmentTable table, int num_segments, int max_rows) const {
    const int share = ceil_div(num_segments, 32), first = lane_ * share;
    const int end = min_of(first + share, num_segments);
    int own = 0, num_tiles;
#pragma unroll 4
    for (int segment = first; segment < end; ++segment) {
      own += ceil_div(table.rows(segment), max_rows);
    }
    int tile = sum_below(lane_, own, num_tiles);
#pragma unroll 4
    for (int segment = first; segment < end; ++segment) {
      const int tiles = ceil_div(table.rows(segment), max_rows);
      table.write_first_tile(segment, tile);
      tile += tiles;
    }
    if (lane_ == 0) table.write_counts(num_segments, num_tiles);
  }

 private:
  const Addressing& addressing_;
  const int num_experts_;
  const int lane_;
};

// Fills a table for one warp alone, where there are at most 32 items: nobody waits for anybody. All
// lanes make one and call build(). In between they have other things to do: the items have been
// asked for, and come from cold memory.
template <class Addressing>
class WarpScheduleBuilder {
 public:
  WarpScheduleBuilder(const Addressing& addressing, int num_experts, int lane)
      : writer_(addressing, num_experts, lane),
        lane_(lane),
        item_(writer_.load(lane)),
        end_(addressing.load_end()) {}

  bool has_all() const { return !writer_.addressing().is_item(32, end_); }

  // Returns the expert of tile `lane` where tiles are the first items one by one, as they mostly
  // are, else -1.
  int build(SegmentTable table, int max_rows) const {
    int begins = 0, ends = 0;
    const Item item = writer_.valid(lane_, item_, end_);
    const bool one_tile_each = writer_.write(table, lane_, item, max_rows, begins, ends);
    if (lane_ == 0) table.write_counts(begins, begins);
    const bool all_one = ptx::ballot(!one_tile_each) == 0;
    ptx::sync_warp();
    if (all_one) return ptx::ballot(lane_ < begins && !item.begins()) == 0 ? item.own : -1;
    writer_.number_tiles(table, begins, max_rows);
    ptx::sync_warp();
    return -1;
  }

 private:
  const SegmentWriter<Addressing> writer_;
  const int lane_;
  const Item item_;
  const int end_;  // which items exist
};

// Fills the table for a block. All threads make one and call build(), which synchronises the block:
// what was written to shared memory before is visible after. As above, there is time in between.
template <int kThreads, bool kLongestFirst, class Addressing>
class ScheduleBuilder {
  static constexpr int kWarps = kThreads / 32;
  static_assert(8 * kWarps <= kScheduleScratchBytes, "two counts a warp");

 public:
  ScheduleBuilder(const Addressing& addressing, int num_experts)
      : writer_(addressing, num_experts, lane_) {
    const int share = round_up(ceil_div(addressing.max_items(), kWarps), 32);
    warp_begin_ = warp_ * share;
    warp_end_ = min_of(warp_begin_ + share, addressing.max_items());
    first_ = writer_.load(warp_begin_ + lane_);
    end_ = addressing.load_end();
  }

  // `scratch`: kScheduleScratchBytes, with kLongestFirst kSortScratchBytes.
  void build(SegmentTable table, SmemAddress scratch, int max_rows) const {
    // Count the segments that begin and end among each warp's items.
    int begins = 0, ends = 0;
    for_each_item([&](int, const Item& item) {
      begins += ptx::count_bits(ptx::ballot(item.begins()));
      ends += ptx::count_bits(ptx::ballot(item.ends()));
    });
    if (lane_ == 0) {
      ptx::store_shared(scratch + 8 * warp_, begins);
      ptx::store_shared(scratch + 8 * warp_ + 4, ends);
    }
    ptx::sync_block();

    // Sum the counts of the warps before this one: a lane has those of one warp.
    U32x2 counts{0, 0};
    if (lane_ < kWarps) counts = ptx::load_shared_x2(scratch + 8 * lane_);
    const bool is_before = lane_ < warp_;
    const int num_segments = ptx::sum_lanes(counts.x);
    begins = ptx::sum_lanes(is_before ? counts.x : 0);
    ends = ptx::sum_lanes(is_before ? counts.y : 0);
    // More segments than experts means blocks of one expert that do not lie together.
    if (num_segments > kMaxSegments) ptx::trap();

    bool one_tile_each = true;
    for_each_item([&](int index, const Item& item) {
      one_tile_each = writer_.write(table, index, item, max_rows, begins, ends) && one_tile_each;
    });
    if (thread_ == 0) table.write_counts(num_segments, num_segments);
    one_tile_each = ptx::sync_block_and(one_tile_each);
    if constexpr (kLongestFirst) {
      sort_by_tile_rows<kThreads>(table, scratch, num_segments, max_rows);
      ptx::sync_block();
    }
    if (one_tile_each) return;
    if (warp_ == 0) writer_.number_tiles(table, num_segments, max_rows);
    ptx::sync_block();
  }

 private:
  // Visits the warp's items with those left out that count for nothing, a lane an item.
  template <class Visit>
  __forceinline__ void for_each_item(Visit&& visit) const {
    Item item = first_;
#pragma unroll 1
    for (int base = warp_begin_; base < warp_end_; base += 32) {
      const int index = base + lane_;
      if (base > warp_begin_) item = writer_.load(index);
      visit(index, writer_.valid(index, item, end_));
    }
  }

  // Nothing of it is kept for what comes later, which needs all registers.
  const int thread_ = ptx::opaque(ptx::thread_idx());
  const int warp_ = thread_ / 32;
  const int lane_ = thread_ % 32;
  const SegmentWriter<Addressing> writer_;
  int warp_begin_, warp_end_;  // the warp's items
  Item first_;                 // of the lane
  int end_;                    // which items exist
};

}  // namespace chord
