// Switches with the compiler's own setjmp and longjmp, which cost a few ns, make no system call and
// leave the address sanitizer's picture of the stacks alone; ucontext only starts a fiber.
#include "fiber.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <vector>

#ifdef CHORD_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace chord::emulator {

namespace {

constexpr std::size_t kStackBytes = 256 * 1024;

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
