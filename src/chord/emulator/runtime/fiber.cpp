// Switches with the compiler's own setjmp and longjmp, which cost a few ns, make no system call and
// leave the address sanitizer's picture of the stacks alone; ucontext only starts a fiber.
#include "fiber.hpp"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#ifdef CHORD_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace chord::emulator {

namespace {

constexpr std::size_t kStackBytes = 256 * 1024;
constexpr std::uint64_t kCanary = 0x6b636174735f6f66u;

Fiber* leaving = nullptr;

}  // namespace

void Fiber::prepare(char* stack, std::size_t stack_bytes, void (*body)()) {
  started_ = false;
  stack_ = stack;
  stack_bytes_ = stack_bytes;
#ifdef CHORD_ADDRESS_SANITIZER
  __asan_unpoison_memory_region(stack, stack_bytes);
#endif
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack;
  context_.uc_stack.ss_size = stack_bytes;
  context_.uc_link = nullptr;
  makecontext(&context_, body, 0);
}

#ifdef CHORD_ADDRESS_SANITIZER

void fiber_entered() {
  const void* bottom;
  std::size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (leaving->stack_ == nullptr) {
    leaving->stack_ = bottom;
    leaving->stack_bytes_ = bytes;
  }
}

#else

void fiber_entered() {}

#endif

__attribute__((noinline)) void Fiber::switch_from(Fiber& running) {
  leaving = &running;
#ifdef CHORD_ADDRESS_SANITIZER
  __sanitizer_start_switch_fiber(&running.fake_stack_, stack_, stack_bytes_);
#endif
  if (__builtin_setjmp(running.registers_) == 0) {
    if (started_) __builtin_longjmp(registers_, 1);
    started_ = true;
    setcontext(&context_);
  }
#ifdef CHORD_ADDRESS_SANITIZER
  __sanitizer_finish_switch_fiber(running.fake_stack_, nullptr, nullptr);
#endif
}

FiberStacks::FiberStacks(std::size_t count) : count_(count) {
  void* memory = mmap(nullptr, count * kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  memory_ = static_cast<char*>(memory);
  for (std::size_t i = 0; i < count; ++i) std::memcpy(stack(i), &kCanary, sizeof kCanary);
}

FiberStacks::~FiberStacks() { munmap(memory_, count_ * kStackBytes); }

char* FiberStacks::stack(std::size_t index) const { return memory_ + index * kStackBytes; }

std::size_t FiberStacks::stack_bytes() { return kStackBytes; }

bool FiberStacks::is_intact(std::size_t index) const {
  return std::memcmp(stack(index), &kCanary, sizeof kCanary) == 0;
}

}  // namespace chord::emulator
