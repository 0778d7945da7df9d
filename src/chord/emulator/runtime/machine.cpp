#include "machine.hpp"

#include <bit>
#include <cstdlib>
#include <utility>

namespace chord::emulator {

Launch* launch = nullptr;
Thread* self = nullptr;

namespace {

constexpr int kNamedBarriers = 16;
constexpr int kRegistersPerBlock = 65536;
constexpr std::int64_t kMostSteps = 4'000'000'000;

void thread_body() {
  fiber_entered();
  launch->arguments.entry(launch->arguments.params);
  Thread& thread = *self;
  if (--thread.block->alive == 0) check_block_end(*thread.block);
  thread.state = State::kDone;
  launch->scheduler.switch_from(thread.fiber);
  std::abort();
}

}  // namespace

std::uint64_t Random::next() {
  state += 0x9e3779b97f4a7c15u;
  std::uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

Launch::Launch(const LaunchArguments& arguments, GlobalMemory* memory)
    : arguments(arguments),
      global(memory),
      random{arguments.seed},
      stacks_(static_cast<std::size_t>(arguments.blocks) * arguments.threads) {
  launch = this;
  event_policy_ = random.below(3);
  for (int i = 0; i < arguments.blocks; ++i) make_block(i);
}

void Launch::make_block(int index) {
  blocks.push_back(std::make_unique<Block>());
  Block& block = *blocks.back();
  const int threads = arguments.threads, warps = threads / 32;
  block.index = index;
  block.slots = {threads, warps};
  block.shared.reset(arguments.smem_bytes);
  block.named.resize(kNamedBarriers);
  block.alive = threads;
  const int registers = kRegistersPerBlock / threads / 8 * 8;
  block.free_registers = 0;  // what rounding down leaves over is not the block's
  const bool slow_block = random.below(4) == 0;
  for (int i = 0; i < warps; ++i) {
    block.warps.push_back(std::make_unique<Warp>());
    Warp& warp = *block.warps.back();
    warp.block = &block;
    warp.index = i;
    warp.slow = slow_block || random.below(4) == 0;
    warp.registers = registers;
  }
  for (int i = 0; i < threads; ++i) {
    block.threads.push_back(std::make_unique<Thread>());
    Thread& thread = *block.threads.back();
    thread.block = &block;
    thread.warp = block.warps[i / 32].get();
    thread.index = i;
    thread.lane = i % 32;
    thread.knowledge = Knowledge(block.slots.count());
    thread.advance();
    const std::size_t stack = static_cast<std::size_t>(index) * threads + i;
    thread.fiber.prepare(stacks_.stack(stack), FiberStacks::stack_bytes(), thread_body);
    wake(thread);
  }
  alive_ += threads;
}

void Launch::wake(Thread& thread) {
  thread.state = State::kReady;
  Warp& warp = *thread.warp;
  warp.ready |= 1u << thread.lane;
  if (warp.queue_position < 0) {
    warp.queue_position = static_cast<int>(runnable_.size());
    runnable_.push_back(&warp);
  }
}

void Launch::suspend(State state, Where where, std::uint32_t what, std::uint32_t value) {
  Thread& thread = *self;
  thread.state = state;
  thread.waits_at = where;
  thread.waits_for = what;
  thread.waits_value = value;
  scheduler.switch_from(thread.fiber);
}

// Stays with a warp for a while, which is kind to the cache; slow warps are passed over.
Warp& Launch::pick_warp() {
  if (current_ != nullptr && current_->ready != 0 && random.below(64) != 0) return *current_;
  const auto any = [&] { return runnable_[random.below(runnable_.size())]; };
  current_ = any();
  if (current_->slow && random.below(16) != 0) current_ = any();
  return *current_;
}

void Launch::run_thread(Warp& warp) {
  const int turn = static_cast<int>(random.below(32));
  const int lane = (std::countr_zero(std::rotr(warp.ready, turn)) + turn) % 32;
  warp.ready &= ~(1u << lane);
  if (warp.ready == 0) {
    runnable_.back()->queue_position = warp.queue_position;
    std::swap(runnable_[warp.queue_position], runnable_.back());
    runnable_.pop_back();
    warp.queue_position = -1;
  }
  Thread& thread = *warp.block->threads[warp.index * 32 + lane];
  self = &thread;
  thread.fiber.switch_from(scheduler);
  self = nullptr;
  if (thread.state != State::kDone) return;
  --alive_;
  const std::size_t stack =
      static_cast<std::size_t>(thread.block->index) * arguments.threads + thread.index;
  if (!stacks_.is_intact(stack)) error = "a thread of the kernel has overrun the emulator's stack";
}

void Launch::run_event() {
  std::swap(events_[random.below(events_.size())], events_.back());
  const std::function<void()> event = std::move(events_.back());
  events_.pop_back();
  event();
}

std::string Launch::run() {
  try {
    for (std::int64_t step = 0; alive_ > 0 && error.empty(); ++step) {
      const bool event_due = event_policy_ == 0 ? random.below(4) == 0 : event_policy_ == 1;
      if (!events_.empty() && (runnable_.empty() || event_due)) {
        run_event();
      } else if (!runnable_.empty()) {
        run_thread(pick_warp());
      } else {
        return "deadlock: no thread can run\n" + waiting_report(*this);
      }
      if (step == kMostSteps) return "no end after 4e9 steps\n" + waiting_report(*this);
    }
    while (!events_.empty() && error.empty()) run_event();
  } catch (const EventFailure& failure) {
    return failure.message;
  }
  return error;
}

void fail(Where where, const std::string& message) {
  if (self == nullptr) throw EventFailure{place_text(where) + ": " + message};
  launch->error =
      text("%s: block %d, thread %d (warp %d, lane %d) %s", place_text(where).c_str(),
           self->block->index, self->index, self->warp->index, self->lane, message.c_str());
  launch->scheduler.switch_from(self->fiber);
  std::abort();
}

void meet(Collective kind, Where where, void* arguments, void (*execute)(Warp& warp)) {
  touch();
  Warp& warp = *self->warp;
  if (warp.arrived == 0) {
    warp.meeting = kind;
    warp.meeting_at = where;
  } else if (warp.meeting != kind || place_of(where) != place_of(warp.meeting_at)) {
    fail(where, text("is at %s while lanes %#x of its warp are at %s (%s): all 32 lanes have to "
                     "take part in the same instruction",
                     name_of(kind), warp.arrived, name_of(warp.meeting),
                     place_text(warp.meeting_at).c_str()));
  }
  warp.arguments[self->lane] = arguments;
  warp.arrived |= 1u << self->lane;
  if (warp.arrived != 0xffffffffu) {
    launch->suspend(State::kWarp, where, static_cast<std::uint32_t>(kind));
    return;
  }
  execute(warp);
  warp.arrived = 0;
  warp.meeting = Collective::kNone;
  for (int lane = 0; lane < 32; ++lane) {
    if (lane != self->lane) launch->wake(*warp.block->threads[warp.index * 32 + lane]);
  }
}

}  // namespace chord::emulator
