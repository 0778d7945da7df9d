// Counts the routes of each expert in each block's share, for route.cuh, which has the same blocks.
#pragma once

#include <chord/kernels/ptx/ldst.cuh>
#include <chord/kernels/ptx/sync.cuh>
#include <chord/kernels/route_ids.cuh>

namespace chord {

struct CountParams {
  RouteIds ids;
  int* counts;  // [blocks, num_experts]
};
static_assert(sizeof(CountParams) == 48, "CountParams must match jit/params.py");

class Count {
 public:
  static constexpr int kThreads = kRouteThreads;
  static constexpr int kSmemBytes = 4 * kRouteMaxExperts;

  explicit Count(const CountParams& params) : p(params) {}

  void run() const {
    const int num_experts = p.ids.num_experts, end = p.ids.end();
    const SmemAddress counts = ptx::dynamic_smem();
    for (int expert = ptx::thread_idx(); expert < num_experts; expert += kThreads) {
      ptx::store_shared(counts + 4 * expert, 0);
    }
    ptx::sync_block();
    for (int route = p.ids.begin() + ptx::thread_idx(); route < end; route += kThreads) {
      const int expert = p.ids.expert_of(route, end);
      if (expert >= 0) ptx::add_shared(counts + 4 * expert, 1);
    }
    ptx::sync_block();
    int* own = p.counts + ptx::block_idx() * num_experts;
    for (int expert = ptx::thread_idx(); expert < num_experts; expert += kThreads) {
      ptx::store_global(own + expert, static_cast<int>(ptx::load_shared(counts + 4 * expert)));
    }
  }

 private:
  const CountParams& p;
};

__forceinline__ void count(const CountParams& p) { Count(p).run(); }

}  // namespace chord
