"""The kernels without a choice: route sort and top-k sum, one unit an architecture each.

They are compiled, kept and loaded as the GEMMs are, and launched with a grid that the call gives.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from dataclasses import dataclass

from chord.device import DeviceFacts, facts_of
from chord.errors import CaptureError
from chord.jit import cache, driver, launch
from chord.jit.params import Fields, packer_of
from chord.jit.source import ENTRY

WEIGHT_TYPES = ("float32", "bfloat16", "float16")
"""Types of router weights, by the number that the kernels know them by."""


@dataclass(frozen=True)
class FixedKernel:
    """One kernel: function chord::<name> of kernels/<name>.cuh.

    Attributes:
        name: Of function and header; the class that holds the constants begins with a capital.
        fields: Names and kinds of its parameter struct, in order.
        num_threads: Threads of a block.
        shared_bytes: Dynamic shared memory of a block.
        is_stage: Whether it begins while the kernel before on the stream still runs.
    """

    name: str
    fields: Fields
    num_threads: int
    shared_bytes: int
    is_stage: bool

    @property
    def packer(self) -> struct.Struct:
        """Packer of its parameter struct."""
        return packer_of(self.fields)

    def label(self) -> str:
        """Return its name for people."""
        return f"{self.name} kernel"

    def render(self) -> str:
        """Return the CUDA source of its unit."""
        words = self.name.capitalize()
        return f"""\
#include <chord/kernels/{self.name}.cuh>

static_assert(sizeof(chord::{words}Params) == {self.packer.size},
              "host and device disagree on the launch parameters: see jit/fixed.py");
static_assert(chord::{words}::kThreads == {self.num_threads},
              "host and device disagree on the threads of a block: see jit/fixed.py");
static_assert(chord::{words}::kSmemBytes == {self.shared_bytes},
              "host and device disagree on shared memory: see jit/fixed.py");

extern "C" __global__ void __launch_bounds__({self.num_threads})
{ENTRY}(const __grid_constant__ chord::{words}Params p) {{
  chord::{self.name}(p);
}}
"""


ROUTE_THREADS = 512
ROUTE_MAX_EXPERTS = 1024
_ROUTE_WARPS = ROUTE_THREADS // 32

ROUTE = FixedKernel(
    name="route",
    fields=(
        ("ids", "pointer"),
        ("expert_map", "pointer"),
        ("offsets", "pointer"),
        ("routes", "pointer"),
        ("positions", "pointer"),
        ("block_experts", "pointer"),
        ("num_rows_padded", "pointer"),
        ("ids_are_64bit", "int"),
        ("map_is_64bit", "int"),
        ("num_routes", "int"),
        ("num_ids", "int"),
        ("num_experts", "int"),
        ("block_m", "int"),
        ("capacity", "int"),
        ("num_blocks", "int"),
        ("share", "int"),
        ("reserved", "int"),
    ),
    num_threads=ROUTE_THREADS,
    shared_bytes=4 * ((_ROUTE_WARPS + 2) * ROUTE_MAX_EXPERTS + _ROUTE_WARPS),
    is_stage=False,
)

COMBINE_THREADS = 128

COMBINE = FixedKernel(
    name="combine",
    fields=(
        ("rows", "pointer"),
        ("positions", "pointer"),
        ("router_weights", "pointer"),
        ("router_weight_type", "int"),
        ("", "padding"),
        ("out", "pointer"),
        ("top_k", "int"),
        ("n", "int"),
    ),
    num_threads=COMBINE_THREADS,
    shared_bytes=0,
    is_stage=True,
)

FIXED_KERNELS = (ROUTE, COMBINE)


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

    def launch(self, stream: int, num_blocks: int, values: tuple[int, ...]) -> None:
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
    cubin = cubin_of(kernel, facts)
    with _loading:
        if key not in _loaded:
            _loaded[key] = driver.load_function(cubin.code, ENTRY, kernel.shared_bytes)
    return _loaded[key]


def cubin_of(kernel: FixedKernel, facts: DeviceFacts) -> cache.Cubin:
    """Return the compiled kernel for a card: from memory, from disk, or compiled now."""
    return cache.cubin_of_unit(kernel.render(), (f"{kernel.name}.cuh",), facts.arch, kernel.label())
