#include "knowledge.hpp"

namespace chord::emulator {

namespace {

void join_clocks(std::vector<Clock>& into, const std::vector<Clock>& from) {
  Clock* __restrict a = into.data();
  const Clock* __restrict b = from.data();
  const std::size_t count = from.size();
  for (std::size_t i = 0; i < count; ++i) a[i] = a[i] < b[i] ? b[i] : a[i];
}

}  // namespace

void Knowledge::join(const Knowledge& other) {
  join_clocks(seen, other.seen);
  join_clocks(async, other.async);
}

}  // namespace chord::emulator
