// wgmma: executed in order at a random time between issue and wait. Until the wait the accumulators
// belong to the tensor cores, and the B tile may not be overwritten.
#include <algorithm>
#include <cstring>

#include "api.hpp"
#include "bf16.hpp"
#include "machine.hpp"

namespace chord::emulator {

namespace {

constexpr int kWarpsPerGroup = 4;
constexpr std::size_t kMostFenced = 16;

struct WgmmaArguments {
  float* d;
  int eights;
  const std::uint32_t* a;
  std::uint64_t descriptor;
  Where where;
};

WgmmaArguments& arguments_of(Warp& warp, int lane) {
  return *static_cast<WgmmaArguments*>(warp.arguments[lane]);
}

std::uint32_t poison(int index) { return kPoisonTag | static_cast<std::uint32_t>(index); }

// Register arrays are read behind the compiler's back, some after their scope has ended.
__attribute__((no_sanitize("address"))) std::uint32_t word_at(const void* registers, int index) {
  return static_cast<const volatile std::uint32_t*>(registers)[index];
}

FencedRegisters* find_fenced(Thread& thread, const void* registers, int count) {
  for (FencedRegisters& known : thread.fenced) {
    if (known.registers == registers && known.content.size() == static_cast<std::size_t>(count)) {
      return &known;
    }
  }
  return nullptr;
}

// The registers must be as the last fence saw them. A first use can only ask for any fence.
void check_fenced(Thread& thread, const void* registers, int count, const char* what, Where where) {
  const FencedRegisters* known = find_fenced(thread, registers, count);
  if (!thread.has_fenced) fail(where, "issues wgmma without a wgmma_fence before");
  if (known == nullptr) {
    if (thread.fenced.size() == kMostFenced) thread.fenced.erase(thread.fenced.begin());
    thread.fenced.push_back({registers, std::vector<std::uint32_t>(count)});
    for (int i = 0; i < count; ++i) thread.fenced.back().content[i] = word_at(registers, i);
    return;
  }
  for (int i = 0; i < count; ++i) {
    if (known->content[i] == word_at(registers, i)) continue;
    fail(where, text("(for lane %d) issues wgmma with %s written since the last wgmma_fence",
                     thread.lane, what));
  }
}

// All four warps of the group issue the same sequence.
void note_step(Warp& warp, Collective kind, std::uint64_t detail, Where where) {
  warp.steps.push_back({kind, place_of(where), detail});
  const std::size_t index = warp.steps.size() - 1;
  const int first = warp.index / kWarpsPerGroup * kWarpsPerGroup;
  for (int i = first; i < first + kWarpsPerGroup; ++i) {
    if (i >= static_cast<int>(warp.block->warps.size())) {
      fail(where, text("is in a warpgroup of fewer than 4 warps at %s", name_of(kind)));
    }
    const Warp& other = *warp.block->warps[i];
    if (other.steps.size() <= index) continue;
    const WgmmaStep &mine = warp.steps[index], &theirs = other.steps[index];
    if (mine.kind == theirs.kind && mine.place == theirs.place && mine.detail == theirs.detail) {
      continue;
    }
    fail(where, text("is at %s (%#llx) where warp %d of its warpgroup was at %s (%#llx, %s): all "
                     "four warps issue the same wgmma",
                     name_of(mine.kind), static_cast<unsigned long long>(mine.detail), i,
                     name_of(theirs.kind), static_cast<unsigned long long>(theirs.detail),
                     place_text(theirs.place).c_str()));
  }
}

// PTX ISA, "Matrix descriptor", for a K-major tile with the 128-byte swizzle.
void decode_descriptor(std::uint64_t descriptor, Wgmma& work, Where where) {
  const auto field = [&](int low, int bits) {
    return static_cast<std::uint32_t>(descriptor >> low & ((1ull << bits) - 1));
  };
  if (field(62, 2) != 1) {
    fail(where, text("passes a descriptor with swizzle %u; the emulator knows 1 (128 bytes)",
                     field(62, 2)));
  }
  if (field(49, 3) != 0) fail(where, "passes a descriptor with a base offset; none is modelled");
  work.tile = field(0, 14) << 4;
  work.row_group_bytes = field(32, 14) << 4;
  if ((work.tile & 0x380) != 0) {
    fail(where, text("passes a descriptor of a tile at shared %#x: with base offset 0 its rows of "
                     "128 bytes have to begin at a multiple of 1024",
                     work.tile));
  }
}

// Where 16-byte half `half` of token `token`'s 16 K lies.
std::uint32_t chunk_address(const Wgmma& work, int token, int half) {
  const std::uint32_t address =
      work.tile + token / 8 * work.row_group_bytes + token % 8 * 128 + half * 16;
  return address ^ (address >> 7 & 7) << 4;
}

void check_tile(Warp& warp, const Wgmma& work, Where where) {
  Block& block = *warp.block;
  const Epoch reader{static_cast<std::uint16_t>(block.slots.wgmma(warp.index)), place_of(where),
                     work.group};
  Epoch checked;
  for (int token = 0; token < 8 * work.eights; ++token) {
    for (int half = 0; half < 2; ++half) {
      const std::uint32_t address = chunk_address(work, token, half);
      std::string why = block.shared.reject(address, 16, 16);
      if (!why.empty()) fail(where, text("(token %d of operand B) reads ", token) + why);
      for (int offset = 0; offset < 16; offset += 4) {
        Granule& granule = block.shared.granule(address + offset);
        const Epoch& write = granule.write;
        if (write.slot != checked.slot || write.clock != checked.clock ||
            write.slot >= kFirstSpecial || granule.adders != 0) {
          for (int lane = 0; lane < 32; ++lane) {
            const Knowledge& known = lane_of(warp, lane).knowledge;
            why = block.shared.reject_read_by_async_proxy(granule, known, block.slots);
            if (!why.empty()) fail(where, text("(token %d of operand B) ", token) + why);
          }
          checked = write;
        }
        block.shared.note_read(granule, reader);
      }
    }
  }
}

// Takes the accumulators away from the thread until their last group has been waited for.
void hold(Thread& thread, float* d, int count, int group, Where where) {
  for (HeldRegisters& held : thread.held) {
    if (held.registers != d) continue;
    for (int i = 0; i < count; ++i) {
      if (word_at(d, i) != poison(i)) {
        fail(where,
             text("(for lane %d) has written an accumulator that wgmma still owns", thread.lane));
      }
    }
    held.last_group = group;
    return;
  }
  thread.held.push_back({d, count, std::vector<float>(d, d + count), group});
  for (int i = 0; i < count; ++i) d[i] = std::bit_cast<float>(poison(i));
}

void issue(Warp& warp) {
  const WgmmaArguments& first = arguments_of(warp, 0);
  const Where where = first.where;
  Wgmma work;
  work.eights = first.eights;
  work.group = warp.open_group;
  decode_descriptor(first.descriptor, work, where);
  note_step(warp, Collective::kWgmma, first.descriptor, where);
  check_tile(warp, work, where);
  const int count = 4 * work.eights;
  for (int lane = 0; lane < 32; ++lane) {
    const WgmmaArguments& mine = arguments_of(warp, lane);
    Thread& thread = lane_of(warp, lane);
    if (mine.descriptor != first.descriptor) {
      fail(where, text("passes descriptors that differ between lanes 0 and %d", lane));
    }
    const bool is_held = std::any_of(thread.held.begin(), thread.held.end(),
                                     [&](const auto& held) { return held.registers == mine.d; });
    check_fenced(thread, mine.a, 4, "operand A", where);
    if (!is_held) check_fenced(thread, mine.d, count, "accumulators", where);
    hold(thread, mine.d, count, work.group, where);
    work.d[lane] = mine.d;
    std::memcpy(work.a[lane], mine.a, sizeof work.a[lane]);
  }
  warp.queue.push_back(work);
  launch->later([&warp] { wgmma_step(warp); });
}

std::vector<float>& values_of(Thread& thread, const float* d) {
  for (HeldRegisters& held : thread.held) {
    if (held.registers == d) return held.values;
  }
  fail(Where::current(), "has lost an accumulator: an error of the emulator itself");
}

void retire(Thread& thread, int group, Where where) {
  const auto is_done = [&](const HeldRegisters& held) { return held.last_group <= group; };
  for (HeldRegisters& held : thread.held) {
    if (!is_done(held)) continue;
    for (int i = 0; i < held.count; ++i) {
      if (word_at(held.registers, i) != poison(i)) {
        fail(where,
             text("(for lane %d) has written an accumulator before wgmma_wait", thread.lane));
      }
      held.registers[i] = held.values[i];
    }
    FencedRegisters* known = find_fenced(thread, held.registers, held.count);
    if (known == nullptr) continue;
    std::memcpy(known->content.data(), held.values.data(), 4 * held.values.size());
  }
  std::erase_if(thread.held, is_done);
  const int slot = thread.block->slots.wgmma(thread.warp->index);
  thread.knowledge.seen[slot] = thread.knowledge.async[slot] = group;
}

struct WaitArguments {
  int pending;
  Where where;
};

void wait(Warp& warp) {
  const auto& [pending, where] = *static_cast<WaitArguments*>(warp.arguments[0]);
  note_step(warp, Collective::kWgmmaWait, pending, where);
  const int group = std::max(warp.retired_group, warp.open_group - 1 - pending);
  while (!warp.queue.empty() && warp.queue.front().group <= group) wgmma_step(warp);
  for (int lane = 0; lane < 32; ++lane) retire(lane_of(warp, lane), group, where);
  warp.retired_group = group;
}

void fence(Warp& warp) {
  note_step(warp, Collective::kWgmmaFence, 0, *static_cast<Where*>(warp.arguments[0]));
  for (int lane = 0; lane < 32; ++lane) {
    Thread& thread = lane_of(warp, lane);
    thread.has_fenced = true;
    for (FencedRegisters& known : thread.fenced) {
      for (std::size_t i = 0; i < known.content.size(); ++i) {
        known.content[i] = word_at(known.registers, static_cast<int>(i));
      }
    }
  }
}

}  // namespace

void wgmma_step(Warp& warp) {
  if (warp.queue.empty()) return;
  const Wgmma& work = warp.queue.front();
  SharedMemory& shared = warp.block->shared;
  for (int token = 0; token < 8 * work.eights; ++token) {
    std::uint16_t chunk[16];
    float b[16];
    for (int half = 0; half < 2; ++half) {
      std::memcpy(chunk + 8 * half, shared.at(chunk_address(work, token, half)), 16);
    }
    for (int k = 0; k < 16; ++k) b[k] = bf16_to_float(chunk[k]);
    for (int g = 0; g < 8; ++g) {
      for (int upper = 0; upper < 2; ++upper) {
        float sum = 0;
        for (int t = 0; t < 4; ++t) {
          for (int half = 0; half < 2; ++half) {
            const std::uint32_t pair = work.a[4 * g + t][upper + 2 * half];
            sum += bf16_to_float(pair & 0xffff) * b[2 * t + 8 * half];
            sum += bf16_to_float(pair >> 16) * b[2 * t + 8 * half + 1];
          }
        }
        const int lane = 4 * g + token % 8 / 2;
        values_of(lane_of(warp, lane), work.d[lane])[token / 8 * 4 + 2 * upper + token % 2] += sum;
      }
    }
  }
  warp.queue.pop_front();
}

void wgmma_fence(Where where) { meet(Collective::kWgmmaFence, where, &where, fence); }

void wgmma_commit(Where where) {
  meet(Collective::kWgmmaCommit, where, &where, [](Warp& warp) {
    note_step(warp, Collective::kWgmmaCommit, 0, *static_cast<Where*>(warp.arguments[0]));
    ++warp.open_group;
  });
}

void wgmma_pin(const float* d, Where where) {
  touch();
  for (const HeldRegisters& held : self->held) {
    if (held.registers == d) fail(where, "uses an accumulator before wgmma_wait");
  }
}

void wgmma_wait(int pending, Where where) {
  WaitArguments mine{pending, where};
  meet(Collective::kWgmmaWait, where, &mine, wait);
}

void wgmma(float* d, int eights, const std::uint32_t* a, std::uint64_t descriptor, Where where) {
  WgmmaArguments mine{d, eights, a, descriptor, where};
  meet(Collective::kWgmma, where, &mine, issue);
}

}  // namespace chord::emulator
