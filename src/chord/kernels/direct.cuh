// A handful of rows and a short K: weights go from memory straight into the registers of the warp
// that multiplies them with mma.sync. What decode spends on a ring of stages, barriers and a wait
// for whole copies is longer than such a launch takes.
//
// Roles      none: all warps do the same, and the last ones bring rows of x.
// Barriers   x_barrier[place]: 33 arrivals, the 32 lanes of the warp that notes the rows of a tile
//            and one that announces the bytes of x, + these bytes. A phase a group of row tiles.
// Work       tasks of 32 features x all of K x up to max_tokens rows, numbered row tile > features
//            and dealt out in equal runs, one a block, whose warps take them in turn.
// Memory     a warp has asked for the codes and scales of its whole next task while it multiplies
//            one: 4.6 KB at K = 256, 74 KB a multiprocessor.
// Timeline   ask for items, and what else comes from cold memory | find tiles | ask for rows of x,
//            then for weights (stages of the layer: weights, then rows) | wait for the block, then
//            for x | multiply a unit, ask for the next task's, ... | store
#pragma once

#include <chord/kernels/config.cuh>
#include <chord/kernels/epilogue.cuh>
#include <chord/kernels/params.cuh>
#include <chord/kernels/ptx/copy.cuh>
#include <chord/kernels/ptx/ldst.cuh>
#include <chord/kernels/ptx/mbarrier.cuh>
#include <chord/kernels/ptx/sync.cuh>
#include <chord/kernels/schedule.cuh>
#include <chord/kernels/stage.cuh>
#include <chord/kernels/swiglu.cuh>
#include <chord/kernels/unit.cuh>
#include <chord/kernels/weight_layout.cuh>

namespace chord {

template <DirectConfig kConfig, class Addressing>
class Direct {
  static_assert(kConfig.max_tokens == 8 || kConfig.max_tokens == 16,
                "max_tokens must be 8 or 16: one or two mma wide");
  static_assert(kConfig.max_k % kUnitK == 0 && kConfig.max_k <= 256,
                "max_k must be a multiple of 64 (packed unit) and at most 256: a lane copies 16 "
                "bytes of a row of x");

  static constexpr int kRowTiles = 2;  // of a task
  static constexpr int kTaskFeatures = kRowTiles * kRowTileFeatures;
  static constexpr int kTasksPerStripe = kUnitFeatures / kTaskFeatures;
  static constexpr int kUnits = kConfig.units();
  // Whether rows of x and their numbers can be asked for before it is known who needs them.
  static constexpr bool kKnowsInputs = requires(const Addressing& a) { a.num_inputs(); };
  // Blocks of many warps ask for so much at a time that numbers of rows, asked for behind it, take
  // 1.5 us: the warps of the first places keep those of the first rows, 32 times as many. With 8
  // warps their own loads in front of everything cost more (0.4 us).
  static constexpr bool kKeepsRows = kKnowsInputs && kConfig.warps > 8;
  static constexpr int kFirstPlaces = 2, kFirstRows = 8;

  struct Smem {
    SmemAddress x = ptx::dynamic_smem();
    SmemAddress store = x + kConfig.warps * kConfig.x_tile_bytes();
    SmemAddress barriers = store + kConfig.warps * kStoreBytesPerWarp;
    SmemAddress notes = barriers + 8 * kConfig.warps;
    SmemAddress table = notes + kConfig.warps * kConfig.note_bytes();
    SmemAddress scratch = table + kSegmentTableBytes;  // or counts of the warps' own tables
  };
  static_assert(32 * kConfig.warps <= kMaxSegments && 8 * kConfig.warps <= kScheduleScratchBytes,
                "the warps' own tables must fit into the one of the block");

  using Unit = UnitCodes<kRowTiles>;

  // Divides by the same number again and again, small ones by a multiplication.
  class Divisor {
   public:
    explicit Divisor(u32 by)
        : by_(by), inverse_(ptx::opaque(static_cast<int>(by > 1 ? 0xffffffffu / by + 1 : 0))) {}

    // Rounded up, the inverse is too large by less than by_ / 2^32: no matter below 2^16.
    u32 quotient(u32 n) const {
      if ((n | by_) >> 16 != 0 || inverse_ == 0) return n / by_;
      return static_cast<u32>(static_cast<u64>(n) * inverse_ >> 32);
    }

