// Global memory: the tensors of a launch, and who may do what with them.
#pragma once

#include <cstdint>
#include <source_location>
#include <string>
#include <vector>

namespace chord::emulator {

// kInput is only read, kOutput written at most once a byte, kPartial sums that blocks leave for one
// another, kCounters counters of the launch. kAwaited is what the kernel before this one writes: an
// input, for threads that have waited for that kernel.
enum class Use : int { kInput = 0, kOutput = 1, kPartial = 2, kCounters = 3, kAwaited = 4 };

struct GlobalEpoch {
  int block = -1;
  int thread = 0;
  std::uint16_t place = 0;
};

// Sixteen bytes that hold a sum from when a thread leaves it until the thread that has read it
// clears them.
struct PartialGranule {
  bool holds_sum = false;
  GlobalEpoch left;
  int reader_block = -1;
  int reader_thread = -1;
};

struct Region {
  std::string name;
  unsigned char* begin;
  std::uint64_t bytes;
  Use use;
  std::vector<std::uint16_t> written;   // kOutput: place of each 4 bytes, 0 for none
  std::vector<PartialGranule> partial;  // kPartial
};

class GlobalMemory {
 public:
  void add(const char* name, void* begin, std::uint64_t bytes, Use use);
  // The tensor that holds [address, address + bytes), or null; then `why` says what is wrong.
  Region* find(const void* address, std::uint64_t bytes, std::uint64_t alignment, std::string* why);
  std::string name_of(const void* address) const;
  bool has(Use use) const;
  std::vector<Region>& regions() { return regions_; }

 private:
  std::vector<Region> regions_;
};

// Checks a read of a tensor that is only read, and ends the launch if it is wrong.
void check_input(const void* address, std::uint64_t bytes, std::uint64_t alignment,
                 const char* action, std::source_location where);

}  // namespace chord::emulator
