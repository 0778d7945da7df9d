"""Single instructions of the host implementation, and that it has the functions of kernels/ptx."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from chord import errors
from chord.emulator import EmulatorError
from chord.emulator.build import build_source
from chord.emulator.runner import INPUT, OUTPUT, Launch, run_launch

pytestmark = pytest.mark.emulator

PACKAGE = Path(errors.__file__).parent
REAL = PACKAGE / "kernels" / "ptx"
HOST = PACKAGE / "emulator" / "include" / "chord" / "kernels" / "ptx"
HEADERS = sorted(path.name for path in REAL.glob("*.cuh"))

UNIT = """\
#include <chord/kernels/ptx/bf16.cuh>
#include <chord/kernels/ptx/copy.cuh>
#include <chord/kernels/ptx/ldst.cuh>
#include <chord/kernels/ptx/mbarrier.cuh>
#include <chord/kernels/ptx/mma.cuh>
#include <chord/kernels/ptx/sync.cuh>
#include <chord/kernels/ptx/wgmma.cuh>
#include "runtime/launch.hpp"

using namespace chord;

struct Params {
  const int* in;
  int* out;
};

static void enter(const void* params) {
  const Params p = *static_cast<const Params*>(params);
  const int thread = ptx::thread_idx(), lane = thread % 32, warp = thread / 32;
  const SmemAddress smem = ptx::dynamic_smem();
  (void)p, (void)lane, (void)warp, (void)smem;
BODY
}

