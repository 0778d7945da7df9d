"""The few functions of the CUDA driver that loading and launching need, through ctypes.

A launch is one call of `cuLaunchKernelEx` with structs that were filled before: fewer arguments to
convert than `cuLaunchKernel` has, so less time on the CPU (benchmarks/launch_overhead.py).
"""

from __future__ import annotations

import ctypes
import functools

from chord.errors import CompileError

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_CAPTURE_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h, of which only an int of the value is used."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h: grid, block, shared memory, stream, attributes."""

    _fields_ = (
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


def begin_early(config: LaunchConfig) -> ctypes.Array[LaunchAttribute]:
    """Let a launch begin while the kernel before it on the stream still runs.

    Returns:
        The attributes that `config` points at now; they have to live as long.
    """
    attributes = (LaunchAttribute * 1)()
    attributes[0].id = _PROGRAMMATIC_STREAM_SERIALIZATION
    attributes[0].value = 1
    config.attributes = ctypes.addressof(attributes)
    config.num_attributes = 1
    return attributes


@functools.cache
def library() -> ctypes.CDLL:
    """Return the driver.

    Raises:
        CompileError: There is no driver.
    """
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CompileError(
            f"the CUDA driver (libcuda.so.1) cannot be loaded: {error}; kernels need a machine "
            f"with an NVIDIA driver"
        ) from error


def describe(result: int) -> str:
    """Return the driver's words for an error code."""
    text = ctypes.c_char_p()
    if library().cuGetErrorString(result, ctypes.byref(text)) == 0 and text.value:
        return f"{text.value.decode()} (CUDA error {result})"
    return f"CUDA error {result}"


def check(result: int, what: str) -> None:
    """Raise if a driver call failed.

    Raises:
        CompileError: `result` is not 0; says what was tried.
    """
    if result != 0:
        raise CompileError(f"the driver cannot {what}: {describe(result)}")


def make_context_current(index: int) -> None:
    """Give this thread the primary context of device `index` if it has none yet."""
    driver = library()
    context, device = ctypes.c_void_p(), ctypes.c_int()
    check(driver.cuCtxGetCurrent(ctypes.byref(context)), "name the current context")
    if context.value:
        return
    check(driver.cuDeviceGet(ctypes.byref(device), index), f"find device {index}")
    check(
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        f"open the primary context of device {index}",
    )
    check(driver.cuCtxSetCurrent(context), "make the primary context current")


def load_function(cubin: bytes, entry: str, smem_bytes: int) -> int:
    """Load a cubin into the current context, eagerly, and return its entry's handle.

    The library stays loaded for the life of the process: captured graphs may hold its kernels.
    """
    driver = library()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    check(driver.cuModuleLoadData(ctypes.byref(module), cubin), "load a kernel")
    check(
        driver.cuModuleGetFunction(ctypes.byref(function), module, entry.encode()),
        f"find {entry} in a kernel",
    )
    check(
        driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, smem_bytes),
        f"give a block {smem_bytes} bytes of shared memory",
    )
    # With lazy loading the code would come to the card at the first launch, maybe inside a capture.
    if hasattr(driver, "cuFuncLoad"):
        check(driver.cuFuncLoad(function), "load a kernel's code")
    assert function.value is not None, "a loaded kernel has a handle"
    return function.value


def capture_id(stream: int) -> int | None:
    """Return the number of the capture that `stream` takes part in, or None."""
    driver = library()
    status, number = ctypes.c_int(), ctypes.c_ulonglong()
    handle = ctypes.c_void_p(stream)
    if hasattr(driver, "cuStreamGetCaptureInfo_v2"):
        none = ctypes.c_void_p(None)
        result = driver.cuStreamGetCaptureInfo_v2(
            handle, ctypes.byref(status), ctypes.byref(number), none, none, none
        )
    else:
        result = driver.cuStreamGetCaptureInfo(handle, ctypes.byref(status), ctypes.byref(number))
    check(result, "say whether a stream is being captured")
    return number.value if status.value == _CAPTURE_ACTIVE else None
