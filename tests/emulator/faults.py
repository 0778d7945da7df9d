"""Faults to plant in the kernel sources: what changes, and what the emulator must say of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from chord import errors

SOURCES = Path(errors.__file__).parent.parent
RESULT = "routed rows differ"  # what launches.check says


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes:
        name: What is wrong.
        header: Where, below src/.
        old: Text that stands there, once.
        new: What takes its place.
        message: Regular expression of the report.
        flavour: How the unit is compiled, see chord.emulator.build.
    """

    name: str
    header: str
    old: str
    new: str
    message: str
    flavour: str = "fast"

    def replaced(self) -> dict[str, str]:
        """Return the header with the fault in it, as build.build takes it."""
        path = SOURCES / self.header
        text = path.read_text()
        # However the source is wrapped and indented.
        pattern = r"\s+".join(re.escape(word) for word in self.old.split())
        text, count = re.subn(pattern, lambda _: self.new, text)
        assert count == 1, f"{self.header} holds the text of {self.name!r} {count} times, not once"
        return {self.header: text}


_DECODE = "chord/kernels/decode.cuh"
_PREFILL = "chord/kernels/prefill.cuh"
_PIPELINE = "chord/kernels/pipeline.cuh"
_SCHEDULE = "chord/kernels/schedule.cuh"
_EPILOGUE = "chord/kernels/epilogue.cuh"
_INDEXED = "chord/kernels/addressing/indexed.cuh"
_DESCRIPTOR = "chord/kernels/smem_descriptor.cuh"
_CONFIG = "chord/kernels/config.cuh"

_WAIT_FULL = "{ ptx::mbarrier_wait(full(at.stage), at.phase); }"
_WAIT_EMPTY = "ptx::mbarrier_wait(empty(at.stage), at.phase ^ 1);"

