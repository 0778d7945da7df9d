"""Grouped GEMMs over rows that lie grouped already: sorted by expert, or in slots of their expert.

`contiguous` and `masked` check their arguments; `grouped_gemm` chooses the kernel and launches it,
as it does for `indexed`. No routing buffers, and no row moves: out has the order of x.
"""

from __future__ import annotations

from typing import Any

import torch

from chord import reference, routing
from chord.arguments import truth, whole_number
from chord.errors import InputError
from chord.jit.launch import KernelKey, map_of_rows
from chord.ops import checks
from chord.ops.grouped_gemm import choose, refuse_problem, run
from chord.plan.config import Config
from chord.plan.problem import GemmProblem
from chord.weights.packed import PackedExperts

_INTEGERS = (torch.int32, torch.int64)


def contiguous(
    x: torch.Tensor,
    experts: PackedExperts,
    expert_offsets: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    m_indices: torch.Tensor | None = None,
    validate: bool = True,
    config: Config | None = None,
) -> torch.Tensor:
    """Multiply rows that are sorted by expert: `out[r] = x[r] @ W[e(r)].T`.

    Counts need no alignment, and an expert may have none. Rows of nobody are not written, and what
    they hold in x, NaN included, changes nothing. With validate=False nothing waits for the device
    and the call can be captured in a CUDA graph, once a call with as many rows has loaded its
    kernel. Without a CUDA GPU, with tensors on the CPU, `chord.reference` computes the same.

    Prefer expert_offsets: for m_indices every block of the kernel reads the ids of all rows twice
    before it begins, and a launch holds 512 runs of one expert, which any -1 between parts.

    Args:
        x: bf16, [R, K], contiguous, 16-byte aligned.
        experts: PackedExperts of E experts, [N, K] each, on the device of x.
        expert_offsets: int32 or int64, [E + 1]: expert e owns rows offsets[e]..offsets[e+1]-1.
        out: bf16, [R, N], contiguous, 16-byte aligned; rows that no expert owns are left untouched.
            Without it a new tensor is returned, in which they are zero.
        m_indices: int32 or int64, [R], instead of expert_offsets: the expert of each row,
            ascending, -1 for a row of nobody, which may stand anywhere.
        validate: Check the offsets' or indices' values first, which waits for the device.
        config: Run exactly this configuration, on a GPU; None lets `chord.plan.select` choose.

    Returns:
        bf16, [R, N]; `out` if it was given.

    Raises:
        InputError: An argument breaks a rule; nothing has been launched.
        UnsupportedError: No kernel does this shape on this card.
        CompileError: The kernel does not compile or load.
        CaptureError: A CUDA graph is being captured, and the kernel is not loaded yet or values are
            to be validated.

    Example:
        >>> import torch, chord
        >>> codes = torch.randint(0, 16, (2, 64, 64), dtype=torch.uint8)
        >>> experts = chord.pack_experts(codes, torch.ones(2, 64, 2, dtype=torch.bfloat16))
        >>> x = torch.ones(5, 64, dtype=torch.bfloat16)
        >>> chord.contiguous(x, experts, torch.tensor([0, 2, 5])).shape
        torch.Size([5, 64])
    """
    if torch.compiler.is_dynamo_compiling():
        options: dict[str, Any] = {"m_indices": m_indices, "validate": validate, "config": config}
        return checks.outside_graph(contiguous)(x, experts, expert_offsets, out, **options)
    checks.check_rows(x, experts, "[R, K]")
    checks.check_config(config, x)
    num_rows = x.shape[0]
    name, table = _contiguous_table(x, experts, expert_offsets, m_indices)
    out = _prepare_out(x, out, (num_rows, experts.n), "a row for each row of x")
    checks.refuse_shared_memory(out, {name: table, "experts": experts.data})
    addressing = "ContiguousOffsets" if name == "expert_offsets" else "ContiguousIndices"
    problem = GemmProblem(experts.num_experts, experts.n, experts.k, num_rows, addressing)
    if not x.is_cuda:
        refuse_problem(problem)
        checks.say_reference_once()
        return reference.contiguous(
            x, experts, expert_offsets, out, m_indices=m_indices, validate=validate
        )
    kernel = choose(problem, x.get_device(), config)
    if num_rows == 0:
        return out
    if truth("validate", validate):
        where = routing.Contiguous(expert_offsets, m_indices)
        where.validate(num_rows, experts.num_experts)
        if m_indices is not None:
            checks.check_runs("m_indices", m_indices, "rows")
    counts = (int(table.dtype is torch.int64), experts.num_experts, num_rows)
    _launch(kernel, x, experts, out, table, counts)
    return out


