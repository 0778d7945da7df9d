"""Compiles kernel units for the host with g++ and keeps the results.

A result's name is the hash of everything that went in: all headers and sources, the flags and the
compiler's version. Nothing here knows what a unit computes.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from chord import env
from chord.errors import CompileError
from chord.jit.source import ENTRY, render
from chord.plan.config import Config

_SUFFIXES = (".cuh", ".hpp", ".cpp")
EMULATOR = Path(__file__).resolve().parent
PACKAGE_ROOT = EMULATOR.parent.parent
RUNTIME = (
    "fiber",
    "knowledge",
    "report",
    "machine",
    "shared_memory",
    "global_memory",
    "access",
    "sync",
    "mbarrier",
    "copy",
    "bf16",
    "matrix",
    "wgmma",
    "launch",
)
_COMMON = ("-std=c++20", "-g1", "-fPIC", "-fno-strict-aliasing", "-Wno-unknown-pragmas")
# `fast` is a library that runner.py loads; the other two are programs (runtime/main.cpp).
LIBRARY = "fast"
FLAVOURS = {
    LIBRARY: ("-O1",),
    "sanitize": ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "debug": ("-O0", "-g3"),
}
# The runtime itself is not instrumented: it would take a hundred times as long, and its own checks
# cover what the kernel asks of it.
_RUNTIME_FLAGS = {
    LIBRARY: ("-O3",),
    "sanitize": ("-O3", "-DCHORD_ADDRESS_SANITIZER"),
    "debug": ("-O1", "-g2"),
}


def unit_source(config: Config, addressing: str = "Indexed") -> str:
    """Return the C++ of one kernel: what the GPU gets, and how the emulator enters it."""
    params = f"chord::Params<chord::{addressing}>"
    return f"""\
{render(config, addressing)}
#include "runtime/launch.hpp"

namespace {{
void enter(const void* bytes) {{
  {params} params;  // aligned as a tensor map has to be, wherever the bytes lie
  __builtin_memcpy(&params, bytes, sizeof params);
  {ENTRY}(params);
}}
}}  // namespace

const ChordUnit chord_unit{{enter, kConfig.threads(), kConfig.smem_bytes()}};
"""


def cache_folder() -> Path:
    """Return where compiled units are kept; a folder for this user below the system's temporary."""
    folder = env.cache_dir() or Path(tempfile.gettempdir()) / f"chord-{os.getuid()}"
    return folder / "emulator"


@functools.cache
def compiler() -> tuple[str, str]:
    """Return path and version of g++.

    Raises:
        CompileError: There is none.
    """
    path = shutil.which("g++")
    if path is None:
        raise CompileError("the emulator compiles kernels with g++, which is not on PATH")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    return path, version.stdout.splitlines()[0]


@functools.cache
def _digest_of(*folders: Path) -> str:
    digest = hashlib.sha256()
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in _SUFFIXES]
    for path in sorted(files):
        digest.update(path.relative_to(PACKAGE_ROOT).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def _key(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in (compiler()[1], *parts):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def _compile(
    source: str,
    target: Path,
    flags: tuple[str, ...],
    includes: list[Path],
    objects: tuple[Path, ...] = (),
) -> None:
    """Compile one source text to `target`, which appears complete or not at all."""
    path, _ = compiler()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        output = Path(scratch) / target.name
        command = [path, *flags, "-include", str(EMULATOR / "runtime" / "cuda_words.hpp")]
        command += [f"-I{folder}" for folder in includes]
        command += ["-x", "c++", "-", "-x", "none", *map(str, objects), "-o", str(output)]
        done = subprocess.run(command, input=source, capture_output=True, text=True)
        if done.returncode != 0:
            raise CompileError(f"g++ refuses the unit:\n{done.stderr[-8000:]}")
        output.replace(target)


def _runtime_object(flavour: str) -> Path:
    is_library = flavour == LIBRARY
    flags = (*_COMMON, *_RUNTIME_FLAGS[flavour], "-c")
    sources = _digest_of(EMULATOR / "runtime")
    target = cache_folder() / f"runtime-{flavour}-{_key(sources, *flags)}.o"
    if not target.exists():
        names = RUNTIME if is_library else (*RUNTIME, "main")
        source = "".join(f'#include "runtime/{name}.cpp"\n' for name in names)
        _compile(source, target, flags, [EMULATOR])
    return target


def build_source(
    source: str,
    name: str,
    *,
    flavour: str = LIBRARY,
    replaced: Mapping[str, str] | None = None,
) -> Path:
    """Return a unit's source with the emulator, compiled if it is not kept yet.

    Args:
        source: C++ that defines `chord_unit` (runtime/launch.hpp).
        name: Begins the name of the result.
        flavour: A key of FLAVOURS.
        replaced: Headers to take instead of the package's, `chord/kernels/...` -> text. Tests plant
            faults with it.
    """
    replaced = dict(replaced or {})
    is_library = flavour == LIBRARY
    flags = (*_COMMON, *FLAVOURS[flavour], *(("-shared",) if is_library else ()))
    sources = _digest_of(EMULATOR, EMULATOR.parent / "kernels")
    key = _key(
        sources, source, *flags, *(part for item in sorted(replaced.items()) for part in item)
    )
    target = cache_folder() / f"{name}-{flavour}-{key}{'.so' if is_library else ''}"
    if target.exists():
        return target
    runtime = _runtime_object(flavour)
    with tempfile.TemporaryDirectory() as folder:
        for header, text in replaced.items():
            path = Path(folder) / header
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        includes = [Path(folder), EMULATOR / "include", EMULATOR, PACKAGE_ROOT]
        _compile(source, target, flags, includes, (runtime,))
    return target


def build(
    config: Config,
    *,
    addressing: str = "Indexed",
    flavour: str = LIBRARY,
    replaced: Mapping[str, str] | None = None,
) -> Path:
    """Return one kernel with the emulator, compiled if it is not kept yet.

    Args:
        config: The configuration to compile.
        addressing: How rows are found, a type of kernels/addressing.
        flavour: A key of FLAVOURS.
        replaced: As in `build_source`.
    """
    source = unit_source(config, addressing)
    return build_source(source, config.kernel, flavour=flavour, replaced=replaced)
