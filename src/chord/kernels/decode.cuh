// Few rows an expert: streams the packed weights once at memory speed and multiplies with mma.sync.
//
// Roles      kConfig.warps multiplying warps, warp_features features each; one warp loads weights,
//            one rows of x.
// Ring       full[s]: 33 arrivals, lane 0 of the weight loader and the 32 lanes of x's loader (each
//            releases the notes it wrote), + the bytes of weights and rows of x. empty[s]: one
//            arrival a multiplying thread; each releases what it read.
// Work       chunks of warps x warp_features features by block_k, numbered feature tile > row tile
//            > K and dealt out in equal runs, one a block (stream-K): no block waits for a last
//            wave, each gets wide and narrow tiles, and what shares weights lies side by side.
//            With a short K, where finding rows would take longer than a tile, row tile > feature
//            tile > K. A tile that two or more blocks share is finished by the block that has its
//            first chunk; the others work on theirs first of all and leave partial sums in
//            `partial`, so the finisher, which comes to it last of all, finds them. It adds them in
//            the order of K: same bits every run.
// Partial    a slot a block. Between launches it holds kNoSum; the finisher waits until there is a
//            sum in each word and puts kNoSum back. No flag, and no fence, for which a warp would
//            stand still.
// Code       comes from cold memory at every launch, for the weights have driven it out of L2: one
//            copy of the loop's body a width, unrolled no more than pays, is worth 4 us.
// Timeline   weights: wait empty | announce bytes | one bulk copy a stripe
//            x:       wait empty | note rows and width, announce bytes | one bulk copy a row
//            warps:   wait full | dequantise, multiply | arrive empty | after a tile: store it
//
// Tried for x (H200, EP8 gate_up, 30 tokens): one warp that loads weights and rows 216 us, a second
// warp with bulk copies 214, a second warp with cp.async 235.
#pragma once

#include <chord/kernels/config.cuh>
#include <chord/kernels/epilogue.cuh>
#include <chord/kernels/eviction.cuh>
#include <chord/kernels/params.cuh>
#include <chord/kernels/pipeline.cuh>
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

template <DecodeConfig kConfig, class Addressing>
class Decode {
  static_assert(kConfig.max_tokens % 8 == 0 && kConfig.max_tokens <= 64,
                "max_tokens must be a multiple of 8 (one mma) and at most 64 (two rows a lane)");
  static_assert(kConfig.warp_features == 32 || kConfig.warp_features == 64,
                "warp_features must be 32 or 64: a half or the whole of a packed unit");
  static_assert(kConfig.tile_features() % kUnitFeatures == 0,
                "warps x warp_features must be a multiple of 64 (packed unit)");
  static_assert(kConfig.block_k % kUnitK == 0, "block_k must be a multiple of 64 (packed unit)");
  static_assert(kConfig.stages >= 2,
                "stages must be at least 2: one loads while one is multiplied");
  static_assert(16 * kConfig.stages <= kBarrierBytes, "the barriers of the ring must fit");

  static constexpr int kRowTiles = kConfig.warp_features / kRowTileFeatures;
  static constexpr int kRowsPerLane = ceil_div(kConfig.max_tokens, 32);
  static constexpr int kLongK = 4;  // chunks
  // Units of a stage whose code is written out one after another.
  static constexpr int kUnroll = kConfig.units() % 4 == 0 ? 4 : kConfig.units() % 3 == 0 ? 3 : 2;

  struct Smem {
    SmemAddress weight = ptx::dynamic_smem();
    SmemAddress x = weight + kConfig.stages * kConfig.weight_stage_bytes();
    SmemAddress store = x + kConfig.stages * kConfig.x_stage_bytes();
    SmemAddress notes = store + kConfig.warps * kStoreBytesPerWarp;
    SmemAddress table = notes + kConfig.stages * kConfig.note_bytes();
    SmemAddress scratch = table + kSegmentTableBytes;
    SmemAddress barriers = scratch + kScheduleScratchBytes;
  };

  // Where a role stands in the block's run of chunks.
  struct Cursor {
    int row_tile;
    int feature_tile;
    int k_chunk;
  };

