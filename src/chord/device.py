"""Facts about graphics cards, cached: those in the machine and those known by name.

Owns what a card is. Which kernel fits it is `chord.plan`'s question. Importing this module, and
asking for a card by name, touches no GPU.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch

from chord.errors import InputError, UnsupportedError

MIN_COMPUTE_CAPABILITY = (9, 0)


@dataclass(frozen=True)
class DeviceFacts:
    """What planning and compiling need to know about one card.

    Attributes:
        name: The card's own name, "NVIDIA H200" or the like.
        card: Short key that profiles carry, "h200".
        arch: Architecture that kernels are compiled for, "sm_90a".
        num_sms: Streaming multiprocessors; also the grid of the persistent kernels.
        smem_per_block_optin: Most shared memory that one block can ask for, in bytes.
        l2_bytes: Size of the second-level cache.
        driver: CUDA version that the driver speaks, (13, 0), or None when no driver was asked.
    """

    name: str
    card: str
    arch: str
    num_sms: int
    smem_per_block_optin: int
    l2_bytes: int
    driver: tuple[int, int] | None = None


_MIB = 1 << 20
_KNOWN = {
    "h100": DeviceFacts("NVIDIA H100", "h100", "sm_90a", 132, 232448, 50 * _MIB),
    "h200": DeviceFacts("NVIDIA H200", "h200", "sm_90a", 132, 232448, 60 * _MIB),
    "b200": DeviceFacts("NVIDIA B200", "b200", "sm_100a", 148, 232448, 126 * _MIB),
    "b300": DeviceFacts("NVIDIA B300", "b300", "sm_103a", 148, 232448, 126 * _MIB),
}


def known_cards() -> tuple[str, ...]:
    """Return the names that `known` takes."""
    return tuple(_KNOWN)


def known(name: str) -> DeviceFacts:
    """Return the facts of a card that need not be in the machine.

    Args:
        name: Card ("h200") or architecture ("sm_90a", which stands for its first card).

    Raises:
        InputError: The name is not known.
    """
    key = name.lower()
    if key == "sm_90a":
        return _KNOWN["h200"]
    for facts in _KNOWN.values():
        if key in (facts.card, facts.arch):
            return facts
    raise InputError(
        f"card {name!r} is not known; known are {', '.join(_KNOWN)} and their architectures "
        f"{', '.join(dict.fromkeys(facts.arch for facts in _KNOWN.values()))}"
    )


def driver_version() -> tuple[int, int] | None:
    """Return the CUDA version of the installed driver, or None without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0 or version.value == 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


@functools.cache
def facts_of(index: int) -> DeviceFacts:
    """Return the facts of CUDA device `index`; the first call for a device asks the driver.

    Raises:
        UnsupportedError: The card is older than compute capability 9.0.
    """
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    if capability < MIN_COMPUTE_CAPABILITY:
        raise UnsupportedError(
            f"{properties.name} has compute capability {capability[0]}.{capability[1]}; Chord's "
            f"kernels need 9.0 or later (Hopper, Blackwell): use chord.reference there"
        )
    return DeviceFacts(
        name=properties.name,
        card=_card_key(properties.name),
        arch=f"sm_{properties.major}{properties.minor}a",
        num_sms=properties.multi_processor_count,
        smem_per_block_optin=_smem_per_block_optin(index),
        l2_bytes=properties.L2_cache_size,
        driver=driver_version(),
    )


def _smem_per_block_optin(index: int) -> int:
    """Ask the driver, which torch has initialised, for an attribute that torch does not name."""
    attribute = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    library = ctypes.CDLL("libcuda.so.1")
    device, value = ctypes.c_int(), ctypes.c_int()
    result = library.cuDeviceGet(ctypes.byref(device), index)
    result = result or library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    if result != 0:
        raise UnsupportedError(
            f"the driver does not tell the shared memory of device {index} (CUDA error {result})"
        )
    return value.value


def _card_key(name: str) -> str:
    """Return the profile key of a card's full name: its known short name, else a slug."""
    lowered = name.lower()
    for key in _KNOWN:
        if key in lowered.split() or f"{key}-" in lowered:
            return key
    return lowered.replace("nvidia ", "").replace(" ", "-")
