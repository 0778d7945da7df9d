"""Faults to plant: what changes in a header, and what the emulator must say of it.

Most of them change what one instruction does, in the host's copy of kernels/ptx, so that they stay
as the kernels are rewritten: an instruction that does nothing is the same fault as a kernel that
forgets it. The others change the small headers that the kernels share.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from chord import errors

PACKAGE = Path(errors.__file__).parent
HOST = PACKAGE / "emulator" / "include"
WRONG_RESULT = "routed rows differ"  # what launches.check says


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes:
        name: What is wrong.
        header: Below chord/kernels; of ptx/ the host's implementation.
        old: Text that stands there once, however it is wrapped and indented.
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
        name = f"chord/kernels/{self.header}"
        root = HOST if self.header.startswith("ptx/") else PACKAGE.parent
        pattern = r"\s+".join(re.escape(word) for word in self.old.split())
        text, count = re.subn(pattern, lambda _: self.new, (root / name).read_text())
        assert count == 1, f"{name} holds the text of {self.name!r} {count} times, not once"
        return {name: text}


_UNSEEN = "without having waited for it"
_EARLY = f"still in flight|nobody has written|{_UNSEEN}"
_UNRELEASED = "has not released"
_REGISTERS = "wgmma still owns|before wgmma_wait|that wgmma of warp .* reads .* has not released"

BOTH = (
    # --- mbarriers
    Fault(
        "no barrier is waited for",
        "ptx/mbarrier.cuh",
        "emulator::mbarrier_wait(barrier, parity, where);",
        "(void)barrier, (void)parity, (void)where;",
        f"{_EARLY}|{_UNRELEASED}",
    ),
    Fault(
        "full is not waited for",
        "pipeline.cuh",
        "{ ptx::mbarrier_wait(full(at.stage), at.phase); }",
        "{ (void)at; }",
        _EARLY,
    ),
    Fault(
        "full is waited for with the wrong parity",
        "pipeline.cuh",
        "{ ptx::mbarrier_wait(full(at.stage), at.phase); }",
        "{ ptx::mbarrier_wait(full(at.stage), at.phase ^ 1); }",
        _EARLY,
    ),
    Fault(
        "empty is not waited for",
        "pipeline.cuh",
        "ptx::mbarrier_wait(empty(at.stage), at.phase ^ 1);",
        "(void)at;",
        f"{_UNRELEASED}|{_EARLY}|once more than",
    ),
    Fault(
        "empty is waited for with the wrong parity",
        "pipeline.cuh",
        "ptx::mbarrier_wait(empty(at.stage), at.phase ^ 1);",
        "ptx::mbarrier_wait(empty(at.stage), at.phase);",
        r"deadlock(.*\n)*.*phase of parity 0; it is in phase 0 and lacks (8 of 8|256 of 256) arr",
    ),
    Fault(
        "no stage is released",
        "ptx/mbarrier.cuh",
        "emulator::mbarrier_arrive(barrier, where);",
        "(void)barrier, (void)where;",
        r"deadlock(.*\n)*.*lacks (8 of 8|256 of 256|32 of 33) arrivals",
    ),
    Fault(
        "every stage is released twice",
        "ptx/mbarrier.cuh",
        "emulator::mbarrier_arrive(barrier, where);",
        "emulator::mbarrier_arrive(barrier, where), emulator::mbarrier_arrive(barrier, where);",
        f"once more than the (8|33|164|256) arrivals|{_UNRELEASED}|{_EARLY}",
    ),
    Fault(
        "too few bytes announced",
        "ptx/mbarrier.cuh",
        "mbarrier_arrive_expect_bytes(barrier, bytes, where);",
        "mbarrier_arrive_expect_bytes(barrier, bytes == 0 ? 0 : bytes - 16, where);",
        r"\d+ bytes more than were announced",
    ),
    Fault(
        "too many bytes announced",
        "ptx/mbarrier.cuh",
        "mbarrier_arrive_expect_bytes(barrier, bytes, where);",
        "mbarrier_arrive_expect_bytes(barrier, bytes + 16, where);",
        r"deadlock(.*\n)*.*and (16|32|64) bytes",
    ),
    Fault(
        "barriers are not fenced",
        "ptx/mbarrier.cuh",
        "emulator::fence_mbarrier_init(where);",
        "(void)where;",
        "without fence_mbarrier_init",
    ),
    Fault(
        "barriers overlap",
        "pipeline.cuh",
        "return base + 16 * stage + 8;",
        "return base + 16 * stage + 4;",
        "not a multiple of 8",
    ),
    Fault(
        "a barrier is set up twice",
        "pipeline.cuh",
        "ptx::mbarrier_init(empty(stage), empty_arrivals);",
        "ptx::mbarrier_init(full(stage), empty_arrivals);",
        "overwrites a barrier",
    ),
    # --- copies
    Fault(
        "misaligned bulk copy",
        "ptx/copy.cuh",
        "SmemAddress barrier, u64 policy, emulator::Where where = emulator::Where::current()) {",
        "SmemAddress barrier, u64 policy, emulator::Where where = emulator::Where::current()) {"
        " target += 8;",
        "copies to shared .* not a multiple of 16",
    ),
    Fault(
        "rows are read beyond x",
        "addressing/indexed.cuh",
        "return output_row / p.top_k;",
        "return output_row;",
        r"copies from .*x \(\d+ bytes\) at byte \d+, which is outside every tensor",
    ),
    # --- barriers of block and warp, votes
    Fault(
        "the block is not synchronised",
        "ptx/sync.cuh",
        "emulator::sync_block(where);",
        "(void)where;",
        f"without synchronising since|no mbarrier has been set up|{_EARLY}",
    ),
    Fault(
        "the schedule is read before it is written",
        "schedule.cuh",
        "one_tile_each = ptx::sync_block_and(one_tile_each);",
        "",
        f"nobody has written|without having waited|{_UNRELEASED}",
    ),
    Fault(
        "one lane leaves a vote out",
        "ptx/sync.cuh",
        "return emulator::ballot(predicate, where);",
        "return emulator::thread_index() == 5 ? 0 : emulator::ballot(predicate, where);",
        "all 32 lanes have to take part|only lanes 0-4, 6-31 have arrived",
    ),
    Fault(
        "a shuffle reads the neighbour",
        "ptx/sync.cuh",
        "emulator::shuffle(value, source_lane, where);",
        "emulator::shuffle(value, source_lane + 1, where);",
        f"{WRONG_RESULT}|outside every tensor|has stored before|deadlock",
    ),
    # --- the epilogue
    Fault(
        "one store buffer instead of two",
        "config.cuh",
        "kStoreBufferBytes = 8 * 2 * kWarpFeatures;"
        " inline constexpr int kStoreBytesPerWarp = 2 * kStoreBufferBytes;",
        "kStoreBufferBytes = 0; inline constexpr int kStoreBytesPerWarp = 32 * kWarpFeatures;",
        f"overwrites bytes that .* {_UNRELEASED}|overwrites what",
    ),
    Fault(
        "every block does all tiles",
        "ptx/sync.cuh",
        "inline int grid_dim() { return emulator::block_count(); }\n",
        "inline int grid_dim() { return 1; }\n#define block_idx() thread_idx() * 0\n",
        "has stored before",
    ),
    Fault(
        "an array is read past its end",
        "dequant/int4.cuh",
        "const u32 upper = word >> 8;",
        "const u32 upper = word >> (8 + (ptx::broadcast_low(word | 0x40) & 0x40));",
        "runtime error: shift exponent",
        flavour="sanitize",
    ),
)

DECODE = (
    *BOTH,
    Fault(
        "out is written beyond n",
        "epilogue.cuh",
        "output_row >= 0 && feature < n",
        "output_row >= 0",
        "has stored before|outside every tensor",
    ),
    Fault(
        "warps are not synchronised",
        "ptx/sync.cuh",
        "emulator::sync_warp(where);",
        "(void)where;",
        f"{_UNRELEASED}|{_UNSEEN}|more than were announced",
    ),
    Fault(
        "transposed rows are read too early",
        "epilogue.cuh",
        "ptx::sync_warp();",
        "",
        "reads what a matrix store of warp",
    ),
    Fault(
        "misaligned matrix store",
        "epilogue.cuh",
        "store_matrix_x4_transposed(buffer",
        "store_matrix_x4_transposed(8 + buffer",
        "row address of lane .* not a multiple of 16",
    ),
    Fault(
        "a store beyond shared memory",
        "ptx/ldst.cuh",
        "emulator::write_shared(address, &v, 16, where);",
        "emulator::write_shared(address + (1 << 18), &v, 16, where);",
        "outside the block's",
    ),
    Fault(
        "misaligned ldmatrix",
        "ptx/ldst.cuh",
        "emulator::load_matrix_x4(r, row, where);",
        "emulator::load_matrix_x4(r, row + 8, where);",
        "row address of lane .* not a multiple of 16",
    ),
    Fault(
        "ldmatrix of the next row",
        "ptx/ldst.cuh",
        "emulator::load_matrix_x4(r, row, where);",
        "emulator::load_matrix_x4(r, row + 16, where);",
        f"{WRONG_RESULT}|nobody has written",
    ),
    Fault(
        "partial sums are not waited for",
        "decode.cuh",
        "} while (missing);",
        "} while (false && missing);",
        f"{WRONG_RESULT}|clears partial sums of .* that it has not read|that nobody has left",
    ),
    Fault(
        "one word of a partial sum stands for all",
        "decode.cuh",
        "return missing(s.x) || missing(s.y) || missing(s.z) || missing(s.w);",
        "return missing(s.x);",
        f"{WRONG_RESULT}|that it has not read",
    ),
    Fault(
        "partial sums are not cleared",
        "decode.cuh",
        "ptx::store_partial(partial_at(slot, i, eight), {kNoSum, kNoSum, kNoSum, kNoSum});",
        "",
        "holds a sum at byte .* after the launch",
    ),
    Fault(
        "partial sums are never left",
        "ptx/ldst.cuh",
        "emulator::write_partial(address, &v, 16, where);",
        "if (v.x != v.x) emulator::write_partial(address, &v, 16, where);",
        r"deadlock(.*\n)*.*a sum in partial \(\d+ bytes\) at byte \d+",
    ),
    Fault(
        "partial sums of the block after the right one",
        "decode.cuh",
        "if (first_chunk(block + 1) > first_chunk(block)) add_partial<kEights>(sums, block);",
        "if (first_chunk(block + 1) > first_chunk(block)) add_partial<kEights>(sums, block + 1);",
        "deadlock|outside every tensor|beyond|holds a sum",
    ),
    Fault(
        "misaligned partial sums",
        "ptx/ldst.cuh",
        "emulator::write_partial(address, &v, 16, where);",
        "emulator::write_partial(static_cast<char*>(address) + 4, &v, 16, where);",
        "partial .* not a multiple of 16",
    ),
)

PREFILL = (
    *BOTH,
    Fault(
        "out is written beyond n",
        "epilogue.cuh",
        "exists = row >= 0 && feature < n;",
        "exists = row >= 0;",
        "has stored before|outside every tensor",
    ),
    Fault(
        "pairs of warps do not wait for each other's matrices",
        "epilogue.cuh",
        "leave_batch(first + kBatch); ptx::sync_named(barrier, 64);",
        "leave_batch(first + kBatch);",
        "reads what a matrix store of warp|overwrites|nobody has written",
    ),
    Fault(
        "misaligned matrix store",
        "epilogue.cuh",
        "store_matrix_x4_transposed(to",
        "store_matrix_x4_transposed(8 + to",
        "row address of lane .* not a multiple of 16",
    ),
    # --- cp.async and the async proxy
    Fault(
        "cp.async is not fenced from wgmma",
        "ptx/sync.cuh",
        "emulator::fence_proxy_async(where);",
        "(void)where;",
        "without fence_proxy_async",
    ),
    Fault(
        "cp.async is not waited for",
        "ptx/mbarrier.cuh",
        "emulator::mbarrier_arrive_after_cp_async(barrier, where);",
        "emulator::mbarrier_arrive(barrier, where);",
        "still in flight",
    ),
    Fault(
        "misaligned cp.async",
        "ptx/copy.cuh",
        "emulator::cp_async(target, source, valid, where);",
        "emulator::cp_async(target + 4, source, valid, where);",
        "copies to shared .* not a multiple of 16",
    ),
    # --- wgmma
    Fault(
        "wgmma is not waited for",
        "ptx/wgmma.cuh",
        "emulator::wgmma_wait(kPending, where);",
        "(void)where;",
        _REGISTERS,
    ),
    Fault(
        "one group too many is left in flight",
        "ptx/wgmma.cuh",
        "emulator::wgmma_wait(kPending, where);",
        "emulator::wgmma_wait(kPending + 1, where);",
        _REGISTERS,
    ),
    Fault(
        "wgmma is not committed",
        "ptx/wgmma.cuh",
        "emulator::wgmma_commit(where);",
        "(void)where;",
        _REGISTERS,
    ),
    Fault(
        "wgmma is not fenced",
        "ptx/wgmma.cuh",
        "emulator::wgmma_fence(where);",
        "(void)where;",
        "without a wgmma_fence before",
    ),
    Fault(
        "only the first wgmma is fenced",
        "ptx/wgmma.cuh",
        "emulator::wgmma_fence(where);",
        "static bool done[4096];\n"
        "  bool& mine = done[emulator::thread_index() + 1024 * emulator::block_index()];\n"
        "  if (!mine) emulator::wgmma_fence(where);\n"
        "  mine = true;",
        "written since the last wgmma_fence",
    ),
    Fault(
        "accumulators are used too early",
        "ptx/wgmma.cuh",
        "emulator::wgmma(&d[0][0], kEights, a, b_descriptor, where);",
        "emulator::wgmma(&d[0][0], kEights, a, b_descriptor, where);\n"
        "  if (emulator::pack_bf16x2(d[0][0], 0, where) == 1) d[0][0] = 0;",
        "wgmma still owns",
    ),
    Fault(
        "accumulators are written too early",
        "ptx/wgmma.cuh",
        "emulator::wgmma(&d[0][0], kEights, a, b_descriptor, where);",
        "emulator::wgmma(&d[0][0], kEights, a, b_descriptor, where);\n  d[0][0] = 0;",
        "has written an accumulator",
    ),
    Fault(
        "one warp of a group issues more",
        "ptx/wgmma.cuh",
        "emulator::wgmma_commit(where);",
        "if (emulator::thread_index() / 32 == 1) emulator::wgmma_fence(where);\n"
        "  emulator::wgmma_commit(where);",
        "all four warps issue the same",
    ),
    # --- descriptors and the swizzle
    Fault(
        "a descriptor is shifted by 16 bytes",
        "smem_descriptor.cuh",
        "return kSwizzle128 | kRowGroupStride | low;",
        "return kSwizzle128 | kRowGroupStride | (low + 1);",
        f"{WRONG_RESULT}|{_EARLY}",
    ),
    Fault(
        "a descriptor is shifted by a row",
        "smem_descriptor.cuh",
        "return kSwizzle128 | kRowGroupStride | low;",
        "return kSwizzle128 | kRowGroupStride | (low + 8);",
        "begin at a multiple of 1024",
    ),
    Fault(
        "a descriptor is shifted by 64 KiB",
        "smem_descriptor.cuh",
        "return kSwizzle128 | kRowGroupStride | low;",
        "return kSwizzle128 | kRowGroupStride | (low + 4096);",
        f"outside the block's|{_EARLY}|barrier",
    ),
    Fault(
        "groups of eight rows are too near",
        "smem_descriptor.cuh",
        "static_cast<u64>(1024 / 16) << 32",
        "static_cast<u64>(512 / 16) << 32",
        f"{WRONG_RESULT}|{_EARLY}",
    ),
    Fault(
        "a descriptor names no swizzle",
        "smem_descriptor.cuh",
        "1ull << 62",
        "0ull << 62",
        "swizzle 0",
    ),
    Fault(
        "rows are written without the swizzle",
        "smem_descriptor.cuh",
        "((chunk ^ (row & 7)) << 4)",
        "(chunk << 4)",
        WRONG_RESULT,
    ),
    # --- roles
    Fault(
        "the loaders are not synchronised",
        "ptx/sync.cuh",
        "emulator::sync_named(id, threads, where);",
        "(void)id, (void)threads, (void)where;",
        "nobody has written|without having waited|has not released",
    ),
    Fault(
        "a named barrier counts one warp too many",
        "ptx/sync.cuh",
        "emulator::sync_named(id, threads, where);",
        "emulator::sync_named(id, threads + 32, where);",
        r"deadlock(.*\n)*.*named barrier 1, which 128 of 160 threads have reached",
    ),
    Fault(
        "what K leaves empty of the last stage has no weights",
        "prefill.cuh",
        "for (int unit = units; unit < kConfig.units(); ++unit) {",
        "for (int unit = units; unit < units; ++unit) {",
        r"deadlock(.*\n)*.*and \d+ bytes",
    ),
    Fault(
        "what K leaves empty of the last stage has the x of the stage before",
        "prefill.cuh",
        "for (int unit = 0; unit < kConfig.units(); ++unit) { const bool exists",
        "for (int unit = 0; unit < runs.k_units() - k_stage * kConfig.units(); ++unit) { "
        "const bool exists",
        WRONG_RESULT,
    ),
    Fault(
        "no registers are given back",
        "ptx/sync.cuh",
        "emulator::set_registers(kRegisters, false, where);",
        "(void)where;",
        r"deadlock(.*\n)*.*registers a thread, of which the pool of the block is short",
    ),
    Fault(
        "the tile counter is not set back",
        "ptx/ldst.cuh",
        "emulator::write_counter(address, value, where);",
        "(void)address, (void)value, (void)where;",
        "counters have to be zero",
    ),
)

# Weights that go from memory into registers; rows of x in groups of tiles.
DIRECT = (
    *(
        fault
        for fault in DECODE
        if fault.name
        in (
            "no barrier is waited for",
            "no stage is released",
            "every stage is released twice",
            "too few bytes announced",
            "too many bytes announced",
            "barriers are not fenced",
            "rows are read beyond x",
            "the block is not synchronised",
            "one lane leaves a vote out",
            "a shuffle reads the neighbour",
            "every block does all tiles",
            "an array is read past its end",
            "out is written beyond n",
            "warps are not synchronised",
            "transposed rows are read too early",
            "misaligned matrix store",
            "a store beyond shared memory",
            "misaligned ldmatrix",
            "ldmatrix of the next row",
        )
    ),
    # --- the schedule
    Fault(
        "the block is not synchronised before x is waited for",
        "direct.cuh",
        "load_rows(first_tile + place); ptx::sync_block();",
        "load_rows(first_tile + place);",
        f"{_EARLY}|without synchronising since|no mbarrier has been set up",
    ),
    Fault(
        "a warp reads its schedule before it has written it",
        "schedule.cuh",
        "ptx::sync_warp(); if (all_one) return ptx",
        "if (all_one) return ptx",
        _EARLY,
    ),
    Fault(
        "all warps write into one table",
        "schedule.cuh",
        "SegmentTable(base + 4 * 32 * part, counts + 8 * part)",
        "SegmentTable(base, counts)",
        "overwrites what|without having waited",
    ),
    # --- x
    Fault(
        "x is not waited for",
        "direct.cuh",
        "ptx::mbarrier_wait(x_barrier(where), phase);",
        "(void)phase;",
        _EARLY,
    ),
    Fault(
        "x is waited for with the wrong parity",
        "direct.cuh",
        "ptx::mbarrier_wait(x_barrier(where), phase);",
        "ptx::mbarrier_wait(x_barrier(where), phase ^ 1);",
        f"{_EARLY}|deadlock",
    ),
    Fault(
        "x of a further group is waited for with the parity of the first",
        "direct.cuh",
        "ptx::mbarrier_wait(x_barrier(where), phase);",
        "ptx::mbarrier_wait(x_barrier(where), 0);",
        f"{_EARLY}|{_UNRELEASED}",
    ),
    Fault(
        "x is brought over rows that others still read",
        "direct.cuh",
        "ptx::fence_proxy_async(); ptx::sync_block();",
        "ptx::fence_proxy_async();",
        f"{_UNRELEASED}|{_EARLY}|once more than",
    ),
    Fault(
        "x behind K is not cleared",
        "direct.cuh",
        "clear_behind_k(slot);",
        "",
        "nobody has written",
    ),
    Fault(
        "tokens without a row have no x",
        "direct.cuh",
        "if (!is_read) slot = other_slot;",
        "(void)other_slot;",
        "nobody has written",
    ),
    Fault(
        "misaligned bulk copy",
        "ptx/copy.cuh",
        "SmemAddress barrier, emulator::Where where = emulator::Where::current()) {"
        " emulator::bulk_load(",
        "SmemAddress barrier, emulator::Where where = emulator::Where::current()) {"
        " emulator::bulk_load(8 + ",
        "copies to shared .* not a multiple of 16",
    ),
    # --- weights
    Fault(
        "weights are overwritten before they are multiplied",
        "direct.cuh",
        "for (int u = 0; u < kUnits; ++u) { #pragma unroll",
        "for (int u = 0; u < kUnits; ++u) { if (has_next) load_unit(units[u], next_source, u);",
        f"outside every tensor|{WRONG_RESULT}",
    ),
    Fault(
        "weights of the next task are never asked for",
        "direct.cuh",
        "if (has_next) load_unit(units[u], next_source, u);",
        "(void)next, (void)has_next;",
        WRONG_RESULT,
    ),
    Fault(
        "the first weights are all of the first unit",
        "direct.cuh",
        "load_unit(units[u], source, u);",
        "{ Source first = source; load_unit(units[u], first, u); }",
        WRONG_RESULT,
    ),
    Fault(
        "weights are those of the neighbour's features",
        "direct.cuh",
        "const int row_tile = task.features % kTasksPerStripe * kRowTiles;",
        "const int row_tile = (task.features + 1) % kTasksPerStripe * kRowTiles;",
        WRONG_RESULT,
    ),
    Fault(
        "weights behind the last unit are read",
        "direct.cuh",
        "u + 1 < k_units() ? kUnitBytes : 0",
        "kUnitBytes",
        f"outside every tensor|{WRONG_RESULT}",
    ),
    Fault(
        "the expert of a further tile is the first one's",
        "direct.cuh",
        "task.expert = expert_of(task.row_tile);",
        "",
        WRONG_RESULT,
    ),
)

# Where tiles are items, and where they are not for one has no rows.
DIRECT_ITEMS = (
    Fault(
        "a tile has its neighbour's expert",
        "direct.cuh",
        "ptx::shuffle(tile_expert, row_tile % 32)",
        "ptx::shuffle(tile_expert, (row_tile + 1) % 32)",
        WRONG_RESULT,
    ),
    Fault(
        "tiles are taken for items behind items that count for nothing",
        "schedule.cuh",
        "ptx::ballot(lane_ < begins && !item.begins()) == 0 ? item.own : -1",
        "item.own",
        WRONG_RESULT,
    ),
)

# Tiles of two eights.
DIRECT_EIGHTS = (
    *(fault for fault in DECODE if fault.name == "one store buffer instead of two"),
    Fault(
        "a tile of two eights is multiplied as one of one",
        "direct.cuh",
        "ptx::load_shared(width_note(where)) > 8",
        "ptx::load_shared(width_note(where)) > 16",
        WRONG_RESULT,
    ),
)

# Where weights of a tile's first stage are asked for before its rows are known.
EARLY = (
    Fault(
        "the first weights do not wait for their stage",
        "prefill.cuh",
        "ring.wait_empty(at); load_weights(at.stage, tile, 0);",
        "load_weights(at.stage, tile, 0);",
        r"overwrites what a bulk copy .* without having waited for it",
    ),
    Fault(
        "the first weights are asked for twice",
        "prefill.cuh",
        "if (warp() < kWeightWarps && !(kWeightsFirst && is_first)) {",
        "if (warp() < kWeightWarps) {",
        r"overwrites what a bulk copy .* without having waited for it",
    ),
    Fault(
        "the first weights of each further feature tile are left out",
        "prefill.cuh",
        "k_stage == 0 && tile.feature_tile == first_tile",
        "k_stage == 0",
        r"deadlock(.*\n)*.*lacks 4 of 164 arrivals",
    ),
    Fault(
        "the first weights are those of the last stage",
        "prefill.cuh",
        "load_weights(at.stage, tile, 0);",
        "load_weights(at.stage, tile, runs.k_stages() - 1);",
        WRONG_RESULT,
    ),
)

# Where tiles are sorted by their length, and two warps store several eights of tokens at a time.
BATCHES = (
    Fault(
        "counts of tile lengths are read before they are summed",
        "schedule.cuh",
        "sum_words<kCounts / 32>(counts, lane); ptx::sync_block();",
        "sum_words<kCounts / 32>(counts, lane);",
        f"{_UNSEEN}|{_UNRELEASED}|has stored before|{WRONG_RESULT}",
    ),
    Fault(
        "a batch lies over the one that still leaves",
        "epilogue.cuh",
        "to + eight % (2 * kBatch) * kPairBufferBytes, matrices",
        "to + eight % kBatch * kPairBufferBytes, matrices",
        f"reads what a matrix store of warp|overwrites|nobody has written|{WRONG_RESULT}",
    ),
    Fault(
        "the buffers of two pairs overlap",
        "prefill.cuh",
        "smem.store + first_warp * kConfig.warp_store_bytes();",
        "smem.store + first_warp * kStoreBytesPerWarp;",
        f"reads what a matrix store of warp|overwrites|nobody has written|{WRONG_RESULT}",
    ),
)

# Where rows lie sorted, x comes by boxes through a tensor map.
SORTED = (
    *(
        fault
        for fault in PREFILL
        if fault.name
        in (
            "full is not waited for",
            "empty is not waited for",
            "too few bytes announced",
            "too many bytes announced",
            "barriers are not fenced",
            "the loaders are not synchronised",
            "a descriptor is shifted by 16 bytes",
        )
    ),
    Fault(
        "a box reaches beyond its tile",
        "ptx/copy.cuh",
        "emulator::tensor_load_2d(target, map, k, row, barrier, where);",
        "emulator::tensor_load_2d(target + 1024, map, k, row, barrier, where);",
        f"{_EARLY}|{_UNRELEASED}|overwrites the target|{WRONG_RESULT}",
    ),
    Fault(
        "misaligned box",
        "ptx/copy.cuh",
        "emulator::tensor_load_2d(target, map, k, row, barrier, where);",
        "emulator::tensor_load_2d(target + 128, map, k, row, barrier, where);",
        "copies a box to shared .* not a multiple of 1024",
    ),
    Fault(
        "boxes begin a row too late",
        "ptx/copy.cuh",
        "emulator::tensor_load_2d(target, map, k, row, barrier, where);",
        "emulator::tensor_load_2d(target, map, k, row + 1, barrier, where);",
        WRONG_RESULT,
    ),
    Fault(
        "boxes begin 16 bytes too late",
        "ptx/copy.cuh",
        "emulator::tensor_load_2d(target, map, k, row, barrier, where);",
        "emulator::tensor_load_2d(target, map, k + 8, row, barrier, where);",
        WRONG_RESULT,
    ),
    Fault(
        "boxes count on the barrier that frees the stage",
        "ptx/copy.cuh",
        "emulator::tensor_load_2d(target, map, k, row, barrier, where);",
        "emulator::tensor_load_2d(target, map, k, row, barrier + 8, where);",
        "bytes more than were announced|deadlock",
    ),
    Fault(
        "no box brings the zeros behind K",
        "prefill.cuh",
        "(k_stage * kConfig.units() + box.unit) * kUnitK",
        "min_of(k_stage * kConfig.units() + box.unit, runs.k_units() - 1) * kUnitK",
        WRONG_RESULT,
    ),
    Fault(
        "a box is left out",
        "prefill.cuh",
        ".exists = index < boxes",
        ".exists = index < boxes - 1",
        r"deadlock(.*\n)*.*and \d+ bytes",
    ),
    Fault(
        "a warp announces as many boxes as the first",
        "prefill.cuh",
        "ceil_div(max_of(boxes - (warp() - 1), 0), kBoxWarps)",
        "ceil_div(boxes, kBoxWarps)",
        r"deadlock(.*\n)*.*and \d+ bytes",
    ),
    Fault(
        "the end of the work is announced by one warp alone",
        "prefill.cuh",
        "if (warp() > 0 && lane() == 0) ptx::mbarrier_arrive(ring.full(at.stage));",
        "",
        r"deadlock(.*\n)*.*lacks 3 of 36 arrivals",
    ),
)

# Sorting routes: blocks count, then place.
SORTING = (
    Fault(
        "counts are added to before they are cleared",
        "count.cuh",
        "ptx::sync_block(); for (int route",
        "for (int route",
        f"nobody has written|{_UNSEEN}",
    ),
    Fault(
        "counts are left before all have counted",
        "count.cuh",
        "ptx::sync_block(); int* own",
        "int* own",
        f"{_UNSEEN}|{_UNRELEASED}|adds to bytes",
    ),
    Fault(
        "others' counts are added to before they are cleared",
        "route.cuh",
        "ptx::sync_block(); add_others();",
        "add_others();",
        f"nobody has written|{_UNSEEN}",
    ),
    Fault(
        "experts are placed before all have counted",
        "route.cuh",
        "ptx::sync_block(); const int used",
        "const int used",
        f"nobody has written|{_UNSEEN}|{_UNRELEASED}",
    ),
    Fault(
        "routes are placed before all experts are",
        "route.cuh",
        "const int used = place_experts(warps); ptx::sync_block();",
        "const int used = place_experts(warps);",
        f"{_UNSEEN}|{_UNRELEASED}|which the launch has stored before",
    ),
)

# With more experts than threads.
SORTING_TWICE = (
    Fault(
        "sums of the warps are left before all have read those of the experts before",
        "route.cuh",
        "if (first > 0) ptx::sync_block();",
        "",
        f"{_UNSEEN}|overwrites",
    ),
)
