"""The compile-time choices of the kernels: the host's half of kernels/config.cuh.

One field, one meaning; `to_cpp` writes them by name. The sizes that follow from them are computed
here once more, because the host has to know them before anything is compiled; every rendered unit
asserts that the device agrees.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

from chord.errors import InputError
from chord.weights.layout import UNIT_BYTES, UNIT_K, UNIT_N

WARP_FEATURES = 32
MAX_SEGMENTS = 512
NO_SUM = -1  # 32 bits of scratch for partial sums that hold none: a NaN that no arithmetic gives

_SEGMENT_TABLE_BYTES = 3 * MAX_SEGMENTS * 4 + 16
_SCHEDULE_SCRATCH_BYTES = 160
BARRIER_BYTES = 256
_STORE_BYTES_PER_WARP = 2 * 8 * 2 * WARP_FEATURES
MAX_DIRECT_K = 256  # of a task of the direct kernel: 48 registers of weights at a time
MAX_BLOCK_M = 192  # two accumulators of block_m / 2 registers have to fit beside the fragments
# A count of each length of a tile, in eights, in each 32 segments.
_SORT_SCRATCH_BYTES = 4 * (MAX_BLOCK_M // 8) * (MAX_SEGMENTS // 32)
_FIXED_BYTES = _SEGMENT_TABLE_BYTES + BARRIER_BYTES


class _Rendered:
    """What all configurations share: rendering by field name."""

    kernel: ClassVar[str]

    def fields(self) -> dict[str, int]:
        """Return the fields by name, in the order of the C++ struct."""
        return asdict(self)  # type: ignore[call-overload]

    def to_cpp(self) -> str:
        """Return the designated initialiser, `{.stages = 4, ...}`."""
        return "{" + ", ".join(f".{key} = {value}" for key, value in self.fields().items()) + "}"

    def label(self) -> str:
        """Return one line for people: `decode max_tokens=16 warps=8 ...`."""
        values = " ".join(f"{key}={value}" for key, value in self.fields().items())
        return f"{self.kernel} {values}"


@dataclass(frozen=True)
class DecodeConfig(_Rendered):
    """Few rows an expert: weights are streamed, mma.sync multiplies.

    Attributes:
        max_tokens: Rows of one expert that share one pass over its weights.
        warps: Multiplying warps; two more load.
        block_k: K of a pipeline stage.
        stages: Pipeline stages.
        warp_features: Features that a multiplying warp owns, 32 or 64.
    """

    max_tokens: int
    warps: int
    block_k: int
    stages: int
    warp_features: int = WARP_FEATURES

    kernel: ClassVar[str] = "decode"
    cpp_type: ClassVar[str] = "DecodeConfig"

    @property
    def tile_features(self) -> int:
        """Output features of a tile."""
        return self.warps * self.warp_features

    @property
    def tile_rows(self) -> int:
        """Most rows of a tile."""
        return self.max_tokens

    def threads(self) -> int:
        """Return the threads of a block."""
        return 32 * (self.warps + 2)

    def smem_bytes(self) -> int:
        """Return the dynamic shared memory of a block."""
        units = (self.tile_features // UNIT_N) * (self.block_k // UNIT_K)
        note = 16 + 4 * self.max_tokens
        stage = units * UNIT_BYTES + self.max_tokens * (2 * self.block_k + 16) + note
        fixed = _SCHEDULE_SCRATCH_BYTES + _FIXED_BYTES
        return self.stages * stage + self.warps * _STORE_BYTES_PER_WARP + fixed

    def partial_floats(self) -> int:
        """Return the floats of partial sums that one block may leave for another."""
        return self.tile_features * self.max_tokens

    def counters(self) -> int:
        """Return 0: blocks share no counter."""
        return 0


@dataclass(frozen=True)
class DirectConfig(_Rendered):
    """A handful of rows and a short K: weights go straight into registers, mma.sync multiplies.

    Attributes:
        max_tokens: Rows of one expert that share one pass over its weights, 8 or 16.
        warps: Warps of a block, an even number.
        max_k: Longest K, which a warp's registers hold.
    """

    max_tokens: int
    warps: int
    max_k: int

    kernel: ClassVar[str] = "direct"
    cpp_type: ClassVar[str] = "DirectConfig"

    @property
    def tile_features(self) -> int:
        """Output features of a tile, which is a warp's."""
        return WARP_FEATURES

    @property
    def tile_rows(self) -> int:
        """Most rows of a tile."""
        return self.max_tokens

    def threads(self) -> int:
        """Return the threads of a block."""
        return 32 * self.warps

    def smem_bytes(self) -> int:
        """Return the dynamic shared memory of a block."""
        tile = self.max_tokens * (2 * self.max_k + 16) + 8 + 4 + 8 * self.max_tokens
        fixed = _SCHEDULE_SCRATCH_BYTES + _SEGMENT_TABLE_BYTES
        return self.warps * (tile + _STORE_BYTES_PER_WARP) + fixed

    def partial_floats(self) -> int:
        """Return 0: a tile is one warp's."""
        return 0

    def counters(self) -> int:
        """Return 0: blocks share no counter."""
        return 0


