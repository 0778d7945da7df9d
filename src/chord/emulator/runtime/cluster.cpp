// Clusters: neighbouring blocks that reach each other's shared memory.
#include <cstring>

#include "api.hpp"
#include "machine.hpp"

namespace chord::emulator {

namespace {

// An address in the cluster as the card writes it: the block above, the place in it below.
constexpr int kRankShift = 24;
constexpr std::uint32_t kPlaceMask = (1u << kRankShift) - 1;

Block& block_at(std::uint32_t address) {
  return *self->block->cluster->blocks[address >> kRankShift];
}

}  // namespace

Knowledge known_of(const Block& block) {
  Knowledge known(block.slots.count());
  const auto& foreign = self->knowledge.foreign;
  if (foreign != nullptr && !foreign->clocks[block.index].empty()) {
    known.seen = known.async = foreign->clocks[block.index];
  }
  return known;
}

int cluster_rank() { return self->block->index % launch->arguments.cluster; }

void cluster_arrive(Where where) {
  touch();
  Cluster& cluster = *self->block->cluster;
  if (self->cluster_arrivals != self->cluster_waits) {
    fail(where, "arrives twice at the barrier of the cluster without cluster_wait between");
  }
  for (Mbarrier& barrier : self->block->mbarriers) {
    if (barrier.initialiser == self && barrier.fenced && barrier.told < 0) {
      barrier.told = self->cluster_arrivals;
    }
  }
  ++self->cluster_arrivals;
  if (--cluster.pending > 0) return;
  for (const Block* block : cluster.blocks) {
    cluster.pending += static_cast<int>(block->threads.size());
  }
  ++cluster.phases;
  for (Thread* waiter : cluster.waiters) launch->wake(*waiter);
  cluster.waiters.clear();
}

void cluster_wait(Where where) {
  touch();
  Cluster& cluster = *self->block->cluster;
  if (self->cluster_arrivals == self->cluster_waits) {
    fail(where, "waits for the barrier of the cluster without cluster_arrive before");
  }
  if (cluster.phases < self->cluster_arrivals) {
    cluster.waiters.push_back(self);
    launch->suspend(State::kCluster, where, 0);
  }
  ++self->cluster_waits;
}

std::uint32_t cluster_address(std::uint32_t address, int rank, Where where) {
  const std::size_t count = self->block->cluster->blocks.size();
  if (rank < 0 || rank >= static_cast<int>(count)) {
    fail(where, text("asks for an address in block %d of a cluster of %zu", rank, count));
  }
  return static_cast<std::uint32_t>(rank) << kRankShift | address;
}

void cluster_store(std::uint32_t address, int value, std::uint32_t barrier_address, Where where) {
  touch();
  Block& block = block_at(address);
  if (&block != &block_at(barrier_address)) {
    fail(where, "stores to one block of the cluster and lets the bytes arrive in another");
  }
  const std::uint32_t target = address & kPlaceMask;
  claim_target(block, target, sizeof value, false, where);
  Mbarrier& barrier = barrier_of_bulk(block, barrier_address & kPlaceMask, where);
  ++block.copies_in_flight;
  launch->later([&block, target, value, &barrier, where] {
    std::memcpy(block.shared.at(target), &value, sizeof value);
    finish_bulk(block, target, sizeof value, barrier, where);
  });
}

void cluster_mbarrier_arrive(std::uint32_t address, Where where) {
  Block& block = block_at(address);
  const std::uint32_t place = address & kPlaceMask;
  if (&block == self->block) return mbarrier_arrive(place, where);
  touch();
  Mbarrier& barrier = find_barrier(block, place, "arrives at", where);
  barrier.arrivals.foreign = join_foreign(barrier.arrivals.foreign, released_knowledge());
  arrive(block, barrier, "arrives at", where);
}

}  // namespace chord::emulator
