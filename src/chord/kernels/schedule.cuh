// From routing items to tiles of rows, worked out by every block for itself at its start.
//
// A segment is a longest run of items of one expert. Its rows are cut into the fewest tiles of at
// most `max_rows`, all about equally long and a multiple of 8, so that 130 rows at a limit of 64
// become 48 + 48 + 34 and not 64 + 64 + 2. Where blocks take tiles from a counter, segments with
// the longest tiles come first (kLongestFirst): the last tiles, which some wait for, are short.
#pragma once

#include <chord/kernels/common/math.cuh>
#include <chord/kernels/config.cuh>
#include <chord/kernels/ptx/ldst.cuh>
#include <chord/kernels/ptx/sync.cuh>

namespace chord {

struct Segment {
  int expert;
  int row_begin;
  int row_end;
  int first_tile;
  int num_tiles;

  int rows_per_tile() const { return round_up(ceil_div(row_end - row_begin, num_tiles), 8); }
};

// Three words a segment in shared memory: first row, end row, first tile with the expert above it;
// behind them the two counts. Nothing of it lives in registers.
class SegmentTable {
 public:
  explicit SegmentTable(SmemAddress base) : base_(base) {}

  int num_segments() const { return ptx::load_shared(base_ + kSegmentTableBytes - 8); }
  int num_tiles() const { return ptx::load_shared(base_ + kSegmentTableBytes - 4); }
  void write_counts(int num_segments, int num_tiles) {
    ptx::store_shared(base_ + kSegmentTableBytes - 8, num_segments);
    ptx::store_shared(base_ + kSegmentTableBytes - 4, num_tiles);
  }

  void write_begin(int segment, int row, int expert) {
    ptx::store_shared(base_ + 4 * segment, row);
    ptx::store_shared(base_ + 4 * (2 * kMaxSegments + segment), expert << kExpertShift);
  }
  void write_end(int segment, int row) {
    ptx::store_shared(base_ + 4 * (kMaxSegments + segment), row);
  }
  int rows(int segment) const {
    return static_cast<int>(ptx::load_shared(base_ + 4 * (kMaxSegments + segment)) -
                            ptx::load_shared(base_ + 4 * segment));
  }
  void write_first_tile(int segment, int tile) {
    const SmemAddress word = base_ + 4 * (2 * kMaxSegments + segment);
    ptx::store_shared(word, ptx::load_shared(word) | tile);
  }
  // A segment's entry without its first tile, to be put in another place.
  struct Entry {
    u32 row_begin;
    u32 row_end;
    u32 expert;
  };
  Entry entry(int segment) const {
    return {ptx::load_shared(base_ + 4 * segment),
            ptx::load_shared(base_ + 4 * (kMaxSegments + segment)),
            ptx::load_shared(base_ + 4 * (2 * kMaxSegments + segment))};
  }
  void write_entry(int segment, const Entry& entry) {
    ptx::store_shared(base_ + 4 * segment, entry.row_begin);
    ptx::store_shared(base_ + 4 * (kMaxSegments + segment), entry.row_end);
    ptx::store_shared(base_ + 4 * (2 * kMaxSegments + segment), entry.expert);
  }
  int first_tile(int segment) const {
    return ptx::load_shared(base_ + 4 * (2 * kMaxSegments + segment)) & kTileMask;
  }

  // The segment that owns tile `tile` (0 to num_tiles - 1).
  Segment find(int tile) const {
    int low = 0, high = num_segments();
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first_tile(middle) <= tile) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const u32 word = ptx::load_shared(base_ + 4 * (2 * kMaxSegments + low));
    const int first = word & kTileMask;
    const int next = low + 1 < num_segments() ? first_tile(low + 1) : num_tiles();
    return {.expert = static_cast<int>(word >> kExpertShift),
            .row_begin = static_cast<int>(ptx::load_shared(base_ + 4 * low)),
            .row_end = static_cast<int>(ptx::load_shared(base_ + 4 * (kMaxSegments + low))),
            .first_tile = first,
            .num_tiles = next - first};
  }

 private:
  static constexpr int kExpertShift = 20;
  static constexpr u32 kTileMask = (1u << kExpertShift) - 1;
  static_assert(kMaxSegments <= 1 << (32 - kExpertShift), "an expert id must fit in 12 bits");

  SmemAddress base_;
};

// Puts segments with longer tiles first, others in the order they have. All threads of the block
// call it, between two synchronisations of the block. The tiles are not numbered yet: their place
// in the table holds the length of a tile meanwhile.
template <int kThreads>
void sort_by_tile_rows(SegmentTable table, int num_segments, int max_rows) {
  constexpr int kPerThread = ceil_div(kMaxSegments, kThreads);
  SegmentTable::Entry entries[kPerThread];
  int places[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int segment = ptx::thread_idx() + i * kThreads;
    if (segment >= num_segments) break;
    entries[i] = table.entry(segment);
    const int rows = table.rows(segment);
    table.write_first_tile(segment,
                           round_up(ceil_div(rows, max_of(ceil_div(rows, max_rows), 1)), 8));
  }
  ptx::sync_block();
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int segment = ptx::thread_idx() + i * kThreads;
    if (segment >= num_segments) break;
    const int own = table.first_tile(segment);
    places[i] = 0;
#pragma unroll 4
    for (int other = 0; other < num_segments; ++other) {
      const int rows = table.first_tile(other);
      places[i] += rows > own || (rows == own && other < segment);
    }
  }
  ptx::sync_block();
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int segment = ptx::thread_idx() + i * kThreads;
    if (segment < num_segments) table.write_entry(places[i], entries[i]);
  }
}

