"""What a launch passes to a kernel, as bytes: the host's mirror of kernels/params.cuh.

One table of fields an addressing type, in the order of the C++ struct. `struct` in its native mode
lays fields out as C does, and every rendered unit asserts the size.
"""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass

from chord.errors import InputError

_CODES = {"pointer": "P", "int": "i", "float": "f", "padding": "4x", "map": "128s"}
_MAP_ALIGNMENT = 64

Fields = tuple[tuple[str, str], ...]
"""Names and kinds of a C++ struct's fields, in order; a padding has no value."""


def packer_of(fields: Fields) -> struct.Struct:
    """Return the packer of a struct with these fields."""
    code = "@"
    for _, kind in fields:
        if kind == "map":
            code += _pad(code)
        code += _CODES[kind]
    # "0P" pads the end to the alignment of a pointer, as C does.
    code += "0P"
    if any(kind == "map" for _, kind in fields):
        code += _pad(code)
    return struct.Struct(code)


def _pad(code: str) -> str:
    """Return the padding up to the alignment of a tensor map, which `struct` does not know."""
    return f"{-struct.calcsize(code) % _MAP_ALIGNMENT}x"


GEMM_FIELDS = (
    ("x", "pointer"),
    ("weight", "pointer"),
    ("out", "pointer"),
    ("partial", "pointer"),
    ("counters", "pointer"),
    ("l2_share", "int"),
    ("num_experts", "int"),
    ("n", "int"),
    ("k", "int"),
)


@dataclass(frozen=True)
class AddressingLayout:
    """One addressing type of the kernels.

    Attributes:
        name: The C++ type, chord::<name>.
        header: The header that defines it, below chord/kernels.
        fields: Names and kinds of <name>::Params, in order. Where rows of x lie sorted, the first
            is their tensor map, which only prefill reads.
        is_stage: Whether its kernels begin while the one before on the stream still runs
            (kernels/stage.cuh).
        counters_region: Which counters of the stream's scratch its kernels use. A stage that
            touches its counters before it waits needs others than the stage before it.
    """

    name: str
    header: str
    fields: Fields
    is_stage: bool = False
    counters_region: int = 0

    @property
    def packer(self) -> struct.Struct:
        """Packer of chord::Params<name>: the GEMM's fields, then the addressing's."""
        return packer_of((*GEMM_FIELDS, *self.fields))


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
        ("num_positions", "int"),
    ),
)

_CONTIGUOUS_FIELDS = (
    ("x_map", "map"),
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
        ("x_map", "map"),
        ("counts", "pointer"),
        ("num_experts", "int"),
        ("max_rows", "int"),
    ),
)

ROUTED_GATE_UP = AddressingLayout(
    name="RoutedGateUp",
    header="addressing/routed.cuh",
    fields=(
        ("offsets", "pointer"),
        ("routes", "pointer"),
        ("router_weights", "pointer"),
        ("router_weight_type", "int"),
        ("", "padding"),
        ("power_scale", "float"),
        ("beta", "float"),
        ("limit", "float"),
        ("num_experts", "int"),
        ("top_k", "int"),
    ),
    is_stage=True,
)
ROUTED_GATE_UP_WEIGHTED = dataclasses.replace(ROUTED_GATE_UP, name="RoutedGateUpWeighted")
ROUTED_DOWN = AddressingLayout(
    name="RoutedDown",
    header="addressing/routed.cuh",
    fields=(
        ("x_map", "map"),
        ("offsets", "pointer"),
        ("num_experts", "int"),
    ),
    is_stage=True,
    counters_region=1,
)

_LAYOUTS = {
    layout.name: layout
    for layout in (
        INDEXED,
        CONTIGUOUS_OFFSETS,
        CONTIGUOUS_INDICES,
        MASKED,
        ROUTED_GATE_UP,
        ROUTED_GATE_UP_WEIGHTED,
        ROUTED_DOWN,
    )
}
COUNTERS_REGIONS = 1 + max(layout.counters_region for layout in _LAYOUTS.values())


def addressing_layout(name: str) -> AddressingLayout:
    """Return the layout of an addressing type by its name.

    Raises:
        InputError: There is no such type.
    """
    if name not in _LAYOUTS:
        raise InputError(f"addressing {name!r} is not one of {', '.join(_LAYOUTS)}")
    return _LAYOUTS[name]


WEIGHT_TYPES = ("float32", "bfloat16", "float16")
"""Types of router weights, by the number that the kernels know them by."""


@dataclass(frozen=True)
class FixedKernel:
    """A kernel without a choice, one unit an architecture: chord::<name> of kernels/<name>.cuh.

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

    def threads(self) -> int:
        """Return the threads of a block."""
        return self.num_threads

    def label(self) -> str:
        """Return its name for people."""
        return f"{self.name} kernel"


ROUTE_THREADS = 512
ROUTE_MAX_EXPERTS = 1024
_ROUTE_WARPS = ROUTE_THREADS // 32

_ROUTE_IDS = (
    ("ids", "pointer"),
    ("expert_map", "pointer"),
    ("ids_are_64bit", "int"),
    ("map_is_64bit", "int"),
    ("num_routes", "int"),
    ("num_ids", "int"),
    ("num_experts", "int"),
    ("share", "int"),
)

COUNT = FixedKernel(
    name="count",
    fields=(*_ROUTE_IDS, ("counts", "pointer")),
    num_threads=ROUTE_THREADS,
    shared_bytes=4 * ROUTE_MAX_EXPERTS,
    is_stage=False,
)

ROUTE = FixedKernel(
    name="route",
    fields=(
        *_ROUTE_IDS,
        ("counts", "pointer"),
        ("offsets", "pointer"),
        ("routes", "pointer"),
        ("positions", "pointer"),
        ("block_experts", "pointer"),
        ("num_rows_padded", "pointer"),
        ("block_m", "int"),
        ("capacity", "int"),
        ("num_blocks", "int"),
        ("sorting_blocks", "int"),
        ("uncleared", "pointer"),
        ("uncleared_words", "int"),
        ("cleared_value", "int"),
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
        ("shared", "pointer"),
        ("out", "pointer"),
        ("scale", "float"),
        ("top_k", "int"),
        ("n", "int"),
    ),
    num_threads=COMBINE_THREADS,
    shared_bytes=0,
    is_stage=True,
)

FIXED_KERNELS = (COUNT, ROUTE, COMBINE)