  // What travels with a stage: the width that its tile is multiplied at, and each token's output
  // row.
  SmemAddress width_note(int stage) const { return smem.notes + stage * kConfig.note_bytes(); }
  SmemAddress row_note(int stage, int token) const { return width_note(stage) + 16 + 4 * token; }

  // Rows of one tile as the lanes hold them: token lane + 32 i in element i, -1 for none.
  struct Rows {
    int output_row[kRowsPerLane];
    int input_row[kRowsPerLane];
    int width;  // tokens to multiply: a multiple of 8
  };

 public:
  explicit Decode(const Params<Addressing>& params)
      : p(params.gemm), addressing{params.addressing} {}

  __forceinline__ void run() {
    if (ptx::thread_idx() == 0) ring.init(32 + 1, 32 * kConfig.warps);
    await<Addressing, Awaits::kRouting>();
    let_next_begin<Addressing>();
    const ScheduleBuilder<kConfig.threads(), false, Addressing> schedule(addressing, p.num_experts);
    // Rows of x that no copy writes are multiplied too (their sums are dropped): they must not hold
    // what other kernels left.
    constexpr int kZeroBytes = kConfig.stages * kConfig.x_stage_bytes();
    for (int at = 16 * ptx::thread_idx(); at < kZeroBytes; at += 16 * kConfig.threads()) {
      ptx::store_shared_x4(smem.x + at, {0, 0, 0, 0});
    }
    ptx::fence_proxy_async();
    schedule.build(table, smem.scratch, kConfig.max_tokens);
    // The host sees to it that chunks are fewer than 2^31.
    const int chunks = table.num_tiles() * feature_tiles() * k_chunks();
    chunks_per_block = chunks / ptx::grid_dim();
    longer_blocks = chunks % ptx::grid_dim();
    const int begin = first_chunk(ptx::block_idx()), end = first_chunk(ptx::block_idx() + 1);
    if (begin == end) return await<Addressing, Awaits::kRows>();
    if (warp < kConfig.warps) {
      multiply(begin, end);
    } else if (warp == kConfig.warps) {
      load_all_weights(begin, end);
    } else {
      load_all_x(begin, end);
    }
  }

 private:
  // Sizes of the padded weight. Shifts of kernel parameters: cheaper to repeat than to keep.
  int k_units() const { return ceil_div(p.k, kUnitK); }
  int k_chunks() const { return ceil_div(k_units(), kConfig.units()); }
  int stripes() const { return ceil_div(p.n, kUnitFeatures); }
  int feature_tiles() const { return ceil_div(stripes(), kConfig.stripes()); }

  // First chunk of block `block`; blocks differ by at most one chunk.
  int first_chunk(int block) const {
    return chunks_per_block * block + min_of(block, longer_blocks);
  }

  // Whether a block goes from row tile to row tile, and not through all features of one first.
  bool rows_in_turn() const { return k_chunks() >= kLongK; }

  Cursor cursor_at(int chunk) const {
    const int tile = chunk / k_chunks(), k_chunk = chunk % k_chunks();
    if (rows_in_turn()) return {tile % table.num_tiles(), tile / table.num_tiles(), k_chunk};
    return {tile / feature_tiles(), tile % feature_tiles(), k_chunk};
  }

  // Moves on to the next tile; true when that is another row tile.
  bool next_tile(Cursor& at) const {
    at.k_chunk = 0;
    if (rows_in_turn()) {
      if (++at.row_tile == table.num_tiles()) at.row_tile = 0, ++at.feature_tile;
      return true;
    }
    if (++at.feature_tile < feature_tiles()) return false;
    at.feature_tile = 0;
    ++at.row_tile;
    return true;
  }

  int tile_stripes(int feature_tile) const {
    return min_of(kConfig.stripes(), stripes() - feature_tile * kConfig.stripes());
  }
  int chunk_units(int k_chunk) const {
    return min_of(kConfig.units(), k_units() - k_chunk * kConfig.units());
  }

