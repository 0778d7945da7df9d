"""Checks that the grouped GEMMs share: what an argument must be, in words with its values.

None of them waits for the device but `check_runs`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch

from chord.arguments import check_tensor, describe
from chord.errors import InputError, UnsupportedError
from chord.plan.config import MAX_SEGMENTS, Config
from chord.weights.packed import PackedExperts, check_packed

_T = TypeVar("_T")
_LOG = logging.getLogger("chord")
_OUTSIDE: dict[Callable[..., Any], Callable[..., Any]] = {}


def outside_graph(function: Callable[..., _T]) -> Callable[..., _T]:
    """End the graph that torch.compile is tracing, and return the function to run as it is.

    Without it Dynamo traces addresses and launches, and fullgraph=True fails at the first line that
    it cannot follow, in words that are not about the call.

    Args:
        function: One of Chord's that is no operator of torch.library.
    """
    torch._dynamo.graph_break(
        msg=f"chord.{function.__name__} is no operator of torch.library, so a graph ends at it: "
        f"compile without fullgraph=True, or let chord.fused_moe, which is one, do the whole layer"
    )
    if function not in _OUTSIDE:
        _OUTSIDE[function] = torch.compiler.disable(function)
    return _OUTSIDE[function]


def check_config_kind(config: object) -> None:
    """Refuse a configuration that is none, nor None."""
    if config is not None and not isinstance(config, Config):
        raise InputError(
            f"config is {describe(config)}; it must be a DecodeConfig, DirectConfig or "
            f"PrefillConfig of chord.plan.config, or None to let Chord choose"
        )


def check_config(config: Config | None, x: torch.Tensor) -> None:
    """Check a caller's configuration, but for whether it can run: that is `plan.legality`'s.

    Args:
        config: What was given, or None.
        x: bf16, any shape: without a kernel, on the CPU, no configuration can be run.
    """
    check_config_kind(config)
    if config is not None and not x.is_cuda:
        raise InputError(
            f"config={config.label()} names a kernel, and x is on {x.device}, where "
            f"chord.reference computes without one; leave config out, or move x and the experts to "
            f"a GPU"
        )


def check_rows(x: torch.Tensor, experts: PackedExperts, dims: str) -> None:
    """Check x, but for its address, and that the weights fit it.

    Args:
        x: The activations: bf16, of `dims`.
        experts: PackedExperts, [E, N, K] inside.
        dims: Names of the dimensions of x, the last of them K: "[M, K]".
    """
    check_tensor("x", x)
    check_packed("experts", experts)
    if x.dtype is not torch.bfloat16 or x.dim() != dims.count(",") + 1:
        raise InputError(f"x is {x.dtype} {list(x.shape)}; it must be bf16 {dims}")
    if x.shape[-1] != experts.k:
        raise InputError(
            f"x is {list(x.shape)}, the experts have K={experts.k}; the last dimension of x must "
            f"be K"
        )
    check_contiguous("x", x)
    refuse_gradients("x", x)
    data = experts.data
    if data.device != x.device:
        raise InputError(f"experts are on {data.device}, x is on {x.device}; move one of them")
    if x.device.type not in ("cuda", "cpu"):
        raise InputError(f"x is on {x.device}; Chord runs on CUDA, and on the CPU by its reference")
    if experts.gate_up_interleaved:
        raise UnsupportedError(
            "experts were packed with interleave_gate_up=True, whose order the plain grouped GEMM "
            "does not undo; pack them without it"
        )


def refuse_gradients(name: str, x: torch.Tensor) -> None:
    """Refuse a tensor, of any dtype and any shape, whose gradients would be lost in silence."""
    if x.requires_grad and torch.is_grad_enabled():
        raise InputError(
            f"{name} {list(x.shape)} requires grad, and Chord computes no gradients; call under "
            f"torch.no_grad() or pass {name}.detach()"
        )


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor, of any dtype and any shape, that has gaps."""
    if not tensor.is_contiguous():
        raise InputError(
            f"{name} {list(tensor.shape)} has strides {list(tensor.stride())}; it must be "
            f"contiguous: pass {name}.contiguous()"
        )


