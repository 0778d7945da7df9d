"""What Chord does not do under humming's names, refused with the way out.

An engine that finds `humming` may choose it for any quantization, and a choice is not made twice:
so a refusal has to say which flag makes the engine choose otherwise.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

from chord.errors import InputError, UnsupportedError

_T = TypeVar("_T")

WAY_OUT = (
    "`humming` is Chord's here, because humming-kernels is not installed: it serves W4A16 experts "
    "(symmetric INT4, groups of 32, 64 or 128 along K or one scale a row, BF16). Install "
    "humming-kernels, or let vLLM choose another kernel: `--moe-backend marlin` for experts; for "
    "dense layers `--linear-backend marlin`, or VLLM_DISABLED_KERNELS=HummingLinearKernel,"
    "HummingFP8ScaledMMLinearKernel,HummingInt8ScaledMMLinearKernel,HummingNvFp4LinearKernel,"
    "HummingMxFp4LinearKernel,HummingMxFp6LinearKernel,HummingMxfp8LinearKernel"
)


def refuse(what: str) -> NoReturn:
    """Say what is not done, and what to do instead."""
    raise UnsupportedError(f"{what} is not what Chord does; {WAY_OUT}")


def required(name: str, value: _T | None, why: str) -> _T:
    """Return an operand that a call cannot do without.

    Raises:
        InputError: It is None.
    """
    if value is None:
        raise InputError(f"{name} is missing: {why}")
    return value


def refusing_function(name: str) -> Any:
    """Make a function of humming's that refuses to run."""

    def function(*_: Any, **__: Any) -> NoReturn:
        refuse(f"humming's {name}")

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Refuse: Chord has no {name}."
    return function


def refusing_class(name: str, base: type = object) -> Any:
    """Make a class of humming's that refuses to be made; isinstance finds no object of it."""

    def __init__(self: Any, *_: Any, **__: Any) -> None:
        refuse(f"humming's {name}")

    return type(name, (base,), {"__init__": __init__, "__doc__": f"Refused: Chord has no {name}."})