   private:
    u32 by_;
    u32 inverse_;
  };

  struct Task {
    int row_tile;
    int features;  // number of its 32
    int expert;
  };

 public:
  explicit Direct(const Params<Addressing>& params)
      : p(params.gemm), addressing{params.addressing} {}

  __forceinline__ void run() {
    await<Addressing, Awaits::kRouting>();
    let_next_begin<Addressing>();
    // What takes long of a division is done before it is known what to divide.
    const Divisor by_blocks(ptx::grid_dim()), by_tile(tasks_per_row_tile());
    build_schedule();
    // The host sees to it that tasks are fewer than 2^31.
    const u32 tasks = table.num_tiles() * tasks_per_row_tile();
    const u32 share = by_blocks.quotient(tasks), longer = tasks - share * ptx::grid_dim();
    const u32 block = ptx::block_idx();
    const u32 begin = share * block + min_of(block, longer);
    const int count = share + (block < longer ? 1 : 0);
    if (count == 0) return await<Addressing, Awaits::kRows>();
    multiply(begin, by_tile.quotient(begin), count);
  }

 private:
  int k_units() const { return ceil_div(p.k, kUnitK); }
  int stripes() const { return ceil_div(p.n, kUnitFeatures); }
  int tasks_per_row_tile() const { return kTasksPerStripe * stripes(); }

  // A few items are each warp's own affair. What else comes from cold memory is asked for at the
  // same time, for behind the weights it would be there as late as they.
  __forceinline__ void build_schedule() {
    const WarpScheduleBuilder<Addressing> own(addressing, p.num_experts, lane);
    if constexpr (kKnowsInputs) {
      if (warp == kConfig.warps / 2) ask_for_inputs();
      if (kKeepsRows && place < kFirstPlaces) load_first_rows();
    }
    if (lane == 0) {
      ptx::mbarrier_init(x_barrier(place), 32 + 1);
      ptx::fence_mbarrier_init();
    }
    if (own.has_all()) {
      table = SegmentTable(smem.table, warp, smem.scratch);
      tile_expert = own.build(table, kConfig.max_tokens);
    } else {
      ScheduleBuilder<kConfig.threads(), false, Addressing>(addressing, p.num_experts)
          .build(table, smem.scratch, kConfig.max_tokens);
    }
  }

  int expert_of(int row_tile) const {
    const int expert = ptx::shuffle(tile_expert, row_tile % 32);
    return expert >= 0 ? expert : table.find(row_tile).expert;
  }

  // Brings the numbers of the rows and x to L2, lines of 128 bytes a lane, if they are not long.
  // (Into the shared memory of every block: 0.5 us and more lost, for all of them ask for the same
  // lines.)
  void ask_for_inputs() const {
    const int line = ptx::block_idx() * 32 + lane;
    if (!kKeepsRows && 32 * line < addressing.num_positions()) {
      ptx::prefetch(addressing.rows_from(32 * line));
    }
    if (line < static_cast<i64>(addressing.num_inputs()) * p.k / 64) {
      ptx::prefetch(static_cast<const char*>(p.x) + 128 * line);
    }
  }

  // K behind the last is multiplied too, by weights of zero: there must be no NaN in it.
  void clear_behind_k(SmemAddress slot) const {
    for (int at = 2 * p.k; at < 2 * kConfig.max_k; at += 16) {
      ptx::store_shared_x4(slot + at, {0, 0, 0, 0});
    }
  }

  void load_first_rows() {
#pragma unroll
    for (int i = 0; i < kFirstRows; ++i) {
      const int position = lane + 32 * i;
      first_rows[i] = position < addressing.num_positions() ? addressing.output_row(position) : -1;
    }
  }

  // Output rows of neighbouring positions, `position` the lane's, of a tile that ends before `end`.
  template <bool kMayBeKept>
  int output_row(int position, int end) const {
    if constexpr (kMayBeKept && kKeepsRows) {
      if (place < kFirstPlaces && end <= 32 * kFirstRows) {
        int row = -1;
#pragma unroll
        for (int i = 0; i < kFirstRows; ++i) {
          const int other = ptx::shuffle(first_rows[i], position % 32);
          if (position / 32 == i) row = other;
        }
        return position < end ? row : -1;
      }
    }
    return position < end ? addressing.output_row(position) : -1;
  }