// Fills the table. All threads of the block call it; it synchronises the block, so what was written
// to shared memory before is visible after. `scratch`: kScheduleScratchBytes. Experts that are none
// of `num_experts` have no weights to be read: their rows are left out.
template <int kThreads, bool kLongestFirst, class Addressing>
void build_schedule(const Addressing& addressing, SegmentTable table, SmemAddress scratch,
                    int num_experts, int max_rows) {
  constexpr int kWarps = kThreads / 32;
  static_assert(8 * kWarps <= kScheduleScratchBytes, "two counts a warp");
  const int warp = ptx::thread_idx() / 32, lane = ptx::thread_idx() % 32;
  const int max_items = addressing.max_items();
  const int items_per_warp = round_up(ceil_div(max_items, kWarps), 32);
  const int warp_begin = warp * items_per_warp;
  const int warp_end = min_of(warp_begin + items_per_warp, max_items);
  const int num_items = addressing.num_items();

  auto expert_of = [&](int item) {
    // Items that do not exist may be read (the buffer has room for them) but do not count.
    const int expert = item >= 0 && item < max_items ? addressing.expert(item) : -1;
    return item < num_items && expert < num_experts ? expert : -1;
  };
  // One lane an item; hands over whether the item begins and ends a segment.
  auto scan = [&](auto&& visit) {
#pragma unroll 1
    for (int base = warp_begin; base < warp_end; base += 32) {
      const int item = base + lane;
      const int expert = expert_of(item);
      const bool begins = expert >= 0 && expert_of(item - 1) != expert;
      const bool ends = expert >= 0 && expert_of(item + 1) != expert;
      visit(item, expert, begins, ends);
    }
  };

  // Count segment begins and ends of each warp's items.
  int begins_before = 0, ends_before = 0;
  scan([&](int, int, bool begins, bool ends) {
    begins_before += ptx::count_bits(ptx::ballot(begins));
    ends_before += ptx::count_bits(ptx::ballot(ends));
  });
  if (lane == 0) {
    ptx::store_shared(scratch + 8 * warp, begins_before);
    ptx::store_shared(scratch + 8 * warp + 4, ends_before);
  }
  ptx::sync_block();

  // Sum the counts of the warps before this one.
  int num_segments = 0;
  begins_before = ends_before = 0;
#pragma unroll 1
  for (int other = 0; other < kWarps; ++other) {
    const int begins = ptx::load_shared(scratch + 8 * other);
    if (other < warp) {
      begins_before += begins;
      ends_before += ptx::load_shared(scratch + 8 * other + 4);
    }
    num_segments += begins;
  }
  // More segments than experts means blocks of one expert that do not lie together.
  if (num_segments > kMaxSegments) ptx::trap();

  // Write each segment's first and last row.
  scan([&](int item, int expert, bool begins, bool ends) {
    const u32 below = (1u << lane) - 1;
    const u32 begin_mask = ptx::ballot(begins), end_mask = ptx::ballot(ends);
    if (begins) {
      table.write_begin(begins_before + ptx::count_bits(begin_mask & below),
                        addressing.row_begin(item), expert);
    }
    if (ends) {
      table.write_end(ends_before + ptx::count_bits(end_mask & below), addressing.row_end(item));
    }
    begins_before += ptx::count_bits(begin_mask);
    ends_before += ptx::count_bits(end_mask);
  });
  ptx::sync_block();
  if constexpr (kLongestFirst) {
    sort_by_tile_rows<kThreads>(table, num_segments, max_rows);
    ptx::sync_block();
  }

  // Number the tiles.
  if (warp == 0) {
    int tiles_before = 0;
#pragma unroll 1
    for (int base = 0; base < num_segments; base += 32) {
      const int segment = base + lane;
      const bool exists = segment < num_segments;
      const int tiles = exists ? ceil_div(table.rows(segment), max_rows) : 0;
      int inclusive = tiles;
      for (int delta = 1; delta < 32; delta *= 2) {
        const int other = ptx::shuffle_up(inclusive, delta);
        if (lane >= delta) inclusive += other;
      }
      if (exists) table.write_first_tile(segment, tiles_before + inclusive - tiles);
      tiles_before += ptx::shuffle(inclusive, 31);
    }
    if (lane == 0) table.write_counts(num_segments, tiles_before);
  }
  ptx::sync_block();
}

}  // namespace chord
