"""Rendering, compiling and launching, without a GPU. The cache has its own file."""

from __future__ import annotations

import ctypes
import dataclasses
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chord import device as devices
from chord.errors import CaptureError, CompileError, InputError
from chord.jit import cache, compiler, driver, launch, params, source
from chord.plan import legality
from chord.plan.config import NO_SUM, Config, DecodeConfig, DirectConfig, PrefillConfig

DECODE = DecodeConfig(max_tokens=8, warps=8, block_k=256, stages=5)
PREFILL = PrefillConfig(block_m=64, min_width=8, width_step=8, block_k=128, stages=4)
DIRECT = DirectConfig(max_tokens=8, warps=16, max_k=256)
TINY = 'extern "C" __global__ void chord_entry(float* p) { p[threadIdx.x] = 1.0f; }\n'


def test_units_state_what_the_host_believes() -> None:
    unit = source.render(DECODE)
    assert "#include <chord/kernels/decode.cuh>" in unit
    assert f"chord::DecodeConfig kConfig{DECODE.to_cpp()};" in unit
    assert f"kConfig.smem_bytes() == {DECODE.smem_bytes()}" in unit
    assert "sizeof(chord::Params<chord::Indexed>) == 104" in unit
    assert "chord::prefill<kConfig>(p);" in source.render(PREFILL)
    unit = source.render(DIRECT, "RoutedDown")
    assert "#include <chord/kernels/direct.cuh>" in unit
    assert "chord::DirectConfig kConfig{.max_tokens = 8, .warps = 16, .max_k = 256};" in unit
    assert f"kConfig.smem_bytes() == {DIRECT.smem_bytes()}" in unit
    assert "chord::direct<kConfig>(p);" in unit
    with pytest.raises(InputError, match="addressing 'Sorted' is not one of Indexed, "):
        source.render(DECODE, "Sorted")


@pytest.mark.parametrize("max_tokens", [8, 16])
@pytest.mark.parametrize("warps", [2, 6, 16])
@pytest.mark.parametrize("max_k", [64, 256])
def test_host_and_device_agree_on_every_direct_size(
    max_tokens: int, warps: int, max_k: int
) -> None:
    unit = source.render(DirectConfig(max_tokens, warps, max_k))
    compiler.compile_unit(_only_headers(unit), "sm_90a")


@pytest.mark.parametrize("config", [DECODE, DIRECT, PREFILL], ids=lambda config: config.kernel)
def test_a_wrong_belief_is_a_compile_error_that_shows_the_line(config: Config) -> None:
    belief = f"threads() == {config.threads()}"
    unit = source.render(config).replace(belief, "threads() == 32")
    with pytest.raises(CompileError, match=r"(?s)sm_90a.*host and device disagree on the threads"):
        compiler.compile_unit(unit, "sm_90a")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_compiles_to_machine_code_without_a_gpu(arch: str) -> None:
    cubin = compiler.compile_unit(TINY, arch)
    assert cubin.code.startswith(b"\x7fELF") and b".version" not in cubin.code
    assert cubin.report is not None and cubin.report.is_clean and cubin.report.registers > 0


def test_a_compile_error_quotes_the_unit() -> None:
    with pytest.raises(CompileError, match=r"(?s)does not compile for sm_90a.*2: int x = y;"):
        compiler.compile_unit("int w = 1;\nint x = y;\n", "sm_90a")


def test_ptxas_reports_are_read() -> None:
    log = (
        "ptxas info : Function properties for chord_entry\n"
        "ptxas . 32 bytes stack frame, 28 bytes spill stores, 112 bytes spill loads\n"
        "ptxas info : Used 168 registers, used 1 barriers\n"
    )
    report = compiler.parse_ptxas(log)
    assert report == compiler.CompileReport(168, 32, 28, 112) and not report.is_clean
    assert not report.serialised
    slow = "ptxas info : (C7511) wgmma.mma_async instructions are serialized due to ...\n"
    clean = log.replace("32 bytes stack frame, 28", "0 bytes stack frame, 0").replace("112", "0")
    assert compiler.parse_ptxas(clean).is_clean
    assert not compiler.parse_ptxas(clean + slow).is_clean
    harmless = "ptxas info : (C7519) warpgroup.arrive is injected in around line 1 ...\n"
    assert compiler.parse_ptxas(clean + harmless).is_clean
    with pytest.raises(CompileError, match="names no registers"):
        compiler.parse_ptxas("")


@pytest.mark.field_case(8)
def test_a_driver_older_than_nvrtc_is_named_with_it() -> None:
    nvrtc = compiler.nvrtc_version()
    major = int(nvrtc.split(".")[0])
    compiler.check_driver(None)
    compiler.check_driver((major, 0))
    with pytest.raises(CompileError) as caught:
        compiler.check_driver((major - 1, 8))
    assert f"CUDA {major - 1}.8" in str(caught.value) and nvrtc in str(caught.value)


