"""What an argument must be before anyone asks for its shape: a dense tensor, a whole number.

These checks come before those of `routing`, `weights` and `ops`, which know dtypes and shapes.
"""

from __future__ import annotations

import math
import operator
import reprlib
from typing import Any

import torch

from chord.errors import CaptureError, InputError


def check_tensor(name: str, value: object) -> None:
    """Refuse what is not a dense torch.Tensor: None, lists, arrays of other packages, sparse."""
    if not isinstance(value, torch.Tensor):
        raise InputError(f"{name} is {describe(value)}, not a torch.Tensor{_way_to_tensor(value)}")
    if value.layout is not torch.strided or value.is_nested:
        layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise InputError(
            f"{name} is a {layout} tensor {_shape_of(value)}; it must be dense: pass "
            f"{name}.to_dense() or the like"
        )


def check_readable(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor, any dtype and any shape, whose values the host cannot read now.

    Raises:
        InputError: It is on the meta device.
        CaptureError: Its stream is being captured: waiting would break the capture.
    """
    if tensor.device.type == "meta":
        raise InputError(
            f"{name} {list(tensor.shape)} is on the meta device and has no values; load it onto "
            f"the CPU or a GPU first"
        )
    if tensor.is_cuda and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            f"the values of {name} {list(tensor.shape)} cannot be checked while a CUDA graph is "
            f"captured, because the host would wait for the device: pass validate=False there"
        )


def whole_number(name: str, value: Any) -> int:
    """Return an argument that counts something: an int, or what Python takes for one.

    Raises:
        InputError: It is none, as 2.0, "2" and None are.
    """
    if type(value) is int:
        return value
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor raises its own kinds
        raise InputError(f"{name} is {describe(value)}; it must be a whole number") from None


def real_number(name: str, value: Any) -> float:
    """Return an argument that is a finite number: of Python, or a single one of another package.

    Raises:
        InputError: It is none, as "1", NaN and None are.
    """
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError, NotImplementedError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{name} is {describe(value)}; it must be a finite number")
    return number


def truth(name: str, value: Any) -> bool:
    """Return an argument that is a switch: True or False, of Python or of another package.

    Raises:
        InputError: It is neither.
    """
    if type(value) is bool or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise InputError(f"{name} is {describe(value)}; it must be True or False")


def usable_device(name: str, value: Any) -> torch.device:
    """Return a device that tensors can be put on.

    Raises:
        InputError: PyTorch knows no such device, has it not here, or it holds no values.
    """
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as error:
        known = "" if isinstance(error, TypeError) else f": {str(error).splitlines()[0]}"
        raise InputError(f"{name} is {describe(value)}, no device of PyTorch{known}") from None
    if device.type == "meta":
        raise InputError(f"{name}={device} holds no values; name the CPU or a GPU")
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda" and (count == 0 or (device.index or 0) >= count):
        raise InputError(f"{name}={device} is not here: PyTorch sees {count} CUDA GPUs")
    return device


def describe(value: object) -> str:
    """Say what an unexpected argument is, in a few words with its value or its shape."""
    if value is None:
        return "None"
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        return f"a {name} of {dtype} {list(shape)}"
    return f"the {name} {reprlib.repr(value)}"


def _shape_of(tensor: torch.Tensor) -> str:
    return "" if tensor.is_nested else str(list(tensor.shape))


def _way_to_tensor(value: object) -> str:
    if hasattr(value, "__array_interface__"):
        return "; pass torch.from_numpy(...) of it"
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], torch.Tensor):
            return "; pass torch.stack(...) of it"
        return "; pass torch.tensor(...) of it"
    return ""
