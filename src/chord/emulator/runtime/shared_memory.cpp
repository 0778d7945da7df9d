#include "shared_memory.hpp"

#include "machine.hpp"

namespace chord::emulator {

std::string slot_text(const Slots& slots, int slot) {
  if (slot < slots.threads) return text("thread %d", slot);
  slot -= slots.threads;
  if (slot < kMaxBarriers) return text("a bulk copy on barrier %d", slot);
  slot -= kMaxBarriers;
  if (slot < kMaxBarriers) return text("cp.async on barrier %d", slot);
  slot -= kMaxBarriers;
  if (slot < slots.warps) return text("a matrix store of warp %d", slot);
  return text("wgmma of warp %d", slot - slots.warps);
}

void SharedMemory::reset(int bytes) {
  bytes_.assign(bytes, 0xcd);
  granules_.assign((bytes + 3) / 4, Granule{});
  lists_.assign(1, {});
  free_lists_.clear();
}

std::string SharedMemory::reject(std::uint32_t address, int count, int alignment) const {
  if (address % alignment != 0) {
    return text("shared %#x, which is not a multiple of %d bytes", address, alignment);
  }
  if (address < kSharedBase || address - kSharedBase + static_cast<std::uint64_t>(count) > size()) {
    return text("shared [%#x, %#x), which is outside the block's [%#x, %#x)", address,
                address + count, kSharedBase, kSharedBase + size());
  }
  return {};
}

std::string SharedMemory::reject_unfinished(const Granule& granule, const char* action) {
  const Epoch& write = granule.write;
  if (write.slot == kUninitialised) return std::string(action) + " bytes that nobody has written";
  if (write.slot == kInFlight) {
    return std::string(action) + " bytes of a copy that is still in flight, issued at " +
           place_text(write.place);
  }
  if (write.slot != kBarrier) return {};
  return std::string(action) + " the bytes of a barrier set up at " + place_text(write.place);
}

namespace {

constexpr char kNotWaited[] = "without having waited for it";
constexpr char kNotFenced[] = "without fence_proxy_async between";

std::string accusation(const char* action, const Epoch& before, const char* what_it_did,
                       const char* omission, const Slots& slots) {
  return std::string(action) + " what " + slot_text(slots, before.slot) + " " + what_it_did +
         " at " + place_text(before.place) + " " + omission;
}

}  // namespace

std::string SharedMemory::reject_behind_write(const Granule& granule, const char* action,
                                              const std::vector<Clock>& known, const char* omission,
                                              const Slots& slots) {
  const Epoch& write = granule.write;
  if (write.slot >= kFirstSpecial || known[write.slot] >= write.clock) return {};
  return accusation(action, write, "wrote", omission, slots);
}

std::string SharedMemory::reject_behind_changes(const Granule& granule, const char* action,
                                                const std::vector<Clock>& known,
                                                const char* omission, const Slots& slots) const {
  std::string why = reject_behind_write(granule, action, known, omission, slots);
  if (!why.empty()) return why;
  const Epoch* adder = first_unseen(granule.adders, known);
  return adder == nullptr ? std::string{} : accusation(action, *adder, "added to", omission, slots);
}

std::string SharedMemory::reject_behind_reads(const Granule& granule, const char* action,
                                              const std::vector<Clock>& known,
                                              const Slots& slots) const {
  const Epoch* reader = first_unseen_reader(granule, known);
  if (reader == nullptr) return {};
  return std::string(action) + " bytes that " + slot_text(slots, reader->slot) + " reads at " +
         place_text(reader->place) + " and has not released";
}

std::string SharedMemory::reject_read(const Granule& granule, const std::vector<Clock>& known,
                                      const Slots& slots) const {
  std::string why = reject_unfinished(granule, "reads");
  return why.empty() ? reject_behind_changes(granule, "reads", known, kNotWaited, slots) : why;
}

std::string SharedMemory::reject_read_by_async_proxy(const Granule& granule, const Knowledge& known,
                                                     const Slots& slots) const {
  std::string why = reject_read(granule, known.seen, slots);
  if (!why.empty()) return why;
  return reject_behind_changes(granule, "lets the async proxy read", known.async, kNotFenced,
                               slots);
}

std::string SharedMemory::reject_add(const Granule& granule, const std::vector<Clock>& known,
                                     const Slots& slots) const {
  std::string why = reject_unfinished(granule, "adds to");
  if (why.empty()) why = reject_behind_write(granule, "adds to", known, kNotWaited, slots);
  return why.empty() ? reject_behind_reads(granule, "adds to", known, slots) : why;
}

std::string SharedMemory::reject_write(const Granule& granule, const Knowledge& known,
                                       bool by_async_proxy, const Slots& slots) const {
  const Epoch& write = granule.write;
  if (write.slot == kInFlight) {
    return "overwrites the target of a copy that is still in flight, issued at " +
           place_text(write.place);
  }
  if (write.slot == kBarrier) {
    return "overwrites a barrier set up at " + place_text(write.place);
  }
  std::string why = reject_behind_changes(granule, "overwrites", known.seen, kNotWaited, slots);
  if (why.empty() && by_async_proxy) {
    why = reject_behind_changes(granule, "lets the async proxy overwrite", known.async, kNotFenced,
                                slots);
  }
  return why.empty() ? reject_behind_reads(granule, "overwrites", known.seen, slots) : why;
}

const Epoch* SharedMemory::first_unseen(std::uint32_t list, const std::vector<Clock>& known) const {
  for (const Epoch& epoch : lists_[list]) {
    if (known[epoch.slot] < epoch.clock) return &epoch;
  }
  return nullptr;
}

const Epoch* SharedMemory::first_unseen_reader(const Granule& granule,
                                               const std::vector<Clock>& known) const {
  const int inline_count = granule.reader_count < 2 ? granule.reader_count : 2;
  for (int i = 0; i < inline_count; ++i) {
    const Epoch& reader = granule.readers[i];
    if (known[reader.slot] < reader.clock) return &reader;
  }
  return first_unseen(granule.more_readers, known);
}

void SharedMemory::note_read(Granule& granule, Epoch reader) {
  const std::uint32_t inline_count = granule.reader_count < 2 ? granule.reader_count : 2;
  for (std::uint32_t i = 0; i < inline_count; ++i) {
    if (granule.readers[i].slot == reader.slot) {
      granule.readers[i] = reader;
      return;
    }
  }
  if (granule.reader_count < 2) {
    granule.readers[granule.reader_count++] = reader;
    return;
  }
  insert(granule.more_readers, reader);
}

void SharedMemory::note_add(Granule& granule, Epoch adder) { insert(granule.adders, adder); }

void SharedMemory::note_write(Granule& granule, Epoch writer) {
  clear(granule.more_readers);
  clear(granule.adders);
  granule.reader_count = 0;
  granule.write = writer;
}

// Lists are numbered from 1; the first stays empty, for granules that have none.
void SharedMemory::insert(std::uint32_t& list, Epoch epoch) {
  if (list == 0) {
    if (free_lists_.empty()) {
      list = static_cast<std::uint32_t>(lists_.size());
      lists_.emplace_back();
    } else {
      list = free_lists_.back();
      free_lists_.pop_back();
    }
  }
  for (Epoch& other : lists_[list]) {
    if (other.slot == epoch.slot) {
      other = epoch;
      return;
    }
  }
  lists_[list].push_back(epoch);
}

void SharedMemory::clear(std::uint32_t& list) {
  if (list == 0) return;
  lists_[list].clear();
  free_lists_.push_back(list);
  list = 0;
}

}  // namespace chord::emulator
