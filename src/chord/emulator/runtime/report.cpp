// What the emulator says: places, names, and who waits for what.
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>

#include "machine.hpp"

namespace chord::emulator {

namespace {

struct Place {
  const char* file;
  unsigned line;
};

std::vector<Place>& places() {
  static std::vector<Place> all{{"nowhere", 0}};
  return all;
}

std::string lane_text(std::uint32_t lanes) {
  if (lanes == 0xffffffffu) return "all lanes";
  std::string result;
  const char* const word = (lanes & (lanes - 1)) == 0 ? "lane " : "lanes ";
  for (int lane = 0; lane < 32; ++lane) {
    if ((lanes >> lane & 1) == 0) continue;
    int last = lane;
    while (last < 31 && (lanes >> (last + 1) & 1) != 0) ++last;
    result += result.empty() ? word : ", ";
    result += lane == last ? text("%d", lane) : text("%d-%d", lane, last);
    lane = last;
  }
  return result;
}

std::string mbarrier_text(const Thread& thread) {
  for (const Mbarrier& barrier : thread.block->mbarriers) {
    if (barrier.address != thread.waits_for) continue;
    return text(
        "mbarrier %d (shared %#x), phase of parity %u; it is in phase %d and lacks %d of %d "
        "arrivals and %lld bytes",
        barrier.slot, barrier.address, thread.waits_value, barrier.phases, barrier.pending,
        barrier.count, static_cast<long long>(barrier.bytes));
  }
  return "an mbarrier";
}

std::string wait_text(const Thread& thread) {
  std::string what;
  switch (thread.state) {
    case State::kReady:
      return "can run";
    case State::kDone:
      return "has ended";
    case State::kWarp:
      what = text("its warp at %s, where only %s have arrived",
                  name_of(static_cast<Collective>(thread.waits_for)),
                  lane_text(thread.warp->arrived).c_str());
      break;
    case State::kNamed: {
      const NamedBarrier& barrier = thread.block->named[thread.waits_for];
      what = text("named barrier %u, which %zu of %d threads have reached", thread.waits_for,
                  barrier.arrived.size(), barrier.expected);
      break;
    }
    case State::kMbarrier:
      what = mbarrier_text(thread);
      break;
    case State::kPartial:
      what = "a sum in " + launch->global->name_of(thread.polled);
      break;
    case State::kRegisters:
      what =
          text("%u registers a thread, of which the pool of the block is short", thread.waits_for);
      break;
  }
  return "waits at " + place_text(thread.waits_at) + " for " + what;
}

}  // namespace

const char* name_of(Collective kind) {
  static const char* const names[] = {
      "nothing",      "sync_warp",   "ballot",
      "shuffle",      "shuffle_up",  "sum_lanes",
      "match",        "mma",         "load_matrix",
      "store_matrix", "wgmma_fence", "wgmma",
      "wgmma_commit", "wgmma_wait",  "raise_registers or lower_registers"};
  return names[static_cast<int>(kind)];
}

std::string text(const char* format, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  return buffer;
}

std::uint16_t place_of(Where where) {
  struct Cached {
    const char* file = nullptr;
    unsigned line = 0;
    std::uint16_t place = 0;
  };
  static Cached cache[1024];
  const auto hash = reinterpret_cast<std::uintptr_t>(where.file_name()) / 8 + where.line() * 37u;
  Cached& cached = cache[hash % 1024];
  if (cached.file == where.file_name() && cached.line == where.line()) return cached.place;
  std::vector<Place>& all = places();
  std::size_t place = 1;
  while (place < all.size() && (all[place].line != where.line() ||
                                std::strcmp(all[place].file, where.file_name()) != 0)) {
    ++place;
  }
  if (place == all.size()) all.push_back({where.file_name(), where.line()});
  cached = {where.file_name(), where.line(), static_cast<std::uint16_t>(place)};
  return cached.place;
}

std::string place_text(std::uint16_t place) {
  const Place& found = places()[place];
  const char* file = std::strstr(found.file, "chord/kernels/");
  return text("%s:%u", file != nullptr ? file : found.file, found.line);
}

std::string place_text(Where where) { return place_text(place_of(where)); }

std::string waiting_report(const Launch& launch) {
  std::string report;
  for (const auto& block : launch.blocks) {
    if (block->alive == 0) continue;
    report += text("block %d\n", block->index);
    for (const auto& warp : block->warps) {
      std::map<std::string, std::uint32_t> lanes;
      for (int lane = 0; lane < 32; ++lane) {
        lanes[wait_text(*block->threads[warp->index * 32 + lane])] |= 1u << lane;
      }
      for (const auto& [what, mask] : lanes) {
        report += text("  warp %d, %s: ", warp->index, lane_text(mask).c_str()) + what + "\n";
      }
    }
  }
  return report;
}

}  // namespace chord::emulator
