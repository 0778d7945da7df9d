"""Writes wgmma.cuh: one overload of ``wgmma_m64k16`` a token width.

The operand list of the instruction has one entry an accumulator register and cannot be written
with a loop. Run ``python generate_wgmma.py > wgmma.cuh`` after a change; a test compares the two.
"""

WIDTHS = range(8, 193, 8)
_REGISTERS_A_LINE = 12

HEAD = """\
// The warpgroup's matrix multiply: 64 features x `width` tokens x 16 K, BF16 in, FP32 out.
// Written by generate_wgmma.py beside this file; change that one.
#pragma once

#include <chord/kernels/common/types.cuh>

namespace chord::ptx {

// Orders register accesses before the next wgmma of this warpgroup.
__forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes a group of wgmma.
__forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `kPending` groups are unfinished; the registers of the others are free.
template <int kPending>
__forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Orders every other use of an accumulator before (after) the wgmma that follow (precede): the
// compiler must not move a clear into them or a read above their wait.
template <int kEights>
__forceinline__ void wgmma_pin(float (&d)[kEights][4]) {
#pragma unroll
  for (int j = 0; j < kEights; ++j) {
    asm volatile("" : "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])::"memory");
  }
}

// d += a b, asynchronous. Warp w of the group holds rows 16 w to 16 w + 15 of a (registers as in
// mma_m16n8k16) and of d: d[j] are the four sums of mma_m16n8k16 for tokens 8 j to 8 j + 7.
// `b_descriptor` names the tokens x K tile in shared memory (smem_descriptor.cuh).
"""

FOOT = "}  // namespace chord::ptx\n"


def _wrapped(items: list[str], indent: str, width: int = 100) -> str:
    lines, line = [], indent
    for position, item in enumerate(items):
        piece = item + ("," if position + 1 < len(items) else "")
        separator = "" if line == indent else " "
        if len(line) + len(separator) + len(piece) > width:
            lines.append(line)
            line, separator = indent, ""
        line += separator + piece
    return "\n".join([*lines, line])


def overload(width: int) -> str:
    """Return the C++ function that multiplies `width` tokens."""
    count = width // 2
    a, descriptor = count, count + 4
    registers = [f"%{i}" for i in range(count)]
    strings = []
    for start in range(0, count, _REGISTERS_A_LINE):
        last = start + _REGISTERS_A_LINE >= count
        text = ", ".join(registers[start : start + _REGISTERS_A_LINE]) + ("}, " if last else ", ")
        strings.append(f'      "{"{" if start == 0 else ""}{text}"')
    outputs = _wrapped([f'"+f"(d[{i // 4}][{i % 4}])' for i in range(count)], "        ").strip()
    return (
        f"__forceinline__ void wgmma_m64k16(float (&d)[{width // 8}][4], const u32 (&a)[4],\n"
        f"                                  u64 b_descriptor) {{\n"
        f"  asm volatile(\n"
        f'      "wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16 "\n'
        + "\n".join(strings)
        + "\n"
        f'      "{{%{a}, %{a + 1}, %{a + 2}, %{a + 3}}}, %{descriptor}, 1, 1, 1, 0;"\n'
        f"      : {outputs}\n"
        f'      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_descriptor));\n'
        f"}}\n\n"
    )


if __name__ == "__main__":
    print(HEAD + "".join(overload(width) for width in WIDTHS) + FOOT, end="")
