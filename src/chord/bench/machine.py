"""What a record says about the machine: card, versions, the digest of the measured kernels."""

from __future__ import annotations

import importlib.metadata
import subprocess

import torch

import chord
from chord.bench.floors import H200_MEMORY, MemoryModel
from chord.errors import ChordError, UnsupportedError
from chord.jit import compiler, source


def card() -> str:
    """Return the name of the current GPU.

    Raises:
        UnsupportedError: PyTorch sees no GPU.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "a benchmark measures a GPU, and PyTorch sees none here; `chord demo` runs without one"
        )
    return torch.cuda.get_device_name()


def memory_model(card_name: str) -> MemoryModel:
    """Return the memory line of a card.

    Args:
        card_name: As `card` returns it.

    Raises:
        UnsupportedError: No line was fitted for this card.
    """
    if "H200" in card_name.split():
        return H200_MEMORY
    raise UnsupportedError(
        f"no memory floor was fitted for {card_name!r}, only for the H200; fit one with a kernel "
        "that only streams, and add it to src/chord/bench/floors.py"
    )


def driver() -> str:
    """Return the version of the NVIDIA driver, or "none" or "unknown"."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except FileNotFoundError:
        return "none"
    except (subprocess.SubprocessError, OSError):
        return "unknown"
    return answer.stdout.split("\n")[0].strip() or "unknown"


def versions() -> dict[str, str]:
    """Collect the versions that can change a measurement.

    Returns:
        Versions by name: driver, torch, CUDA of torch, NVRTC, cuda-core, chord.
    """
    return {
        "driver": driver(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "nvrtc": nvrtc(),
        "cuda-core": distribution("cuda-core"),
        "chord": chord.__version__,
    }


def distribution(name: str) -> str:
    """Return the version of an installed distribution, or "none"."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def nvrtc() -> str:
    """Return the version of the NVRTC that compiles kernels, or "none"."""
    try:
        return compiler.nvrtc_version()
    except ChordError:
        return "none"


def kernel_digest() -> str:
    """Return the content digest of the kernel sources of this installation."""
    return source.kernel_digest()
