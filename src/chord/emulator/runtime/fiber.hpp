// Cooperative threads on their own stacks: what a CUDA thread becomes on the host.
#pragma once

#include <ucontext.h>

#include <cstddef>

namespace chord::emulator {

// A point of execution. `switch_from` leaves the one that runs and continues here; it returns when
// somebody switches back.
class Fiber {
 public:
  // Makes the fiber start `body(argument)` on `stack` at its first switch. `body` must not return.
  void prepare(char* stack, std::size_t stack_bytes, void (*body)());
  void switch_from(Fiber& running);

 private:
  bool started_ = true;  // the fiber of the scheduler runs already
  const void* stack_ = nullptr;
  std::size_t stack_bytes_ = 0;
  void* fake_stack_ = nullptr;
  void* registers_[5];  // what __builtin_setjmp keeps
  ucontext_t context_;

  friend void fiber_entered();
};

// To be called first on a fresh fiber; tells the address sanitizer which stack is in use.
void fiber_entered();

// The stacks of a launch, in one piece, so that many launches leave nothing behind.
class FiberStacks {
 public:
  explicit FiberStacks(std::size_t count);
  ~FiberStacks();
  FiberStacks(const FiberStacks&) = delete;
  FiberStacks& operator=(const FiberStacks&) = delete;

  char* stack(std::size_t index) const;
  static std::size_t stack_bytes();
  // False if the fiber has used more than its stack.
  bool is_intact(std::size_t index) const;

 private:
  char* memory_;
  std::size_t count_;
};

}  // namespace chord::emulator