def check_table(
    name: str, table: torch.Tensor, x: torch.Tensor, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Check a vector that says where rows belong, but for its values.

    Args:
        name: Its name, for messages.
        table: One of `dtypes`, [any number].
        x: bf16, any shape, on the device that the table has to be on.
        dtypes: Types that it may have.
    """
    check_tensor(name, table)
    if table.dtype not in dtypes or table.dim() != 1 or not table.is_contiguous():
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InputError(
            f"{name} is {table.dtype} {list(table.shape)} with strides {list(table.stride())}; it "
            f"must be {wanted}, of one dimension and contiguous"
        )
    if table.device != x.device:
        raise InputError(
            f"{name} is on {table.device}, the rows are on {x.device}; move one of them"
        )


def check_out(out: torch.Tensor, x: torch.Tensor, shape: tuple[int, ...], rule: str) -> None:
    """Check the caller's output, but for its address.

    Args:
        out: bf16, of `shape`, contiguous.
        x: bf16, any shape, on the device that the output has to be on.
        shape: What the output has to be.
        rule: Why, for the message.
    """
    check_tensor("out", out)
    if out.dtype is not torch.bfloat16 or out.shape != shape:
        raise InputError(
            f"out is {out.dtype} {list(out.shape)}; it must be bf16 {list(shape)}, {rule}"
        )
    if out.device != x.device:
        raise InputError(f"out is on {out.device}, the rows are on {x.device}; move one of them")
    check_contiguous("out", out)
    refuse_gradients("out", out)


def refuse_misaligned(rows: dict[str, torch.Tensor]) -> None:
    """Refuse tensors of rows, bf16, any shape, by name, that kernels cannot copy in 16 bytes."""
    for name, tensor in rows.items():
        if tensor.data_ptr() % 16:
            raise InputError(
                f"{name} begins at address {tensor.data_ptr():#x}; it must be 16-byte aligned "
                f"(rows are copied 16 bytes at a time): pass a copy"
            )


def refuse_addresses(x: torch.Tensor, out: torch.Tensor) -> NoReturn:
    """Say what is wrong with the places of x and out, bf16, any shape, which may not overlap."""
    refuse_misaligned({"x": x, "out": out})
    raise InputError(
        f"out {list(out.shape)} overlaps x {list(x.shape)} in memory; rows of x are read while "
        f"others are written: pass another out"
    )


def refuse_shared_memory(out: torch.Tensor, others: dict[str, torch.Tensor]) -> None:
    """Refuse an output, bf16, any shape, that lies where something is read while it is written.

    Args:
        out: The output.
        others: What is read, by its name for the message: any dtype and any shape.
    """
    begin, end = out.data_ptr(), out.data_ptr() + out.nbytes
    for name, tensor in others.items():
        at, size = tensor.data_ptr(), tensor.nbytes
        if begin < end and size and at < end and begin < at + size:
            raise InputError(
                f"out {list(out.shape)} overlaps {name} {list(tensor.shape)} in memory, which is "
                f"read while out is written: pass another out"
            )


def check_runs(name: str, ids: torch.Tensor, items: str) -> None:
    """Check that a launch's table holds the runs of equal expert ids; waits for the device.

    Args:
        name: The argument that holds them.
        ids: int32 or int64, [items], -1 for an item of nobody, which ends a run.
        items: What has an id: "blocks".
    """
    begins = ids >= 0
    begins[1:] &= ids[1:] != ids[:-1]
    runs = int(begins.sum())
    if runs > MAX_SEGMENTS:
        raise InputError(
            f"{name} changes from expert to expert {runs} times; {items} of one expert must "
            f"lie together (a launch holds {MAX_SEGMENTS} runs)"
        )


@functools.cache
def say_reference_once() -> None:
    """Warn that the CPU computes without the kernels."""
    _LOG.warning(
        "x is on the CPU: Chord computes with chord.reference, in plain PyTorch and slowly; its "
        "kernels need tensors on a CUDA GPU (Hopper or Blackwell)"
    )
