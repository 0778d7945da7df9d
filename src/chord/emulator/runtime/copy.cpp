// Asynchronous copies: they land at a random time, and their bytes may be read by who has waited
// for the barrier that counts them.
#include <cstring>

#include "api.hpp"
#include "machine.hpp"

namespace chord::emulator {

namespace {

// Checks the target of a copy and marks it as in flight.
void claim_target(std::uint32_t target, int bytes, bool by_async_proxy, Where where) {
  Block& block = *self->block;
  if (std::string why = block.shared.reject(target, bytes, 16); !why.empty()) {
    fail(where, "copies to " + why);
  }
  const Epoch in_flight{kInFlight, place_of(where), 0};
  for (int offset = 0; offset < bytes; offset += 4) {
    Granule& granule = block.shared.granule(target + offset);
    std::string why =
        block.shared.reject_write(granule, self->knowledge, by_async_proxy, block.slots);
    if (!why.empty()) fail(where, why);
    block.shared.note_write(granule, in_flight);
  }
}

void mark_landed(Block& block, std::uint32_t target, int bytes, Epoch epoch) {
  for (int offset = 0; offset < bytes; offset += 4) {
    block.shared.granule(target + offset).write = epoch;
  }
}

// A tensor map as runner.py writes it: BF16 [rows, k], for boxes of 16 rows x 64 elements with the
// 128-byte swizzle.
struct MapOfRows {
  const unsigned char* begin;
  std::uint64_t rows;
  std::uint64_t k;
  std::uint64_t row_bytes;
};
constexpr int kMapBytes = 128;
constexpr int kMapAlignment = 64;
constexpr int kBoxRows = 16;
constexpr int kRowBytes = 128;
constexpr int kBoxBytes = kBoxRows * kRowBytes;
constexpr int kSwizzleBytes = 1024;

// The chunk of 16 bytes that a box takes from the tensor, or null outside of it.
const unsigned char* chunk_of(const MapOfRows& map, std::int64_t row, std::int64_t k) {
  const bool exists = row >= 0 && row < static_cast<std::int64_t>(map.rows) && k >= 0 &&
                      k < static_cast<std::int64_t>(map.k);
  return exists ? map.begin + row * map.row_bytes + 2 * k : nullptr;
}

// The hardware swizzles by bits of the address.
std::uint32_t swizzled(std::uint32_t address) { return address ^ ((address >> 7 & 7) << 4); }

// The bytes of a copy are in shared memory.
void finish_bulk(Block& block, std::uint32_t target, int bytes, Mbarrier& barrier, Where where) {
  const Clock phase = barrier.phases + 1;
  mark_landed(block, target, bytes,
              {static_cast<std::uint16_t>(block.slots.bulk(barrier.slot)), place_of(where), phase});
  barrier.bytes_phase = phase;
  barrier.bytes_place = place_of(where);
  barrier.bytes -= bytes;
  --block.copies_in_flight;
  check_announced(block, barrier, where);
  try_complete(barrier);
}

Mbarrier& barrier_of_bulk(Block& block, std::uint32_t address, Where where) {
  Mbarrier& barrier = find_barrier(block, address, "counts a bulk copy on", where);
  if (!barrier.fenced) {
    fail(where, text("counts a bulk copy on mbarrier %d, which was set up without "
                     "fence_mbarrier_init",
                     barrier.slot));
  }
  return barrier;
}

void land_cp_async(Block& block, CpAsync& copy) {
  if (copy.landed) return;
  copy.landed = true;
  if (copy.source != nullptr) {
    std::memcpy(block.shared.at(copy.target), copy.source, 16);
  } else {
    std::memset(block.shared.at(copy.target), 0, 16);
  }
}

}  // namespace

void bulk_load(std::uint32_t target, const void* source, int bytes, std::uint32_t address,
               Where where) {
  touch();
  Block& block = *self->block;
  if (bytes <= 0 || bytes % 16 != 0) {
    fail(where, text("bulk copy of %d bytes; it must be a multiple of 16 and more than 0", bytes));
  }
  check_input(source, bytes, 16, "copies from", where);
  claim_target(target, bytes, true, where);
  Mbarrier& barrier = barrier_of_bulk(block, address, where);
  ++block.copies_in_flight;
  launch->later([&block, target, source, bytes, &barrier, where] {
    std::memcpy(block.shared.at(target), source, bytes);
    finish_bulk(block, target, bytes, barrier, where);
  });
}

void tensor_load_2d(std::uint32_t target, const void* map_bytes, int k, int row,
                    std::uint32_t address, Where where) {
  touch();
  Block& block = *self->block;
  if (reinterpret_cast<std::uintptr_t>(map_bytes) % kMapAlignment != 0) {
    fail(where, text("copies through a tensor map that is not aligned to %d bytes", kMapAlignment));
  }
  MapOfRows map;
  static_assert(sizeof map <= kMapBytes, "the emulator's map has to fit where the driver's lies");
  std::memcpy(&map, map_bytes, sizeof map);
  if (map.begin == nullptr || map.rows == 0 || map.k % 8 != 0 || map.row_bytes % 16 != 0) {
    fail(where,
         text("copies through a tensor map of %llu rows of %llu elements, %llu bytes apart; "
              "none that the driver would encode",
              static_cast<unsigned long long>(map.rows), static_cast<unsigned long long>(map.k),
              static_cast<unsigned long long>(map.row_bytes)));
  }
  if (target % kSwizzleBytes != 0) {
    fail(where, text("copies a box to shared %#x, which is not a multiple of %d bytes: its rows "
                     "would be swizzled as others",
                     target, kSwizzleBytes));
  }
  for (int r = 0; r < kBoxRows; ++r) {
    for (int chunk = 0; chunk < kRowBytes / 16; ++chunk) {
      const unsigned char* source = chunk_of(map, std::int64_t{row} + r, k + 8 * chunk);
      if (source != nullptr) check_input(source, 16, 16, "copies from", where);
    }
  }
  claim_target(target, kBoxBytes, true, where);
  Mbarrier& barrier = barrier_of_bulk(block, address, where);
  ++block.copies_in_flight;
  launch->later([&block, target, map, k, row, &barrier, where] {
    for (int r = 0; r < kBoxRows; ++r) {
      for (int chunk = 0; chunk < kRowBytes / 16; ++chunk) {
        unsigned char* place = block.shared.at(swizzled(target + kRowBytes * r + 16 * chunk));
        const unsigned char* source = chunk_of(map, std::int64_t{row} + r, k + 8 * chunk);
        if (source != nullptr) {
          std::memcpy(place, source, 16);
        } else {
          std::memset(place, 0, 16);
        }
      }
    }
    finish_bulk(block, target, kBoxBytes, barrier, where);
  });
}

void cp_async(std::uint32_t target, const void* source, bool valid, Where where) {
  touch();
  Block& block = *self->block;
  if (valid) check_input(source, 16, 16, "copies from", where);
  claim_target(target, 16, false, where);
  auto copy =
      std::make_shared<CpAsync>(CpAsync{target, valid ? source : nullptr, place_of(where), false});
  self->copies.push_back(copy);
  launch->later([&block, copy] { land_cp_async(block, *copy); });
}

void mbarrier_arrive_after_cp_async(std::uint32_t address, Where where) {
  touch();
  Block& block = *self->block;
  Mbarrier& barrier = find_barrier(block, address, "arrives at", where);
  auto copies = std::make_shared<std::vector<std::shared_ptr<CpAsync>>>();
  copies->swap(self->copies);
  ++block.copies_in_flight;
  launch->later([&block, &barrier, copies, where] {
    const auto slot = static_cast<std::uint16_t>(block.slots.cp_async(barrier.slot));
    for (const auto& copy : *copies) {
      land_cp_async(block, *copy);
      mark_landed(block, copy->target, 16, {slot, copy->place, barrier.phases + 1});
    }
    barrier.bytes_phase = barrier.phases + 1;
    barrier.bytes_place = place_of(where);
    --block.copies_in_flight;
    arrive(block, barrier, "arrives (after cp.async) at", where);
  });
}

// Shared memory goes to another block as soon as this one has ended.
void check_block_end(Block& block) {
  const Where where = Where::current();
  if (!block.has_awaited && launch->global->has(Use::kAwaited)) {
    fail(where, "is the last of its block, and nobody of it has waited for the kernel before");
  }
  for (const Mbarrier& barrier : block.mbarriers) {
    if (barrier.bytes_phase > barrier.observed_phase) {
      fail(where,
           text("is the last of its block, and nobody has waited for the copies on mbarrier "
                "%d (phase %d) of %s",
                barrier.slot, barrier.bytes_phase - 1, place_text(barrier.bytes_place).c_str()));
    }
  }
  if (block.copies_in_flight != 0) {
    fail(where,
         text("is the last of its block, and %d copies are in flight", block.copies_in_flight));
  }
  for (const auto& thread : block.threads) {
    if (thread->copies.empty()) continue;
    fail(where, text("is the last of its block, and thread %d has cp.async (%s) that no barrier "
                     "counts",
                     thread->index, place_text(thread->copies.front()->place).c_str()));
  }
  for (const auto& warp : block.warps) {
    if (warp->retired_group == warp->open_group - 1 && warp->queue.empty()) continue;
    fail(where,
         text("is the last of its block, and warp %d has not waited for its wgmma", warp->index));
  }
}

}  // namespace chord::emulator
