// Ordinary loads and stores of shared and global memory.
#include <algorithm>
#include <cstring>

#include "api.hpp"
#include "machine.hpp"

namespace chord::emulator {

namespace {

Region& region_or_fail(const void* address, int bytes, const char* action, Where where) {
  std::string why;
  Region* region = launch->global->find(address, bytes, bytes, &why);
  if (region == nullptr) fail(where, std::string(action) + " " + why);
  return *region;
}

std::string epoch_text(const GlobalEpoch& epoch) {
  return text("thread %d of block %d at %s", epoch.thread, epoch.block,
              place_text(epoch.place).c_str());
}

GlobalEpoch global_epoch(Where where) { return {self->block->index, self->index, place_of(where)}; }

PartialGranule& partial_granule(Region& region, const void* address, Where where) {
  if (region.use != Use::kPartial) {
    fail(where, "takes partial sums from or to " + region.name);
  }
  return region.partial[(static_cast<const unsigned char*>(address) - region.begin) / 16];
}

void check_counter(const std::uint32_t* address, const char* action, Where where) {
  touch();
  const Region& region = region_or_fail(address, 4, action, where);
  if (region.use != Use::kCounters)
    fail(where, std::string(action) + " a counter in " + region.name);
}

// What a place without a sum holds; the kernels' kNoSum.
constexpr std::uint32_t kNoSum = 0xffffffffu;

void wake_partial_waiters(const void* address) {
  const std::vector<Thread*> waiters = std::move(launch->partial_waiters);
  launch->partial_waiters.clear();
  for (Thread* waiter : waiters) {
    if (waiter->polled == address) {
      launch->wake(*waiter);
    } else {
      launch->partial_waiters.push_back(waiter);
    }
  }
}

}  // namespace

void read_shared(std::uint32_t address, void* value, int bytes, Where where) {
  touch();
  SharedMemory& shared = self->block->shared;
  if (std::string why = shared.reject(address, bytes, bytes); !why.empty()) {
    fail(where, "accesses " + why);
  }
  const Epoch reader{static_cast<std::uint16_t>(self->index), place_of(where), self->clock()};
  for (int offset = 0; offset < bytes; offset += 4) {
    Granule& granule = shared.granule(address + offset);
    std::string why = shared.reject_read(granule, self->knowledge.seen, self->block->slots);
    if (!why.empty()) fail(where, why);
    shared.note_read(granule, reader);
  }
  std::memcpy(value, shared.at(address), bytes);
}

void write_shared(std::uint32_t address, const void* value, int bytes, Where where) {
  touch();
  SharedMemory& shared = self->block->shared;
  if (std::string why = shared.reject(address, bytes, bytes); !why.empty()) {
    fail(where, "accesses " + why);
  }
  const Epoch writer{static_cast<std::uint16_t>(self->index), place_of(where), self->clock()};
  for (int offset = 0; offset < bytes; offset += 4) {
    Granule& granule = shared.granule(address + offset);
    std::string why = shared.reject_write(granule, self->knowledge, false, self->block->slots);
    if (!why.empty()) fail(where, why);
    shared.note_write(granule, writer);
  }
  std::memcpy(shared.at(address), value, bytes);
}

void add_shared(std::uint32_t address, std::uint32_t value, Where where) {
  touch();
  SharedMemory& shared = self->block->shared;
  if (std::string why = shared.reject(address, 4, 4); !why.empty()) fail(where, "adds to " + why);
  const Epoch adder{static_cast<std::uint16_t>(self->index), place_of(where), self->clock()};
  Granule& granule = shared.granule(address);
  std::string why = shared.reject_add(granule, self->knowledge.seen, self->block->slots);
  if (!why.empty()) fail(where, why);
  shared.note_add(granule, adder);
  std::uint32_t sum;
  std::memcpy(&sum, shared.at(address), sizeof sum);
  sum += value;
  std::memcpy(shared.at(address), &sum, sizeof sum);
}

void check_input(const void* address, std::uint64_t bytes, std::uint64_t alignment,
                 const char* action, Where where) {
  std::string why;
  const Region* region = launch->global->find(address, bytes, alignment, &why);
  if (region == nullptr) fail(where, std::string(action) + " " + why);
  if (region->use == Use::kAwaited) {
    if (self->has_awaited) return;
    fail(where, std::string(action) + " " + region->name +
                    ", which the kernel before may still write, without having waited for it");
  }
  if (region->use != Use::kInput) {
    fail(where, std::string(action) + " " + region->name +
                    ", which the launch writes; this load is for what nobody writes");
  }
}

void read_global(const void* address, void* value, int bytes, Where where) {
  touch();
  check_input(address, bytes, bytes, "loads", where);
  std::memcpy(value, address, bytes);
}

// What it brings is not looked at, so the kernel before may still write it.
void prefetch(const void* address, Where where) {
  touch();
  region_or_fail(address, 1, "prefetches from", where);
}

void write_global(void* address, const void* value, int bytes, Where where) {
  touch();
  Region& region = region_or_fail(address, bytes, "stores to", where);
  if (region.use != Use::kOutput) fail(where, "stores to " + region.name + ", which is no output");
  const std::uint64_t first = (static_cast<unsigned char*>(address) - region.begin) / 4;
  for (int i = 0; 4 * i < bytes; ++i) {
    std::uint16_t& place = region.written[first + i];
    if (place != 0) {
      fail(where, "stores to " + launch->global->name_of(address) +
                      ", which the launch has stored before at " + place_text(place));
    }
    place = place_of(where);
  }
  std::memcpy(address, value, bytes);
}

void write_partial(void* address, const void* value, int bytes, Where where) {
  touch();
  Region& region = region_or_fail(address, bytes, "stores to", where);
  PartialGranule& granule = partial_granule(region, address, where);
  std::uint32_t words[4];
  std::memcpy(words, value, sizeof words);
  const auto empty = std::count(words, words + 4, kNoSum);
  if (empty == 4) {
    if (!granule.holds_sum) fail(where, "clears partial sums that nobody has left");
    if (granule.reader_block != self->block->index || granule.reader_thread != self->index) {
      fail(where, "clears partial sums of " + epoch_text(granule.left) + " that it has not read");
    }
    granule = {};
  } else {
    if (empty != 0) fail(where, "leaves a partial sum that looks like none");
    if (granule.holds_sum) {
      fail(where,
           "overwrites partial sums of " + epoch_text(granule.left) + " that nobody has taken");
    }
    granule.holds_sum = true;
    granule.left = global_epoch(where);
    wake_partial_waiters(address);
  }
  std::memcpy(address, value, bytes);
}

// A thread that finds nothing again and again sleeps until a sum is left where it last looked.
// Words of a sum may become visible one by one: some reads find a part of them.
void read_partial(const void* address, void* value, int bytes, Where where) {
  constexpr int kEmptyReads = 64;
  Region& region = region_or_fail(address, bytes, "loads", where);
  PartialGranule& granule = partial_granule(region, address, where);
  if (!granule.holds_sum && ++self->empty_reads > kEmptyReads) {
    self->polled = address;
    launch->partial_waiters.push_back(self);
    launch->suspend(State::kPartial, where, 0);
    self->empty_reads = 0;
  }
  std::memcpy(value, address, bytes);
  if (!granule.holds_sum) return;
  if (launch->random.below(4) == 0) {
    auto* words = static_cast<std::uint32_t*>(value);
    words[launch->random.below(4)] = kNoSum;
    return;
  }
  granule.reader_block = self->block->index;
  granule.reader_thread = self->index;
}

void write_counter(std::uint32_t* address, std::uint32_t value, Where where) {
  check_counter(address, "stores", where);
  *address = value;
}

std::uint32_t atomic_add(std::uint32_t* address, std::uint32_t value, Where where) {
  check_counter(address, "adds to", where);
  const std::uint32_t before = *address;
  *address = before + value;
  return before;
}

}  // namespace chord::emulator
