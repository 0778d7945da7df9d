"""Loading compiled kernels and launching them with little work on the CPU.

`Launcher` is one kernel on one device for one thread: its structs are filled once, a launch packs
the pointers and sizes and calls the driver. It knows nothing of shapes: `ops` has checked them.

Scratch (partial sums, flags and counters) belongs to a stream, so two streams never
share it, and within a stream launches follow each other. Kernels leave the flags zero, so a stream
handle that is destroyed and used again finds its scratch fit for use. A captured graph may be
replayed on any stream, so every capture takes scratch of its own from the graph's memory pool and
zeroes its flags in the graph: once a capture and stream, not once a launch.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from dataclasses import dataclass

import torch

from chord import device as devices
from chord.errors import CaptureError, CompileError
from chord.jit import cache, compiler, driver
from chord.jit.params import addressing_layout
from chord.jit.source import ENTRY
from chord.plan.config import Config, shipped_configs

# torch's own compiled code reads streams through these; the public calls cost ten times as much.
_current_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


def current_stream(index: int) -> int:
    """Return the handle of torch's current stream on device `index`."""
    if _current_raw_stream is not None:
        return int(_current_raw_stream(index))
    return int(torch.cuda.current_stream(index).cuda_stream)


def is_capturing() -> bool:
    """Return whether torch's current stream is being captured into a graph."""
    if _is_capturing is not None:
        return bool(_is_capturing())
    return torch.cuda.is_current_stream_capturing()


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
        packer = addressing_layout(kernel.addressing).packer
        self.kernel = kernel
        self._params = ctypes.create_string_buffer(packer.size)
        self._pack = packer.pack_into
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
        launch = driver.library().cuLaunchKernelEx
        self._call = functools.partial(
            launch,
            ctypes.byref(self._config),
            ctypes.c_void_p(kernel.function),
            self._arguments,
            None,
        )

    def launch(self, stream: int, values: tuple[int, ...]) -> None:
        """Enqueue the kernel on `stream`, which is of the kernel's device.

        Args:
            stream: Handle of the stream.
            values: All fields of the kernel's parameters, in the order of `jit.params`.

        Raises:
            CompileError: The driver refuses the launch.
        """
        self._pack(self._params, 0, *values)
        self._config.stream = stream
        result = self._call()
        if result != 0:
            driver.check(result, f"launch {self.kernel.config.label()}")


class _Thread(threading.local):
    """What one thread has prepared."""

    def __init__(self) -> None:
        self.launchers: dict[tuple[Config, str, int], Launcher] = {}


_thread = _Thread()


def launcher(config: Config, addressing: str, index: int) -> Launcher:
    """Return this thread's launcher of a kernel on device `index`, which is the current one.

    Raises:
        CaptureError, CompileError: As `load`.
    """
    key = (config, addressing, index)
    found = _thread.launchers.get(key)
    if found is None:
        kernel = load(config, addressing, index)
        found = Launcher(kernel, devices.facts_of(index).num_sms)
        _thread.launchers[key] = found
    return found


@dataclass(frozen=True)
class Scratch:
    """What the blocks of a launch tell each other, for one stream.

    Attributes:
        partial: fp32, [num_sms, floats of a block]: decode's partial sums.
        flags: int32, [num_sms, warps], zero between launches: decode's flags, prefill's counters.
        capture: Number of the capture that it was allocated in, or None.
    """

    partial: torch.Tensor
    flags: torch.Tensor
    capture: int | None = None

    @functools.cached_property
    def pointers(self) -> tuple[int, int]:
        """Addresses of partial and flags."""
        return self.partial.data_ptr(), self.flags.data_ptr()

    def fits(self, config: Config) -> bool:
        """Return whether a launch of `config` finds room."""
        return (
            config.partial_floats() <= self.partial.shape[1] and config.warps <= self.flags.shape[1]
        )


_scratch: dict[tuple[int, int], Scratch] = {}
_captured_scratch: dict[tuple[int, int], Scratch] = {}


def scratch_pointers(config: Config, index: int, stream: int) -> tuple[int, int]:
    """Return the addresses of partial sums and flags for a launch on torch's current stream.

    Args:
        config: What will be launched.
        index: The current device.
        stream: Handle of its current stream.
    """
    key = (index, stream)
    if is_capturing():
        number = driver.capture_id(stream)
        scratch = _captured_scratch.get(key)
        if scratch is None or scratch.capture != number or not scratch.fits(config):
            # Gives the last capture's memory back to its pool, where the next graph may take it.
            _captured_scratch.pop(key, None)
            scratch = _captured_scratch[key] = _allocate(config, index, number)
    else:
        scratch = _scratch.get(key)
        if scratch is None or not scratch.fits(config):
            scratch = _scratch[key] = _allocate(config, index, None)
    return scratch.pointers


def _allocate(config: Config, index: int, capture: int | None) -> Scratch:
    """Return scratch for the largest shipped configuration, and for `config`."""
    facts = devices.facts_of(index)
    shipped = shipped_configs(facts.arch)
    floats = max(c.partial_floats() for c in (config, *shipped))
    warps = max(c.warps for c in (config, *shipped))
    where = torch.device("cuda", index)
    return Scratch(
        partial=torch.empty(facts.num_sms, floats, dtype=torch.float32, device=where),
        flags=torch.zeros(facts.num_sms, warps, dtype=torch.int32, device=where),
        capture=capture,
    )
