"""`PackedExperts`: the frozen container of one projection's weights. Conversion is `pack.py`."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, replace

import torch

from chord.arguments import check_tensor, describe, truth, usable_device, whole_number
from chord.errors import InputError, UnsupportedError
from chord.weights.layout import (
    GROUP_SIZE,
    LAYOUT,
    TILE_N,
    UNIT_BYTES,
    buffer_shape,
    reject_shape,
)

# The buffers that are alive, by address and size: what is packed is not packed again.
_ALIVE: weakref.WeakValueDictionary[tuple[int, int], torch.Tensor] = weakref.WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class PackedExperts:
    """The weights of E experts for one projection, packed once for every kernel, phase and card.

    Two instances are equal only if they are the same object: compare `data` for contents.

    Attributes:
        data: uint8, [E, ceil(n / 64), ceil(k / 64), 2304], contiguous; see `layout.py`.
        n: output features, as in the checkpoint (padding is invisible outside).
        k: reduction length, as in the checkpoint.
        group_size: values along K that share a stored scale, always 32; larger groups of a
            checkpoint were repeated when packing.
        gate_up_interleaved: rows n/2.. are up features and alternate with gate features by
            eights in `data`. Outputs are in the checkpoint's order all the same.
        layout: the number of the layout that `data` is in; keep it with bytes that are kept.

    Raises:
        UnsupportedError: a shape that the layout does not hold, or another layout.
        InputError: `data` does not fit the other fields.
    """

    data: torch.Tensor
    n: int
    k: int
    group_size: int = GROUP_SIZE
    gate_up_interleaved: bool = False
    layout: int = LAYOUT

    def __post_init__(self) -> None:
        data = self.data
        check_tensor("data", data)
        # Kept as Python's own: a number of another package may change in place.
        for name in ("n", "k", "group_size", "layout"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        interleaved = truth("gate_up_interleaved", self.gate_up_interleaved)
        object.__setattr__(self, "gate_up_interleaved", interleaved)
        if data.dtype != torch.uint8 or data.dim() != 4 or data.shape[-1] != UNIT_BYTES:
            raise InputError(
                f"data is {data.dtype} {list(data.shape)}; a packed weight is uint8 "
                f"[E, ceil(n/64), ceil(k/64), {UNIT_BYTES}], as pack_experts makes it"
            )
        if self.layout != LAYOUT:
            raise UnsupportedError(
                f"layout={self.layout}: this Chord reads layout {LAYOUT}; pack the checkpoint's "
                f"tensors again with chord.pack_experts"
            )
        reason = reject_shape(data.shape[0], self.n, self.k)
        if reason is not None:
            raise UnsupportedError(reason)
        if self.group_size != GROUP_SIZE:
            raise UnsupportedError(
                f"group_size={self.group_size}: the packed layout stores one scale per "
                f"{GROUP_SIZE} values; pack_experts repeats the scales of larger groups"
            )
        if self.gate_up_interleaved and self.n % TILE_N:
            raise UnsupportedError(
                f"n={self.n} with gate_up_interleaved: gate and up need a multiple of 8 features "
                f"each, n a multiple of {TILE_N}; pack without interleave_gate_up"
            )
        wanted = buffer_shape(data.shape[0], self.n, self.k)
        if data.shape != wanted:
            raise InputError(
                f"data has shape {list(data.shape)}, n={self.n} and k={self.k} need {list(wanted)}"
            )
        if not data.is_contiguous() or data.data_ptr() % 16:
            raise InputError(
                f"data of shape {list(data.shape)} has strides {list(data.stride())} at address "
                f"{data.data_ptr():#x}; the kernels need it contiguous and 16-byte aligned"
            )
        if data.data_ptr():
            _ALIVE[data.data_ptr(), data.numel()] = data

    @property
    def num_experts(self) -> int:
        """Number of experts E."""
        return self.data.shape[0]

    @functools.cached_property
    def facts(self) -> tuple[int, int, int, bool]:
        """All but place and contents: E, n, k, gate_up_interleaved."""
        return self.num_experts, self.n, self.k, self.gate_up_interleaved

    @property
    def device(self) -> torch.device:
        """Device of the buffer."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes."""
        return self.data.numel()

    def expert_range(self, start: int, stop: int) -> PackedExperts:
        """Return experts start..stop-1 as a PackedExperts that shares this one's memory."""
        start, stop = whole_number("start", start), whole_number("stop", stop)
        if not 0 <= start < stop <= self.num_experts:
            raise InputError(
                f"expert range {start}..{stop} is not a non-empty part of 0..{self.num_experts}"
            )
        return replace(self, data=self.data[start:stop])

    def to(self, device: torch.device | str) -> PackedExperts:
        """Return the same weights on `device`: a copy, or this object if it is there already."""
        moved = self.data.to(usable_device("device", device))
        return self if moved is self.data else replace(self, data=moved)

    def __repr__(self) -> str:
        order = ", gate_up_interleaved" if self.gate_up_interleaved else ""
        return (
            f"PackedExperts(E={self.num_experts}, n={self.n}, k={self.k}{order}, "
            f"{self.nbytes / 2**20:.1f} MiB on {self.device})"
        )


def check_packed(name: str, value: object) -> None:
    """Refuse what `pack_experts` has not made."""
    if not isinstance(value, PackedExperts):
        raise InputError(
            f"{name} is {describe(value)}, not PackedExperts; pack it with chord.pack_experts"
        )


def check_pair(w13: PackedExperts, w2: PackedExperts) -> None:
    """Refuse packed weights, uint8 inside, whose sizes are not those of one layer.

    Args:
        w13: Gate and up, [E, 2 I, H] inside.
        w2: Down, [E, H, I] inside.
    """
    if (w2.num_experts, w2.n, 2 * w2.k) != (w13.num_experts, w13.k, w13.n):
        raise InputError(
            f"w13 is [E={w13.num_experts}, 2I={w13.n}, H={w13.k}] and w2 is "
            f"[E={w2.num_experts}, H={w2.n}, I={w2.k}]; they must agree in E, H and I"
        )


def refuse_packed_memory(name: str, tensor: torch.Tensor) -> None:
    """Refuse a checkpoint tensor, any dtype and any shape, that lies in a packed weight's memory.

    Packing from there would read bytes that are packed already, or overwrite what it still reads.
    """
    if tensor.numel() == 0:
        return
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in strides)
    begin = tensor.data_ptr()
    end = begin + span * tensor.element_size()
    for (address, size), data in list(_ALIVE.items()):
        is_there = data.device == tensor.device and data.data_ptr() == address  # it may have moved
        if is_there and address < end and begin < address + size:
            raise InputError(
                f"{name} {list(tensor.shape)} at {begin:#x} is the memory of a packed weight "
                f"({list(data.shape)} at {address:#x}); pack from the checkpoint's own tensors"
            )