def masked(
    x: torch.Tensor,
    experts: PackedExperts,
    tokens_per_expert: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    expected: int | None = None,
    validate: bool = True,
    config: Config | None = None,
) -> torch.Tensor:
    """Multiply the first rows of each expert's slots: `out[e, i] = x[e, i] @ W[e].T`.

    Slots from an expert's count on are not written, and what they hold in x, NaN included, changes
    nothing. With validate=False nothing waits for the device and the call can be captured in a CUDA
    graph, once a call of the same shape has loaded its kernel. Without a CUDA GPU, with tensors on
    the CPU, `chord.reference` computes the same.

    The host does not know the counts: without `expected` the kernel is chosen for full slots.

    Args:
        x: bf16, [E, max_m, K], contiguous, 16-byte aligned; any max_m.
        experts: PackedExperts of E experts, [N, K] each, on the device of x.
        tokens_per_expert: int32, [E], rows in use of each expert, 0..max_m.
        out: bf16, [E, max_m, N], contiguous, 16-byte aligned; slots not in use are left untouched.
            Without it a new tensor is returned, in which they are zero.
        expected: The usual number of rows in use per expert; it may change which kernel runs and
            so the order of sums, never which rows are computed.
        validate: Check the counts first, which waits for the device.
        config: Run exactly this configuration, on a GPU; None lets `chord.plan.select` choose.

    Returns:
        bf16, [E, max_m, N]; `out` if it was given.

    Raises:
        InputError: An argument breaks a rule; nothing has been launched.
        UnsupportedError: No kernel does this shape on this card.
        CompileError: The kernel does not compile or load.
        CaptureError: A CUDA graph is being captured, and the kernel is not loaded yet or values are
            to be validated.

    Example:
        >>> import torch, chord
        >>> codes = torch.randint(0, 16, (2, 64, 64), dtype=torch.uint8)
        >>> experts = chord.pack_experts(codes, torch.ones(2, 64, 2, dtype=torch.bfloat16))
        >>> x = torch.ones(2, 3, 64, dtype=torch.bfloat16)
        >>> chord.masked(x, experts, torch.tensor([3, 1], dtype=torch.int32), expected=2).shape
        torch.Size([2, 3, 64])
    """
    if torch.compiler.is_dynamo_compiling():
        options: dict[str, Any] = {"expected": expected, "validate": validate, "config": config}
        return checks.outside_graph(masked)(x, experts, tokens_per_expert, out, **options)
    checks.check_rows(x, experts, "[E, max_m, K]")
    checks.check_config(config, x)
    num_experts, max_rows = experts.num_experts, x.shape[1]
    if x.shape[0] != num_experts:
        raise InputError(
            f"x is {list(x.shape)}, the experts are {num_experts}; the first dimension of x must "
            f"be E"
        )
    checks.check_table("tokens_per_expert", tokens_per_expert, x, (torch.int32,))
    _check_length("tokens_per_expert", tokens_per_expert, num_experts, "a count for each expert")
    if expected is not None:
        expected = whole_number("expected", expected)
        if expected < 0:
            raise InputError(f"expected={expected} must not be negative; leave it out")
    shape = (num_experts, max_rows, experts.n)
    out = _prepare_out(x, out, shape, "a row for each slot of x")
    read = {"tokens_per_expert": tokens_per_expert, "experts": experts.data}
    checks.refuse_shared_memory(out, read)
    problem = GemmProblem(
        num_experts,
        experts.n,
        experts.k,
        num_experts * max_rows,
        "Masked",
        None if expected is None else num_experts * expected,
    )
    if not x.is_cuda:
        refuse_problem(problem)
        checks.say_reference_once()
        return reference.masked(
            x, experts, tokens_per_expert, out, expected=expected, validate=validate
        )
    kernel = choose(problem, x.get_device(), config)
    if max_rows == 0:
        return out
    if truth("validate", validate):
        routing.Masked(tokens_per_expert, expected).validate(max_rows, num_experts)
    _launch(kernel, x, experts, out, tokens_per_expert, (num_experts, max_rows))
    return out


def _launch(
    kernel: KernelKey,
    x: torch.Tensor,
    experts: PackedExperts,
    out: torch.Tensor,
    table: torch.Tensor,
    counts: tuple[int, ...],
) -> None:
    """Launch the kernel; `table` and `counts` are the addressing's parameters."""
    x_at, k = x.data_ptr(), experts.k
    run(
        kernel,
        (x_at, experts.data.data_ptr(), out.data_ptr()),
        (experts.num_experts, experts.n, k),
        (map_of_rows(kernel, x_at, x.numel() // k, k), table.data_ptr()),
        counts,
    )


def _contiguous_table(
    x: torch.Tensor,
    experts: PackedExperts,
    expert_offsets: torch.Tensor | None,
    m_indices: torch.Tensor | None,
) -> tuple[str, torch.Tensor]:
    """Return which of the two was given, by its name, and the tensor, checked but for values."""
    if expert_offsets is not None and m_indices is None:
        checks.check_table("expert_offsets", expert_offsets, x, _INTEGERS)
        length = experts.num_experts + 1
        _check_length("expert_offsets", expert_offsets, length, "E + 1 offsets")
        return "expert_offsets", expert_offsets
    if m_indices is not None and expert_offsets is None:
        checks.check_table("m_indices", m_indices, x, _INTEGERS)
        _check_length("m_indices", m_indices, x.shape[0], "an expert for each row of x")
        return "m_indices", m_indices
    given = "neither" if m_indices is None else "both"
    raise InputError(
        f"{given} of expert_offsets and m_indices given; rows are described by exactly one"
    )


def _check_length(name: str, table: torch.Tensor, length: int, rule: str) -> None:
    if table.numel() != length:
        raise InputError(f"{name} has {table.numel()} elements; it must have {length}, {rule}")


def _prepare_out(
    x: torch.Tensor, out: torch.Tensor | None, shape: tuple[int, ...], rule: str
) -> torch.Tensor:
    """Return the output: the caller's, checked, or a new one of zeros."""
    if out is None:
        out = torch.zeros(shape, dtype=torch.bfloat16, device=x.device)
    else:
        checks.check_out(out, x, shape, rule)
    x_at, out_at = x.data_ptr(), out.data_ptr()
    if (x_at | out_at) & 15 or x_at - 2 * out.numel() < out_at < x_at + 2 * x.numel():
        checks.refuse_addresses(x, out)
    return out
