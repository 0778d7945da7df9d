// What is asked of the routes: whose they are, and which of them a block has.
#pragma once

#include <chord/kernels/common/math.cuh>
#include <chord/kernels/ptx/ldst.cuh>
#include <chord/kernels/ptx/sync.cuh>

namespace chord {

inline constexpr int kRouteThreads = 512;
inline constexpr int kRouteMaxExperts = 1024;

struct RouteIds {
  const void* ids;         // expert of each route
  const void* expert_map;  // local expert of each id, or null: ids are local
  int ids_are_64bit;
  int map_is_64bit;
  int num_routes;
  int num_ids;      // ids are 0 to num_ids - 1, others stand for nobody
  int num_experts;  // local
  int share;        // routes that a block has

  // The block's routes.
  int begin() const { return min_of(ptx::block_idx() * share, num_routes); }
  int end() const { return min_of(begin() + share, num_routes); }

  // Local expert of a route, -1 for nobody's and from `end` on.
  int expert_of(int route, int end) const {
    if (route >= end) return -1;
    int expert = load(ids, ids_are_64bit, route, num_ids);
    if (expert < 0 || expert >= num_ids) return -1;
    if (expert_map != nullptr) expert = load(expert_map, map_is_64bit, expert, num_experts);
    return expert >= 0 && expert < num_experts ? expert : -1;
  }

 private:
  static int load(const void* table, int is_64bit, int index, int limit) {
    if (!is_64bit) return ptx::load_global(static_cast<const int*>(table) + index);
    const i64 value = ptx::load_global(static_cast<const i64*>(table) + index);
    return value >= 0 && value < limit ? static_cast<int>(value) : -1;
  }
};
static_assert(sizeof(RouteIds) == 40, "RouteIds must match jit/params.py");

}  // namespace chord
