// Sorts routes by expert, in one launch and without a word between blocks.
//
// Work     Each block places its own share of the routes, in their order. To know where, it counts
//          the routes of all experts before, in and after its share: reading all ids again costs
//          less than a barrier of the grid, and no block has to be resident with another.
//          What lies before and after is counted by additions to shared memory, in any order.
// Warps    A warp ranks and places 32 of the block's own routes at a time; `match` finds the lanes
//          of one expert, and the highest of them keeps the warp's own counter of it. So every
//          route has its rank: same input, same order. `match` is slow (73 cycles a warp), which is
//          why the others' routes go without, and why a block places few.
// Result   Position p of the sorted order holds a route (token * top_k + slot). With block_m above
//          1 each expert begins at a multiple of it, and what only fills blocks holds num_routes:
//          the buffers of vLLM's moe_align_block_size. Routes of nobody have no position.
#pragma once

#include <chord/kernels/common/math.cuh>
#include <chord/kernels/ptx/ldst.cuh>
#include <chord/kernels/ptx/sync.cuh>

namespace chord {

struct RouteParams {
  const void* ids;         // expert of each route
  const void* expert_map;  // local expert of each id, or null: ids are local
  int* offsets;            // num_experts + 1: first position of each expert; null: not wanted
  int* routes;             // route of each position
  int* positions;          // position of each route, -1 for none; null: not wanted
  int* block_experts;      // expert of each block of positions; null: not wanted
  int* num_rows_padded;    // positions in use; null: not wanted
  int ids_are_64bit;
  int map_is_64bit;
  int num_routes;
  int num_ids;      // ids are 0 to num_ids - 1, others stand for nobody
  int num_experts;  // local
  int block_m;
  int capacity;  // positions that `routes` has room for
  int num_blocks;
  int share;  // routes that a block places
  int reserved;
};
static_assert(sizeof(RouteParams) == 96, "RouteParams must match jit/params.py");

class Route {
 public:
  static constexpr int kThreads = 512;
  static constexpr int kMaxExperts = 1024;

 private:
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kExpertsPerThread = kMaxExperts / kThreads;
  static constexpr int kUnroll = 4;         // ids that are on their way at a time
  static constexpr int kOthersUnroll = 16;  // the same of other blocks' routes

  // Words of shared memory: a warp's counters, the places of the experts, sums of the warps.
  SmemAddress counter(int in_warp, int expert) const {
    return base + 4 * (in_warp * kMaxExperts + expert);
  }
  SmemAddress first_of(int expert) const { return counter(kWarps, expert); }
  SmemAddress end_of(int expert) const { return counter(kWarps + 1, expert); }
  SmemAddress warp_sum(int in_warp) const { return counter(kWarps + 2, in_warp); }
  // Counts of other blocks' routes, in the words that hold the expert's places later.
  SmemAddress before_of(int expert) const { return first_of(expert); }
  SmemAddress after_of(int expert) const { return end_of(expert); }

 public:
  static constexpr int kSmemBytes = 4 * ((kWarps + 2) * kMaxExperts + kWarps);

  explicit Route(const RouteParams& params) : p(params) {}

  void run() {
    ptx::let_kernel_after_begin();
    const int begin = min_of(ptx::block_idx() * p.share, p.num_routes);
    const int end = min_of(begin + p.share, p.num_routes);
    // A warp's share lies in a piece, so that ranks go by warp.
    const int warp_share = round_up(ceil_div(end - begin, kWarps), 32);
    const int warp_begin = min_of(begin + warp * warp_share, end);
    const int warp_end = min_of(warp_begin + warp_share, end);
    const int warps = ceil_div(end - begin, max_of(warp_share, 1));
    clear_counters();
    count_own(warp_begin, warp_end);
    const bool is_alone = begin == 0 && end == p.num_routes;
    if (!is_alone) {
      clear_others();
      ptx::sync_block();
      count_others(before_of(0), 0, begin);
      count_others(after_of(0), end, p.num_routes);
    }
    ptx::sync_block();
    const int used = place_experts(warps, is_alone);
    ptx::sync_block();
    place_routes(warp_begin, warp_end);
    if (ptx::block_idx() == 0) write_offsets(used);
    if (p.block_experts != nullptr) fill_blocks(used);
  }