  // Moves on by `tasks`.
  void advance(Task& task, int tasks) const {
    task.features += tasks;
    if (task.features < tasks_per_row_tile()) return;
    for (; task.features >= tasks_per_row_tile(); ++task.row_tile) {
      task.features -= tasks_per_row_tile();
    }
    task.expert = expert_of(task.row_tile);
  }

  // Where the lane finds its part of a unit; further units follow kUnitBytes apart.
  struct Source {
    const char* codes;
    int to_scales;  // bytes from there
  };
  Source source_of(const Task& task) const {
    const i64 offset =
        unit_offset(task.expert, task.features / kTasksPerStripe, 0, stripes(), k_units());
    const char* unit = static_cast<const char*>(p.weight) + offset;
    const int row_tile = task.features % kTasksPerStripe * kRowTiles;
    const int codes = code_offset(row_tile, lane);
    return {unit + codes, scale_offset(row_tile, lane) - codes};
  }

  // Loads unit `u` and moves on to the next. Units behind the last are the last again, for x has
  // zeros there: no branch, so that all are on their way at once.
  void load_unit(Unit& unit, Source& source, int u) const {
    const u64 policy = ptx::evict_first();
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      unit.set(
          i, ptx::load_weights_x4(source.codes + i * kRowTileCodeBytes, policy),
          ptx::load_weights_x2(source.codes + source.to_scales + i * kRowTileScaleBytes, policy));
    }
    source.codes += u + 1 < k_units() ? kUnitBytes : 0;
  }
  void load_units(Unit (&units)[kUnits], Source source) const {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) load_unit(units[u], source, u);
  }

  // Finds the rows of a tile, notes them in the warp's place and brings their x. Tokens without a
  // row read x of one that has one, for their sums are dropped.
  template <bool kMayBeKept = false>
  void load_rows(int row_tile) const {
    const Segment segment = table.find(row_tile);
    const int rows_per_tile = segment.rows_per_tile();
    const int position = segment.row_begin + (row_tile - segment.first_tile) * rows_per_tile + lane;
    const int end = min_of(position - lane + rows_per_tile, segment.row_end);
    const int row = output_row<kMayBeKept>(position, end);
    const u32 valid = ptx::ballot(row >= 0);
    // A tile of padding alone gets row 0 of x.
    const u32 read = valid == 0 ? 1 : valid;
    const bool is_read = (read >> lane & 1) != 0;
    const int input_row = row < 0 ? 0 : addressing.input_row(row);
    SmemAddress slot = x_slot(place * kConfig.max_tokens + lane);
    const SmemAddress barrier = x_barrier(place);
    if (lane == 0) ptx::mbarrier_arrive_expect_bytes(barrier, ptx::count_bits(read) * 2 * p.k);
    // The bytes are announced before the first of them can arrive.
    ptx::sync_warp();
    if (is_read) {
      const i64 source = static_cast<i64>(input_row) * p.k * 2;
      ptx::bulk_load(slot, static_cast<const char*>(p.x) + source, 2 * p.k, barrier);
      clear_behind_k(slot);
    }
    const int other_slot = ptx::shuffle(slot, ptx::highest_bit(read));
    if (!is_read) slot = other_slot;
    if (lane < kConfig.max_tokens) {
      ptx::store_shared(row_note(place, lane), row);
      ptx::store_shared(slot_note(place, lane), slot);
    }
    if (lane == 0) ptx::store_shared(width_note(place), ptx::highest_bit(read) + 1);
    ptx::mbarrier_arrive(barrier);
  }

  // Tasks [begin, begin + count), of which the warp takes every kConfig.warps-th. Rows of x lie in
  // shared memory for as many tiles as there are warps, each of which brings one.
  __forceinline__ void multiply(u32 begin, int first_tile, int count) {
    const int per_tile = tasks_per_row_tile();
    const int first_features = begin - first_tile * per_tile;
    Task next{first_tile, first_features, expert_of(first_tile)};
    if (warp < count) advance(next, warp);
    Unit units[kUnits];
    // Stages ask for weights while they wait for rows; others ask for rows first, so that these are
    // there before the weights. The last warps, which may have no task, bring the first tiles.
    constexpr bool kWeightsFirst = awaits<Addressing, Awaits::kRows>();
    int tasks_behind = first_features + count;  // from the first of the tile on
    const bool brings_rows = place * per_tile < tasks_behind;
    if (!kWeightsFirst && brings_rows) load_rows<true>(first_tile + place);
    if (warp < count) load_units(units, source_of(next));
    await<Addressing, Awaits::kRows>();
    if (kWeightsFirst && brings_rows) load_rows(first_tile + place);
    ptx::sync_block();  // the barriers of x are there
    int left = count - warp;
    for (u32 phase = 0;; phase ^= 1) {
      while (left > 0 && next.row_tile < first_tile + kConfig.warps) {
        const Task task = next;
        left -= kConfig.warps;
        if (left > 0) advance(next, kConfig.warps);
        const int where = task.row_tile - first_tile;
        ptx::mbarrier_wait(x_barrier(where), phase);
        if (kConfig.max_tokens > 8 && ptx::load_shared(width_note(where)) > 8) {
          multiply_task<kConfig.max_tokens / 8>(units, where, task, next, left > 0);
        } else {
          multiply_task<1>(units, where, task, next, left > 0);
        }
      }
      first_tile += kConfig.warps;
      tasks_behind -= kConfig.warps * per_tile;
      if (tasks_behind <= 0) return;
      ptx::fence_proxy_async();
      ptx::sync_block();  // all have read the rows of these tiles
      if (place * per_tile < tasks_behind) load_rows(first_tile + place);
    }
  }

  template <int kEights>
  __forceinline__ void multiply_task(Unit (&units)[kUnits], int place, const Task& task,
                                     const Task& next, bool has_next) {
    float sums[kRowTiles][kEights][4] = {};
    Source next_source = source_of(next);
    // ldmatrix: lanes 8 m to 8 m + 7 address the 16 bytes of K block m of tokens 0 to 7.
    SmemAddress x[kEights];
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
      x[eight] = ptx::load_shared(slot_note(place, 8 * eight + lane % 8)) + lane / 8 * 16;
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        mma_group(sums, units[u], group,
                  [&](int eight) { return x[eight] + (2 * u + group) * 2 * kGroupK; });
      }
      if (has_next) load_unit(units[u], next_source, u);
    }
    int output_row[kEights];  // of token 8 e + lane / 4
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
      output_row[eight] = ptx::load_shared(row_note(place, 8 * eight + lane / 4));
    }
    store_sums<kRowTiles>(sums, output_row, smem.store + warp * kStoreBytesPerWarp, addressing,
                          p.out, task.features * kTaskFeatures, p.n);
    ptx::sync_warp();
  }

  SmemAddress x_slot(int slot) const { return smem.x + slot * kConfig.x_row_bytes(); }

  // Of the tile in place `place`: how many tokens are multiplied, each one's output row (-1 for
  // none) and the slot of its x, and the barrier that says that all this, and x, is there.
  SmemAddress width_note(int place) const { return smem.notes + place * kConfig.note_bytes(); }
  SmemAddress row_note(int place, int token) const { return width_note(place) + 4 + 8 * token; }
  SmemAddress slot_note(int place, int token) const { return row_note(place, token) + 4; }
  SmemAddress x_barrier(int place) const { return smem.barriers + 8 * place; }

  const GemmParams& p;
  const Addressing addressing;
  const Smem smem;
  const int warp = ptx::thread_idx() / 32;
  const int lane = ptx::thread_idx() % 32;
  const int place = kConfig.warps - 1 - warp;  // of the tiles whose rows the warp brings
  SegmentTable table{smem.table};
  int tile_expert = -1;  // of tile `lane`, if known
  int first_rows[kFirstRows];
};

template <DirectConfig kConfig, class Addressing>
__forceinline__ void direct(const Params<Addressing>& p) {
  Direct<kConfig, Addressing>(p).run();
}

}  // namespace chord
