"""Loading compiled kernels and launching them with little work on the CPU.

`Launcher` is one kernel on one device for one thread: its structs are filled once, a launch packs
the pointers and sizes and calls the driver. It knows nothing of shapes: `ops` has checked them.

Scratch (partial sums and counters) belongs to a stream, so two streams never share it, and within a
stream launches follow each other. Kernels leave no sum and counters of zero, so a stream
handle that is destroyed and used again finds its scratch fit for use. A captured graph may be
replayed on any stream, so every capture takes scratch of its own from the graph's memory pool and
clears it in the graph: once a capture and stream, and again where a later kernel needs more, not
once a launch. Where a whole layer needs it first, its route sort does so (`stages_scratch`).
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from chord import device as devices
from chord.errors import CaptureError, CompileError
from chord.jit import cache, compiler, driver
from chord.jit.params import COUNTERS_REGIONS, addressing_layout
from chord.jit.source import ENTRY
from chord.plan.config import NO_SUM, Config, shipped_configs


def _public_current_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


# What torch's own compiled code calls; the public functions, which stand in where a release of
# torch lacks one of these, cost ten times as much.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""Return torch's current CUDA device."""
current_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", _public_current_stream
)
"""Return the handle of torch's current stream on a device."""
is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
"""Return whether torch's current stream is being captured into a graph."""


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel whose code lies on a device.

    Attributes:
        function: The driver's handle.
        config: What it was compiled from.
        addressing: Its addressing type.
        index: The device.
    """

    function: int
    config: Config
    addressing: str
    index: int


_loaded: dict[tuple[Config, str, int], LoadedKernel] = {}
_loading = threading.Lock()


def load(config: Config, addressing: str, index: int) -> LoadedKernel:
    """Return the kernel of `config` on device `index`, compiled and loaded if need be.

    Raises:
        CaptureError: It is not loaded yet and the current stream is being captured.
        CompileError: It does not compile or load, or CHORD_JIT=cached forbids compiling.
    """
    key = (config, addressing, index)
    kernel = _loaded.get(key)
    if kernel is not None:
        return kernel
    if is_capturing():
        raise CaptureError(
            f"{config.label()} {addressing} is not loaded on device {index}, and a kernel cannot "
            f"be loaded while a CUDA graph is captured: warm up first, by one call with as many "
            f"rows outside of capture"
        )
    facts = devices.facts_of(index)
    compiler.check_driver(facts.driver)
    cubin = cache.cubin_for(config, facts.arch, addressing)
    with _loading:
        kernel = _loaded.get(key)
        if kernel is None:
            kernel = LoadedKernel(_load_cubin(cubin.code, config, facts), config, addressing, index)
            _loaded[key] = kernel
    return kernel


def _load_cubin(code: bytes, config: Config, facts: devices.DeviceFacts) -> int:
    try:
        return driver.load_function(code, ENTRY, config.smem_bytes())
    except CompileError as error:
        spoken = "unknown" if facts.driver is None else ".".join(map(str, facts.driver))
        raise CompileError(
            f"{config.label()} for {facts.arch} on {facts.name}: {error}; the driver speaks CUDA "
            f"{spoken}, NVRTC is {compiler.nvrtc_version()}"
        ) from error


class Launcher:
    """One loaded kernel, ready to be launched by one thread.

    Args:
        kernel: The kernel.
        num_sms: Blocks of the grid; kernels are persistent.
    """

    def __init__(self, kernel: LoadedKernel, num_sms: int) -> None:
        driver.make_context_current(kernel.index)
        layout = addressing_layout(kernel.addressing)
        packer = layout.packer
        self.kernel = kernel
        self._index = kernel.index
        # Floats of partial sums, of each block, and counters that it needs as scratch.
        self.room = (kernel.config.partial_floats(), kernel.config.counters())
        self._params = ctypes.create_string_buffer(packer.size)
        self._pack = functools.partial(packer.pack_into, self._params, 0)
        # The driver takes an array of pointers to arguments; ours has one.
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self._params))
        self._config = driver.LaunchConfig(
            grid_x=num_sms,
            grid_y=1,
            grid_z=1,
            block_x=kernel.config.threads(),
            block_y=1,
            block_z=1,
            smem_bytes=kernel.config.smem_bytes(),
        )
        self._counters_region = layout.counters_region
        self._attributes = driver.begin_early(self._config) if layout.is_stage else None
        launch = driver.library().cuLaunchKernelEx
        self._call = functools.partial(
            launch,
            ctypes.byref(self._config),
            ctypes.c_void_p(kernel.function),
            self._arguments,
            None,
        )

    def scratch_values(self, stream: int) -> tuple[int, int, int]:
        """Return what a launch on `stream` is told of its scratch and its card.

        These are the fields `partial`, `counters` and `l2_share` of the kernel's parameters.

        Args:
            stream: Handle of torch's current stream on the kernel's device, the current one.
        """
        floats, counters = self.room
        capture = driver.capture_id(stream) if is_capturing() else None
        scratch = (_scratch if capture is None else _captured_scratch).get((self._index, stream))
        # Asked here and in `stages_scratch`: in a function it would cost every warm call another.
        if (
            scratch is None
            or scratch.capture != capture
            or scratch.floats < floats
            or scratch.num_counters < counters
        ):
            scratch = _renew(self._index, stream, capture, floats, counters)
        return scratch.values[self._counters_region]

    def launch(self, stream: int, values: tuple[float | bytes, ...]) -> None:
        """Enqueue the kernel on `stream`, which is of the kernel's device.

        Args:
            stream: Handle of the stream.
            values: All fields of the kernel's parameters, in the order of `jit.params`.

        Raises:
            CompileError: The driver refuses the launch.
        """
        self._pack(*values)
        self._config.stream = stream
        result = self._call()
        if result != 0:
            driver.check(result, f"launch {self.kernel.config.label()}")


@dataclass(frozen=True, eq=False)
class KernelKey:
    """Which kernel, on which device. `kernel_key` makes them: one object for equal fields.

    So keys are compared by identity, and finding a launcher hashes no configuration.
    """

    config: Config
    addressing: str
    index: int


@functools.cache
def kernel_key(config: Config, addressing: str, index: int) -> KernelKey:
    """Return the key of a kernel on device `index`."""
    return KernelKey(config, addressing, index)


_NO_MAP = bytes(driver.TENSOR_MAP_BYTES)


def map_of_rows(key: KernelKey, address: int, rows: int, k: int) -> bytes:
    """Return what a kernel's parameters say of its rows of x where they lie sorted.

    Args:
        key: The kernel; all but prefill copy rows by their addresses and read no map.
        address: Where BF16 [rows, k] lies on the kernel's device.
        rows: Rows, at least 1.
        k: Elements of a row.

    Raises:
        CompileError: The driver refuses the map.
    """
    return driver.encode_rows(address, rows, k) if key.config.kernel == "prefill" else _NO_MAP


class _Thread(threading.local):
    """What one thread has prepared."""

    def __init__(self) -> None:
        self.launchers: dict[KernelKey, Launcher] = {}


_thread = _Thread()


def launcher(key: KernelKey) -> Launcher:
    """Return this thread's launcher of a kernel, whose device is the current one.

    Raises:
        CaptureError, CompileError: As `load`.
    """
    found = _thread.launchers.get(key)
    if found is None:
        kernel = load(key.config, key.addressing, key.index)
        found = Launcher(kernel, devices.facts_of(key.index).num_sms)
        _thread.launchers[key] = found
    return found


@dataclass(frozen=True)
class Scratch:
    """What the blocks of a launch tell each other, for one stream.

    Attributes:
        partial: int32, [num_sms, floats]: decode's partial sums by their bits, NO_SUM between
            launches.
        counters: int32, [regions, num_counters], zero between launches: prefill's; a region for
            each of the kernels that may run at the same time on a stream.
        capture: Number of the capture that it was allocated in, or None.
        values: Addresses of partial and counters, and bytes of L2 for each multiprocessor: for
            each region what `Launcher.scratch_values` returns.
        floats: Floats of partial sums that a block finds room for.
        num_counters: Counters of a region.
    """

    partial: torch.Tensor
    counters: torch.Tensor
    capture: int | None
    values: tuple[tuple[int, int, int], ...]
    floats: int
    num_counters: int


_scratch: dict[tuple[int, int], Scratch] = {}
_captured_scratch: dict[tuple[int, int], Scratch] = {}


class Uncleared(NamedTuple):
    """Scratch for partial sums that the caller has to fill with NO_SUM before they are used.

    Attributes:
        address: Where it begins, 16-byte aligned.
        words: Words of 32 bits, a multiple of 4; 0 if there is nothing to fill.
    """

    address: int
    words: int


NOTHING_UNCLEARED = Uncleared(0, 0)


def stages_scratch(
    stages: tuple[Launcher, Launcher], stream: int
) -> tuple[tuple[int, int, int], tuple[int, int, int], Uncleared]:
    """Return `Launcher.scratch_values` of two kernels, and what they must find cleared.

    A kernel before them that has little to do clears it for less than a launch of its own costs.

    Args:
        stages: Launchers of one device.
        stream: Handle of torch's current stream on it, the current one.
    """
    first, second = stages
    uncleared = NOTHING_UNCLEARED
    # None also for a capture that has failed already, in which nothing would be cleared any more.
    capture = driver.capture_id(stream) if is_capturing() else None
    if capture is not None:
        index = first.kernel.index
        floats, counters = map(max, first.room, second.room)
        scratch = _captured_scratch.get((index, stream))
        if (
            scratch is None
            or scratch.capture != capture
            or scratch.floats < floats
            or scratch.num_counters < counters
        ):
            scratch = _renew(index, stream, capture, floats, counters, is_filled=False)
            uncleared = Uncleared(scratch.partial.data_ptr(), scratch.partial.numel())
    return first.scratch_values(stream), second.scratch_values(stream), uncleared


def forget_captured(index: int, stream: int) -> None:
    """Forget a capture's scratch, which has not been cleared after all."""
    _captured_scratch.pop((index, stream), None)


