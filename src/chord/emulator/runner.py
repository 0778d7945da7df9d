"""Runs one launch on the emulator, on torch CPU tensors.

The counterpart of jit/launch.py: it packs the same parameters, but names the tensors to the
emulator, which refuses every access beside them.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import struct
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from chord.emulator.build import LIBRARY, build
from chord.errors import ChordError
from chord.jit.params import addressing_layout
from chord.plan.config import NO_SUM, Config
from chord.routing import Contiguous, Indexed, Masked
from chord.weights.packed import PackedExperts

# What a kernel may do with a tensor, see runtime/global_memory.hpp.
INPUT, OUTPUT, PARTIAL, COUNTERS, AWAITED = range(5)
# Bytes of L2 for each block: small, so that streams are long beside it, but a stage or two.
_L2_SHARE = 1 << 16
_ERROR_BYTES = 1 << 20
_GUARD_BYTES = 64 << 20


class EmulatorError(ChordError):
    """The emulator has found a fault in a kernel; the message names the place and the thread."""


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("begin", ctypes.c_void_p),
        ("bytes", ctypes.c_ulonglong),
        ("use", ctypes.c_int),
    ]


@dataclass
class Launch:
    """What one launch consists of, apart from the kernel.

    Attributes:
        params: The kernel's parameter struct.
        tensors: Name, tensor and use of everything that the kernel may touch.
    """

    params: bytes
    tensors: list[tuple[str, torch.Tensor, int]]


def _scratch_of(config: Config, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scratch for a launch of `num_blocks` blocks.

    Returns:
        Partial sums, float32, [num_blocks * config.partial_floats()], no sum anywhere; counters,
        int32, [config.counters()], zero.
    """
    floats = num_blocks * config.partial_floats()
    partial = torch.full((floats,), NO_SUM, dtype=torch.int32).view(torch.float32)
    return partial, torch.zeros(config.counters(), dtype=torch.int32)


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to memory of its own, far from every other tensor of a launch.

    An address beyond one tensor is then outside all of them, wherever the allocator put them.

    Args:
        tensor: any dtype, any shape, on the CPU; one without elements is returned as it is.
    """
    if tensor.numel() == 0:
        return tensor
    size = tensor.numel() * tensor.element_size()
    memory = mmap.mmap(-1, size + 2 * _GUARD_BYTES)  # pages that nobody touches cost nothing
    copy = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=_GUARD_BYTES)
    copy.copy_(tensor.contiguous().view(-1).view(torch.uint8))
    return copy.view(tensor.dtype).view(tensor.shape)


def map_of_rows(x: torch.Tensor) -> bytes:
    """Return the tensor map of bf16 [..., K] as the emulator reads it (runtime/copy.cpp)."""
    k = x.shape[-1]
    return struct.pack("@P3Q96x", x.data_ptr(), x.numel() // k, k, 2 * k)


Routing = Indexed | Contiguous | Masked


def addressing_of(routing: Routing) -> str:
    """Return the addressing type of the kernels that a routing needs."""
    if isinstance(routing, Contiguous):
        return "ContiguousIndices" if routing.expert_offsets is None else "ContiguousOffsets"
    return type(routing).__name__


def _addressing_values(
    x: torch.Tensor, packed: PackedExperts, routing: Routing, out: torch.Tensor
) -> tuple[tuple[int | bytes, ...], list[tuple[str, torch.Tensor]]]:
    """Return the fields of an addressing's parameters, and the tables that they point to."""
    sizes: tuple[int, ...]
    maps = () if isinstance(routing, Indexed) else (map_of_rows(x),)
    if isinstance(routing, Indexed):
        tables = [
            (name, alone(getattr(routing, name)))
            for name in ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
        ]
        ids, blocks = routing.sorted_token_ids.numel(), routing.expert_ids.numel()
        sizes = (out.shape[0], routing.top_k, routing.block_m, blocks, ids)
    elif isinstance(routing, Contiguous):
        name = "m_indices" if routing.expert_offsets is None else "expert_offsets"
        table = alone(getattr(routing, name))
        tables = [(name, table)]
        sizes = (int(table.dtype is torch.int64), packed.num_experts, x.shape[0])
    else:
        tables = [("tokens_per_expert", alone(routing.tokens_per_expert))]
        sizes = (packed.num_experts, x.shape[1])
    return (*maps, *(table.data_ptr() for _, table in tables), *sizes), tables


def gemm_operands(
    config: Config,
    x: torch.Tensor,
    packed: PackedExperts,
    out: torch.Tensor,
    num_blocks: int,
    x_use: int = INPUT,
) -> tuple[tuple[int, ...], list[tuple[str, torch.Tensor, int]]]:
    """Return the fields of GemmParams, and copies of the tensors that they point to.

    Args:
        config: The configuration.
        x: bfloat16, [..., K].
        packed: E experts of N features.
        out: bfloat16, [..., N].
        num_blocks: Blocks of the launch.
        x_use: What the kernel may do with x.

    Returns:
        The fields; x, weight, out, partial and counters by name, each in memory of its own, with
        what the kernel may do with it.
    """
    partial, counters = _scratch_of(config, num_blocks)
    given = (
        ("x", x, x_use),
        ("weight", packed.data, INPUT),
        ("out", out, OUTPUT),
        ("partial", partial, PARTIAL),
        ("counters", counters, COUNTERS),
    )
    tensors = [(name, alone(tensor), use) for name, tensor, use in given]
    addresses = (tensor.data_ptr() for _, tensor, _ in tensors)
    return (*addresses, _L2_SHARE, packed.num_experts, packed.n, packed.k), tensors


