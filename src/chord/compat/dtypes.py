"""Number types as humming names them. Chord computes with three; the others can be named."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from chord.errors import InputError


@dataclass(frozen=True)
class DataType:
    """A number type.

    Attributes:
        name: For example "uint4", "bfloat16", "float8e4m3".
        num_bits: Bits of a number.
        is_floating_point_type: Whether it has an exponent.
        is_signed: Whether it has a sign.
    """

    name: str
    num_bits: int
    is_floating_point_type: bool
    is_signed: bool

    def __str__(self) -> str:
        return self.name

    @classmethod
    def from_str(cls, name: str) -> DataType:
        """Return the type of a name.

        Raises:
            InputError: There is no such type.
        """
        found = TYPES.get(name)
        if found is None:
            raise InputError(f"number type {name!r} is not known; known are {', '.join(TYPES)}")
        return found

    @classmethod
    def from_torch_dtype(cls, dtype: torch.dtype) -> DataType:
        """Return the type of a torch dtype.

        Raises:
            InputError: There is none.
        """
        name = str(dtype).removeprefix("torch.")
        return cls.from_str(
            {"float8_e4m3fn": "float8e4m3", "float8_e5m2": "float8e5m2"}.get(name, name)
        )

    @classmethod
    def from_any(cls, value: Any) -> DataType:
        """Return the type of a torch dtype, a name, or a type itself."""
        if isinstance(value, DataType):
            return value
        return (
            cls.from_torch_dtype(value) if isinstance(value, torch.dtype) else cls.from_str(value)
        )


def _parse(name: str) -> DataType:
    if name == "bfloat16":
        return DataType(name, 16, True, True)
    match = re.fullmatch(r"(u?int|float)(\d+)(?:e\d+m\d+)?", name)
    assert match is not None, f"{name} is made of a kind and bits"
    return DataType(name, int(match[2]), match[1] == "float", match[1] != "uint")


_NAMES = (
    *("float4e0m3", "float4e2m1", "float6e2m3", "float6e3m2"),
    *("float8e3m4", "float8e4m3", "float8e5m2", "float8e8m0"),
    *("float16", "bfloat16", "float32"),
    *("int4", "int8"),
    *("uint2", "uint3", "uint4", "uint5", "uint6", "uint7", "uint8"),
)
TYPES: dict[str, DataType] = {name: _parse(name) for name in _NAMES}
"""All types by name."""
