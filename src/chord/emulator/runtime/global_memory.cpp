#include "global_memory.hpp"

#include "machine.hpp"

namespace chord::emulator {

void GlobalMemory::add(const char* name, void* begin, std::uint64_t bytes, Use use) {
  Region region{name, static_cast<unsigned char*>(begin), bytes, use, {}, {}};
  if (use == Use::kOutput) region.written.resize((bytes + 3) / 4);
  if (use == Use::kPartial) region.partial.resize((bytes + 15) / 16);
  regions_.push_back(std::move(region));
}

Region* GlobalMemory::find(const void* address, std::uint64_t bytes, std::uint64_t alignment,
                           std::string* why) {
  const auto* begin = static_cast<const unsigned char*>(address);
  if (reinterpret_cast<std::uintptr_t>(address) % alignment != 0) {
    *why = name_of(address) + text(", which is not a multiple of %llu bytes",
                                   static_cast<unsigned long long>(alignment));
    return nullptr;
  }
  for (Region& region : regions_) {
    if (begin >= region.begin && begin + bytes <= region.begin + region.bytes) return &region;
  }
  *why = text("%llu bytes from ", static_cast<unsigned long long>(bytes)) + name_of(address) +
         ", which is outside every tensor";
  return nullptr;
}

bool GlobalMemory::has(Use use) const {
  for (const Region& region : regions_) {
    if (region.use == use) return true;
  }
  return false;
}

// The nearest tensor with the distance from its start.
std::string GlobalMemory::name_of(const void* address) const {
  const auto* at = static_cast<const unsigned char*>(address);
  const Region* nearest = nullptr;
  std::int64_t least = 0;
  for (const Region& region : regions_) {
    const std::int64_t before = region.begin - at, after = at - (region.begin + region.bytes);
    const std::int64_t distance = before > 0 ? before : after > 0 ? after : 0;
    if (nearest == nullptr || distance < least) nearest = &region, least = distance;
  }
  if (nearest == nullptr) return "no tensor";
  return nearest->name + text(" (%llu bytes) at byte %lld",
                              static_cast<unsigned long long>(nearest->bytes),
                              static_cast<long long>(at - nearest->begin));
}

}  // namespace chord::emulator
