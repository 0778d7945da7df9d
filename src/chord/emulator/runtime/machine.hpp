// The machine that a launch runs on: blocks, warps and threads, one of which runs at a time.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <source_location>
#include <string>
#include <vector>

#include "fiber.hpp"
#include "global_memory.hpp"
#include "knowledge.hpp"
#include "shared_memory.hpp"

namespace chord::emulator {

using Where = std::source_location;

struct Block;
struct Warp;

// What a thread waits for; `text` is written only for a report.
enum class State : std::uint8_t { kReady, kWarp, kNamed, kMbarrier, kPartial, kRegisters, kDone };

struct CpAsync {
  std::uint32_t target;
  const void* source;  // null: zero fill
  std::uint16_t place;
  bool landed = false;
};

// The accumulators of one thread while wgmma own them: the true values; memory holds poison.
struct HeldRegisters {
  float* registers;
  int count;
  std::vector<float> values;
  int last_group;
};

// The last content of a register array that wgmma has used, as the last fence saw it.
struct FencedRegisters {
  const void* registers;
  std::vector<std::uint32_t> content;
};

struct Thread {
  Block* block = nullptr;
  Warp* warp = nullptr;
  int index = 0;
  int lane = 0;
  State state = State::kReady;
  Where waits_at;
  std::uint32_t waits_for = 0;  // barrier address, named barrier, lanes, registers
  std::uint32_t waits_value = 0;
  const void* polled = nullptr;  // partial sums that the thread sleeps for
  int empty_reads = 0;           // of partial sums, one after another
  Knowledge knowledge;
  std::vector<std::shared_ptr<CpAsync>> copies;  // not yet followed by an arrival
  std::vector<HeldRegisters> held;
  std::vector<FencedRegisters> fenced;
  bool has_fenced = false;
  bool agreed = false;       // what the last barrier with a vote said
  bool has_awaited = false;  // the kernel before this one
  Fiber fiber;

  Clock clock() const { return knowledge.seen[index]; }
  // Starts a new epoch: what follows is not covered by what was released.
  void advance() { ++knowledge.seen[index]; }
};

// Which instruction the lanes of a warp meet at.
enum class Collective : std::uint8_t {
  kNone,
  kSyncWarp,
  kBallot,
  kShuffle,
  kShuffleUp,
  kSumLanes,
  kMatch,
  kMma,
  kLoadMatrix,
  kStoreMatrix,
  kWgmmaFence,
  kWgmma,
  kWgmmaCommit,
  kWgmmaWait,
  kSetRegisters,
};
const char* name_of(Collective kind);

struct Wgmma {
  int eights;  // tokens / 8
  int group;
  std::uint32_t tile;  // address of the first row's first 16 bytes, before the swizzle
  std::uint32_t row_group_bytes;
  float* d[32];
  std::uint32_t a[32][4];
};

// One wgmma instruction as all four warps of a warpgroup have to issue it.
struct WgmmaStep {
  Collective kind;
  std::uint16_t place;
  std::uint64_t detail;  // descriptor, or groups to leave unfinished
};

struct Warp {
  Block* block = nullptr;
  int index = 0;
  std::uint32_t ready = 0;  // lanes that can run
  int queue_position = -1;  // in Launch::runnable
  bool slow = false;
  // The instruction where lanes meet.
  Collective meeting = Collective::kNone;
  Where meeting_at;
  std::uint32_t arrived = 0;
  void* arguments[32] = {};
  // Collective stores of the warp so far.
  Clock stores = 0;
  // wgmma: executed in order, some time between issue and wait.
  std::deque<Wgmma> queue;
  int open_group = 1;
  int retired_group = 0;
  std::vector<WgmmaStep> steps;  // what the warp has asked of wgmma, to compare in the group
  int registers = 0;
  int wanted_registers = 0;
};

struct NamedBarrier {
  int expected = 0;
  Where first;
  std::vector<Thread*> arrived;
  bool votes = false;  // whether they pass something
  bool all = true;     // of them have passed true
};

struct Mbarrier {
  std::uint32_t address = 0;
  int slot = 0;
  int count = 0;
  int pending = 0;
  std::int64_t bytes = 0;  // announced and not yet arrived
  Clock phases = 0;        // completed so far
  Epoch initialised;
  Thread* initialiser = nullptr;
  bool fenced = false;
  Knowledge arrivals;     // of all phases up to the open one
  Knowledge released;     // of all completed phases
  Clock bytes_phase = 0;  // last phase that copies were counted in, and the last one waited for
  Clock observed_phase = 0;
  std::uint16_t bytes_place = 0;
  std::vector<Thread*> waiters;
};

struct Block {
  int index = 0;
  Slots slots;
  SharedMemory shared;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<NamedBarrier> named;
  std::deque<Mbarrier> mbarriers;
  int copies_in_flight = 0;
  int alive = 0;
  int free_registers = 0;
  bool has_awaited = false;
};

inline Thread& lane_of(Warp& warp, int lane) {
  return *warp.block->threads[warp.index * 32 + lane];
}

struct Random {
  std::uint64_t state;
  std::uint64_t next();
  std::uint32_t below(std::uint32_t bound) {
    return static_cast<std::uint32_t>(((next() >> 32) * bound) >> 32);
  }
};

struct LaunchArguments {
  void (*entry)(const void*);
  const void* params;
  int threads;
  int smem_bytes;
  int blocks;
  std::uint64_t seed;
};

class Launch {
 public:
  Launch(const LaunchArguments& arguments, GlobalMemory* memory);
  // Runs everything; returns the first error or an empty string.
  std::string run();

