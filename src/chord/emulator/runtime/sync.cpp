// Barriers of warp and block, votes, shuffles, register budgets.
#include <bit>
#include <utility>

#include "api.hpp"
#include "machine.hpp"

namespace chord::emulator {

namespace {

// Gives all of `threads` what each of them knows.
template <class Threads>
void share_knowledge(Block& block, const Threads& threads) {
  Knowledge all(block.slots.count());
  for (Thread* thread : threads) {
    all.join(thread->knowledge);
    Clock& stores = all.seen[block.slots.collective(thread->warp->index)];
    if (stores < thread->warp->stores) stores = thread->warp->stores;
  }
  for (Thread* thread : threads) {
    thread->knowledge = all;
    thread->advance();
  }
}

void share_in_warp(Warp& warp) {
  std::vector<Thread*> lanes;
  for (int lane = 0; lane < 32; ++lane) lanes.push_back(&lane_of(warp, lane));
  share_knowledge(*warp.block, lanes);
}

// What a thread passes at a barrier.
enum class Vote : std::uint8_t { kNone, kYes, kNo };

// Returns whether no thread passes no.
bool named(int id, int threads, Where where, Vote vote = Vote::kNone) {
  touch();
  Block& block = *self->block;
  if (id < 0 || id >= static_cast<int>(block.named.size())) {
    fail(where, text("uses named barrier %d; there are 0 to 15", id));
  }
  if (threads <= 0 || threads % 32 != 0 || threads > block.slots.threads) {
    fail(where, text("waits on barrier %d for %d threads; that must be a multiple of 32 up to %d",
                     id, threads, block.slots.threads));
  }
  NamedBarrier& barrier = block.named[id];
  if (barrier.arrived.empty()) {
    barrier.expected = threads;
    barrier.first = where;
    barrier.votes = vote != Vote::kNone;
  } else if (barrier.expected != threads) {
    fail(where, text("waits on barrier %d for %d threads, others for %d (%s)", id, threads,
                     barrier.expected, place_text(barrier.first).c_str()));
  }
  if (barrier.votes != (vote != Vote::kNone)) {
    fail(where, text("waits on barrier %d %s a vote, others %s one (%s)", id,
                     barrier.votes ? "without" : "with", barrier.votes ? "with" : "without",
                     place_text(barrier.first).c_str()));
  }
  barrier.arrived.push_back(self);
  barrier.all &= vote != Vote::kNo;
  if (static_cast<int>(barrier.arrived.size()) < threads) {
    launch->suspend(State::kNamed, where, id);
    return self->agreed;
  }
  share_knowledge(block, barrier.arrived);
  const std::vector<Thread*> arrived = std::move(barrier.arrived);
  barrier.arrived.clear();
  const bool all = std::exchange(barrier.all, true);
  for (Thread* thread : arrived) {
    thread->agreed = all;
    if (thread != self) launch->wake(*thread);
  }
  return all;
}

struct Exchange {
  int value;
  int lane;  // or distance
  int result;
};

Exchange& exchange_of(Warp& warp, int lane) {
  return *static_cast<Exchange*>(warp.arguments[lane]);
}

bool take_registers(Warp& warp) {
  Block& block = *warp.block;
  const int more = 32 * (warp.wanted_registers - warp.registers);
  if (more > block.free_registers) return false;
  block.free_registers -= more;
  warp.registers = warp.wanted_registers;
  return true;
}

void set_registers(Warp& warp) {
  warp.wanted_registers = *static_cast<int*>(warp.arguments[0]);
  if (warp.wanted_registers > warp.registers) return;
  take_registers(warp);
  for (const auto& thread : warp.block->threads) {
    if (thread->state == State::kRegisters) launch->wake(*thread);
  }
}

}  // namespace

int thread_index() { return self->index; }
int block_index() { return self->block->index; }
int block_count() { return launch->arguments.blocks; }

void sync_block(Where where) { named(0, self->block->slots.threads, where); }

bool sync_block_and(bool predicate, Where where) {
  return named(0, self->block->slots.threads, where, predicate ? Vote::kYes : Vote::kNo);
}

void sync_named(int id, int threads, Where where) {
  if (id == 0) fail(where, "uses named barrier 0, which belongs to sync_block");
  named(id, threads, where);
}

void sync_warp(Where where) { meet(Collective::kSyncWarp, where, nullptr, share_in_warp); }

std::uint32_t ballot(bool predicate, Where where) {
  Exchange mine{predicate, 0, 0};
  meet(Collective::kBallot, where, &mine, [](Warp& warp) {
    std::uint32_t mask = 0;
    for (int lane = 0; lane < 32; ++lane) {
      mask |= static_cast<std::uint32_t>(exchange_of(warp, lane).value) << lane;
    }
    for (int lane = 0; lane < 32; ++lane) {
      exchange_of(warp, lane).result = static_cast<int>(mask);
    }
  });
  return static_cast<std::uint32_t>(mine.result);
}

int shuffle(int value, int source_lane, Where where) {
  Exchange mine{value, source_lane & 31, 0};
  meet(Collective::kShuffle, where, &mine, [](Warp& warp) {
    for (int lane = 0; lane < 32; ++lane) {
      Exchange& exchange = exchange_of(warp, lane);
      exchange.result = exchange_of(warp, exchange.lane).value;
    }
  });
  return mine.result;
}

int shuffle_up(int value, int delta, Where where) {
  Exchange mine{value, delta, 0};
  meet(Collective::kShuffleUp, where, &mine, [](Warp& warp) {
    for (int lane = 0; lane < 32; ++lane) {
      Exchange& exchange = exchange_of(warp, lane);
      const int source = lane - exchange.lane;
      exchange.result = exchange_of(warp, source < 0 ? lane : source).value;
    }
  });
  return mine.result;
}

int sum_lanes(int value, Where where) {
  Exchange mine{value, 0, 0};
  meet(Collective::kSumLanes, where, &mine, [](Warp& warp) {
    int sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += exchange_of(warp, lane).value;
    for (int lane = 0; lane < 32; ++lane) exchange_of(warp, lane).result = sum;
  });
  return mine.result;
}

std::uint32_t match(int value, Where where) {
  Exchange mine{value, 0, 0};
  meet(Collective::kMatch, where, &mine, [](Warp& warp) {
    for (int lane = 0; lane < 32; ++lane) {
      std::uint32_t mask = 0;
      for (int other = 0; other < 32; ++other) {
        const bool same = exchange_of(warp, other).value == exchange_of(warp, lane).value;
        mask |= static_cast<std::uint32_t>(same) << other;
      }
      exchange_of(warp, lane).result = static_cast<int>(mask);
    }
  });
  return static_cast<std::uint32_t>(mine.result);
}

void fence_proxy_async(Where) {
  touch();
  self->knowledge.async = self->knowledge.seen;
}

void wait_for_kernel_before() {
  touch();
  self->has_awaited = self->block->has_awaited = true;
}

void set_registers(int registers, bool raise, Where where) {
  Warp& warp = *self->warp;
  if (raise ? registers < warp.registers && warp.arrived == 0 : registers > warp.registers) {
    fail(where, text("%s its registers to %d from %d", raise ? "raises" : "lowers", registers,
                     warp.registers));
  }
  meet(Collective::kSetRegisters, where, &registers, set_registers);
  while (warp.registers != warp.wanted_registers && !take_registers(warp)) {
    launch->suspend(State::kRegisters, where, registers);
  }
}

void trap(Where where) { fail(where, "stops the launch with trap"); }

}  // namespace chord::emulator