DECODE = (
    Fault(
        "full is not waited for",
        _PIPELINE,
        _WAIT_FULL,
        "{ (void)at; }",
        "still in flight|nobody has written|without having waited",
    ),
    Fault(
        "full is waited for with the wrong parity",
        _PIPELINE,
        _WAIT_FULL,
        "{ ptx::mbarrier_wait(full(at.stage), at.phase ^ 1); }",
        "still in flight|nobody has written|without having waited",
    ),
    Fault(
        "empty is not waited for",
        _PIPELINE,
        _WAIT_EMPTY,
        "(void)at;",
        "has not released|still in flight|once more than|without having waited",
    ),
    Fault(
        "a stage is not released",
        _DECODE,
        "if (lane == 0) ptx::mbarrier_arrive(ring.empty(at.stage));",
        "",
        r"deadlock.*\n(.*\n)*.*phase of parity \d; it is in phase \d and lacks \d+ of \d+ arrivals",
    ),
    Fault(
        "one lane releases for a warp that still reads",
        _DECODE,
        "ptx::sync_warp();\n      if (lane == 0) ptx::mbarrier_arrive(ring.empty(at.stage));",
        "if (lane == 0) ptx::mbarrier_arrive(ring.empty(at.stage));",
        "overwrites bytes that thread .* reads .* has not released",
    ),
    Fault(
        "too many arrivals",
        _DECODE,
        "ring.init(1, kConfig.warps)",
        "ring.init(1, kConfig.warps - 1)",
        "once more than the 7 arrivals|has not released",
    ),
    Fault(
        "too few bytes announced",
        _DECODE,
        "+ num_rows * x_bytes",
        "",
        "bytes more than were announced",
    ),
    Fault(
        "too many bytes announced",
        _DECODE,
        "+ num_rows * x_bytes",
        "+ num_rows * x_bytes + 16",
        r"deadlock(.*\n)*.*lacks 0 of 1 arrivals and 16 bytes|lacks 1 of 1 arrivals and 16 bytes",
    ),
    Fault(
        "barriers are not fenced",
        _PIPELINE,
        "ptx::fence_mbarrier_init();",
        "",
        "without fence_mbarrier_init",
    ),
    Fault(
        "a barrier is set up twice as far",
        _PIPELINE,
        "return base + 16 * stage + 8;",
        "return base + 16 * stage + 12;",
        "not a multiple of 8",
    ),
    Fault(
        "zeros are not fenced from bulk copies",
        _DECODE,
        "ptx::fence_proxy_async();",
        "",
        "without fence_proxy_async",
    ),
    Fault(
        "misaligned bulk copy",
        _DECODE,
        "ptx::bulk_load_stream(weight_stage(at.stage) +",
        "ptx::bulk_load_stream(8 + weight_stage(at.stage) +",
        "not a multiple of 16",
    ),
    Fault(
        "rows are read beyond x",
        _INDEXED,
        "return output_row / p.top_k;",
        "return output_row;",
        r"x \(\d+ bytes\) at byte \d+, which is outside every tensor|routed rows differ",
    ),
    Fault(
        "misaligned ldmatrix",
        _DECODE,
        "(lane / 8) * 16;",
        "(lane / 8) * 8;",
        "row address of lane .* not a multiple of 16",
    ),
    Fault(
        "part of a warp votes",
        _DECODE,
        "const u32 valid = ptx::ballot(rows.output_row[i] >= 0);",
        "const u32 valid = lane == 3 ? 0 : ptx::ballot(rows.output_row[i] >= 0);",
        "all 32 lanes have to take part|deadlock",
    ),
    Fault(
        "transposed rows are read too early",
        _EPILOGUE,
        "ptx::sync_warp();",
        "",
        "reads what a matrix store of warp",
    ),
    Fault(
        "a store buffer is used again too early",
        _DECODE,
        "buffer ^= 1;",
        "",
        "overwrites (what|bytes that) .* has not released",
    ),
    Fault(
        "shared memory is used beyond the block's",
        _DECODE,
        "+ warp * kStoreBytesPerWarp;",
        "+ (warp + 40) * kStoreBytesPerWarp;",
        "outside the block's|overwrites",
    ),
    Fault(
        "a copy is started that nobody waits for",
        _DECODE,
        "chunk < end; ++chunk) {\n      load_stage",
        "chunk <= end; ++chunk) {\n      load_stage",
        "nobody has waited for the copies|outside every tensor",
    ),
    Fault(
        "partial sums are released before they are written",
        _DECODE,
        "ptx::sync_warp();\n    if (lane == 0) ptx::store_release(flag_at(ptx::block_idx()), 1);",
        "if (lane == 0) ptx::store_release(flag_at(ptx::block_idx()), 1);",
        "without having acquired them|nobody has written in this launch",
    ),
    Fault(
        "partial sums are not waited for",
        _DECODE,
        "while (ptx::load_acquire(flag_at(block)) == 0) {\n        }",
        "",
        "without having acquired them|nobody has written in this launch|flags have to be zero",
    ),
    Fault(
        "a flag is not reset",
        _DECODE,
        "ptx::store_release(flag_at(block), 0);",
        "",
        "flags have to be zero",
    ),
    Fault(
        "a flag is never set",
        _DECODE,
        "if (lane == 0) ptx::store_release(flag_at(ptx::block_idx()), 1);",
        "",
        r"deadlock(.*\n)*.*flags \(\d+ bytes\) at byte \d+ to change from 0",
    ),
    Fault(
        "out is written beyond n",
        _EPILOGUE,
        "output_row >= 0 && feature < n",
        "output_row >= 0",
        "has stored before|outside every tensor",
    ),
    Fault(
        "the schedule is read before it is written",
        _SCHEDULE,
        "ptx::sync_block();\n\n  // Number the tiles.",
        "\n\n  // Number the tiles.",
        "nobody has written|without having waited",
    ),
    Fault(
        "an array is read past its end",
        _DECODE,
        "codes[i][2 * group + step]",
        "codes[i][2 * group + step + p.reserved + 1]",
        "AddressSanitizer|runtime error",
        flavour="sanitize",
    ),
)

