// A GEMM as one stage of the whole layer (ops/fused_moe.py): what its addressing type says beyond
// the places of rows.
//
// A stage is launched as dependent: its blocks may begin while the kernel before it on the stream
// still runs, as soon as all blocks of that one have called `let_next_begin` or ended. So it waits
// before it touches what that kernel writes. `Addressing::kAwaits` names the first such thing; a
// type without it belongs to kernels that are launched alone, and nothing here does anything.
// Every block waits at some time: only so has all earlier work ended when a stage has.
#pragma once

#include <chord/kernels/ptx/sync.cuh>

namespace chord {

enum class Awaits {
  kRouting,  // offsets and routes, so everything
  kRows,     // rows of x; routing and weights are there when the first block begins
};

template <class Addressing>
inline constexpr bool kIsStage = requires { Addressing::kAwaits; };

template <class Addressing>
inline constexpr bool kHasSwiglu = requires { Addressing::kSwiglu; };

// Whether it is `kWhat` that a stage waits for.
template <class Addressing, Awaits kWhat>
constexpr bool awaits() {
  if constexpr (kIsStage<Addressing>) return Addressing::kAwaits == kWhat;
  return false;
}

template <class Addressing, Awaits kWhat>
__forceinline__ void await() {
  if constexpr (awaits<Addressing, kWhat>()) ptx::wait_for_kernel_before();
}

// Behind the wait for the routing, if there is one: a kernel that begins earlier could not tell
// whether the kernel before the last has ended.
template <class Addressing>
__forceinline__ void let_next_begin() {
  if constexpr (kIsStage<Addressing>) ptx::let_kernel_after_begin();
}

}  // namespace chord
