"""Grouped GEMMs with packed experts: check the arguments, choose a kernel, launch it.

`indexed` is public. `choose` and `run` are below it, for every kernel and addressing type.

A call is checked in two parts. What follows from shapes, strides, types and devices is checked once
and remembered, with the kernel chosen: a warm call looks it up. Addresses and, with `validate`, the
routing's values are checked in every call.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from chord import device as devices
from chord import reference, routing
from chord.arguments import check_tensor, truth, whole_number
from chord.errors import InputError, UnsupportedError
from chord.jit import launch as launching
from chord.jit.launch import KernelKey, kernel_key
from chord.ops import checks
from chord.plan import select
from chord.plan.config import Config
from chord.plan.legality import reject, reject_problem
from chord.plan.problem import GemmProblem
from chord.weights.packed import PackedExperts, check_packed

MAX_BLOCK_M = 1024
_INT_LIMIT = 1 << 31
_MAX_REMEMBERED = 4096  # calls of about 2 KB each


@dataclass(frozen=True)
class _Call:
    """What is known of a legal call of `indexed` from all but addresses and contents.

    Attributes:
        num_routes: Rows of the output, M * top_k.
        block_m: Entries of a block.
        x_bytes: Size of x.
        out_bytes: Size of the output.
        read_bytes: Sizes of the packed weights, sorted_token_ids and expert_ids.
        on_cuda: Whether a kernel computes, not the reference.
        kernel: The kernel to launch; None if there is no row to route.
        sizes: Numbers of the GEMM's parameters: num_experts, n, k.
        counts: Numbers of the addressing's parameters: num_routes, top_k, block_m, num_blocks and
            num_positions.
    """

    num_routes: int
    block_m: int
    x_bytes: int
    out_bytes: int
    read_bytes: tuple[int, int, int]
    on_cuda: bool
    kernel: KernelKey | None
    sizes: tuple[int, int, int]
    counts: tuple[int, int, int, int, int]


_calls: dict[Hashable, _Call] = {}


def indexed(
    x: torch.Tensor,
    experts: PackedExperts,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    top_k: int,
    *,
    block_m: int | None = None,
    out: torch.Tensor | None = None,
    validate: bool = True,
    config: Config | None = None,
) -> torch.Tensor:
    """Multiply each route's row with its expert's weight: `out[r] = x[r // top_k] @ W[e(r)].T`.

    The routing buffers are those of vLLM's `moe_align_block_size`, or of `chord.routing.align`;
    they may be larger than what is used. With validate=False nothing waits for the device and the
    call can be captured in a CUDA graph, once a call with as many rows has loaded its kernel.
    Without a CUDA GPU, with tensors on the CPU, `chord.reference` computes the same.

    Args:
        x: bf16, [M, K], contiguous, 16-byte aligned.
        experts: PackedExperts of E experts, [N, K] each, on the device of x.
        sorted_token_ids: int32, [P], routes sorted by expert; M * top_k and above is padding.
        expert_ids: int32, [B], local expert of each block, -1 for a block to skip.
        num_tokens_post_padded: int32, [1], entries of sorted_token_ids in use.
        top_k: Routes that share a row of x: 1 if every route has a row of its own.
        block_m: Entries of a block; worked out from P and B where they allow one power of two only.
        out: bf16, [M * top_k, N], contiguous, 16-byte aligned; rows that no block names are left
            untouched. Without it a new tensor is returned, in which they are zero.
        validate: Check the routing's values first, which waits for the device. Unchecked, blocks
            of an expert from E on are left out.
        config: Run exactly this configuration, on a GPU; None lets `chord.plan.select` choose.

    Returns:
        bf16, [M * top_k, N]; `out` if it was given.

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
        >>> where = chord.routing.align(torch.tensor([[0], [1]]), num_experts=2, block_m=16)
        >>> x = torch.ones(2, 64, dtype=torch.bfloat16)
        >>> chord.indexed(x, experts, where.sorted_token_ids, where.expert_ids,
        ...               where.num_tokens_post_padded, top_k=1, block_m=16).shape
        torch.Size([2, 64])
    """
    ids, blocks, used = sorted_token_ids, expert_ids, num_tokens_post_padded
    if torch.compiler.is_dynamo_compiling():
        options = {"block_m": block_m, "out": out, "validate": validate, "config": config}
        return checks.outside_graph(indexed)(x, experts, ids, blocks, used, top_k, **options)
    # Whatever `_check_call` looks at. Written out: a helper for each would add a third to the call.
    try:
        # fmt: off
        facts = (
            top_k, block_m, config, experts.facts, experts.data.get_device(),
            x.shape, x.dtype, x.device, x.is_contiguous(), x.requires_grad,
            ids.shape, ids.dtype, ids.get_device(), ids.is_contiguous(),
            blocks.shape, blocks.dtype, blocks.get_device(), blocks.is_contiguous(),
            used.shape, used.dtype, used.get_device(),  # its one element is always contiguous
            None if out is None else (
                out.shape, out.dtype, out.get_device(), out.is_contiguous(), out.requires_grad),
        )
        # fmt: on
        call = _calls.get(facts)
    except Exception:  # not a tensor or the like: `_check_call` says so
        facts, call = None, None
    if call is None:
        call = _check_call(x, experts, (ids, blocks, used), top_k, block_m, out, config)
        with_grad = x.requires_grad or (out is not None and out.requires_grad)
        if facts is not None and not with_grad:  # whether grad is enabled is asked each time
            _remember(facts, call)
    if out is None:
        out = torch.zeros(call.num_routes, experts.n, dtype=torch.bfloat16, device=x.device)
    x_at, out_at = x.data_ptr(), out.data_ptr()
    if (x_at | out_at) & 15 or x_at - call.out_bytes < out_at < x_at + call.x_bytes:
        checks.refuse_addresses(x, out)
    weights_at = experts.data.data_ptr()
    ids_at, blocks_at, used_at = ids.data_ptr(), blocks.data_ptr(), used.data_ptr()
    room, (weight_bytes, ids_bytes, blocks_bytes) = call.out_bytes, call.read_bytes
    if (
        weights_at - room < out_at < weights_at + weight_bytes
        or ids_at - room < out_at < ids_at + ids_bytes
        or blocks_at - room < out_at < blocks_at + blocks_bytes
        or used_at - room < out_at < used_at + 4
    ):
        tables = {"sorted_token_ids": ids, "expert_ids": blocks, "num_tokens_post_padded": used}
        checks.refuse_shared_memory(out, {"experts": experts.data, **tables})
    if not call.on_cuda:
        checks.say_reference_once()
        top_k, block_m = call.counts[1:3]
        return reference.indexed(
            x, experts, ids, blocks, used, top_k, out, block_m=block_m, validate=validate
        )
    if call.kernel is None:
        return out
    if validate is not False and truth("validate", validate):
        where = routing.Indexed(ids, blocks, used, call.counts[1], call.block_m)
        _validate_values(where, x.shape[0], experts.num_experts)
    run(
        call.kernel,
        (x_at, weights_at, out_at),
        call.sizes,
        (ids_at, blocks_at, used_at),
        call.counts,
    )
    return out


def run(
    kernel: KernelKey,
    pointers: tuple[int, int, int],
    sizes: tuple[int, int, int],
    tables: tuple[int | bytes, ...],
    counts: tuple[int, ...],
) -> None:
    """Launch a grouped GEMM on torch's current stream of a device; all has been checked.

    Args:
        kernel: What to launch, from `choose`, and the device.
        pointers: Addresses of x, the packed weights and the output.
        sizes: Numbers of the GEMM's parameters, in the order of `chord.jit.params`.
        tables: Addresses in the addressing's parameters, behind the map of x if it has one.
        counts: Numbers in the addressing's parameters.

    Raises:
        CompileError, CaptureError: As `indexed`.
    """
    if kernel.index != launching.current_device():
        with torch.cuda.device(kernel.index):
            run(kernel, pointers, sizes, tables, counts)
        return
    launcher = launching.launcher(kernel)
    stream = launching.current_stream(kernel.index)
    scratch = launcher.scratch_values(stream)
    launcher.launch(stream, (*pointers, *scratch, *sizes, *tables, *counts))


def choose(problem: GemmProblem, index: int, config: Config | None = None) -> KernelKey:
    """Return the kernel that runs `problem` on device `index`: of `config` if it is given.

    Raises:
        InputError: `config` cannot run here; says why.
        UnsupportedError: No kernel does this shape on this card.
    """
    chosen = _choose(problem, index) if config is None else _accept(config, problem, index)
    return kernel_key(chosen, problem.addressing, index)


def refuse_problem(problem: GemmProblem) -> None:
    """Refuse on the CPU what no kernel does on any card, as `choose` does on a GPU.

    Raises:
        UnsupportedError: The message says why.
    """
    reason = reject_problem(problem)
    if reason is not None:
        raise UnsupportedError(reason)


@functools.lru_cache(maxsize=16384)
def _choose(problem: GemmProblem, index: int) -> Config:
    return select.decide(problem, devices.facts_of(index)).config


def _accept(config: Config, problem: GemmProblem, index: int) -> Config:
    facts = devices.facts_of(index)
    reason = reject(config, problem, facts)
    if reason is not None:
        raise InputError(f"config={config.label()} cannot run on {facts.name}: {reason}")
    return config


def _remember(facts: tuple[Hashable, ...], call: _Call) -> None:
    """Keep what was found about a legal call for the next call of the same facts.

    Calls on the CPU are not kept: so a remembered x, and all that has the number of its device, is
    on CUDA. Nor is what was given as anything but an int, which may change in place.
    """
    top_k, block_m = facts[:2]
    if call.on_cuda and type(top_k) is int and (block_m is None or type(block_m) is int):
        if len(_calls) >= _MAX_REMEMBERED:
            _calls.clear()
        _calls[facts] = call


def _check_kinds(
    x: object,
    experts: object,
    where: tuple[object, object, object],
    top_k: object,
    block_m: object,
    out: object,
    config: object,
) -> None:
    """Refuse arguments of `indexed` that are not of the kinds that the other checks rely on."""
    check_tensor("x", x)
    check_packed("experts", experts)
    names = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
    for name, table in zip(names, where, strict=True):
        check_tensor(name, table)
    whole_number("top_k", top_k)
    if block_m is not None:
        whole_number("block_m", block_m)
    if out is not None:
        check_tensor("out", out)
    checks.check_config_kind(config)


def _check_call(
    x: torch.Tensor,
    experts: PackedExperts,
    where: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    top_k: int,
    block_m: int | None,
    out: torch.Tensor | None,
    config: Config | None,
) -> _Call:
    """Check all of a call of `indexed` but addresses and contents, and choose its kernel."""
    _check_kinds(x, experts, where, top_k, block_m, out, config)
    sorted_token_ids, expert_ids, _ = where
    top_k = whole_number("top_k", top_k)
    checks.check_rows(x, experts, "[M, K]")
    if block_m is None:
        block_m = infer_block_m(sorted_token_ids.numel(), expert_ids.numel())
    block_m = whole_number("block_m", block_m)
    num_routes = _check_routing(x, *where, top_k, block_m)
    if out is not None:
        checks.check_out(out, x, (num_routes, experts.n), "a row for each of the M * top_k routes")
    checks.check_config(config, x)
    has_work = num_routes > 0 and expert_ids.numel() > 0 and sorted_token_ids.numel() > 0
    kernel = None
    problem = GemmProblem(experts.num_experts, experts.n, experts.k, num_routes, "Indexed")
    if not x.is_cuda:
        refuse_problem(problem)
    else:
        chosen = choose(problem, x.get_device(), config)
        kernel = chosen if has_work else None
    return _Call(
        num_routes=num_routes,
        block_m=block_m,
        x_bytes=2 * x.numel(),
        out_bytes=2 * num_routes * experts.n,
        read_bytes=(experts.nbytes, sorted_token_ids.nbytes, expert_ids.nbytes),
        on_cuda=x.is_cuda,
        kernel=kernel,
        sizes=(experts.num_experts, experts.n, experts.k),
        counts=(num_routes, top_k, block_m, expert_ids.numel(), sorted_token_ids.numel()),
    )


def infer_block_m(num_slots: int, num_blocks: int) -> int:
    """Return the one power of two that makes `num_blocks` blocks out of `num_slots` slots.

    Args:
        num_slots: Length of sorted_token_ids.
        num_blocks: Length of expert_ids.

    Raises:
        InputError: Several block sizes, or none, fit both lengths.
    """
    candidates = [1 << bits for bits in range(MAX_BLOCK_M.bit_length())]
    if num_blocks == 0 or num_slots == 0:
        return candidates[0]  # nothing is read
    fitting = [size for size in candidates if -(-num_slots // size) == num_blocks]
    if len(fitting) != 1:
        found = f"blocks of {fitting} fit" if fitting else "no power of two fits"
        raise InputError(
            f"block_m cannot be told from sorted_token_ids of {num_slots} and expert_ids of "
            f"{num_blocks} entries ({found}); pass block_m"
        )
    return fitting[0]


def _check_routing(
    x: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    top_k: int,
    block_m: int,
) -> int:
    """Check what the host knows of the routing; return the number of routes."""
    for name, tensor in (
        ("sorted_token_ids", sorted_token_ids),
        ("expert_ids", expert_ids),
        ("num_tokens_post_padded", num_tokens_post_padded),
    ):
        checks.check_table(name, tensor, x, (torch.int32,))
    if num_tokens_post_padded.numel() != 1:
        raise InputError(
            f"num_tokens_post_padded has {num_tokens_post_padded.numel()} elements; it must hold "
            f"the one number of used slots"
        )
    if top_k < 1:
        raise InputError(f"top_k={top_k} must be at least 1")
    if not 1 <= block_m <= MAX_BLOCK_M:
        raise InputError(f"block_m={block_m} is not in 1..{MAX_BLOCK_M}")
    num_routes = x.shape[0] * top_k
    for name, count in (
        ("x with top_k", num_routes),
        ("sorted_token_ids", sorted_token_ids.numel()),
        ("expert_ids with block_m", expert_ids.numel() * block_m),
    ):
        if count >= _INT_LIMIT:
            raise InputError(f"{name} makes {count} rows; rows are counted in 32 bits, below 2^31")
    return num_routes


def _validate_values(where: routing.Indexed, num_tokens: int, num_experts: int) -> None:
    """Check the routing's values, and that a launch's table of runs holds them."""
    where.validate(num_tokens, num_experts)
    used = where.expert_ids[: int(where.num_tokens_post_padded.item()) // where.block_m]
    checks.check_runs("expert_ids", used, "blocks")
