// Ordinary loads and stores of shared and global memory.
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

bool is_known(const GlobalEpoch& epoch) {
  if (epoch.block < 0) return true;
  const Knowledge& known = self->knowledge;
  if (epoch.block == self->block->index) return known.seen[epoch.thread] >= epoch.clock;
  if (known.foreign == nullptr || known.foreign->clocks[epoch.block].empty()) return false;
  return known.foreign->clocks[epoch.block][epoch.thread] >= epoch.clock;
}

std::string epoch_text(const GlobalEpoch& epoch) {
  return text("thread %d of block %d at %s", epoch.thread, epoch.block,
              place_text(epoch.place).c_str());
}

GlobalEpoch global_epoch(Where where) {
  return {self->block->index, self->index, self->clock(), place_of(where)};
}

PartialGranule& partial_granule(Region& region, const void* address, Where where) {
  if (region.use != Use::kPartial) {
    fail(where, "takes partial sums from or to " + region.name);
  }
  return region.partial[(static_cast<const unsigned char*>(address) - region.begin) / 16];
}

Region& flags_or_fail(const std::uint32_t* address, const char* action, Where where) {
  touch();
  Region& region = region_or_fail(address, 4, action, where);
  if (region.use != Use::kFlags) fail(where, std::string(action) + " a flag in " + region.name);
  return region;
}

FlagState& flag_state(Region& region, const std::uint32_t* address) {
  return region.flags[address - reinterpret_cast<const std::uint32_t*>(region.begin)];
}

// What the running thread knows, for whoever acquires it.
std::shared_ptr<const Foreign> released_knowledge() {
  Thread& thread = *self;
  const std::vector<Clock>& seen = thread.knowledge.seen;
  auto snapshot = std::make_shared<Foreign>();
  snapshot->clocks.resize(launch->blocks.size());
  snapshot->clocks[thread.block->index].assign(seen.begin(),
                                               seen.begin() + thread.block->slots.threads);
  thread.advance();
  return join_foreign(snapshot, thread.knowledge.foreign);
}

void set_flag(std::uint32_t* address, std::uint32_t value) {
  *address = value;
  const std::vector<Thread*> waiters = std::move(launch->flag_waiters);
  launch->flag_waiters.clear();
  for (Thread* waiter : waiters) {
    if (waiter->polled == address && value != waiter->polled_value) {
      launch->wake(*waiter);
    } else {
      launch->flag_waiters.push_back(waiter);
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
    std::string why = shared.reject_write(granule, *self, false, self->block->slots);
    if (!why.empty()) fail(where, why);
    shared.note_write(granule, writer);
  }
  std::memcpy(shared.at(address), value, bytes);
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
  if (!is_known(granule.write)) {
    fail(where, "overwrites partial sums of " + epoch_text(granule.write) +
                    " without having acquired them");
  }
  for (const GlobalEpoch& reader : granule.readers) {
    if (!is_known(reader)) {
      fail(where, "overwrites partial sums that " + epoch_text(reader) + " reads");
    }
  }
  granule.readers.clear();
  granule.write = global_epoch(where);
  std::memcpy(address, value, bytes);
}

void read_partial(const void* address, void* value, int bytes, Where where) {
  touch();
  Region& region = region_or_fail(address, bytes, "loads", where);
  PartialGranule& granule = partial_granule(region, address, where);
  if (granule.write.block < 0) {
    fail(where,
         "loads " + launch->global->name_of(address) + ", which nobody has written in this launch");
  }
  if (!is_known(granule.write)) {
    fail(where, "loads partial sums that " + epoch_text(granule.write) +
                    " wrote, without having acquired them");
  }
  granule.readers.push_back(global_epoch(where));
  std::memcpy(value, address, bytes);
}

void write_flag(std::uint32_t* address, std::uint32_t value, Where where) {
  Region& region = flags_or_fail(address, "stores", where);
  flag_state(region, address).knowledge = released_knowledge();
  set_flag(address, value);
}

// Acquires what the flag holds and releases it again with the own knowledge.
std::uint32_t atomic_add(std::uint32_t* address, std::uint32_t value, Where where) {
  Region& region = flags_or_fail(address, "adds to", where);
  FlagState& state = flag_state(region, address);
  self->knowledge.foreign = join_foreign(self->knowledge.foreign, state.knowledge);
  state.knowledge = released_knowledge();
  const std::uint32_t before = *address;
  set_flag(address, before + value);
  return before;
}

// A thread that polls and finds the same value again sleeps until somebody changes it.
std::uint32_t read_flag(const std::uint32_t* address, Where where) {
  Thread& thread = *self;
  if (thread.polled == address && thread.polled_value == *address) {
    launch->flag_waiters.push_back(&thread);
    launch->suspend(State::kFlag, where, 0);
  }
  Region& region = flags_or_fail(address, "loads", where);
  const std::shared_ptr<const Foreign>& released = flag_state(region, address).knowledge;
  thread.knowledge.foreign = join_foreign(thread.knowledge.foreign, released);
  thread.polled = address;
  thread.polled_value = *address;
  return *address;
}

}  // namespace chord::emulator
