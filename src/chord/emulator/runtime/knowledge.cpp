#include "knowledge.hpp"

#include <algorithm>

namespace chord::emulator {

namespace {

void join_clocks(std::vector<Clock>& into, const std::vector<Clock>& from) {
  Clock* __restrict a = into.data();
  const Clock* __restrict b = from.data();
  const std::size_t count = from.size();
  for (std::size_t i = 0; i < count; ++i) a[i] = a[i] < b[i] ? b[i] : a[i];
}

}  // namespace

std::shared_ptr<const Foreign> join_foreign(const std::shared_ptr<const Foreign>& a,
                                            const std::shared_ptr<const Foreign>& b) {
  if (a == b || b == nullptr) return a;
  if (a == nullptr) return b;
  auto joined = std::make_shared<Foreign>(*a);
  bool grew = false;
  for (std::size_t block = 0; block < b->clocks.size(); ++block) {
    const std::vector<Clock>& from = b->clocks[block];
    std::vector<Clock>& into = joined->clocks[block];
    if (from.empty()) continue;
    if (into.empty()) into.resize(from.size());
    for (std::size_t i = 0; i < from.size(); ++i) {
      if (from[i] > into[i]) {
        into[i] = from[i];
        grew = true;
      }
    }
  }
  return grew ? joined : a;
}

void Knowledge::join(const Knowledge& other) {
  join_clocks(seen, other.seen);
  join_clocks(async, other.async);
  foreign = join_foreign(foreign, other.foreign);
}

}  // namespace chord::emulator
