// Who has seen what: vector clocks, the happens-before order of a launch.
//
// Every actor of a block has a slot: each thread, each barrier once for bulk copies and once for
// cp.async, each warp once for its collective stores and once for its wgmma. An access is an epoch
// (slot, clock); a thread that knows `clock` of `slot` comes after it. Two kinds of knowledge are
// kept: of ordinary accesses by ordinary ones, and of accesses that the async proxy may rely on.
#pragma once

#include <cstdint>
#include <vector>

namespace chord::emulator {

using Clock = std::int32_t;

inline constexpr int kMaxBarriers = 32;

struct Slots {
  int threads = 0;
  int warps = 0;

  int bulk(int barrier) const { return threads + barrier; }
  int cp_async(int barrier) const { return threads + kMaxBarriers + barrier; }
  int collective(int warp) const { return threads + 2 * kMaxBarriers + warp; }
  int wgmma(int warp) const { return threads + 2 * kMaxBarriers + warps + warp; }
  int count() const { return threads + 2 * kMaxBarriers + 2 * warps; }
};

struct Knowledge {
  std::vector<Clock> seen;   // by ordinary accesses
  std::vector<Clock> async;  // by the async proxy

  explicit Knowledge(int slots = 0) : seen(slots), async(slots) {}
  void join(const Knowledge& other);
};

}  // namespace chord::emulator