PREFILL = (
    Fault(
        "cp.async is not fenced from wgmma",
        _PREFILL,
        "ptx::fence_proxy_async();",
        "",
        "without fence_proxy_async",
    ),
    Fault(
        "cp.async is not waited for",
        _PREFILL,
        "ptx::mbarrier_arrive_after_cp_async(ring.full(at.stage));",
        "ptx::mbarrier_arrive(ring.full(at.stage));",
        "still in flight|without having waited",
    ),
    Fault(
        "wgmma is not waited for",
        _PREFILL,
        "ptx::wgmma_wait<0>();",
        "",
        "before wgmma_wait|that wgmma of warp .* reads .* has not released",
    ),
    Fault(
        "wgmma is not committed",
        _PREFILL,
        "ptx::wgmma_commit();",
        "",
        "before wgmma_wait|that wgmma of warp .* reads .* has not released",
    ),
    Fault(
        "wgmma is not fenced",
        _PREFILL,
        "ptx::wgmma_fence();",
        "",
        "without a wgmma_fence before",
    ),
    Fault(
        "wgmma is fenced before its operands are made",
        _PREFILL,
        "for (int i = 0; i < 2; ++i) dequantize(a[i], codes[i][step], scales[i][step / 2]);\n"
        "      ptx::wgmma_fence();",
        "for (int i = 0; i < 2; ++i) if (i == 0) ptx::wgmma_fence();\n"
        "      for (int i = 0; i < 2; ++i) dequantize(a[i], codes[i][step], scales[i][step / 2]);",
        "operand A written since the last wgmma_fence",
    ),
    Fault(
        "a descriptor is shifted by 16 bytes",
        _DESCRIPTOR,
        "return descriptor + 2 * k16_steps;",
        "return descriptor + 2 * k16_steps + 1;",
        "routed rows differ|nobody has written|without having waited",
    ),
    Fault(
        "a descriptor is shifted by a row",
        _DESCRIPTOR,
        "return descriptor + 2 * k16_steps;",
        "return descriptor + 2 * k16_steps + 8;",
        "begin at a multiple of 1024",
    ),
    Fault(
        "a descriptor names no swizzle",
        _DESCRIPTOR,
        "1ull << 62",
        "0ull << 62",
        "swizzle 0",
    ),
    Fault(
        "rows are written without the swizzle",
        _DESCRIPTOR,
        "((chunk ^ (row & 7)) << 4)",
        "(chunk << 4)",
        "routed rows differ",
    ),
    Fault(
        "a descriptor names another stage's rows",
        _PREFILL,
        "x_tile_descriptor(x_stage(stage) +",
        "x_tile_descriptor(x_stage(stage ^ 1) +",
        "nobody has written|in flight|without having waited|routed rows differ",
    ),
    Fault(
        "one warp of a group issues more",
        _PREFILL,
        "ptx::wgmma_commit();",
        "ptx::wgmma_commit();\n      if (warp() == 1) ptx::wgmma_commit();",
        "all four warps issue the same",
    ),
    Fault(
        "a table is read before it is written",
        _PREFILL,
        "ptx::sync_named(kLoaderBarrier, kLoaders);\n#pragma",
        "#pragma",
        "nobody has written|without having waited",
    ),
    Fault(
        "a table is written before it is read",
        _PREFILL,
        "ptx::sync_named(kLoaderBarrier, kLoaders);  // the last tile's rows have been read",
        "",
        "overwrites bytes that thread|overwrites what thread",
    ),
    Fault(
        "a named barrier counts one warp too many",
        _PREFILL,
        "ptx::sync_named(kLoaderBarrier, kLoaders);  // the last",
        "ptx::sync_named(kLoaderBarrier, kLoaders + 32);  // the last",
        "deadlock(.*\\n)*.*named barrier 1, which 128 of 160 threads have reached",
    ),
    Fault(
        "two blocks store one tile",
        _PREFILL,
        "index += ptx::grid_dim()",
        "index += 1",
        "has stored before",
    ),
    Fault(
        "more registers than the block has",
        _PREFILL,
        "ptx::lower_registers<kLoaderRegisters>();",
        "",
        r"deadlock(.*\n)*.*registers a thread",
    ),
    Fault(
        "accumulators are read too early",
        _PREFILL,
        "ptx::wgmma_wait<0>();",
        "if (ptx::pack_bf16x2(sums[0][0][0], 0) == 1) return;\n    ptx::wgmma_wait<0>();",
        "wgmma still owns",
    ),
    Fault(
        "accumulators are written too early",
        _PREFILL,
        "ptx::wgmma_wait<0>();",
        "sums[0][0][0] = 0;\n    ptx::wgmma_wait<0>();",
        "has written an accumulator",
    ),
)
