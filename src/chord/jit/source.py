"""Renders the one source unit that a configuration is compiled from.

A unit is an include, the configuration by field name, what the host believes about it as
static_asserts, and one `extern "C"` entry. Kernel code lives in chord/kernels.
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

from chord.jit.params import FixedKernel, addressing_layout
from chord.plan.config import Config

ENTRY = "chord_entry"
_INCLUDE = re.compile(r"^#include <chord/kernels/([^>]+)>", re.MULTILINE)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
KERNELS = Path(__file__).resolve().parent.parent / "kernels"


def render(config: Config | FixedKernel, addressing: str = "Indexed") -> str:
    """Return the CUDA source of one kernel.

    Args:
        config: The configuration to compile, or a kernel without one.
        addressing: How rows are found, a type of kernels/addressing; "" for a kernel without.
    """
    if isinstance(config, FixedKernel):
        return _render_fixed(config)
    layout = addressing_layout(addressing)
    params = f"chord::Params<chord::{layout.name}>"
    return f"""\
#include <chord/kernels/{config.kernel}.cuh>
#include <chord/kernels/{layout.header}>

inline constexpr chord::{config.cpp_type} kConfig{config.to_cpp()};
static_assert(kConfig.smem_bytes() == {config.smem_bytes()},
              "host and device disagree on shared memory: see plan/config.py");
static_assert(kConfig.threads() == {config.threads()},
              "host and device disagree on the threads of a block: see plan/config.py");
static_assert(sizeof({params}) == {layout.packer.size},
              "host and device disagree on the launch parameters: see jit/params.py");

extern "C" __global__ void __launch_bounds__(kConfig.threads(), 1)
{ENTRY}(const __grid_constant__ {params} p) {{
  chord::{config.kernel}<kConfig>(p);
}}
"""


def _render_fixed(kernel: FixedKernel) -> str:
    words = kernel.name.capitalize()
    return f"""\
#include <chord/kernels/{kernel.name}.cuh>

static_assert(sizeof(chord::{words}Params) == {kernel.packer.size},
              "host and device disagree on the launch parameters: see jit/params.py");
static_assert(chord::{words}::kThreads == {kernel.num_threads},
              "host and device disagree on the threads of a block: see jit/params.py");
static_assert(chord::{words}::kSmemBytes == {kernel.shared_bytes},
              "host and device disagree on shared memory: see jit/params.py");

extern "C" __global__ void __launch_bounds__({kernel.num_threads})
{ENTRY}(const __grid_constant__ chord::{words}Params p) {{
  chord::{kernel.name}(p);
}}
"""


@functools.cache
def kernel_digest(addressing: str = "Indexed", root: Path = KERNELS) -> str:
    """Return the hash of the headers that all kernels reach: names and code, never times.

    Records of measurements carry it, and every cache key contains it. What another addressing type
    brings does not count, so that a new one leaves records and caches of the others valid.

    Args:
        addressing: How rows are found, a type of kernels/addressing.
        root: Folder of the headers.
    """
    return digest_headers(headers_of(addressing), root)


def headers_of(addressing: str, config: Config | FixedKernel | None = None) -> tuple[str, ...]:
    """Return the headers that a kernel reaches the others from; alike for all configurations.

    Args:
        addressing: How rows are found, a type of kernels/addressing.
        config: A configuration, or a kernel without one.
    """
    if isinstance(config, FixedKernel):
        return (f"{config.name}.cuh",)
    return ("decode.cuh", "direct.cuh", "prefill.cuh", addressing_layout(addressing).header)


def digest_headers(names: tuple[str, ...], root: Path) -> str:
    """Return the hash of headers below `root` and of all that they include, read anew.

    Comments and the way lines are broken do not count: what was measured stays measured when a
    comment is put right.
    """
    contents: dict[str, bytes] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in contents:
            contents[name] = (root / name).read_bytes()
            waiting += _INCLUDE.findall(contents[name].decode())
    digest = hashlib.sha256()
    for name, content in sorted(contents.items()):
        code = " ".join(_COMMENT.sub(" ", content.decode()).split())
        digest.update(f"{name}\0{len(code)}\0{code}".encode())
    return digest.hexdigest()
