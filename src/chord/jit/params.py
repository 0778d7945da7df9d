"""What a launch passes to a kernel, as bytes: the host's mirror of kernels/params.cuh.

One table of fields an addressing type, in the order of the C++ struct. `struct` in its native mode
lays fields out as C does, and every rendered unit asserts the size.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from chord.errors import InputError

_CODES = {"pointer": "P", "int": "i"}

GEMM_FIELDS = (
    ("x", "pointer"),
    ("weight", "pointer"),
    ("out", "pointer"),
    ("partial", "pointer"),
    ("flags", "pointer"),
    ("num_experts", "int"),
    ("n", "int"),
    ("k", "int"),
    ("reserved", "int"),
)


@dataclass(frozen=True)
class AddressingLayout:
    """One addressing type of the kernels.

    Attributes:
        name: The C++ type, chord::<name>.
        header: The header that defines it, below chord/kernels.
        fields: Names and kinds of <name>::Params, in order.
    """

    name: str
    header: str
    fields: tuple[tuple[str, str], ...]

    @property
    def packer(self) -> struct.Struct:
        """Packer of chord::Params<name>: the GEMM's fields, then the addressing's."""
        kinds = [kind for _, kind in (*GEMM_FIELDS, *self.fields)]
        # "0P" pads the end to the alignment of a pointer, as C does.
        return struct.Struct("@" + "".join(_CODES[kind] for kind in kinds) + "0P")


INDEXED = AddressingLayout(
    name="Indexed",
    header="addressing/indexed.cuh",
    fields=(
        ("row_ids", "pointer"),
        ("expert_ids", "pointer"),
        ("num_rows_padded", "pointer"),
        ("num_routes", "int"),
        ("top_k", "int"),
        ("block_m", "int"),
        ("num_blocks", "int"),
    ),
)

_CONTIGUOUS_FIELDS = (
    ("table", "pointer"),
    ("is_64bit", "int"),
    ("num_experts", "int"),
    ("num_rows", "int"),
)
CONTIGUOUS_OFFSETS = AddressingLayout(
    name="ContiguousOffsets",
    header="addressing/contiguous.cuh",
    fields=_CONTIGUOUS_FIELDS,
)
CONTIGUOUS_INDICES = AddressingLayout(
    name="ContiguousIndices",
    header="addressing/contiguous.cuh",
    fields=_CONTIGUOUS_FIELDS,
)
MASKED = AddressingLayout(
    name="Masked",
    header="addressing/masked.cuh",
    fields=(
        ("counts", "pointer"),
        ("num_experts", "int"),
        ("max_rows", "int"),
    ),
)

_LAYOUTS = {
    layout.name: layout for layout in (INDEXED, CONTIGUOUS_OFFSETS, CONTIGUOUS_INDICES, MASKED)
}


def addressing_layout(name: str) -> AddressingLayout:
    """Return the layout of an addressing type by its name.

    Raises:
        InputError: There is no such type.
    """
    if name not in _LAYOUTS:
        raise InputError(f"addressing {name!r} is not one of {', '.join(_LAYOUTS)}")
    return _LAYOUTS[name]
