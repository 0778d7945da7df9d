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

std::string SharedMemory::reject_read(const Granule& granule, const std::vector<Clock>& known,
                                      const Slots& slots) const {
  const Epoch& write = granule.write;
  if (write.slot < kFirstSpecial) {
    if (known[write.slot] >= write.clock) return {};
    return "reads what " + slot_text(slots, write.slot) + " wrote at " + place_text(write.place) +
           " without having waited for it";
  }
  if (write.slot == kUninitialised) return "reads bytes that nobody has written";
  if (write.slot == kInFlight) {
    return "reads bytes of a copy that is still in flight, issued at " + place_text(write.place);
  }
  return "reads the bytes of a barrier set up at " + place_text(write.place);
}

std::string SharedMemory::reject_write(const Granule& granule, const Thread& writer,
                                       bool by_async_proxy, const Slots& slots) const {
  const Epoch& write = granule.write;
  const Knowledge& known = writer.knowledge;
  if (write.slot == kInFlight) {
    return "overwrites the target of a copy that is still in flight, issued at " +
           place_text(write.place);
  }
  if (write.slot == kBarrier) {
    return "overwrites a barrier set up at " + place_text(write.place);
  }
  if (write.slot != kUninitialised) {
    if (known.seen[write.slot] < write.clock) {
      return "overwrites what " + slot_text(slots, write.slot) + " wrote at " +
             place_text(write.place) + " without having waited for it";
    }
    if (by_async_proxy && known.async[write.slot] < write.clock) {
      return "lets the async proxy overwrite what " + slot_text(slots, write.slot) + " wrote at " +
             place_text(write.place) + " without fence_proxy_async between";
    }
  }
  auto unseen = [&](const Epoch& reader) { return known.seen[reader.slot] < reader.clock; };
  auto reason = [&](const Epoch& reader) {
    return "overwrites bytes that " + slot_text(slots, reader.slot) + " reads at " +
           place_text(reader.place) + " and has not released";
  };
  const int inline_count = granule.reader_count < 2 ? granule.reader_count : 2;
  for (int i = 0; i < inline_count; ++i) {
    if (unseen(granule.readers[i])) return reason(granule.readers[i]);
  }
  if (granule.more_readers != 0) {
    for (const Epoch& reader : lists_[granule.more_readers]) {
      if (unseen(reader)) return reason(reader);
    }
  }
  return {};
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
  if (granule.more_readers == 0) {
    if (free_lists_.empty()) {
      granule.more_readers = static_cast<std::uint32_t>(lists_.size());
      lists_.emplace_back();
    } else {
      granule.more_readers = free_lists_.back();
      free_lists_.pop_back();
    }
  }
  std::vector<Epoch>& list = lists_[granule.more_readers];
  for (Epoch& other : list) {
    if (other.slot == reader.slot) {
      other = reader;
      return;
    }
  }
  list.push_back(reader);
}

void SharedMemory::note_write(Granule& granule, Epoch writer) {
  if (granule.more_readers != 0) {
    lists_[granule.more_readers].clear();
    free_lists_.push_back(granule.more_readers);
    granule.more_readers = 0;
  }
  granule.reader_count = 0;
  granule.write = writer;
}

}  // namespace chord::emulator