def _renew(
    index: int,
    stream: int,
    capture: int | None,
    floats: int,
    counters: int,
    *,
    is_filled: bool = True,
) -> Scratch:
    """Return new scratch of a stream, with room for what it had room for in this capture too.

    It is found by others when it has been filled, or, if that is left to the caller, at once.
    """
    kept, key = (_scratch if capture is None else _captured_scratch), (index, stream)
    last = kept.get(key)
    if last is not None and last.capture == capture:
        floats, counters = max(floats, last.floats), max(counters, last.num_counters)
    elif last is not None:
        # The last capture's memory goes back to its pool, where the next graph may take it.
        del kept[key], last
    scratch = _allocate(index, capture, floats, counters)
    if is_filled:
        scratch.partial.fill_(NO_SUM)
    kept[key] = scratch
    return scratch


def _allocate(index: int, capture: int | None, floats: int, counters: int) -> Scratch:
    """Return scratch for a kernel; outside of a capture, for the shipped configurations as well.

    A graph clears its scratch at every replay, and so has no more than its kernels need. What
    `partial` holds is left open.
    """
    facts = devices.facts_of(index)
    if capture is None:
        configs = shipped_configs(facts.arch)
        floats = max(floats, *(config.partial_floats() for config in configs))
        counters = max(counters, *(config.counters() for config in configs))
    where = torch.device("cuda", index)
    partial = torch.empty(facts.num_sms, floats, dtype=torch.int32, device=where)
    region = torch.zeros(COUNTERS_REGIONS, counters, dtype=torch.int32, device=where)
    l2_share = facts.l2_bytes // facts.num_sms
    values = tuple((partial.data_ptr(), one.data_ptr(), l2_share) for one in region)
    return Scratch(partial, region, capture, values, floats, counters)
