// Barriers in shared memory that count arrivals and bytes.
#include "api.hpp"
#include "machine.hpp"

namespace chord::emulator {

namespace {

constexpr int kBarrierBytes = 8;
constexpr std::int64_t kMostBytes = (1 << 20) - 1;

std::string barrier_text(const Mbarrier& barrier) {
  return text("mbarrier %d (shared %#x)", barrier.slot, barrier.address);
}

// Everything the completed phases released, for one thread.
void acquire(Thread& thread, Mbarrier& barrier) {
  const Slots& slots = thread.block->slots;
  Knowledge& known = thread.knowledge;
  known.join(barrier.released);
  known.seen[slots.bulk(barrier.slot)] = barrier.phases;
  known.async[slots.bulk(barrier.slot)] = barrier.phases;
  known.seen[slots.cp_async(barrier.slot)] = barrier.phases;
  if (barrier.observed_phase < barrier.phases) barrier.observed_phase = barrier.phases;
}

// The running thread's arrival releases what it did before.
void release_to(Mbarrier& barrier) {
  barrier.arrivals.join(self->knowledge);
  self->advance();
}

}  // namespace

Mbarrier& find_barrier(Block& block, std::uint32_t address, const char* action, Where where) {
  for (Mbarrier& barrier : block.mbarriers) {
    if (barrier.address != address) continue;
    if (self != nullptr &&
        self->knowledge.seen[barrier.initialised.slot] < barrier.initialised.clock) {
      fail(where, std::string(action) + " " + barrier_text(barrier) + ", which thread " +
                      std::to_string(barrier.initialised.slot) + " set up at " +
                      place_text(barrier.initialised.place) + " without synchronising since");
    }
    return barrier;
  }
  fail(where, text("%s shared %#x, where no mbarrier has been set up", action, address));
}

void try_complete(Mbarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.released = barrier.arrivals;
  barrier.pending = barrier.count;
  ++barrier.phases;
  const std::vector<Thread*> waiters = std::move(barrier.waiters);
  barrier.waiters.clear();
  for (Thread* thread : waiters) {
    if (thread->waits_value == static_cast<std::uint32_t>(barrier.phases & 1)) {
      barrier.waiters.push_back(thread);
      continue;
    }
    acquire(*thread, barrier);
    launch->wake(*thread);
  }
}

void check_announced(const Block& block, const Mbarrier& barrier, Where where) {
  if (barrier.pending != 0 || barrier.bytes >= 0) return;
  fail(where,
       text("(block %d) completes the arrivals of phase %d on %s, where %lld bytes more than "
            "were announced have arrived",
            block.index, barrier.phases, barrier_text(barrier).c_str(),
            static_cast<long long>(-barrier.bytes)));
}

void arrive(Block& block, Mbarrier& barrier, const char* action, Where where) {
  if (barrier.pending == 0) {
    fail(where, text("%s %s once more than the %d arrivals it was set up for (phase %d)", action,
                     barrier_text(barrier).c_str(), barrier.count, barrier.phases));
  }
  --barrier.pending;
  check_announced(block, barrier, where);
  try_complete(barrier);
}

void mbarrier_init(std::uint32_t address, int arrivals, Where where) {
  touch();
  Block& block = *self->block;
  SharedMemory& shared = block.shared;
  if (std::string why = shared.reject(address, kBarrierBytes, kBarrierBytes); !why.empty()) {
    fail(where, "sets up an mbarrier: " + why);
  }
  if (arrivals < 1 || arrivals >= 1 << 20) {
    fail(where, text("sets up an mbarrier for %d arrivals; 1 to 2^20 - 1 are possible", arrivals));
  }
  if (block.mbarriers.size() == kMaxBarriers) {
    fail(where, text("sets up more than the emulator's %d mbarriers a block", kMaxBarriers));
  }
  const Epoch initialised{static_cast<std::uint16_t>(self->index), place_of(where), self->clock()};
  for (int offset = 0; offset < kBarrierBytes; offset += 4) {
    Granule& granule = shared.granule(address + offset);
    std::string why = shared.reject_write(granule, self->knowledge, false, block.slots);
    if (!why.empty()) fail(where, why);
    shared.note_write(granule, {kBarrier, initialised.place, 0});
  }
  block.mbarriers.emplace_back();
  Mbarrier& barrier = block.mbarriers.back();
  barrier.address = address;
  barrier.slot = static_cast<int>(block.mbarriers.size()) - 1;
  barrier.count = barrier.pending = arrivals;
  barrier.initialised = initialised;
  barrier.initialiser = self;
  barrier.arrivals = barrier.released = Knowledge(block.slots.count());
}

void fence_mbarrier_init(Where) {
  touch();
  for (Mbarrier& barrier : self->block->mbarriers) {
    if (barrier.initialiser == self) barrier.fenced = true;
  }
}

void mbarrier_arrive(std::uint32_t address, Where where) {
  touch();
  Mbarrier& barrier = find_barrier(*self->block, address, "arrives at", where);
  release_to(barrier);
  arrive(*self->block, barrier, "arrives at", where);
}

void mbarrier_arrive_expect_bytes(std::uint32_t address, int bytes, Where where) {
  touch();
  Mbarrier& barrier = find_barrier(*self->block, address, "arrives at", where);
  if (bytes < 0 || barrier.bytes + bytes > kMostBytes) {
    fail(where, text("announces %d bytes on %s; a phase can count 2^20 - 1", bytes,
                     barrier_text(barrier).c_str()));
  }
  barrier.bytes += bytes;
  release_to(barrier);
  arrive(*self->block, barrier, "arrives at", where);
}

void mbarrier_wait(std::uint32_t address, std::uint32_t parity, Where where) {
  touch();
  Mbarrier& barrier = find_barrier(*self->block, address, "waits for", where);
  if (parity > 1) {
    fail(where, text("waits for a phase of parity %u; it is 0 or 1", parity));
  }
  if (parity == static_cast<std::uint32_t>(barrier.phases & 1)) {
    barrier.waiters.push_back(self);
    launch->suspend(State::kMbarrier, where, address, parity);
    return;
  }
  acquire(*self, barrier);
}

}  // namespace chord::emulator