  // Suspends the thread that runs until `wake`.
  void suspend(State state, Where where, std::uint32_t what, std::uint32_t value = 0);
  void wake(Thread& thread);
  // Lets something happen at a random time, in the scheduler's context.
  void later(std::function<void()> event) { events_.push_back(std::move(event)); }

  LaunchArguments arguments;
  GlobalMemory* global;
  Random random;
  std::vector<std::unique_ptr<Block>> blocks;
  std::string error;
  Fiber scheduler;
  std::vector<Thread*> partial_waiters;

 private:
  void make_block(int index);
  void run_thread(Warp& warp);
  Warp& pick_warp();
  void run_event();

  FiberStacks stacks_;
  std::vector<Warp*> runnable_;
  std::vector<std::function<void()>> events_;
  Warp* current_ = nullptr;
  int event_policy_ = 0;
  int alive_ = 0;
};

extern Launch* launch;
extern Thread* self;  // null in the scheduler's context

// Ends the launch with an error at `where`.
[[noreturn]] void fail(Where where, const std::string& message);
// The same where no thread runs: in an event.
struct EventFailure {
  std::string message;
};

// Who waits for what, for all threads that have not ended.
std::string waiting_report(const Launch& launch);
std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Places in kernel sources as small numbers.
std::uint16_t place_of(Where where);
std::string place_text(std::uint16_t place);
std::string place_text(Where where);

// Notes that the running thread does something other than waiting for partial sums.
inline void touch() { self->empty_reads = 0; }

// Brings the 32 lanes together: the last one to arrive runs `execute`, then all go on.
void meet(Collective kind, Where where, void* arguments, void (*execute)(Warp& warp));

Mbarrier& find_barrier(Block& block, std::uint32_t address, const char* action, Where where);
// Fails if more bytes have arrived than the arrivals, now complete, announced.
void check_announced(const Block& block, const Mbarrier& barrier, Where where);
// Completes the open phase if nothing is missing.
void try_complete(Mbarrier& barrier);

void arrive(Block& block, Mbarrier& barrier, const char* action, Where where);

// Executes the oldest wgmma in the queue, if any.
void wgmma_step(Warp& warp);
// Checks that a block leaves nothing in flight.
void check_block_end(Block& block);

}  // namespace chord::emulator
