// Sorts routes by expert: blocks place a share of the routes each, in their order. Where there is
// more than one, count.cuh has counted the routes of all shares before.
//
// Warps    A warp ranks and places 32 routes at a time; `match` finds the lanes of one expert, and
//          the highest of them keeps the warp's own counter of it. So every route has its rank:
//          same input, same order. `match` is slow (73 cycles a warp), which is why shares are
//          small; counting all ids again in every block instead took 44 us for 65,536.
// Code     comes from cold memory, like decode's: a lane has one id at a time and a thread one
//          expert. With four ids on their way a decode step's sort took 1 to 3 us longer.
// Result   Position p of the sorted order holds a route (token * top_k + slot). With block_m above
//          1 each expert begins at a multiple of it, and what only fills blocks holds num_routes:
//          the buffers of vLLM's moe_align_block_size. Routes of nobody have no position.
// Scratch  of the kernels behind this one, where a graph has to clear it, is cleared by blocks of
//          their own: in a launch of its own that takes 1 to 3 us of a decode layer.
#pragma once

#include <chord/kernels/common/math.cuh>
#include <chord/kernels/ptx/ldst.cuh>
#include <chord/kernels/ptx/sync.cuh>
#include <chord/kernels/route_ids.cuh>
#include <chord/kernels/warp_sum.cuh>

namespace chord {

struct RouteParams {
  RouteIds ids;          // whose routes they are
  const int* counts;     // of each block and expert, of more than one block
  int* offsets;          // num_experts + 1: first position of each expert; null: not wanted
  int* routes;           // route of each position
  int* positions;        // position of each route, -1 for none; null: not wanted
  int* block_experts;    // expert of each block of positions; null: not wanted
  int* num_rows_padded;  // positions in use; null: not wanted
  int block_m;
  int capacity;  // positions that `routes` has room for
  int num_blocks;
  int sorting_blocks;   // of the grid, the first ones; the others only clear
  void* uncleared;      // scratch of the kernels behind this one
  int uncleared_words;  // a multiple of 4
  int cleared_value;    // of each word
};
static_assert(sizeof(RouteParams) == 120, "RouteParams must match jit/params.py");

class Route {
 public:
  static constexpr int kThreads = kRouteThreads;
  static constexpr int kMaxExperts = kRouteMaxExperts;

 private:
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kCountsUnroll = 16;  // counts of other blocks on their way at a time

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
    if (ptx::block_idx() >= p.sorting_blocks) {
      clear_scratch();
      return;
    }
    const int begin = p.ids.begin(), end = p.ids.end();
    // A warp's share lies in a piece, so that ranks go by warp.
    const int warp_share = round_up(max_of(ceil_div(end - begin, kWarps), 1), 32);
    const int warp_begin = min_of(begin + warp * warp_share, end);
    const int warp_end = min_of(warp_begin + warp_share, end);
    const int warps = ceil_div(end - begin, warp_share);
    clear_counters();
    count(warp_begin, warp_end);
    if (p.sorting_blocks > 1) {
      clear_others();
      ptx::sync_block();
      add_others();
    }
    ptx::sync_block();
    const int used = place_experts(warps);
    ptx::sync_block();
    place_routes(warp_begin, warp_end);
    if (ptx::block_idx() == 0) write_offsets(used);
    if (p.block_experts != nullptr) fill_blocks(used);
  }

 private:
  void clear_scratch() const {
    const u32 value = static_cast<u32>(p.cleared_value);
    const int blocks = ptx::grid_dim() - p.sorting_blocks;
    const int first = (ptx::block_idx() - p.sorting_blocks) * kThreads + ptx::thread_idx();
#pragma unroll 4
    for (int quad = first; quad < p.uncleared_words / 4; quad += blocks * kThreads) {
      ptx::store_global_x4(static_cast<char*>(p.uncleared) + 16 * static_cast<i64>(quad),
                           {value, value, value, value});
    }
  }

  // Calls visit(route, expert) for [begin, end), 32 routes at a time.
  template <class Visit>
  void for_each_route(int begin, int end, Visit&& visit) const {
#pragma unroll 1
    for (int first = begin; first < end; first += 32) {
      visit(first + lane, p.ids.expert_of(first + lane, end));
    }
  }

  void clear_counters() const {
#pragma unroll 1
    for (int expert = 4 * lane; expert < p.ids.num_experts; expert += 4 * 32) {
      ptx::store_shared_x4(counter(warp, expert), {0, 0, 0, 0});
    }
    ptx::sync_warp();
  }

  void clear_others() const {
#pragma unroll 1
    for (int expert = ptx::thread_idx(); expert < p.ids.num_experts; expert += kThreads) {
      ptx::store_shared(before_of(expert), 0);
      ptx::store_shared(after_of(expert), 0);
    }
  }