 private:
  int expert_of_thread(int i) const { return kExpertsPerThread * ptx::thread_idx() + i; }

  static int load(const void* table, int is_64bit, int index, int limit) {
    if (!is_64bit) return ptx::load_global(static_cast<const int*>(table) + index);
    const i64 value = ptx::load_global(static_cast<const i64*>(table) + index);
    return value >= 0 && value < limit ? static_cast<int>(value) : -1;
  }

  // Local expert of a route, -1 for nobody's and from `end` on.
  int expert_of(int route, int end) const {
    if (route >= end) return -1;
    int expert = load(p.ids, p.ids_are_64bit, route, p.num_ids);
    if (expert < 0 || expert >= p.num_ids) return -1;
    if (p.expert_map != nullptr) {
      expert = load(p.expert_map, p.map_is_64bit, expert, p.num_experts);
    }
    return expert >= 0 && expert < p.num_experts ? expert : -1;
  }

  // Calls visit(route, expert) for [begin, end), the warp's lanes side by side, then a stride on;
  // `kAtOnce` ids are on their way at a time.
  template <int kAtOnce, class Visit>
  void for_each_route(int begin, int end, int stride, Visit&& visit) const {
#pragma unroll 1
    for (int first = begin; first < end; first += kAtOnce * stride) {
      int expert[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) expert[i] = expert_of(first + i * stride + lane, end);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) visit(first + i * stride + lane, expert[i]);
    }
  }

  void clear_counters() const {
#pragma unroll 1
    for (int expert = 4 * lane; expert < p.num_experts; expert += 4 * 32) {
      ptx::store_shared_x4(counter(warp, expert), {0, 0, 0, 0});
    }
    ptx::sync_warp();
  }

  void clear_others() const {
#pragma unroll 1
    for (int expert = ptx::thread_idx(); expert < p.num_experts; expert += kThreads) {
      ptx::store_shared(before_of(expert), 0);
      ptx::store_shared(after_of(expert), 0);
    }
  }

  // Adds the warp's routes to its counters.
  void count_own(int begin, int end) const {
    for_each_route<kUnroll>(begin, end, 32, [&](int, int expert) {
      const u32 same = ptx::match(expert);
      if (expert >= 0 && lane == ptx::highest_bit(same)) {
        const SmemAddress at = counter(warp, expert);
        ptx::store_shared(at, ptx::load_shared(at) + ptx::count_bits(same));
      }
      ptx::sync_warp();
    });
  }

  // Adds routes to the counts at `counts`, with all warps.
  void count_others(SmemAddress counts, int begin, int end) const {
    for_each_route<kOthersUnroll>(begin + 32 * warp, end, kThreads, [&](int, int expert) {
      if (expert >= 0) ptx::add_shared(counts + 4 * expert, 1);
    });
  }

