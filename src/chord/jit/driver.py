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
_BFLOAT16 = 9  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
_INTERLEAVE_NONE = 0  # CU_TENSOR_MAP_INTERLEAVE_NONE
_SWIZZLE_128B = 3  # CU_TENSOR_MAP_SWIZZLE_128B
_PROMOTION_256B = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B
_FILL_ZEROS = 0  # CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE

TENSOR_MAP_BYTES = 128
_TENSOR_MAP_ALIGNMENT = 64
BOX_ROWS, BOX_K = 16, 64
"""What one copy through a tensor map of rows of x brings: kernels/smem_descriptor.cuh."""


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


@functools.lru_cache(maxsize=4096)
def encode_rows(address: int, rows: int, k: int) -> bytes:
    """Return the tensor map of a matrix, for copies of BOX_ROWS rows by BOX_K elements.

    It says nothing but these numbers, so it is kept: memory that comes to the same address later
    has the same map.

    Args:
        address: Where BF16 [rows, k] lies on a device; a multiple of 16.
        rows: Rows, at least 1; kernels get zeros for those behind.
        k: Elements of a row, a multiple of 8; kernels get zeros for those behind.

    Raises:
        CompileError: The driver refuses.
    """
    room = ctypes.create_string_buffer(TENSOR_MAP_BYTES + _TENSOR_MAP_ALIGNMENT)
    offset = -ctypes.addressof(room) % _TENSOR_MAP_ALIGNMENT
    check(
        library().cuTensorMapEncodeTiled(
            ctypes.c_void_p(ctypes.addressof(room) + offset),
            ctypes.c_int(_BFLOAT16),
            ctypes.c_uint(2),
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * 2)(k, rows),
            (ctypes.c_uint64 * 1)(2 * k),  # bytes from row to row
            (ctypes.c_uint32 * 2)(BOX_K, BOX_ROWS),
            (ctypes.c_uint32 * 2)(1, 1),  # every element
            ctypes.c_int(_INTERLEAVE_NONE),
            ctypes.c_int(_SWIZZLE_128B),
            ctypes.c_int(_PROMOTION_256B),
            ctypes.c_int(_FILL_ZEROS),
        ),
        f"describe {rows} rows of {k} elements at {address:#x} to the copy engine",
    )
    return room.raw[offset : offset + TENSOR_MAP_BYTES]


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