  // Adds the warp's routes to its counters.
  void count(int begin, int end) const {
    for_each_route(begin, end, [&](int, int expert) {
      const u32 same = ptx::match(expert);
      if (expert >= 0 && lane == ptx::highest_bit(same)) {
        const SmemAddress at = counter(warp, expert);
        ptx::store_shared(at, ptx::load_shared(at) + ptx::count_bits(same));
      }
      ptx::sync_warp();
    });
  }

  // Adds up what other blocks have counted: a thread takes one expert of every so many blocks.
  void add_others() const {
    const int num_experts = p.ids.num_experts, own = ptx::block_idx();
    const int slices = max_of(kThreads / max_of(num_experts, 1), 1);
#pragma unroll 1
    for (int at = ptx::thread_idx(); at < num_experts * slices; at += kThreads) {
      const int expert = at % num_experts;
      int before = 0, after = 0;
#pragma unroll 1
      for (int first = at / num_experts; first < p.sorting_blocks;
           first += kCountsUnroll * slices) {
        int counts[kCountsUnroll];
#pragma unroll
        for (int i = 0; i < kCountsUnroll; ++i) {
          const int block = first + i * slices;
          counts[i] = 0;
          if (block >= p.sorting_blocks) continue;
          counts[i] = ptx::load_global(p.counts + block * num_experts + expert);
        }
#pragma unroll
        for (int i = 0; i < kCountsUnroll; ++i) {
          const int block = first + i * slices;
          before += block < own ? counts[i] : 0;
          after += block > own ? counts[i] : 0;
        }
      }
      ptx::add_shared(before_of(expert), before);
      ptx::add_shared(after_of(expert), after);
    }
  }

  // Turns counters into the next position of each warp and expert, and notes each expert's
  // positions; returns the number of positions in use. The first `warps` warps have routes.
  int place_experts(int warps) const {
    int used = 0;
#pragma unroll 1
    for (int first = 0; first < p.ids.num_experts; first += kThreads) {
      const int expert = first + ptx::thread_idx();
      const bool exists = expert < p.ids.num_experts;
      int before = 0, total = 0;
      if (exists) {
        if (p.sorting_blocks > 1) {
          before = static_cast<int>(ptx::load_shared(before_of(expert)));
          total = before + static_cast<int>(ptx::load_shared(after_of(expert)));
        }
#pragma unroll 4
        for (int other = 0; other < warps; ++other) {
          total += static_cast<int>(ptx::load_shared(counter(other, expert)));
        }
      }
      const int padded = round_up(total, p.block_m);
      int warps_own;
      int position = used + sum_below(lane, padded, warps_own);
      // All have read the sums of the experts before.
      if (first > 0) ptx::sync_block();
      if (lane == 31) ptx::store_shared(warp_sum(warp), warps_own);
      ptx::sync_block();
#pragma unroll
      for (int other = 0; other < kWarps; ++other) {
        const int others = static_cast<int>(ptx::load_shared(warp_sum(other)));
        if (other < warp) position += others;
        used += others;
      }
      if (!exists) continue;
      ptx::store_shared(first_of(expert), position);
      ptx::store_shared(end_of(expert), position + total);
      int next = position + before;
#pragma unroll 4
      for (int other = 0; other < warps; ++other) {
        const SmemAddress at = counter(other, expert);
        const int count = static_cast<int>(ptx::load_shared(at));
        ptx::store_shared(at, next);
        next += count;
      }
    }
    return used;
  }

  void place_routes(int begin, int end) const {
    for_each_route(begin, end, [&](int route, int expert) {
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
      for (int expert = ptx::thread_idx(); expert < p.ids.num_experts; expert += kThreads) {
        ptx::store_global(p.offsets + expert, ptx::load_shared(first_of(expert)));
      }
    }
    if (ptx::thread_idx() != 0) return;
    if (p.offsets != nullptr) ptx::store_global(p.offsets + p.ids.num_experts, used);
    if (p.num_rows_padded != nullptr) ptx::store_global(p.num_rows_padded, used);
  }

  // Writes the expert of each block, -1 behind the last, and the slots that only fill.
  void fill_blocks(int used) const {
    const int warps = p.sorting_blocks * kWarps, own = ptx::block_idx() * kWarps + warp;
#pragma unroll 1
    for (int expert = own; expert < p.ids.num_experts; expert += warps) {
      const int first = ptx::load_shared(first_of(expert)), end = ptx::load_shared(end_of(expert));
      const int padded = first + round_up(end - first, p.block_m);
      fill(p.routes, end, padded, p.ids.num_routes);
      fill(p.block_experts, first / p.block_m, padded / p.block_m, expert);
    }
    const int slots = ceil_div(p.capacity - used, warps);
    const int from = min_of(used + own * slots, p.capacity);
    fill(p.routes, from, min_of(from + slots, p.capacity), p.ids.num_routes);
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