  Rows load_rows(int row_tile) const {
    const Segment segment = table.find(row_tile);
    const int rows_per_tile = segment.rows_per_tile();
    const int begin = segment.row_begin + (row_tile - segment.first_tile) * rows_per_tile;
    const int end = min_of(begin + rows_per_tile, segment.row_end);
    Rows rows;
    int used = 0;
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      const int position = begin + lane + 32 * i;
      rows.output_row[i] = position < end ? addressing.output_row(position) : -1;
      rows.input_row[i] = rows.output_row[i] >= 0 ? addressing.input_row(rows.output_row[i]) : -1;
      const u32 valid = ptx::ballot(rows.output_row[i] >= 0);
      if (valid != 0) used = 32 * i + ptx::highest_bit(valid) + 1;
    }
    rows.width = round_up(used, 8);
    return rows;
  }

  // ---- Loading warps. Weights do not wait until it is known whose rows they are for.
  __forceinline__ void load_all_weights(int begin, int end) {
    RingPosition<kConfig.stages> at;
    Cursor cursor = cursor_at(begin);
    Segment segment = table.find(cursor.row_tile);
    const int ordinary_end =
        begin + ordinary_stages<Addressing>(end - begin, kConfig.weight_stage_bytes(), p.l2_share);
    for (int chunk = begin; chunk < end; ++chunk) {
      ring.wait_empty(at);
      // Row tiles of one segment read the same weights at different times, for runs begin anywhere.
      const bool is_ordinary = chunk < ordinary_end || segment.num_tiles > 1;
      load_weights(at.stage, cursor, segment.expert, is_ordinary);
      at.advance();
      const bool tile_done = ++cursor.k_chunk == k_chunks();
      if (tile_done && next_tile(cursor) && chunk + 1 < end) {
        segment = table.find(cursor.row_tile);
      }
    }
  }

  __forceinline__ void load_all_x(int begin, int end) {
    await<Addressing, Awaits::kRows>();
    RingPosition<kConfig.stages> at;
    Cursor cursor = cursor_at(begin);
    Rows rows = load_rows(cursor.row_tile);
    for (int chunk = begin; chunk < end; ++chunk) {
      ring.wait_empty(at);
      load_x(at.stage, cursor, rows);
      at.advance();
      const bool tile_done = ++cursor.k_chunk == k_chunks();
      if (tile_done && next_tile(cursor) && chunk + 1 < end) rows = load_rows(cursor.row_tile);
    }
  }

  void load_weights(int stage, const Cursor& cursor, int expert, bool is_ordinary) {
    const int units = chunk_units(cursor.k_chunk);
    const int first_stripe = cursor.feature_tile * kConfig.stripes();
    const int num_stripes = tile_stripes(cursor.feature_tile);
    const SmemAddress full = ring.full(stage);
    if (lane == 0) ptx::mbarrier_arrive_expect_bytes(full, num_stripes * units * kUnitBytes);
    // The bytes are announced before the first of them can arrive.
    ptx::sync_warp();
    if (lane < num_stripes) {
      const i64 source = unit_offset(expert, first_stripe + lane, cursor.k_chunk * kConfig.units(),
                                     stripes(), k_units());
      ptx::bulk_load(weight_stage(stage) + lane * kConfig.units() * kUnitBytes,
                     static_cast<const char*>(p.weight) + source, units * kUnitBytes, full,
                     is_ordinary ? ptx::evict_unchanged() : ptx::evict_first());
    }
  }

  void load_x(int stage, const Cursor& cursor, const Rows& rows) {
    const int first_k = cursor.k_chunk * kConfig.block_k;
    const int row_bytes = 2 * min_of(kConfig.block_k, p.k - first_k);
    int num_rows = 0;
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      num_rows += ptx::count_bits(ptx::ballot(rows.input_row[i] >= 0));
    }
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      const int token = lane + 32 * i;
      if (token < kConfig.max_tokens) ptx::store_shared(row_note(stage, token), rows.output_row[i]);
    }
    const SmemAddress full = ring.full(stage);
    if (lane == 0) {
      ptx::store_shared(width_note(stage), rows.width);
      ptx::mbarrier_arrive_expect_bytes(full, num_rows * row_bytes);
    } else {
      ptx::mbarrier_arrive(full);
    }
    ptx::sync_warp();
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      if (rows.input_row[i] < 0) continue;
      const i64 source = static_cast<i64>(rows.input_row[i]) * p.k + first_k;
      ptx::bulk_load(x_stage(stage) + (lane + 32 * i) * kConfig.x_row_bytes(),
                     static_cast<const char*>(p.x) + 2 * source, row_bytes, full);
    }
  }

  // ---- Multiplying warps.
  __forceinline__ void multiply(int begin, int end) {
    RingPosition<kConfig.stages> at;
    Cursor cursor = cursor_at(begin);
    for (int chunk = begin; chunk < end;) {
      const int chunks = min_of(end - chunk, k_chunks() - cursor.k_chunk);
      // Lane-dependent addresses are worked out once a tile; hoisted above the widths, each width's
      // copies would stay live and spill.
      lane = ptx::opaque(lane);
      warp = ptx::opaque(warp);
      ring.wait_full(at);
      const int width = ptx::load_shared(width_note(at.stage));
      with_width<kConfig.max_tokens>(
          width, [&]<int kWidth>() { multiply_tile<kWidth>(at, cursor, chunks, chunk); });
      chunk += chunks;
      next_tile(cursor);
    }
  }

  // Calls `body` with the tile's width as a constant.
  template <int kWidth, class Body>
  static void with_width(int width, Body&& body) {
    if constexpr (kWidth > 8) {
      if (width < kWidth) return with_width<kWidth - 8>(width, body);
    }
    body.template operator()<kWidth>();
  }

  // Chunks [chunk, chunk + chunks) of one tile, from `cursor` on.
  template <int kWidth>
  void multiply_tile(RingPosition<kConfig.stages>& at, const Cursor& cursor, int chunks,
                     int chunk) {
    constexpr int kEights = kWidth / 8;
    float sums[kRowTiles][kEights][4] = {};
    // Warps behind N repeat the last stripe, and nothing of it is stored.
    const int stripe =
        min_of(warp * kConfig.warp_features / kUnitFeatures, tile_stripes(cursor.feature_tile) - 1);
    for (int i = 0;; ++i) {
      ring.wait_full(at);
      multiply_stage<kEights>(sums, at.stage, cursor.k_chunk + i, stripe);
      if (i == chunks - 1) break;
      release(at);
    }
    int output_row[kEights];  // of token 8 e + lane / 4
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
      output_row[eight] = ptx::load_shared(row_note(at.stage, 8 * eight + lane / 4));
    }
    release(at);
    if (cursor.k_chunk > 0) {
      leave_partial<kEights>(sums);
      return;
    }