const ChordUnit chord_unit{enter, THREADS, 8192};
"""


def run(body: str, given: torch.Tensor, out_ints: int, threads: int = 32) -> torch.Tensor:
    """Run `body` in every thread of one block; p.in is `given`, p.out what comes back (int32)."""
    unit = UNIT.replace("BODY", body).replace("THREADS", str(threads))
    library = build_source(unit, "probe")
    given = given.contiguous()
    out = torch.zeros(out_ints, dtype=torch.int32)
    params = b"".join(t.data_ptr().to_bytes(8, "little") for t in (given, out))
    launch = Launch(params, [("in", given, INPUT), ("out", out, OUTPUT)])
    run_launch(library, launch, num_blocks=1, seed=3)
    return out


def functions(path: Path) -> dict[str, set[str]]:
    """Return name -> parameter lists of a header's functions, without the host's last argument."""
    text = re.sub(r"//[^\n]*", "", path.read_text())
    text = re.sub(r",?\s*emulator::Where where = emulator::Where::current\(\)", "", text)
    found: dict[str, set[str]] = {}
    pattern = r"(?:__forceinline__|inline)\s+[\w:]+\s+(\w+)\(([^{]*?)\)\s*\{"
    for name, parameters in re.findall(pattern, text):
        found.setdefault(name, set()).add(" ".join(parameters.split()))
    return found


@pytest.mark.parametrize("header", HEADERS)
def test_host_has_exactly_the_functions_of_ptx(header: str) -> None:
    real, host = functions(REAL / header), functions(HOST / header)
    assert real, f"no functions found in {header}"
    assert set(real) == set(host)
    for name, parameters in real.items():
        if name == "wgmma_m64k16":  # one overload a width there, one template here
            parameters = {re.sub(r"\[\d+\]\[4\]", "[kEights][4]", text) for text in parameters}
        assert parameters == host[name], f"{name} of {header}"


def bf16_bits(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().view(torch.int16).int() & 0xFFFF


def nearest_bf16(value: Fraction) -> int:
    """Bits of the BF16 value next to `value`, ties to even; finite, by search from both sides."""
    sign, value = (0x8000, -value) if value < 0 else (0, value)

    def at(bits: int) -> Fraction:
        exponent, mantissa = bits >> 7, bits & 0x7F
        if exponent == 0:
            return Fraction(mantissa) / 2**133
        return Fraction(mantissa + 128) * Fraction(2) ** (exponent - 134)

    low, high = 0, 0x7F80
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at(middle) <= value else (low, middle)
    below, above = value - at(low), at(high) - value
    return sign | (low if below < above or (below == above and low % 2 == 0) else high)


def as_fraction(bits: int) -> Fraction:
    return Fraction(torch.tensor(bits << 16, dtype=torch.int64).int().view(torch.float32).item())


def test_fma_rounds_once_and_keeps_subnormals() -> None:
    generator = torch.Generator().manual_seed(0)
    # Exponents that meet, that cancel, and that are far apart; codes as the kernels pass them.
    bits = torch.randint(0, 0x7F00, (3, 4096), generator=generator)
    near = torch.randint(0x3E00, 0x4100, (3, 4096), generator=generator)
    near[2] |= 0x8000 * torch.randint(0, 2, (4096,), generator=generator)
    codes = torch.stack(
        (
            torch.randint(0, 256, (2048,), generator=generator),
            torch.randint(0x7000, 0x7E00, (2048,), generator=generator),
            torch.randint(0xB000, 0xC000, (2048,), generator=generator),
        )
    )
    bits[:, :2048] //= 2
    a, b, c = torch.cat((bits, near, codes), dim=1).int()
    count = len(a)
    body = (
        f"constexpr int kCount = {count};"
        + """
  for (int i = lane; i < kCount; i += 32) {
    const int a = ptx::load_global(p.in + i);
    const int b = ptx::load_global(p.in + kCount + i);
    const int c = ptx::load_global(p.in + 2 * kCount + i);
    p.out[i] = ptx::fma_bf16x2(a | a << 16, b | b << 16, c | c << 16);
  }"""
    )
    result = run(body, torch.cat((a, b, c)), count)
    assert torch.equal(result & 0xFFFF, (result >> 16) & 0xFFFF)
    for i in range(count):
        product = as_fraction(int(a[i])) * as_fraction(int(b[i]))
        expected = nearest_bf16(product + as_fraction(int(c[i])))
        if expected & 0x7FFF == 0 or expected & 0x7FFF >= 0x7F00:
            continue  # the sign of zero and the edge of infinity are not what is asked here
        assert int(result[i]) & 0xFFFF == expected, (hex(a[i]), hex(b[i]), hex(c[i]))


def test_pack_rounds_like_torch() -> None:
    values = torch.randn(64, generator=torch.Generator().manual_seed(1)) * 1e3
    body = """
  const float low = __builtin_bit_cast(float, ptx::load_global(p.in + 2 * lane));
  const float high = __builtin_bit_cast(float, ptx::load_global(p.in + 2 * lane + 1));
  p.out[lane] = ptx::pack_bf16x2(low, high);"""
    result = run(body, values.view(torch.int32), 32)
    assert torch.equal(result & 0xFFFF, bf16_bits(values[0::2]))
    assert torch.equal((result >> 16) & 0xFFFF, bf16_bits(values[1::2]))


def test_matrix_load_multiply_and_store() -> None:
    """Load A and B with ldmatrix, multiply with mma, store C = A B^T with stmatrix."""
    g = torch.Generator().manual_seed(2)
    a = torch.randint(-8, 9, (16, 16), generator=g).bfloat16()
    b = torch.randint(-8, 9, (8, 16), generator=g).bfloat16()
    given = torch.cat((a, b)).view(torch.int32).flatten()  # 24 rows of 8 words
    body = """
  for (int i = lane; i < 24 * 8; i += 32) {
    ptx::store_shared(smem + 4 * i, ptx::load_global(p.in + i));
  }
  ptx::sync_warp();
  u32 a[4], b[4];
  ptx::load_matrix_x4(a, smem + (lane % 16) * 32 + (lane / 16) * 16);
  ptx::load_matrix_x4(b, smem + (16 + lane % 8) * 32 + (lane / 8 % 2) * 16);
  float d[4] = {};
  ptx::mma_m16n8k16(d, a, b[0], b[1]);
  const u32 sums[4] = {ptx::pack_bf16x2(d[0], d[1]), ptx::pack_bf16x2(d[2], d[3]), 0, 0};
  ptx::store_matrix_x4_transposed(smem + 1024 + (lane % 8) * 64 + (lane / 8) * 16, sums);
  ptx::sync_warp();
  if (lane < 8) {
    for (int i = 0; i < 8; ++i) {
      p.out[8 * lane + i] = ptx::load_shared(smem + 1024 + 64 * lane + 4 * i);
    }
  }"""
    result = run(body, given, 64).view(torch.bfloat16).view(8, 16)
    assert torch.equal(result, (b.float() @ a.float().T).bfloat16())


def test_loads_of_weights() -> None:
    given = torch.randint(-(2**31), 2**31, (192,), generator=torch.Generator().manual_seed(5)).int()
    body = """
  const U32x4 four = ptx::load_weights_x4(p.in + 4 * lane, ptx::evict_first());
  const U32x2 two = ptx::load_weights_x2(p.in + 128 + 2 * lane, ptx::evict_first());
  const u32 words[6] = {four.x, four.y, four.z, four.w, two.x, two.y};
  for (int i = 0; i < 4; ++i) p.out[4 * lane + i] = words[i];
  for (int i = 0; i < 2; ++i) p.out[128 + 2 * lane + i] = words[4 + i];"""
    assert torch.equal(run(body, given, 192), given)


def test_a_prefetch_inside_a_tensor_is_no_more_than_a_hint() -> None:
    """It may name any byte, also of what the launch writes."""
    body = "ptx::prefetch(p.in + lane), ptx::prefetch(reinterpret_cast<const char*>(p.out) + 127);"
    assert not run(body, torch.zeros(32, dtype=torch.int32), 32).any()


def test_votes_and_shuffles() -> None:
    given = torch.arange(100, 132, dtype=torch.int32)
    body = """
  const int value = ptx::load_global(p.in + lane);
  p.out[lane] = ptx::shuffle(value, lane ^ 5);
  p.out[32 + lane] = ptx::shuffle_up(value, 4);
  const u32 mask = ptx::ballot(lane % 3 == 0);
  p.out[64 + lane] = ptx::count_bits(mask) * 100 + ptx::highest_bit(mask);"""
    result = run(body, given, 96)
    lanes = torch.arange(32)
    assert torch.equal(result[:32], given[lanes ^ 5])
    assert torch.equal(result[32:64], given[torch.where(lanes < 4, lanes, lanes - 4)])
    assert torch.equal(result[64:], torch.full((32,), 1130, dtype=torch.int32))


def test_sums_of_a_warp() -> None:
    given = torch.arange(-5, 27, dtype=torch.int32) ** 3
    body = "p.out[lane] = ptx::sum_lanes(ptx::load_global(p.in + lane));"
    assert torch.equal(run(body, given, 32), given.sum().int().expand(32))


@pytest.mark.parametrize("no", (-1, 0, 37, 63))
def test_votes_of_a_block(no: int) -> None:
    """One thread that says no is enough, and the next vote knows nothing of it."""
    body = f"""
  const bool first = ptx::sync_block_and(thread != {no});
  const bool second = ptx::sync_block_and(true);
  p.out[thread] = 2 * first + second;"""
    result = run(body, torch.zeros(1, dtype=torch.int32), 64, threads=64)
    assert torch.equal(result, torch.full((64,), 3 if no < 0 else 1, dtype=torch.int32))


def test_a_vote_and_a_plain_barrier_do_not_meet() -> None:
    """PTX leaves open what happens then."""
    body = "if (thread < 32) ptx::sync_block(); else ptx::sync_block_and(true);"
    with pytest.raises(EmulatorError, match=r"barrier 0 with(out)? a vote, others with"):
        run(body, torch.zeros(1, dtype=torch.int32), 1, threads=64)


def test_additions_to_shared_memory() -> None:
    body = """
  for (int i = thread; i < 8; i += 64) ptx::store_shared(smem + 4 * i, 1000 * i);
  ptx::sync_block();
  ptx::add_shared(smem + 4 * (thread % 8), thread);
  ptx::sync_block();
  if (thread < 8) p.out[thread] = ptx::load_shared(smem + 4 * thread);"""
    result = run(body, torch.zeros(1, dtype=torch.int32), 8, threads=64)
    threads = torch.arange(64).view(8, 8)
    assert torch.equal(result, (1000 * torch.arange(8) + threads.sum(0)).int())


BOX = """
  alignas(64) const u64 map[16] = {reinterpret_cast<u64>(p.in), ROWS, 96, 192};
  const SmemAddress barrier = smem + 4096;
  if (lane == 0) {
    ptx::mbarrier_init(barrier, 1);
    FENCE;
  }
  ptx::sync_warp();
  if (lane == 0) {
    ptx::mbarrier_arrive_expect_bytes(barrier, 2048);
    ptx::tensor_load_2d(TARGET, reinterpret_cast<const TensorMap*>(map), K, ROW, barrier);
  }
  ptx::mbarrier_wait(barrier, 0);
  for (int i = lane; i < 512; i += 32) p.out[i] = ptx::load_shared(TARGET + 4 * i);"""
X_ROWS = 20


def box_body(k: int = 0, row: int = 0, **words: str) -> str:
    """Return a body that copies the box at (row, k) of bf16 [ROWS, 96] and shows its bytes."""
    words = {"ROWS": str(X_ROWS), "FENCE": "ptx::fence_mbarrier_init()", "TARGET": "smem"} | words
    body = BOX
    for word, text in (words | {"K": str(k), "ROW": str(row)}).items():
        body = re.sub(rf"\b{word}\b", text, body)
    return body


@pytest.mark.parametrize("target", ("smem", "smem + 1024"))
@pytest.mark.parametrize(("k", "row"), [(0, 0), (32, 3), (64, 8), (0, 19), (0, 20), (96, 0)])
def test_a_box_is_swizzled_and_zero_outside_the_tensor(k: int, row: int, target: str) -> None:
    x = torch.randn(X_ROWS, 96, generator=torch.Generator().manual_seed(4)).bfloat16()
    result = run(box_body(k, row, TARGET=target), x.view(torch.int32), 512)
    wide = torch.zeros(X_ROWS + 16, 96 + 64, dtype=torch.bfloat16)
    wide[:X_ROWS, :96] = x
    box = wide[row : row + 16, k : k + 64].reshape(16, 8, 8)
    chunks = result.view(torch.bfloat16).view(16, 8, 8)
    for r in range(16):
        for chunk in range(8):
            assert torch.equal(chunks[r, chunk ^ r % 8], box[r, chunk]), (r, chunk)


BOX_REPORTS = {
    "no map": (box_body(ROWS="0"), "through a tensor map of 0 rows"),
    "a map beyond the tensor": (
        box_body(row=16, ROWS=str(X_ROWS + 1)),
        "copies from .* from in .*outside every tensor",
    ),
    "an unaligned box": (box_body(TARGET="smem + 512"), "not a multiple of 1024"),
    "a box beyond shared memory": (box_body(TARGET="smem + 7168"), "outside the block's"),
    "an unfenced barrier": (box_body(FENCE=""), "without fence_mbarrier_init"),
}


@pytest.mark.parametrize("name", BOX_REPORTS)
def test_report_of_a_box(name: str) -> None:
    body, message = BOX_REPORTS[name]
    with pytest.raises(EmulatorError, match=message):
        run(body, torch.zeros(X_ROWS * 48, dtype=torch.int32), 512)


def test_warps_announce_their_bytes_on_one_barrier() -> None:
    """None, 32 and 64 bytes, in one phase."""
    body = """
  const SmemAddress barrier = smem + 4096;
  if (thread == 0) {
    ptx::mbarrier_init(barrier, 3);
    ptx::fence_mbarrier_init();
  }
  ptx::sync_block();
  if (lane == 0) {
    ptx::mbarrier_arrive_expect_bytes(barrier, 32 * warp);
    if (warp > 0) {
      const int first = 8 * (warp - 1);
      ptx::bulk_load(smem + 4 * first, p.in + first, 32 * warp, barrier);
    }
  }
  ptx::mbarrier_wait(barrier, 0);
  if (thread < 24) p.out[thread] = ptx::load_shared(smem + 4 * thread);"""
    given = torch.arange(100, 124, dtype=torch.int32)
    assert torch.equal(run(body, given, 24, threads=96), given)


REPORTS = {
    "trap": ("ptx::trap();", "stops the launch with trap"),
    "misaligned vector": ("ptx::load_shared_x4(smem + 8);", "not a multiple of 16"),
    "beyond shared memory": ("ptx::store_shared(smem + 8192, 1);", "outside the block's"),
    "beyond a tensor": ("ptx::load_global(p.in + 64 + lane);", "in .*outside every tensor"),
    "prefetch beyond a tensor": (
        "ptx::prefetch(p.in + 64);",
        "prefetches from .*in .*outside every tensor",
    ),
    "prefetch before a tensor": ("ptx::prefetch(p.in - 1);", "outside every tensor"),
    "weights beyond a tensor": (
        "ptx::load_weights_x4(p.in + 4 * thread, 0);",
        "in .*outside every tensor",
    ),
    "half of a tensor's last weights": (
        "ptx::load_weights_x2(p.in + 62 + 2 * (thread / 63), 0);",
        "in .*outside every tensor",
    ),
    "misaligned four words of weights": (
        "ptx::load_weights_x4(p.in + 2, 0);",
        "not a multiple of 16",
    ),
    "misaligned two words of weights": (
        "ptx::load_weights_x2(p.in + 1, 0);",
        "not a multiple of 8",
    ),
    "weights of an output": (
        "ptx::load_weights_x2(p.out, 0);",
        "loads out, which the launch writes",
    ),
    "load of an output": ("ptx::load_global(p.out);", "loads out, which the launch writes"),
    "uninitialised": ("ptx::load_shared(smem);", "nobody has written"),
    "race": (
        "ptx::store_shared(smem, lane);",
        "overwrites what thread .* without having waited for it",
    ),
    "addition to nothing": ("ptx::add_shared(smem, 1);", "adds to bytes that nobody has written"),
    "addition beside a store": (
        "if (thread == 0) ptx::store_shared(smem, 0); ptx::sync_block();"
        "if (thread == 0) ptx::store_shared(smem, 1); if (warp == 1) ptx::add_shared(smem, 1);",
        "(adds to what thread 0 wrote|overwrites what thread .* added to) at .* without having",
    ),
    "sum read before all have added": (
        "if (thread == 0) ptx::store_shared(smem, 0); ptx::sync_block();"
        "ptx::add_shared(smem, 1); if (thread == 0) ptx::load_shared(smem);",
        "reads what thread .* added to at .* without having|adds to bytes that thread 0 reads",
    ),
    "copy over an addition": (
        "if (thread == 0) ptx::store_shared_x4(smem, {0, 0, 0, 0}); ptx::sync_block();"
        "ptx::fence_proxy_async(); ptx::sync_block(); ptx::add_shared(smem, 1); ptx::sync_block();"
        "if (thread == 0) { ptx::mbarrier_init(smem + 4096, 1); ptx::fence_mbarrier_init();"
        "ptx::mbarrier_arrive_expect_bytes(smem + 4096, 16);"
        "ptx::bulk_load(smem, p.in, 16, smem + 4096); }",
        "lets the async proxy overwrite what thread .* added to at .* without fence_proxy_async",
    ),
    "barrier bytes": (
        "ptx::mbarrier_init(smem + 64 * lane, 1); ptx::load_shared(smem + 64 * lane);",
        "reads the bytes of a barrier",
    ),
    "no barrier there": ("ptx::mbarrier_arrive(smem);", "where no mbarrier has been set up"),
    "barrier of another thread": (
        "if (lane == 0) ptx::mbarrier_init(smem + warp * 8, 32);"
        "ptx::ballot(true); ptx::mbarrier_arrive(smem + warp * 8);",
        "set up at .* without synchronising since",
    ),
    "arrivals": (
        "if (thread == 0) ptx::mbarrier_init(smem, 2), ptx::mbarrier_wait(smem, 0);",
        "lacks 2 of 2 arrivals",
    ),
    "lanes apart": (
        "if (lane < 7) ptx::sync_warp(); else ptx::ballot(true);",
        "all 32 lanes have to take part",
    ),
    "lanes missing": ("if (lane < 7) ptx::sync_warp();", "only lanes 0-6 have arrived"),
    "warps apart": ("if (thread < 32) ptx::sync_block();", "which 32 of 64 threads have reached"),
    "named barrier counts": (
        "ptx::sync_named(1, thread < 40 ? 64 : 32);",
        "waits on barrier 1 for (32|64) threads, others for (32|64)",
    ),
    "registers of a lone warpgroup": (
        "ptx::wgmma_fence();",
        "in a warpgroup of fewer than 4 warps",
    ),
}


@pytest.mark.parametrize("name", REPORTS)
def test_report(name: str) -> None:
    body, message = REPORTS[name]
    with pytest.raises(EmulatorError, match=message):
        run(body, torch.zeros(64, dtype=torch.int32), 64, threads=64)
