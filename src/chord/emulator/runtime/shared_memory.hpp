// One block's shared memory with a shadow: for every 4 bytes who wrote them, who has added to them
// and who has read them since, and whether a copy is still under way.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "knowledge.hpp"

namespace chord::emulator {

inline constexpr std::uint16_t kUninitialised = 0xffff;
inline constexpr std::uint16_t kInFlight = 0xfffe;
inline constexpr std::uint16_t kBarrier = 0xfffd;
inline constexpr std::uint16_t kFirstSpecial = kBarrier;

struct Epoch {
  std::uint16_t slot = kUninitialised;
  std::uint16_t place = 0;
  Clock clock = 0;
};

struct Granule {
  Epoch write;
  Epoch readers[2];
  std::uint32_t reader_count = 0;
  std::uint32_t more_readers = 0;  // index of a list, 0 for none
  std::uint32_t adders = 0;        // of additions since the write; likewise
};

// The shared window starts here, as on the card, where the first KiB is the system's.
inline constexpr std::uint32_t kSharedBase = 1024;

class SharedMemory {
 public:
  void reset(int bytes);
  std::uint32_t size() const { return static_cast<std::uint32_t>(bytes_.size()); }
  unsigned char* at(std::uint32_t address) { return bytes_.data() + (address - kSharedBase); }
  Granule& granule(std::uint32_t address) { return granules_[(address - kSharedBase) / 4]; }

  // Why [address, address + count) may not be accessed at all; empty if it may.
  std::string reject(std::uint32_t address, int count, int alignment) const;

  // Each checks one granule against what `known` has seen and returns an empty string if all is
  // well. `known` is the clock vector of the right proxy.
  std::string reject_read(const Granule& granule, const std::vector<Clock>& known,
                          const Slots& slots) const;
  std::string reject_read_by_async_proxy(const Granule& granule, const Knowledge& known,
                                         const Slots& slots) const;
  std::string reject_write(const Granule& granule, const Knowledge& known, bool by_async_proxy,
                           const Slots& slots) const;

  // Additions do not wait for each other.
  std::string reject_add(const Granule& granule, const std::vector<Clock>& known,
                         const Slots& slots) const;

  void note_read(Granule& granule, Epoch reader);
  void note_add(Granule& granule, Epoch adder);
  void note_write(Granule& granule, Epoch writer);

 private:
  // Why `action` cannot be done to bytes that are not there, or not data.
  static std::string reject_unfinished(const Granule& granule, const char* action);
  // Why `action` comes too early behind the write (and additions; reads) of a granule: `known` has
  // not seen it, for want of what `omission` says.
  static std::string reject_behind_write(const Granule& granule, const char* action,
                                         const std::vector<Clock>& known, const char* omission,
                                         const Slots& slots);
  std::string reject_behind_changes(const Granule& granule, const char* action,
                                    const std::vector<Clock>& known, const char* omission,
                                    const Slots& slots) const;
  std::string reject_behind_reads(const Granule& granule, const char* action,
                                  const std::vector<Clock>& known, const Slots& slots) const;
  // The first of a list that `known` has not seen, or null.
  const Epoch* first_unseen(std::uint32_t list, const std::vector<Clock>& known) const;
  const Epoch* first_unseen_reader(const Granule& granule, const std::vector<Clock>& known) const;
  void insert(std::uint32_t& list, Epoch epoch);
  void clear(std::uint32_t& list);

  std::vector<unsigned char> bytes_;
  std::vector<Granule> granules_;
  std::vector<std::vector<Epoch>> lists_;
  std::vector<std::uint32_t> free_lists_;
};

std::string slot_text(const Slots& slots, int slot);

}  // namespace chord::emulator
