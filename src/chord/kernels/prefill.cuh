// Many rows an expert: dequantised weights in registers are operand A of wgmma, rows of x in shared
// memory operand B. Hopper only (sm_90a).
//
// Roles      two multiplying warpgroups (0, 1), 128 features each: two m64 tiles, whose rows are
//            dealt out so that a warp owns 32 neighbouring features; one loading warpgroup (2).
// Ring       full[s]: for weights one arrival of each loading warp that asks for some (the first
//            where rows lie sorted, else all four; it announces their bytes) + these bytes; one of
//            each lane of the first (it releases its own notes); for x 128 when the loader's
//            cp.async have landed, or, where rows lie sorted, one of each of its other warps + the
//            bytes of x.
//            empty[s]: one arrival a multiplying thread; each releases what it read.
// Barriers   named 1: the loaders, around the rows of a tile; 2 to 5: two neighbouring multiplying
//            warps, once more than they store batches of a tile (epilogue.cuh).
// Work       tiles of 256 features x up to block_m tokens over all of K, in the order segment >
//            feature tile > row tile, so that neighbours in time share weights. A block that has
//            finished loading takes the next from a counter (a run of them with a short K): dealt
//            out round robin, the slowest block kept the others waiting for 8 % of the time. A
//            tile's own width (its valid rows) picks the instruction, so padding costs nothing.
// Timeline   loader: take a tile | wait empty | bulk copies of weights; rows of x by cp.async, or,
//            where they lie sorted (kSortedRows), by boxes of 16 through a tensor map: cp.async
//            writes shared memory in pieces, which costs 9 % in the widest tiles
//            groups: wait full | dequantise step i + 1 while the tensor cores run step i, fetch the
//            next unit's codes | arrive empty | after a tile: store
#pragma once

#include <chord/kernels/config.cuh>
#include <chord/kernels/dequant/int4.cuh>
#include <chord/kernels/epilogue.cuh>
#include <chord/kernels/eviction.cuh>
#include <chord/kernels/params.cuh>
#include <chord/kernels/pipeline.cuh>
#include <chord/kernels/ptx/copy.cuh>
#include <chord/kernels/ptx/ldst.cuh>
#include <chord/kernels/ptx/mbarrier.cuh>
#include <chord/kernels/ptx/sync.cuh>
#include <chord/kernels/ptx/wgmma.cuh>
#include <chord/kernels/runs.cuh>
#include <chord/kernels/schedule.cuh>
#include <chord/kernels/smem_descriptor.cuh>
#include <chord/kernels/stage.cuh>
#include <chord/kernels/swiglu.cuh>
#include <chord/kernels/unit.cuh>
#include <chord/kernels/weight_layout.cuh>

namespace chord {

template <PrefillConfig kConfig, class Addressing>
class Prefill {
  static_assert(kConfig.width_step == 8 || kConfig.width_step == 16,
                "width_step must be 8 or 16: the steps of wgmma's token width that pay");
  static_assert(kConfig.block_m % 8 == 0 && kConfig.block_m <= 8 * kMaxTileEights,
                "block_m must be a multiple of 8 and at most 192: two accumulators of block_m / 2 "
                "registers each have to fit beside the fragments");
  static_assert(kConfig.min_width % 8 == 0 && kConfig.min_width <= kConfig.block_m &&
                    (kConfig.block_m - kConfig.min_width) % kConfig.width_step == 0,
                "widths go from min_width to block_m in steps of width_step");
  static_assert(kConfig.block_k % kUnitK == 0, "block_k must be a multiple of 64 (packed unit)");
  static_assert(kConfig.store_eights >= 1 && kConfig.store_eights <= kConfig.block_m / 8,
                "store_eights must be from 1 to the eights of block_m");
  static_assert(kConfig.weight_stage_bytes() % 1024 == 0,
                "stages must keep the 1,024-byte alignment of the swizzled tiles");
  static_assert(16 * kConfig.stages <= kBarrierBytes, "the barriers must fit");
  static_assert(!Addressing::kSortedRows || kConfig.block_m % kBoxRows == 0,
                "block_m must be a multiple of 16 where rows of x lie sorted: a box of 16 rows may "
                "not reach beyond its tile");

