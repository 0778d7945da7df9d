"""Launching the kernels without a choice, route sort and top-k sum, with the caller's grid."""

from __future__ import annotations

import ctypes
import functools
import threading

from chord.device import facts_of
from chord.errors import CaptureError
from chord.jit import cache, driver, launch
from chord.jit.params import FixedKernel
from chord.jit.source import ENTRY


class FixedLauncher:
    """One loaded kernel on one device, ready to be launched by one thread."""

    def __init__(self, kernel: FixedKernel, index: int) -> None:
        function = _load(kernel, index)
        packer = kernel.packer
        self._kernel = kernel
        self._params = ctypes.create_string_buffer(packer.size)
        self._pack = functools.partial(packer.pack_into, self._params, 0)
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self._params))
        self._config = driver.LaunchConfig(
            grid_x=1,
            grid_y=1,
            grid_z=1,
            block_x=kernel.num_threads,
            block_y=1,
            block_z=1,
            smem_bytes=kernel.shared_bytes,
        )
        self._attributes = driver.begin_early(self._config) if kernel.is_stage else None
        self._call = functools.partial(
            driver.library().cuLaunchKernelEx,
            ctypes.byref(self._config),
            ctypes.c_void_p(function),
            self._arguments,
            None,
        )

    def launch(self, stream: int, num_blocks: int, values: tuple[int | float, ...]) -> None:
        """Enqueue the kernel on `stream`, which is of the kernel's device, the current one.

        Args:
            stream: Handle of the stream.
            num_blocks: Blocks of the grid.
            values: All fields of the kernel's parameters, in order.

        Raises:
            CompileError: The driver refuses the launch.
        """
        self._pack(*values)
        self._config.stream = stream
        self._config.grid_x = num_blocks
        result = self._call()
        if result != 0:
            driver.check(result, f"launch the {self._kernel.label()}")


class _Thread(threading.local):
    """What one thread has prepared."""

    def __init__(self) -> None:
        self.launchers: dict[tuple[str, int], FixedLauncher] = {}


_thread = _Thread()
_loaded: dict[tuple[str, int], int] = {}
_loading = threading.Lock()


def fixed_launcher(kernel: FixedKernel, index: int) -> FixedLauncher:
    """Return this thread's launcher of a kernel, whose device is the current one.

    Raises:
        CaptureError: It is not loaded yet and the current stream is being captured.
        CompileError: It does not compile or load, or CHORD_JIT=cached forbids compiling.
    """
    key = (kernel.name, index)
    found = _thread.launchers.get(key)
    if found is None:
        found = _thread.launchers[key] = FixedLauncher(kernel, index)
    return found


def _load(kernel: FixedKernel, index: int) -> int:
    driver.make_context_current(index)
    key = (kernel.name, index)
    function = _loaded.get(key)
    if function is not None:
        return function
    if launch.is_capturing():
        raise CaptureError(
            f"the {kernel.label()} is not loaded on device {index}, and a kernel cannot be loaded "
            f"while a CUDA graph is captured: warm up first, by one call outside of capture"
        )
    facts = facts_of(index)
    cubin = cache.cubin_for(kernel, facts.arch, "")
    with _loading:
        if key not in _loaded:
            _loaded[key] = driver.load_function(cubin.code, ENTRY, kernel.shared_bytes)
    return _loaded[key]