def launch_of(
    config: Config,
    x: torch.Tensor,
    packed: PackedExperts,
    routing: Routing,
    out: torch.Tensor,
    num_blocks: int,
) -> Launch:
    """Pack the parameters of a launch, and copy its tensors to memory of their own.

    Args:
        config: The configuration.
        x: bfloat16, [M, K] (Indexed), [R, K] (Contiguous) or [E, max_m, K] (Masked).
        packed: E experts of N features.
        routing: Which row belongs to which expert.
        out: bfloat16, [M * top_k, N], [R, N] or [E, max_m, N].
        num_blocks: Blocks of the launch.
    """
    fields, tensors = gemm_operands(config, x, packed, out, num_blocks)
    values, tables = _addressing_values(tensors[0][1], packed, routing, out)
    params = addressing_layout(addressing_of(routing)).packer.pack(*fields, *values)
    return Launch(params, [*tensors, *((name, table, INPUT) for name, table in tables)])


@functools.cache
def _load(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


def run_launch(library: Path, launch: Launch, num_blocks: int, seed: int) -> None:
    """Run a launch in this process.

    Raises:
        EmulatorError: The kernel has a fault.
    """
    unit = _load(library)
    tensors = (_Tensor * len(launch.tensors))()
    for entry, (name, tensor, use) in zip(tensors, launch.tensors, strict=True):
        entry.name = name.encode()
        entry.begin = tensor.data_ptr()
        entry.bytes = tensor.numel() * tensor.element_size()
        entry.use = use
    error = ctypes.create_string_buffer(_ERROR_BYTES)
    failed = unit.chord_emulator_run(
        ctypes.byref(ctypes.c_char.in_dll(unit, "chord_unit")),
        ctypes.c_char_p(launch.params),
        ctypes.c_int(num_blocks),
        ctypes.c_ulonglong(seed),
        tensors,
        ctypes.c_int(len(tensors)),
        error,
        ctypes.c_int(_ERROR_BYTES),
    )
    if failed:
        raise EmulatorError(error.value.decode(errors="replace"))


def write_case(launch: Launch, num_blocks: int, seed: int, folder: Path) -> tuple[Path, Path]:
    """Write a launch for the flavours that are programs; return their two arguments."""
    addresses = {tensor.data_ptr(): i for i, (_, tensor, _) in enumerate(launch.tensors)}
    words = memoryview(launch.params).cast("Q")
    lines = [f"{num_blocks} {seed} {len(launch.tensors)} {len(words)}"]
    for name, tensor, use in launch.tensors:
        lines.append(f"{name} {use} {tensor.numel() * tensor.element_size()}")
    for word in words:
        index = addresses.get(word) if word else None
        lines.append(f"value {word}" if index is None else f"tensor {index}")
    case, data = folder / "case.txt", folder / "data.bin"
    case.write_text("\n".join(lines) + "\n")
    data.write_bytes(b"".join(_bytes_of(tensor) for _, tensor, _ in launch.tensors))
    return case, data


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def run_program(program: Path, launch: Launch, num_blocks: int, seed: int) -> None:
    """Run a launch in a process of its own, which the sanitizers can watch.

    Raises:
        EmulatorError: The kernel has a fault, or a sanitizer has found one.
    """
    with tempfile.TemporaryDirectory() as folder:
        case, data = write_case(launch, num_blocks, seed, Path(folder))
        command = [str(program), str(case), str(data)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise EmulatorError(done.stderr[-8000:])
        content = bytearray(data.read_bytes())
    begin = 0
    for _, tensor, use in launch.tensors:
        size = tensor.numel() * tensor.element_size()
        if use == OUTPUT:
            after = torch.frombuffer(content, dtype=torch.uint8, offset=begin, count=size)
            tensor.view(-1).view(torch.uint8).copy_(after)
        begin += size


def run(
    config: Config,
    x: torch.Tensor,
    packed: PackedExperts,
    routing: Routing,
    out: torch.Tensor,
    *,
    num_blocks: int,
    seed: int = 0,
    flavour: str = LIBRARY,
    replaced: Mapping[str, str] | None = None,
) -> None:
    """Run the kernel of `chord.indexed`, `contiguous` or `masked` for `config` on the CPU.

    Args:
        config: A configuration of any kernel.
        x: bfloat16, contiguous: [M, K], [R, K] or [E, max_m, K], as the routing says.
        packed: E experts of N features.
        routing: Which row belongs to which expert; its type picks the addressing.
        out: bfloat16, contiguous: [M * top_k, N], [R, N] or [E, max_m, N]; written where a row is
            routed.
        num_blocks: Blocks of the launch, all resident at once.
        seed: Picks the interleaving of threads and the times at which copies land.
        flavour: "fast" runs here, "sanitize" in a process of its own under the address and
            undefined-behaviour sanitizers.
        replaced: Headers to compile instead of the package's (see build.build).

    Raises:
        EmulatorError: The kernel has a fault.
        CompileError: g++ is missing or refuses the kernel.

    Example:
        >>> out = torch.zeros(len(x), packed.n, dtype=torch.bfloat16)
        >>> run(DecodeConfig(8, 8, 256, 2), x, packed, Contiguous(offsets), out, num_blocks=3)
    """
    addressing = addressing_of(routing)
    compiled = build(config, addressing=addressing, flavour=flavour, replaced=replaced)
    launch = launch_of(config, x, packed, routing, out, num_blocks)
    launch_it = run_launch if flavour == LIBRARY else run_program
    launch_it(compiled, launch, num_blocks, seed)
    out.copy_(next(tensor for name, tensor, _ in launch.tensors if name == "out"))