  static constexpr bool kSorted = Addressing::kSortedRows;
  // Narrow tiles are about equally long: memory takes longer than they do.
  static constexpr bool kLongestFirst = kConfig.block_m > 32;
  static constexpr int kLoaders = 128;
  // Loading warps that ask for boxes of x, and for weights. Lanes of a warp take turns to ask,
  // about 60 cycles each.
  static constexpr int kBoxWarps = kLoaders / 32 - 1;
  static constexpr int kWeightWarps = kSorted ? 1 : kLoaders / 32;
  static constexpr int kWarpStripes = kConfig.stripes() / kWeightWarps;
  // Arrivals for x. The loading warps that fill stages all arrive: one that did not might fall
  // behind by a turn of the ring and wait for a phase that is long over.
  static constexpr int kRowArrivals = kSorted ? kBoxWarps : kLoaders;
  // Eight neighbouring threads copy one row of 128 bytes, so that a warp reads whole lines.
  static constexpr int kRowsPerPass = kLoaders / 8;
  static constexpr int kPasses = ceil_div(kConfig.block_m, kRowsPerPass);
  static constexpr int kRowsPerLane = ceil_div(kConfig.block_m, 32);
  // Weights of a tile's first stage are asked for before its rows are known, 1 to 2 us later. With
  // two long stages rows are found in the meantime anyhow, before a stage is empty.
  static constexpr bool kWeightsFirst = kConfig.stages > 2;
  // Whether memory may take longer than the tensor cores, so that it matters how weights leave L2.
  // In ordinary turn (eviction.cuh) only where tiles are that narrow, and where little x is read
  // again for other feature tiles: else it has to stay in L2 (down at 10 to 21 rows: 1 to 3 %).
  static constexpr bool kMemoryBound = kConfig.block_m <= 32;
  static constexpr int kOrdinaryRows = 16;
  static constexpr int kOrdinaryReads = 256;  // rows times feature tiles
  // The output of narrow tiles is small beside the weights.
  static constexpr bool kStays = kConfig.block_m <= 64;
  static constexpr int kLoaderBarrier = 1;
  static constexpr int kPairBarrier = 2;  // of the first two multiplying warps, and so on
  // Warps store in pairs, whole lines at a time; with SwiGLU half of each row is left.
  static constexpr bool kPairs = !kHasSwiglu<Addressing>;
  static constexpr int kLoaderRegisters = kConfig.block_m > 128 ? 56 : 72;
  static constexpr int kMultiplierRegisters = kConfig.block_m > 128 ? 224 : 216;
  // The block owns what it was launched with; asking for more in sum waits for ever.
  static constexpr int kLaunchRegisters = 65536 / kConfig.threads() / 8 * 8;
  static_assert(kLoaders * kLoaderRegisters + 32 * kConfig.warps() * kMultiplierRegisters <=
                    kConfig.threads() * kLaunchRegisters,
                "the roles may not share out more registers than the block was launched with");

  struct Smem {
    SmemAddress x = ptx::dynamic_smem();
    SmemAddress weight = x + kConfig.stages * kConfig.x_stage_bytes();
    SmemAddress store = weight + kConfig.stages * kConfig.weight_stage_bytes();
    SmemAddress notes = store + kConfig.store_bytes();
    SmemAddress rows = notes + kConfig.stages * kConfig.note_bytes();
    SmemAddress x_rows = rows + 4 * kConfig.block_m;
    SmemAddress next_run = rows + kConfig.row_table_bytes();
    SmemAddress table = next_run + 16;
    SmemAddress scratch = table + kSegmentTableBytes;
    SmemAddress barriers = scratch + kSortScratchBytes;
  };

 public:
  explicit Prefill(const Params<Addressing>& params)
      : p(params.gemm), addressing{params.addressing} {}

  __forceinline__ void run() {
    if (ptx::thread_idx() == 0) {
      ring.init(kRowArrivals + kWeightWarps + 32, 32 * kConfig.warps());
    }
    await<Addressing, Awaits::kRouting>();
    let_next_begin<Addressing>();
    ScheduleBuilder<kConfig.threads(), kLongestFirst, Addressing>(addressing, p.num_experts)
        .build(table, smem.scratch, kConfig.block_m);
    // ptxas puts the code of `load` first this way round, see multiply_tile_of.
    if (ptx::thread_idx() < 32 * kConfig.warps()) {
      ptx::raise_registers<kMultiplierRegisters>();
      multiply();
    } else {
      ptx::lower_registers<kLoaderRegisters>();
      load();
    }
  }