#pragma unroll 1
    for (int block = ptx::block_idx() + 1; first_chunk(block) < chunk + k_chunks(); ++block) {
      if (first_chunk(block + 1) > first_chunk(block)) add_partial<kEights>(sums, block);
    }
    store_tile<kEights>(sums, output_row, cursor.feature_tile);
  }

  // Hands the stage back to the loader and moves on.
  void release(RingPosition<kConfig.stages>& at) const {
    ptx::mbarrier_arrive(ring.empty(at.stage));
    at.advance();
  }

  template <int kEights>
  void multiply_stage(float (&sums)[kRowTiles][kEights][4], int stage, int k_chunk, int stripe) {
    const int groups = ceil_div(p.k - k_chunk * kConfig.block_k, kGroupK);
    const SmemAddress weight = weight_stage(stage) + stripe * kConfig.units() * kUnitBytes;
    // ldmatrix: lanes 8 m to 8 m + 7 address the 16 bytes of K block m of tokens 0 to 7.
    const SmemAddress x = x_stage(stage) + (lane % 8) * kConfig.x_row_bytes() + (lane / 8) * 16;
    if (groups >= 2 * kConfig.units()) {
      // Unrolled, so that loads of the next units overlap; wider sums leave fewer registers for it.
#pragma unroll(kEights* kRowTiles > 8 ? 1 : (kEights * kRowTiles > 4 ? 2 : kUnroll))
      for (int unit = 0; unit < kConfig.units(); ++unit) {
        multiply_unit<kEights>(sums, weight + unit * kUnitBytes, x + unit * 2 * kUnitK, 2);
      }
    } else {
#pragma unroll 1
      for (int unit = 0; 2 * unit < groups; ++unit) {
        multiply_unit<kEights>(sums, weight + unit * kUnitBytes, x + unit * 2 * kUnitK,
                               groups - 2 * unit);
      }
    }
  }

  // The unit's first group, and its second unless `groups` is 1: with K mod 64 = 32 the last unit
  // has no activations for it.
  template <int kEights>
  void multiply_unit(float (&sums)[kRowTiles][kEights][4], SmemAddress weight, SmemAddress x,
                     int groups) {
    const int row_tile = warp * kRowTiles % (kUnitFeatures / kRowTileFeatures);
    const UnitCodes<kRowTiles> unit = load_unit<kRowTiles>(weight, row_tile, lane);
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      if (group >= groups) break;
      mma_group(sums, unit, group, [&](int eight) {
        return x + eight * 8 * kConfig.x_row_bytes() + group * 2 * kGroupK;
      });
    }
  }

  // A NaN that no arithmetic gives.
  static constexpr u32 kNoSumBits = 0xffffffffu;
  static constexpr float kNoSum = __builtin_bit_cast(float, kNoSumBits);

  static bool is_missing(const F32x4& s) {
    const auto missing = [](float word) { return __builtin_bit_cast(u32, word) == kNoSumBits; };
    return missing(s.x) || missing(s.y) || missing(s.z) || missing(s.w);
  }

  // A warp's 16 bytes a lane at (slot, i, eight) of block `slot`'s partial sums.
  F32x4* partial_at(int slot, int i, int eight) const {
    const i64 row = (static_cast<i64>(slot) * kConfig.warps + warp) * kRowTiles + i;
    return reinterpret_cast<F32x4*>(p.partial) + (row * (kConfig.max_tokens / 8) + eight) * 32 +
           lane;
  }

  template <int kEights>
  void leave_partial(const float (&sums)[kRowTiles][kEights][4]) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int eight = 0; eight < kEights; ++eight) {
        const float (&s)[4] = sums[i][eight];
        ptx::store_partial(partial_at(ptx::block_idx(), i, eight), {s[0], s[1], s[2], s[3]});
      }
    }
  }

  // Waits for what block `slot` leaves, adds it and clears the slot for the next launch.
  template <int kEights>
  void add_partial(float (&sums)[kRowTiles][kEights][4], int slot) {
    F32x4 other[kRowTiles][kEights];
    bool missing;
    do {
      missing = false;
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int eight = 0; eight < kEights; ++eight) {
          other[i][eight] = ptx::load_partial(partial_at(slot, i, eight));
        }
      }
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int eight = 0; eight < kEights; ++eight) {
          missing = missing || is_missing(other[i][eight]);
        }
      }
    } while (missing);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int eight = 0; eight < kEights; ++eight) {
        const F32x4& s = other[i][eight];
        ptx::store_partial(partial_at(slot, i, eight), {kNoSum, kNoSum, kNoSum, kNoSum});
        sums[i][eight][0] += s.x, sums[i][eight][1] += s.y;
        sums[i][eight][2] += s.z, sums[i][eight][3] += s.w;
      }
    }
  }

  template <int kEights>
  void store_tile(const float (&sums)[kRowTiles][kEights][4], const int (&output_row)[kEights],
                  int feature_tile) {
    const int first_feature = feature_tile * kConfig.tile_features() + warp * kConfig.warp_features;
    const SmemAddress buffers = smem.store + warp * kStoreBytesPerWarp;
    store_sums<kRowTiles>(sums, output_row, buffers, addressing, p.out, first_feature, p.n);
    // The next tile begins with the first buffer again.
    ptx::sync_warp();
  }

  SmemAddress weight_stage(int stage) const {
    return smem.weight + stage * kConfig.weight_stage_bytes();
  }
  SmemAddress x_stage(int stage) const { return smem.x + stage * kConfig.x_stage_bytes(); }

  const GemmParams& p;
  const Addressing addressing;
  const Smem smem;
  const Ring<kConfig.stages> ring{smem.barriers};
  int warp = ptx::thread_idx() / 32;
  int lane = ptx::thread_idx() % 32;
  const SegmentTable table{smem.table};
  int chunks_per_block = 0;
  int longer_blocks = 0;  // the first of them have one chunk more
};

template <DecodeConfig kConfig, class Addressing>
__forceinline__ void decode(const Params<Addressing>& p) {
  Decode<kConfig, Addressing>(p).run();
}

}  // namespace chord
