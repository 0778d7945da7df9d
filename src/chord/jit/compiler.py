"""NVRTC through cuda-core: from a source unit to a cubin for one real architecture.

Needs neither nvcc nor CUDA headers nor a GPU. Caching is `cache`'s part.
"""

from __future__ import annotations

import functools
import importlib.metadata
import io
import re
import time
from dataclasses import dataclass
from pathlib import Path

from chord.errors import CompileError
from chord.jit.source import KERNELS

# The folder that <chord/kernels/...> is found in.
INCLUDE_ROOT = KERNELS.parent.parent
OPTIONS = {
    "std": "c++20",
    "device_as_default_execution_space": True,
    "ptxas_options": ["-v"],
    # A hit in NVRTC's own cache comes without the log that names registers and spills.
    "no_cache": True,
}
_UNIT_NAME = "chord_unit"


@dataclass(frozen=True)
class CompileReport:
    """What ptxas says about a kernel.

    Attributes:
        registers: Registers of a thread.
        stack_bytes: Stack frame of a thread; not zero means an array indexed at run time.
        spill_store_bytes: Bytes that spilling stores.
        spill_load_bytes: Bytes that spilling loads.
        serialised: Whether each wgmma waits for the one before (a note C75xx of ptxas).
    """

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    serialised: bool = False

    @property
    def is_clean(self) -> bool:
        """Whether the kernel uses neither stack nor spills, and no wgmma waits for another."""
        memory = self.stack_bytes + self.spill_store_bytes + self.spill_load_bytes
        return memory == 0 and not self.serialised


@dataclass(frozen=True)
class Origin:
    """What a cubin was made from, so that the cache can tell what is out of date.

    Attributes:
        headers: Headers of chord/kernels that the unit includes.
        kernels: Hash of those, and of what they include.
        nvrtc: Version of the compiler.
        label: The configuration and addressing, for people.
        arch: The architecture.
    """

    headers: tuple[str, ...]
    kernels: str
    nvrtc: str
    label: str
    arch: str


@dataclass(frozen=True)
class Cubin:
    """A compiled unit: machine code for one architecture and what ptxas said.

    Attributes:
        code: The cubin.
        report: Registers and spills; None if the compiler printed nothing about them.
        seconds: Time of the compile, 0.0 if it came from a cache.
        log: Messages of the compiler, "" if it came from a cache.
        origin: What it was made from; None for a unit that is not of the cache.
    """

    code: bytes
    report: CompileReport | None
    seconds: float = 0.0
    log: str = ""
    origin: Origin | None = None


@functools.cache
def nvrtc_version() -> str:
    """Return the version of NVRTC, "13.0.88" where its package says so, else "13.0".

    Raises:
        CompileError: NVRTC is not installed.
    """
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise CompileError(_missing_nvrtc(error)) from error
    version = f"{major}.{minor}"
    for package in ("nvidia-cuda-nvrtc", f"nvidia-cuda-nvrtc-cu{major}"):
        try:
            full = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if full.startswith(version + "."):
            return full
    return version


def check_driver(driver: tuple[int, int] | None) -> None:
    """Refuse a driver that cannot load what this NVRTC makes.

    A cubin loads on every driver of the same major version (CUDA's minor version compatibility).

    Raises:
        CompileError: The driver's major version is older; names both.
    """
    if driver is None:
        return
    nvrtc = nvrtc_version()
    if driver[0] < int(nvrtc.split(".")[0]):
        raise CompileError(
            f"the driver speaks CUDA {driver[0]}.{driver[1]}, NVRTC is {nvrtc}: the driver would "
            f"not load its kernels; update the driver, or install "
            f"chord-kernels[cu{driver[0]}] with a PyTorch built for CUDA {driver[0]}"
        )


def compile_unit(source: str, arch: str, include_root: Path = INCLUDE_ROOT) -> Cubin:
    """Compile one unit to a cubin.

    Args:
        source: What `source.render` returned.
        arch: Real architecture, "sm_90a".
        include_root: Folder that holds chord/kernels.

    Raises:
        CompileError: The source does not compile, or NVRTC is missing.
    """
    nvrtc_version()
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise CompileError(_missing_nvrtc(error)) from error
    log = io.StringIO()
    started = time.perf_counter()
    try:
        options = ProgramOptions(
            name=_UNIT_NAME,
            arch=arch,
            include_path=[str(include_root)],
            **OPTIONS,
        )
        code = Program(source, "c++", options).compile("cubin", logs=log).code
    except Exception as error:  # cuda-core has a family of classes for one failure
        raise CompileError(_failure(str(error), source, arch)) from error
    text = log.getvalue().rstrip("\0\n")
    return Cubin(
        code=bytes(code),
        report=parse_ptxas(text) if text else None,
        seconds=time.perf_counter() - started,
        log=text,
    )


def parse_ptxas(log: str) -> CompileReport:
    """Read registers, stack, spills and serialised wgmma from the output of `ptxas -v`.

    Raises:
        CompileError: The log does not hold them.
    """
    frames = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log
    )
    registers = re.findall(r"Used (\d+) registers", log)
    if not frames or not registers:
        raise CompileError(
            f"the log of ptxas names no registers and spills, so they cannot be checked: {log!r}"
        )
    stack, stores, loads = (max(int(frame[i]) for frame in frames) for i in range(3))
    serialised = re.search(r"\(C75\d\d\).*wgmma.* serialized", log) is not None
    return CompileReport(max(map(int, registers)), stack, stores, loads, serialised)


def _missing_nvrtc(error: Exception) -> str:
    return (
        f"NVRTC, which compiles the kernels, cannot be loaded ({error}); install it with "
        f"`pip install 'chord-kernels[cu13]'` (or [cu12] for a driver of CUDA 12)"
    )


def _failure(message: str, source: str, arch: str) -> str:
    """Return the compiler's message with the lines of the unit that it points at."""
    lines = source.splitlines()
    numbers = sorted({int(n) for n in re.findall(rf"{_UNIT_NAME}\((\d+)\)", message)})
    quoted = [f"  {n}: {lines[n - 1]}" for n in numbers if 0 < n <= len(lines)]
    unit = "\nlines of the unit:\n" + "\n".join(quoted) if quoted else ""
    return f"a kernel does not compile for {arch} with NVRTC {nvrtc_version()}: {message}{unit}"