 private:
  // Within the role: the loading warpgroup counts from 0 too.
  int warp() const { return thread / 32; }
  int lane() const { return thread % 32; }

  // What travels with a stage: the width and the feature tile that it belongs to, and, with the
  // last stage of a tile, each token's output row. Width 0 ends the work.
  SmemAddress width_note(int stage) const { return smem.notes + stage * kConfig.note_bytes(); }
  SmemAddress feature_note(int stage) const { return width_note(stage) + 4; }
  SmemAddress row_note(int stage, int token) const { return width_note(stage) + 16 + 4 * token; }

  // ---- Loading warpgroup.
  __forceinline__ void load() {
    thread = ptx::thread_idx() - 32 * kConfig.warps();
    if constexpr (kMemoryBound) {
      const i64 stages =
          static_cast<i64>(table.num_tiles()) * runs.feature_tiles() * runs.k_stages();
      ordinary_left = ordinary_stages<Addressing>(stages / ptx::grid_dim(),
                                                  kConfig.weight_stage_bytes(), p.l2_share);
      ordinary_rows = min_of(kOrdinaryRows, kOrdinaryReads / runs.feature_tiles());
    }
    RingPosition<kConfig.stages> at;
    const int num_runs = runs.count();
    for (int index = runs.first_index(); index < num_runs; index = runs.next_index()) {
      Tile tile = runs.tile_at(index);
      const int first_tile = tile.feature_tile;
      if (kWeightsFirst && warp() < kWeightWarps) {
        ring.wait_empty(at);
        load_weights(at.stage, tile, 0);
      }
      u32 x_row[kPasses];
      const int width = find_rows(x_row, tile);
      const Box box = box_of_lane(width);
      const int end = runs.end_of_run(first_tile);
      for (; tile.feature_tile < end; ++tile.feature_tile) {
        const char* x = static_cast<const char*>(p.x);
        for (int k_stage = 0; k_stage < runs.k_stages(); ++k_stage) {
          ring.wait_empty(at);
          if (thread < 32) {
            if (k_stage == runs.k_stages() - 1) note_rows(at.stage);
            note_tile(at.stage, tile, width);
          }
          const bool is_first = k_stage == 0 && tile.feature_tile == first_tile;
          if (warp() < kWeightWarps && !(kWeightsFirst && is_first)) {
            load_weights(at.stage, tile, k_stage);
          }
          if constexpr (kSorted) {
            if (warp() > 0) {
              if (k_stage == 0) await<Addressing, Awaits::kRows>();
              load_box(at.stage, tile.row_begin, k_stage, box);
            }
          } else {
            if (k_stage == 0) await<Addressing, Awaits::kRows>();
            if ((k_stage + 1) * kConfig.block_k > p.k) {
              load_x_and_zeros(at.stage, x, k_stage, width);
            } else {
              load_x<kPasses>(at.stage, x, x_row, width);
            }
            x += 2 * kConfig.block_k;
            ptx::mbarrier_arrive_after_cp_async(ring.full(at.stage));
          }
          at.advance();
        }
      }
    }
    await<Addressing, Awaits::kRows>();
    ring.wait_empty(at);
    if (thread == 0) ptx::store_shared(width_note(at.stage), 0);
    if (warp() == 0) ptx::mbarrier_arrive(ring.full(at.stage));
    if (warp() < kWeightWarps && lane() == 0) ptx::mbarrier_arrive(ring.full(at.stage));
    if (thread == 0) runs.end();
    if constexpr (kSorted) {
      if (warp() > 0 && lane() == 0) ptx::mbarrier_arrive(ring.full(at.stage));
    } else {
      ptx::mbarrier_arrive_after_cp_async(ring.full(at.stage));
    }
  }

