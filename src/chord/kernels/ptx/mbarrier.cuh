// Barriers in shared memory that count arrivals and the bytes of asynchronous copies.
#pragma once

#include <chord/kernels/common/types.cuh>

namespace chord::ptx {

// Sets up the barrier for `arrivals` arrivals a phase. One thread calls it, once.
__forceinline__ void mbarrier_init(SmemAddress barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the async proxy; the initialising thread calls it before
// the block synchronises.
__forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival; releases this thread's earlier accesses.
__forceinline__ void mbarrier_arrive(SmemAddress barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival that also announces `bytes` of bulk copies; the phase ends when both are in.
__forceinline__ void mbarrier_arrive_expect_bytes(SmemAddress barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// One arrival as soon as all earlier `cp_async` of this thread have landed. The arrival is one of
// those that mbarrier_init counted.
__forceinline__ void mbarrier_arrive_after_cp_async(SmemAddress barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits until the phase with this parity has ended (parity 0 = first phase); acquires what the
// arrivals released and the bytes that the copies wrote.
__forceinline__ void mbarrier_wait(SmemAddress barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace chord::ptx