def test_digest_follows_contents_and_names_of_what_is_included(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "elsewhere" / "two"
    for root in (one, two):
        (root / "ptx").mkdir(parents=True)
        (root / "decode.cuh").write_text("#include <chord/kernels/ptx/mma.cuh>\n")
        (root / "ptx" / "mma.cuh").write_text("int b;\n")
        (root / "unused.cuh").write_text(f"// {root}\n")
    names = ("decode.cuh",)
    digest = source.digest_headers(names, one)
    assert digest == source.digest_headers(names, two)
    assert digest != source.digest_headers((*names, "unused.cuh"), one)
    (two / "ptx" / "mma.cuh").write_text("// A comment,\nint\n  b; /* and\nanother */\n")
    assert digest == source.digest_headers(names, two)
    (two / "ptx" / "mma.cuh").write_text("int c;\n")
    assert digest != source.digest_headers(names, two)
    (one / "ptx" / "mma.cuh").rename(one / "mma.cuh")
    (one / "decode.cuh").write_text("#include <chord/kernels/mma.cuh>\n")
    assert digest != source.digest_headers(names, one)


def test_key_changes_with_everything_that_changes_the_bits() -> None:
    unit = source.render(DECODE)
    key = cache.cache_key(unit, "sm_90a", "digest", "13.0.88")
    assert key == cache.cache_key(unit, "sm_90a", "digest", "13.0.88")
    others = {
        cache.cache_key(unit + " ", "sm_90a", "digest", "13.0.88"),
        cache.cache_key(unit, "sm_100a", "digest", "13.0.88"),
        cache.cache_key(unit, "sm_90a", "other", "13.0.88"),
        cache.cache_key(unit, "sm_90a", "digest", "13.1.1"),
    }
    assert len(others | {key}) == 5
    assert str(Path(compiler.INCLUDE_ROOT)) not in unit


def test_parameters_are_packed_as_c_lays_them_out() -> None:
    packer = params.INDEXED.packer
    assert packer.size == 104
    packed = packer.pack(1, 2, 3, 4, 5, 48, 4096, 7168, 0, 6, 7, 8, 160, 8, 16, 99, 990)
    assert struct.unpack_from("<5Q", packed) == (1, 2, 3, 4, 5)
    assert struct.unpack_from("<4i", packed, 40) == (48, 4096, 7168, 0)
    assert struct.unpack_from("<3Q5i", packed, 56) == (6, 7, 8, 160, 8, 16, 99, 990)


@pytest.mark.parametrize("name", ("ContiguousOffsets", "ContiguousIndices", "Masked", "RoutedDown"))
def test_a_tensor_map_lies_at_a_multiple_of_64_bytes(name: str) -> None:
    layout = params.addressing_layout(name)
    assert layout.fields[0] == ("x_map", "map") and layout.packer.size == 256
    x_map = bytes(range(128))
    numbers = range(6, 6 + len(layout.fields) - 1)
    packed = layout.packer.pack(1, 2, 3, 4, 5, 48, 4096, 7168, 0, x_map, *numbers)
    assert packed[64:192] == x_map and packed[56:64] == bytes(8)
    assert struct.unpack_from("<5Q4i", packed) == (1, 2, 3, 4, 5, 48, 4096, 7168, 0)
    table, *sizes = numbers
    assert struct.unpack_from(f"<Q{len(sizes)}i", packed, 192) == (table, *sizes)


def test_a_tensor_map_is_wanted_exactly_where_the_kernels_sort_rows() -> None:
    for name in legality.ADDRESSINGS:
        layout = params.addressing_layout(name)
        has_map = ("x_map", "map") in layout.fields
        assert has_map is (name in legality.SORTED_ADDRESSINGS)
        unit = source.render(PREFILL, name)
        belief = f"static_assert(chord::{name}::kSortedRows == {str(has_map).lower()});"
        compiler.compile_unit(_only_headers(unit) + belief, "sm_90a")


def _only_headers(unit: str) -> str:
    """Return a unit without its kernel, which would take long to compile."""
    return unit[: unit.index('extern "C"')] + TINY


class MapDriver:
    """Notes what a tensor map is to say, as numbers."""

    def __init__(self) -> None:
        self.encoded: list[tuple[object, ...]] = []
        self.result = 0

    def cuTensorMapEncodeTiled(self, target, kind, rank, address, *rest) -> int:
        dims, strides, box, steps, *modes = rest
        assert target.value % 64 == 0
        ctypes.memmove(target.value, bytes(range(128)), 128)
        arrays = [list(array) for array in (dims, strides, box, steps)]
        modes = [mode.value for mode in modes]
        self.encoded.append((kind.value, rank.value, address.value, *arrays, *modes))
        return self.result

    def cuGetErrorString(self, result, text) -> int:
        text._obj.value = b"invalid argument"
        return 0


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> Iterator[MapDriver]:
    stand_in = MapDriver()
    monkeypatch.setattr(driver, "library", lambda: stand_in)
    driver.encode_rows.cache_clear()
    yield stand_in
    driver.encode_rows.cache_clear()


def test_rows_are_described_to_the_copy_engine_once(maps: MapDriver) -> None:
    key = launch.kernel_key(PREFILL, "Masked", 0)
    for _ in range(3):
        assert launch.map_of_rows(key, 4096, 300, 7168) == bytes(range(128))
    # BF16, rank 2; no interleave, 128-byte swizzle, L2 promotion 256 bytes, zeros outside.
    numbers = (9, 2, 4096, [7168, 300], [2 * 7168], [64, 16], [1, 1], 0, 3, 3, 0)
    assert maps.encoded == [numbers]
    for change in ((8192, 300, 7168), (4096, 301, 7168), (4096, 300, 7136)):
        launch.map_of_rows(key, *change)
    assert len(maps.encoded) == 4
    maps.result = 1
    with pytest.raises(CompileError, match=r"5 rows of 64 elements at 0x2000 .*invalid argument"):
        launch.map_of_rows(key, 8192, 5, 64)


@pytest.mark.parametrize("config", [DECODE, DIRECT], ids=lambda config: config.kernel)
def test_only_prefill_needs_a_tensor_map(maps: MapDriver, config: Config) -> None:
    key = launch.kernel_key(config, "Masked", 0)
    assert launch.map_of_rows(key, 4096, 300, 7168) == bytes(128) and not maps.encoded


class StandInDriver:
    """Remembers what a launch hands to the driver."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, int, int, int, bytes]] = []
        self.result = 0

    def cuLaunchKernelEx(self, config, function, arguments, extra) -> int:
        filled = config._obj
        data = ctypes.string_at(arguments[0], 104)
        grid, smem = filled.grid_x, filled.smem_bytes
        self.launches.append((grid, filled.block_x, smem, filled.stream, data))
        return self.result

    def cuCtxGetCurrent(self, context) -> int:
        context._obj.value = 1
        return 0

    def cuGetErrorString(self, result, text) -> int:
        text._obj.value = b"out of resources"
        return 0


def test_a_launch_hands_over_grid_block_memory_stream_and_parameters(monkeypatch) -> None:
    stand_in = StandInDriver()
    monkeypatch.setattr(driver, "library", lambda: stand_in)
    prepared = launch.Launcher(launch.LoadedKernel(77, DECODE, "Indexed", 0), num_sms=132)
    values = (1, 2, 3, 4, 5, 48, 4096, 7168, 0, 6, 7, 8, 160, 8, 16, 99, 990)
    prepared.launch(1234, values)
    prepared.launch(5678, (*values[:-1], 100))
    (grid, block, smem, stream, data), second = stand_in.launches
    assert (grid, block, smem, stream) == (132, DECODE.threads(), DECODE.smem_bytes(), 1234)
    assert data == params.INDEXED.packer.pack(*values)
    assert second[3] == 5678 and struct.unpack_from("<i", second[4], 96) == (100,)
    stand_in.result = 701
    with pytest.raises(CompileError, match=r"cannot launch decode .*out of resources"):
        prepared.launch(1, values)


class Room:
    """Allocates scratch on the CPU, and remembers it."""

    def __init__(self) -> None:
        self.made: list[launch.Scratch] = []

    def allocate(self, index: int, capture: int | None, floats: int, counters: int):
        partial = torch.zeros(3, floats, dtype=torch.int32)
        region = torch.zeros(2, counters, dtype=torch.int32)
        values = tuple((partial.data_ptr(), one.data_ptr(), 9) for one in region)
        self.made.append(launch.Scratch(partial, region, capture, values, floats, counters))
        return self.made[-1]


def test_scratch_of_a_capture_is_cleared_once(monkeypatch) -> None:
    room, now = Room(), {"capture": None}
    monkeypatch.setattr(driver, "library", StandInDriver)
    monkeypatch.setattr(driver, "capture_id", lambda stream: now["capture"])
    monkeypatch.setattr(launch, "is_capturing", lambda: now["capture"] is not None)
    monkeypatch.setattr(launch, "_allocate", room.allocate)
    for name in ("_scratch", "_captured_scratch"):
        monkeypatch.setattr(launch, name, {})
    wide = dataclasses.replace(DECODE, warp_features=2 * DECODE.warp_features)
    small, large, prefill = (
        launch.Launcher(launch.LoadedKernel(77, config, addressing, 0), num_sms=3)
        for config, addressing in (
            (DECODE, "RoutedGateUp"),
            (wide, "RoutedDown"),
            (PREFILL, "RoutedDown"),
        )
    )
    nothing = launch.NOTHING_UNCLEARED

    # Outside of a capture it is filled at once, and kept.
    first, second, uncleared = launch.stages_scratch((large, small), 5)
    assert uncleared == nothing and first[0] == second[0]
    assert launch.stages_scratch((small, large), 5) == (first, second, nothing)
    assert len(room.made) == 1
    assert room.made[0].partial.eq(NO_SUM).all()

    # In a capture the caller fills it: once, and with room for both.
    for capture in (7, 8):
        now["capture"] = capture
        first, second, uncleared = launch.stages_scratch((small, large), 5)
        own = room.made[-1]
        assert (own.capture, own.floats) == (capture, wide.partial_floats())
        assert uncleared == (own.partial.data_ptr(), own.partial.numel())
        assert not own.partial.any() and first[0] == second[0] == own.partial.data_ptr()
        kept = len(room.made)
        assert launch.stages_scratch((small, large), 5) == (first, second, nothing)
        assert small.scratch_values(5) == first
        assert len(room.made) == kept

    # A layer that needs more in the same capture clears its own, a kernel alone has it filled.
    _, _, more = launch.stages_scratch((large, prefill), 5)
    grown = room.made[-1]
    assert more == (grown.partial.data_ptr(), grown.partial.numel())
    assert (grown.floats, grown.num_counters) == (wide.partial_floats(), PREFILL.counters())
    launch.forget_captured(0, 5)
    assert prefill.scratch_values(5)[0] == room.made[-1].partial.data_ptr()
    assert room.made[-1].partial.eq(NO_SUM).all()

    # A capture that has failed has no number: what is kept outside stays as it is.
    monkeypatch.setattr(driver, "capture_id", lambda stream: None)
    assert launch.stages_scratch((small, large), 5)[2] == nothing
    assert launch._scratch[0, 5] is room.made[0]

    # Outside again, what was kept there still is.
    now["capture"] = None
    assert small.scratch_values(5)[0] == room.made[0].partial.data_ptr()


def test_scratch_that_could_not_be_filled_is_not_kept(monkeypatch) -> None:
    room = Room()

    class Unfillable:
        def fill_(self, value: int) -> None:
            raise RuntimeError("out of memory")

    def allocate(*sizes: Any) -> launch.Scratch:
        return dataclasses.replace(room.allocate(*sizes), partial=Unfillable())

    monkeypatch.setattr(driver, "library", StandInDriver)
    monkeypatch.setattr(launch, "is_capturing", lambda: False)
    monkeypatch.setattr(launch, "_scratch", {})
    alone = launch.Launcher(launch.LoadedKernel(77, DECODE, "Indexed", 0), num_sms=3)
    monkeypatch.setattr(launch, "_allocate", allocate)
    with pytest.raises(RuntimeError, match="out of memory"):
        alone.scratch_values(5)
    monkeypatch.setattr(launch, "_allocate", room.allocate)
    assert alone.scratch_values(5)[0] == room.made[-1].partial.data_ptr()
    assert room.made[-1].partial.eq(NO_SUM).all()


def test_launch_config_matches_the_driver_header() -> None:
    offsets = [
        getattr(driver.LaunchConfig, name).offset for name, _ in driver.LaunchConfig._fields_
    ]
    assert offsets == [0, 4, 8, 12, 16, 20, 24, 32, 40, 48]
    assert ctypes.sizeof(driver.LaunchConfig) == 56


@pytest.mark.field_case(9)
def test_loading_inside_a_capture_asks_to_warm_up(monkeypatch) -> None:
    monkeypatch.setattr(launch, "is_capturing", lambda: True)
    with pytest.raises(CaptureError, match="warm up first"):
        launch.load(DECODE, "Indexed", 0)


def test_a_failed_load_names_driver_and_nvrtc(monkeypatch) -> None:
    def refuse(*_: object) -> int:
        raise CompileError("the driver cannot load a kernel: no binary for the card")

    monkeypatch.setattr(driver, "load_function", refuse)
    facts = SimpleNamespace(**vars(devices.known("h200")) | {"driver": (12, 4)})
    with pytest.raises(CompileError, match=r"driver speaks CUDA 12\.4, NVRTC is \d+\.\d+"):
        launch._load_cubin(b"", DECODE, facts)