  // Leaves the tile's output rows (-1 for none) in the row table and returns the width that the
  // tile is multiplied at. Where rows are not sorted, finds where in x the pieces lie that this
  // thread copies, in 16-byte steps (x has at most 64 GiB): slots without a row copy row 0 of x,
  // for their sums are dropped, and a copy without a condition is cheaper.
  int find_rows(u32 (&x_row)[kPasses], const Tile& tile) const {
    // All have read the number of this run and noted the rows of the last one.
    ptx::sync_named(kLoaderBarrier, kLoaders);
    // Ask for the next run now; the answer takes as long as the rows that are asked for meanwhile.
    u32 next = 0;
    if (thread == 0) next = runs.ask();
    // Unrolled, the loader of the largest tiles would spill; so would it with the expert's part of
    // the offset kept across stages.
#pragma unroll 1
    for (int token = thread; token < kConfig.block_m; token += kLoaders) {
      const int position = tile.row_begin + token;
      const int row = position < tile.row_end ? addressing.output_row(position) : -1;
      ptx::store_shared(smem.rows + 4 * token, row);
      if constexpr (!kSorted) {
        const u32 input_row = row < 0 ? 0 : addressing.input_row(row);
        ptx::store_shared(smem.x_rows + 4 * token, input_row * static_cast<u32>(p.k / 8));
      }
    }
    if (thread == 0) runs.note(next);
    ptx::sync_named(kLoaderBarrier, kLoaders);
    if constexpr (!kSorted) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int token = min_of(thread / 8 + pass * kRowsPerPass, kConfig.block_m - 1);
        x_row[pass] = ptx::load_shared(smem.x_rows + 4 * token) + thread % 8;
      }
    }
    int used = 0;
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      const int token = lane() + 32 * i;
      const u32 mask = ptx::ballot(token < kConfig.block_m && row_of(token) >= 0);
      if (mask != 0) used = 32 * i + ptx::highest_bit(mask) + 1;
    }
    return kConfig.min_width + round_up(max_of(used - kConfig.min_width, 0), kConfig.width_step);
  }

  int row_of(int token) const { return ptx::load_shared(smem.rows + 4 * token); }

  // Sends the tile's output rows along: the first warp writes them all, since its lanes' arrivals
  // release ordinary stores with the stage.
  void note_rows(int stage) const {
    for (int token = thread; token < kConfig.block_m; token += 32) {
      ptx::store_shared(row_note(stage, token), row_of(token));
    }
  }

  void note_tile(int stage, const Tile& tile, int width) const {
    if (lane() == 0) {
      ptx::store_shared(width_note(stage), width);
      ptx::store_shared(feature_note(stage), tile.feature_tile);
    }
    ptx::mbarrier_arrive(ring.full(stage));
  }

  void load_weights(int stage, const Tile& tile, int k_stage) {
    const int units = min_of(kConfig.units(), runs.k_units() - k_stage * kConfig.units());
    const int num_stripes = runs.tile_stripes(tile.feature_tile);
    const int first = warp() * kWarpStripes;
    const int count = max_of(min_of(num_stripes - first, kWarpStripes), 0);
    if (lane() == 0) {
      ptx::mbarrier_arrive_expect_bytes(ring.full(stage), count * kConfig.units() * kUnitBytes);
    }
    bool is_ordinary = false;
    if constexpr (kMemoryBound) {
      is_ordinary = ordinary_left > 0 && tile.row_end - tile.row_begin <= ordinary_rows;
      --ordinary_left;
    }
    const u64 policy = is_ordinary ? ptx::evict_unchanged() : ptx::evict_first();
    // The bytes are announced before the first of them can arrive.
    ptx::sync_warp();
    if (lane() < count) {
      const int stripe = first + lane();
      const i64 source =
          unit_offset(ptx::opaque(tile.expert), tile.feature_tile * kConfig.stripes() + stripe,
                      k_stage * kConfig.units(), runs.stripes(), runs.k_units());
      const SmemAddress target = weight_stage(stage) + stripe * kConfig.units() * kUnitBytes;
      const char* weight = static_cast<const char*>(p.weight) + source;
      ptx::bulk_load(target, weight, units * kUnitBytes, ring.full(stage), policy);
#pragma unroll 1
      for (int unit = units; unit < kConfig.units(); ++unit) {
        ptx::bulk_load(target + unit * kUnitBytes, weight, kUnitBytes, ring.full(stage), policy);
      }
    }
  }

  // Where rows lie sorted: what a lane copies of every stage of a tile, 64 K of 16 rows. Loading
  // warps but the first deal out the boxes of a stage.
  struct Box {
    int unit;
    int token;  // the first of its rows
    bool exists;
    int of_warp;  // boxes of the lane's warp
  };
  Box box_of_lane(int width) const {
    static_assert(kConfig.units() * ceil_div(kConfig.block_m, kBoxRows) <= 32 * kBoxWarps,
                  "a lane copies at most one box of a stage");
    const int boxes_of_unit = ceil_div(width, kBoxRows);
    const int boxes = boxes_of_unit * kConfig.units();
    const int index = lane() * kBoxWarps + warp() - 1;
    return {.unit = index / boxes_of_unit,
            .token = index % boxes_of_unit * kBoxRows,
            .exists = index < boxes,
            .of_warp = ceil_div(max_of(boxes - (warp() - 1), 0), kBoxWarps)};
  }

  // Copies the lane's box of the tile's rows of x, which begin at `first_row`. A box beyond the end
  // of x or of K brings zeros, and all of its bytes; rows behind the tile's own are other
  // experts', and their sums are dropped.
  void load_box(int stage, int first_row, int k_stage, const Box& box) const {
    if (lane() == 0) {
      ptx::mbarrier_arrive_expect_bytes(ring.full(stage), box.of_warp * kBoxBytes);
    }
    // The bytes are announced before the first of them can arrive.
    ptx::sync_warp();
    if (!box.exists) return;
    ptx::tensor_load_2d(x_stage(stage) + box.unit * kConfig.x_unit_bytes() + box.token * 128,
                        &addressing.p.x_map, (k_stage * kConfig.units() + box.unit) * kUnitK,
                        first_row + box.token, ring.full(stage));
  }

  // Copies the thread's part of the tile's rows; `x` is where K of the stage begins in row 0. The
  // number of passes is made a constant: then a row costs an address and a copy a unit.
  template <int kCount>
  __forceinline__ void load_x(int stage, const char* x, const u32 (&x_row)[kPasses],
                              int width) const {
    if constexpr ((kCount - 1) * kRowsPerPass < kConfig.min_width) {
      copy_rows<kCount>(stage, x, x_row, width);
    } else if (width > (kCount - 1) * kRowsPerPass) {
      copy_rows<kCount>(stage, x, x_row, width);
    } else {
      load_x<kCount - 1>(stage, x, x_row, width);
    }
  }

  template <int kCount>
  __forceinline__ void copy_rows(int stage, const char* x, const u32 (&x_row)[kPasses],
                                 int width) const {
    const SmemAddress target = x_stage(stage) + x_tile_offset(thread / 8, thread % 8);
#pragma unroll
    for (int pass = 0; pass < kCount; ++pass) {
      if (pass == kCount - 1 && thread / 8 + pass * kRowsPerPass >= width) break;
      const char* source = x + 16 * static_cast<u64>(x_row[pass]);
#pragma unroll
      for (int unit = 0; unit < kConfig.units(); ++unit) {
        // Rows 16 apart share their place in the swizzle.
        ptx::cp_async(target + unit * kConfig.x_unit_bytes() + pass * kRowsPerPass * 128,
                      source + unit * 2 * kUnitK);
      }
    }
  }

  // The same for a stage that K fills in part, with zeros for what lies behind K: short code.
  void load_x_and_zeros(int stage, const char* x, int k_stage, int width) const {
    const int chunk = thread % 8;
#pragma unroll 1
    for (int token = thread / 8; token < width; token += kRowsPerPass) {
      const u32 x_row = ptx::load_shared(smem.x_rows + 4 * token) + chunk;
      const char* source = x + 16 * static_cast<u64>(x_row);
#pragma unroll 1
      for (int unit = 0; unit < kConfig.units(); ++unit) {
        const bool exists = (k_stage * kConfig.units() + unit) * kUnitK + 8 * chunk < p.k;
        ptx::cp_async_or_zero(
            x_stage(stage) + unit * kConfig.x_unit_bytes() + x_tile_offset(token, chunk),
            exists ? source + unit * 2 * kUnitK : source, exists);
      }
    }
  }

  // ---- Multiplying warpgroups.
  __forceinline__ void multiply() {
    thread = ptx::thread_idx();
    RingPosition<kConfig.stages> at;
    for (;;) {
      // Lane-dependent addresses are worked out once a tile; hoisted above the widths, each width's
      // copies would stay live and spill.
      thread = ptx::opaque(thread);
      ring.wait_full(at);
      const int width = ptx::load_shared(width_note(at.stage));
      if (width == 0) return;
      const int feature_tile = ptx::load_shared(feature_note(at.stage));
      multiply_tile_of<kConfig.min_width, kConfig.block_m>(width, at, feature_tile);
    }
  }

  // Makes the tile's width, one of kLow to kHigh, a constant. All of it is inlined by force, for a
  // call anywhere makes ptxas serialise wgmma (C7510).
  //
  // Where ptxas puts what matters: the first jump to code that lies more than 64 KB behind the
  // kernel's begin takes 3 us, and each width is 9 to 13 KB. With the multiplication in the `then`
  // of each `if`, all comparisons stand side by side, and what is compared last comes first: two
  // narrow widths are taken away, then a wide one, until one is left.
  template <int kLow, int kHigh, int kTurn = 0>
  __forceinline__ void multiply_tile_of(int width, RingPosition<kConfig.stages>& at,
                                        int feature_tile) {
    constexpr bool kTakesLow = kTurn % 3 != 2;
    constexpr int kWidth = kTakesLow ? kLow : kHigh, kStep = kConfig.width_step;
    if constexpr (kLow == kHigh) {
      multiply_tile<kWidth>(at, feature_tile);
    } else if (width == kWidth) {
      multiply_tile<kWidth>(at, feature_tile);
    } else {
      multiply_tile_of<kLow + (kTakesLow ? kStep : 0), kHigh - (kTakesLow ? 0 : kStep), kTurn + 1>(
          width, at, feature_tile);
    }
  }

  // Two row tiles of a unit: warp w of the group owns 2 w and 2 w + 1 of its 128 features.
  using Codes = UnitCodes<2>;

  __forceinline__ Codes load_codes(int stage, int unit, int stripe) const {
    const SmemAddress source = weight_stage(stage) + (stripe * kConfig.units() + unit) * kUnitBytes;
    return load_unit<2>(source, 2 * (warp() % 2), lane());
  }

  // k16 steps of a row tile that are multiplied as one group of wgmma. Two save some of what stands
  // between groups: 4 % at 48 tokens, nothing where a step takes long.
  static constexpr int kGroupSteps = kConfig.block_m <= 64 ? 2 : 1;
  static constexpr int kGroups = 4 / kGroupSteps;  // of a unit

  // Operand A of row tile `i` for group `group` of the unit.
  __forceinline__ static void dequantize_group(u32 (&a)[kGroupSteps][4], const Codes& codes, int i,
                                               int group) {
#pragma unroll
    for (int s = 0; s < kGroupSteps; ++s) {
      const int step = group * kGroupSteps + s;
      dequantize(a[s], codes.words[i][step], prepare_scale(codes.scales[i][step / 2]));
    }
  }

  // The units of a stage, four k16 steps each. Two row tiles take turns: while the tensor cores run
  // one, its next group is dequantised; the queue never holds less than the other one. (Both at a
  // time, the whole arithmetic of a step falls behind the second: 2 to 3 %.) A unit's codes are
  // fetched while the unit before is multiplied. At the end all wgmma are done: a group in flight
  // across the loop's edge makes ptxas serialise every wgmma (C7512, C7513); meanwhile the other
  // warpgroup keeps the tensor cores busy.
  //
  // Stages are multiplied whole: what K leaves empty of the last has zeros for x, and the weights
  // of its first unit. With a second copy of this code for it, tiles of up to 64 rows take 2 %
  // longer, also where K fills all stages.
  template <int kWidth>
  __forceinline__ void multiply_stage(float (&sums)[2][kWidth / 8][4], int stage, int stripe) {
    // From one lane: a descriptor is then made and advanced in uniform registers.
    const u32 x = ptx::shuffle(x_tile_descriptor_low(x_stage(stage)), 0);
    Codes codes = load_codes(stage, 0, stripe);
    u32 a[2][2][kGroupSteps][4];  // [group's parity][row tile][step]
    for (int i = 0; i < 2; ++i) dequantize_group(a[0][i], codes, i, 0);
#pragma unroll
    for (int unit = 0; unit < kConfig.units(); ++unit) {
      const u32 x_unit = x + unit * descriptor_step(kConfig.x_unit_bytes());
      Codes following = codes;
      if (unit + 1 < kConfig.units()) following = load_codes(stage, unit + 1, stripe);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const bool is_last = unit + 1 == kConfig.units() && group + 1 == kGroups;
        if (group + 1 == kGroups) codes = following;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          ptx::wgmma_fence();
#pragma unroll
          for (int s = 0; s < kGroupSteps; ++s) {
            const int step = group * kGroupSteps + s;
            ptx::wgmma_m64k16(sums[i], a[group % 2][i][s],
                              x_tile_descriptor(x_unit + step * kDescriptorK16));
          }
          ptx::wgmma_commit();
          if (is_last) continue;
          // All but this one and the other tile's: the registers of the group before are free.
          ptx::wgmma_wait<2>();
          dequantize_group(a[(group + 1) % 2][i], codes, i, (group + 1) % kGroups);
        }
      }
    }
    ptx::wgmma_wait<0>();
  }

  template <int kWidth>
  __forceinline__ void multiply_tile(RingPosition<kConfig.stages>& at, int feature_tile) {
    // Cleared here, not by a first wgmma that overwrites: an accumulator without a first value
    // counts as live in all widths at once, and ptxas spills thousands of bytes.
    float sums[2][kWidth / 8][4] = {};
    ptx::wgmma_pin(sums[0]);
    ptx::wgmma_pin(sums[1]);
    // Warps behind N repeat the last stripe, and nothing of it is stored.
    const int stripe = min_of(warp() / 2, runs.tile_stripes(feature_tile) - 1);
    for (int k_stage = 0;; ++k_stage) {
      ring.wait_full(at);
      // cp.async wrote x as ordinary accesses do; wgmma reads through the async proxy, as boxes
      // are written.
      if constexpr (!kSorted) ptx::fence_proxy_async();
      multiply_stage<kWidth>(sums, at.stage, stripe);
      if (k_stage == runs.k_stages() - 1) break;
      release(at.stage);
      at.advance();
    }
    ptx::wgmma_pin(sums[0]);
    ptx::wgmma_pin(sums[1]);
    int output_row[kWidth / 8];
#pragma unroll
    for (int eight = 0; eight < kWidth / 8; ++eight) {
      const int token = kPairs ? warp() % 2 * 4 + lane() / 8 : lane() / 4;
      output_row[eight] = ptx::load_shared(row_note(at.stage, 8 * eight + token));
    }
    release(at.stage);
    at.advance();
    store_tile<kWidth>(sums, output_row, feature_tile);
  }

  void release(int stage) const { ptx::mbarrier_arrive(ring.empty(stage)); }

  template <int kWidth>
  __forceinline__ void store_tile(const float (&sums)[2][kWidth / 8][4],
                                  const int (&output_row)[kWidth / 8], int feature_tile) {
    const int group = kPairs ? 2 : 1;
    const int first_warp = warp() / group * group;
    const int first_feature = feature_tile * kConfig.tile_features() + first_warp * kWarpFeatures;
    const SmemAddress buffers = smem.store + first_warp * kConfig.warp_store_bytes();
    if constexpr (kPairs) {
      store_lines<kConfig.store_eights, kStays>(
          sums, output_row, buffers, kPairBarrier + warp() / 2, p.out, first_feature, p.n);
    } else {
      store_sums<2>(sums, output_row, buffers, addressing, p.out, first_feature, p.n);
      // The next tile begins with the first buffer again.
      ptx::sync_warp();
    }
  }

  SmemAddress weight_stage(int stage) const {
    return smem.weight + stage * kConfig.weight_stage_bytes();
  }
  SmemAddress x_stage(int stage) const { return smem.x + stage * kConfig.x_stage_bytes(); }

  const GemmParams& p;
  const Addressing addressing;
  const Smem smem;
  const Ring<kConfig.stages> ring{smem.barriers};
  int thread = 0;
  int ordinary_left = 0;  // stages of weights that may leave L2 in ordinary turn
  int ordinary_rows = 0;  // most rows of a tile whose weights do
  const SegmentTable table{smem.table};
  const Runs<kConfig> runs{p, table, smem.next_run};
};

template <PrefillConfig kConfig, class Addressing>
__forceinline__ void prefill(const Params<Addressing>& p) {
  Prefill<kConfig, Addressing>(p).run();
}

}  // namespace chord
