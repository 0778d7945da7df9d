// Switches with setjmp and longjmp, which cost some 10 ns and make no system call; ucontext only
// starts a fiber. Under the address sanitizer ucontext does both, because its checks know it.
#undef _FORTIFY_SOURCE

#include "fiber.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace chord::emulator {

namespace {

#ifdef __SANITIZE_ADDRESS__
constexpr std::size_t kStackBytes = 512 * 1024;
#else
constexpr std::size_t kStackBytes = 128 * 1024;
#endif

Fiber* leaving = nullptr;

}  // namespace

void Fiber::prepare(char* stack, std::size_t stack_bytes, void (*body)()) {
  started_ = false;
  stack_ = stack;
  stack_bytes_ = stack_bytes;
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(stack, stack_bytes);
#endif
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack;
  context_.uc_stack.ss_size = stack_bytes;
  context_.uc_link = nullptr;
  makecontext(&context_, body, 0);
}

#ifdef __SANITIZE_ADDRESS__

void fiber_entered() {
  const void* bottom;
  std::size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (leaving != nullptr && leaving->stack_ == nullptr) {
    leaving->stack_ = bottom;
    leaving->stack_bytes_ = bytes;
  }
}

__attribute__((noinline)) void Fiber::switch_from(Fiber& running) {
  leaving = &running;
  started_ = true;
  __sanitizer_start_switch_fiber(&running.fake_stack_, stack_, stack_bytes_);
  swapcontext(&running.context_, &context_);
  __sanitizer_finish_switch_fiber(running.fake_stack_, nullptr, nullptr);
}

#else

void fiber_entered() {}

__attribute__((noinline)) void Fiber::switch_from(Fiber& running) {
  leaving = &running;
  if (_setjmp(running.registers_) == 0) {
    if (started_) _longjmp(registers_, 1);
    started_ = true;
    setcontext(&context_);
  }
}

#endif

std::size_t fiber_stack_bytes() { return kStackBytes; }

char* fiber_stack(std::size_t index) {
  static std::vector<char*> stacks;
  const std::size_t guard = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  while (stacks.size() <= index) {
    void* memory = mmap(nullptr, guard + kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    mprotect(memory, guard, PROT_NONE);
    stacks.push_back(static_cast<char*>(memory) + guard);
  }
  return stacks[index];
}

}  // namespace chord::emulator
