// The way in from Python, and from the main program.
#include "launch.hpp"

#include <cstring>
#include <string>

#include "machine.hpp"

int chord_emulator_run(const ChordUnit* unit, const void* params, int blocks,
                       unsigned long long seed, const ChordTensor* tensors, int num_tensors,
                       char* error, int error_bytes) {
  using namespace chord::emulator;
  GlobalMemory memory;
  for (int i = 0; i < num_tensors; ++i) {
    const ChordTensor& tensor = tensors[i];
    memory.add(tensor.name, tensor.begin, tensor.bytes, static_cast<Use>(tensor.use));
  }
  Launch emulated({unit->entry, params, unit->threads, unit->smem_bytes, blocks, seed}, &memory);
  std::string message = emulated.run();
  for (const Region& region : memory.regions()) {
    for (std::size_t i = 0; i < region.partial.size() && message.empty(); ++i) {
      if (!region.partial[i].holds_sum) continue;
      message = text("%s holds a sum at byte %zu after the launch; somebody has to take each",
                     region.name.c_str(), 16 * i);
    }
    if (region.use != Use::kCounters || !message.empty()) continue;
    for (std::uint64_t i = 0; i < region.bytes / 4; ++i) {
      std::uint32_t value;
      std::memcpy(&value, region.begin + 4 * i, 4);
      if (value == 0) continue;
      message = text("%s[%llu] is %u after the launch; counters have to be zero between launches",
                     region.name.c_str(), static_cast<unsigned long long>(i), value);
    }
  }
  launch = nullptr;
  std::strncpy(error, message.c_str(), error_bytes - 1);
  error[error_bytes - 1] = 0;
  return message.empty() ? 0 : 1;
}