@dataclass(frozen=True)
class PrefillConfig(_Rendered):
    """Many rows an expert: wgmma with the dequantised weights in registers, Hopper only.

    Attributes:
        block_m: Most rows of a tile.
        min_width: Tiles are multiplied at the smallest of the widths min_width,
        width_step: min_width + width_step, ..., block_m that holds their rows.
        block_k: K of a pipeline stage.
        stages: Pipeline stages.
        store_eights: Eights of rows that two warps store at a time.
    """

    block_m: int
    min_width: int
    width_step: int
    block_k: int
    stages: int
    store_eights: int = 1

    kernel: ClassVar[str] = "prefill"
    cpp_type: ClassVar[str] = "PrefillConfig"
    warps: ClassVar[int] = 8

    @property
    def tile_features(self) -> int:
        """Output features of a tile."""
        return self.warps * WARP_FEATURES

    @property
    def tile_rows(self) -> int:
        """Most rows of a tile."""
        return self.block_m

    def threads(self) -> int:
        """Return the threads of a block."""
        return 32 * self.warps + 128

    def smem_bytes(self) -> int:
        """Return the dynamic shared memory of a block."""
        units = self.block_k // UNIT_K
        weights = (self.tile_features // UNIT_N) * units * UNIT_BYTES
        note = 16 + 4 * self.block_m
        stage = units * self.block_m * 2 * UNIT_K + weights + note
        rows = 8 * self.block_m + 16
        fixed = _SORT_SCRATCH_BYTES + _FIXED_BYTES
        store = self.store_eights * self.warps * _STORE_BYTES_PER_WARP
        return self.stages * stage + store + rows + fixed

    def partial_floats(self) -> int:
        """Return 0: a prefill tile is one block's."""
        return 0

    def counters(self) -> int:
        """Return the 32-bit counters that the blocks share, zero between launches."""
        return 2


Config = DecodeConfig | DirectConfig | PrefillConfig

_KERNELS: dict[str, type[Config]] = {
    "decode": DecodeConfig,
    "direct": DirectConfig,
    "prefill": PrefillConfig,
}


def config_from_fields(kernel: str, fields: dict[str, int]) -> Config:
    """Return the configuration that a profile row or a command line names.

    Raises:
        InputError: No such kernel, or the fields are not the kernel's.
    """
    if kernel not in _KERNELS:
        raise InputError(f"kernel {kernel!r} is not one of {', '.join(_KERNELS)}")
    try:
        return _KERNELS[kernel](**fields)
    except TypeError as error:
        raise InputError(f"fields {fields} do not make a {kernel} configuration: {error}") from None


_NARROW_DECODE = (
    DecodeConfig(max_tokens=16, warps=8, block_k=512, stages=2),
    DecodeConfig(max_tokens=16, warps=8, block_k=256, stages=2, warp_features=64),
)
_DIRECT = (
    DirectConfig(max_tokens=16, warps=8, max_k=MAX_DIRECT_K),
    DirectConfig(max_tokens=16, warps=16, max_k=MAX_DIRECT_K),
)
_HOPPER = (
    *_NARROW_DECODE,
    DecodeConfig(max_tokens=16, warps=8, block_k=384, stages=3),
    DecodeConfig(max_tokens=16, warps=8, block_k=256, stages=4),
    DecodeConfig(max_tokens=16, warps=4, block_k=256, stages=7),
    DecodeConfig(max_tokens=32, warps=8, block_k=256, stages=2, warp_features=64),
    *_DIRECT,
    PrefillConfig(block_m=16, min_width=8, width_step=8, block_k=512, stages=2),
    PrefillConfig(block_m=32, min_width=8, width_step=8, block_k=256, stages=4),
    PrefillConfig(block_m=64, min_width=8, width_step=8, block_k=256, stages=3),
    PrefillConfig(block_m=96, min_width=48, width_step=8, block_k=256, stages=2),
    PrefillConfig(block_m=128, min_width=64, width_step=8, block_k=256, stages=2),
    PrefillConfig(block_m=176, min_width=88, width_step=8, block_k=128, stages=3, store_eights=3),
)
# Blackwell has no wgmma, so wide tiles run on mma.sync too; 64 features a warp would spill there.
_BLACKWELL = (
    *_NARROW_DECODE,
    DecodeConfig(max_tokens=32, warps=8, block_k=256, stages=3),
    DecodeConfig(max_tokens=48, warps=8, block_k=256, stages=3),
    *_DIRECT,
)
_SHIPPED: dict[str, tuple[Config, ...]] = {
    "sm_90a": _HOPPER,
    "sm_100a": _BLACKWELL,
    "sm_103a": _BLACKWELL,
}


def shipped_archs() -> tuple[str, ...]:
    """Return the architectures that configurations are shipped for."""
    return tuple(_SHIPPED)


def shipped_configs(arch: str) -> tuple[Config, ...]:
    """Return the configurations that are compiled ahead and tested for `arch`; () if unknown."""
    return _SHIPPED.get(arch, ())