  // Turns counters into the next position of each warp and expert, and notes each expert's
  // positions; returns the number of positions in use. Thread t has experts 2 t and 2 t + 1; the
  // first `warps` warps have routes.
  int place_experts(int warps, bool is_alone) const {
    int before[kExpertsPerThread], total[kExpertsPerThread], padded[kExpertsPerThread], sum = 0;
#pragma unroll
    for (int i = 0; i < kExpertsPerThread; ++i) {
      const int expert = expert_of_thread(i);
      before[i] = total[i] = padded[i] = 0;
      if (expert >= p.num_experts) continue;
      if (!is_alone) {
        before[i] = static_cast<int>(ptx::load_shared(before_of(expert)));
        total[i] = before[i] + static_cast<int>(ptx::load_shared(after_of(expert)));
      }
#pragma unroll 4
      for (int other = 0; other < warps; ++other) {
        total[i] += static_cast<int>(ptx::load_shared(counter(other, expert)));
      }
      padded[i] = round_up(total[i], p.block_m);
      sum += padded[i];
    }
    int inclusive = sum;
    for (int delta = 1; delta < 32; delta *= 2) {
      const int other = ptx::shuffle_up(inclusive, delta);
      if (lane >= delta) inclusive += other;
    }
    if (lane == 31) ptx::store_shared(warp_sum(warp), inclusive);
    ptx::sync_block();
    int position = inclusive - sum, used = 0;
#pragma unroll
    for (int other = 0; other < kWarps; ++other) {
      const int others = static_cast<int>(ptx::load_shared(warp_sum(other)));
      if (other < warp) position += others;
      used += others;
    }
#pragma unroll
    for (int i = 0; i < kExpertsPerThread; ++i) {
      const int expert = expert_of_thread(i);
      if (expert >= p.num_experts) continue;
      ptx::store_shared(first_of(expert), position);
      ptx::store_shared(end_of(expert), position + total[i]);
      int next = position + before[i];
#pragma unroll 4
      for (int other = 0; other < warps; ++other) {
        const SmemAddress at = counter(other, expert);
        const int count = static_cast<int>(ptx::load_shared(at));
        ptx::store_shared(at, next);
        next += count;
      }
      position += padded[i];
    }
    return used;
  }

  void place_routes(int begin, int end) const {
    for_each_route<kUnroll>(begin, end, 32, [&](int route, int expert) {
      const u32 same = ptx::match(expert);
      int position = -1;
      if (expert >= 0) {
        const u32 below = same & ((1u << lane) - 1);
        position = ptx::load_shared(counter(warp, expert)) + ptx::count_bits(below);
        ptx::store_global(p.routes + position, route);
      }
      if (route < end && p.positions != nullptr) ptx::store_global(p.positions + route, position);
      ptx::sync_warp();
      if (expert >= 0 && lane == ptx::highest_bit(same)) {
        ptx::store_shared(counter(warp, expert), position + 1);
      }
      ptx::sync_warp();
    });
  }

  void write_offsets(int used) const {
    if (p.offsets != nullptr) {
      for (int expert = ptx::thread_idx(); expert < p.num_experts; expert += kThreads) {
        ptx::store_global(p.offsets + expert, ptx::load_shared(first_of(expert)));
      }
    }
    if (ptx::thread_idx() != 0) return;
    if (p.offsets != nullptr) ptx::store_global(p.offsets + p.num_experts, used);
    if (p.num_rows_padded != nullptr) ptx::store_global(p.num_rows_padded, used);
  }

  // Writes the expert of each block, -1 behind the last, and the slots that only fill.
  void fill_blocks(int used) const {
    const int warps = ptx::grid_dim() * kWarps, own = ptx::block_idx() * kWarps + warp;
#pragma unroll 1
    for (int expert = own; expert < p.num_experts; expert += warps) {
      const int first = ptx::load_shared(first_of(expert)), end = ptx::load_shared(end_of(expert));
      const int padded = first + round_up(end - first, p.block_m);
      fill(p.routes, end, padded, p.num_routes);
      fill(p.block_experts, first / p.block_m, padded / p.block_m, expert);
    }
    const int slots = ceil_div(p.capacity - used, warps);
    const int from = min_of(used + own * slots, p.capacity);
    fill(p.routes, from, min_of(from + slots, p.capacity), p.num_routes);
    if (own == 0) fill(p.block_experts, used / p.block_m, p.num_blocks, -1);
  }

  void fill(int* table, int begin, int end, int value) const {
#pragma unroll 1
    for (int at = begin + lane; at < end; at += 32) ptx::store_global(table + at, value);
  }

  const RouteParams& p;
  const SmemAddress base = ptx::dynamic_smem();
  const int warp = ptx::thread_idx() / 32;
  const int lane = ptx::thread_idx() % 32;
};

__forceinline__ void route(const RouteParams& p) { Route(p).run(); }

}  // namespace chord
