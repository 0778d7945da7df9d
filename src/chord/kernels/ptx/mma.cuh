// The warp's matrix multiply: 16 features x 8 tokens x 16 K, BF16 in, FP32 out.
#pragma once

#include <chord/kernels/common/types.cuh>

namespace chord::ptx {

// d += a b. Lane = 4 g + t holds of a (16 x 16): rows g and g + 8, columns 2t, 2t+1, 2t+8, 2t+9; of
// b (16 x 8): rows 2t, 2t+1 (b0) and 2t+8, 2t+9 (b1), column g; of d (16 x 8): rows g (d[0], d[1])
// and g + 8 (d[2], d[3]), columns 2t, 2t+1. Not volatile: the study lost 12 % to a fixed order.
__forceinline__ void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace chord::ptx
