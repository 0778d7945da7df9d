"""The whole routed layer below its public name: check once, plan, launch the stages on a stream.

    route     ids [T, top_k] -> the routes sorted by expert
    gate_up   gathers tokens, multiplies, applies SwiGLU: [R, I] in the order of the sort
    down      multiplies: [R, H] in the same order
    combine   gathers each token's rows, weights, sums and scales them, adds the caller's: [T, H]

From gate_up on, each begins while the one before drains (kernels/stage.cuh). More than MAX_ROUTES
routes are run in parts, which bounds the workspace and costs nothing: weights are read again, but
by then the arithmetic takes longer. What follows from shapes is checked once and remembered, as in
`indexed`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NoReturn

import torch

from chord import device as devices
from chord import reference
from chord.arguments import check_tensor
from chord.errors import InputError
from chord.jit import launch as launching
from chord.jit.fixed import fixed_launcher
from chord.jit.launch import KernelKey
from chord.jit.params import COMBINE, COMBINE_THREADS
from chord.ops import checks, layer_checks, route
from chord.ops.grouped_gemm import choose, refuse_problem
from chord.plan.config import Config
from chord.plan.problem import GemmProblem
from chord.weights.packed import PackedExperts

MAX_ROUTES = 131072
_ALIGNMENT = 256
_LOG2_E = math.log2(math.e)
MAX_CONSTANT = 1e38  # of a call: times log2(e) it still is a number of FP32
_MAX_REMEMBERED = 4096


@dataclass(frozen=True)
class Swiglu:
    """Constants of the activation, `gate' * sigmoid(alpha * gate') * (up' + beta)`.

    Attributes:
        alpha: Factor inside the sigmoid.
        beta: Added to up.
        limit: gate' is gate up to the limit, up' is up within plus and minus it; None for none.
    """

    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None


PLAIN_SWIGLU = Swiglu()


@dataclass(frozen=True)
class Layer:
    """The operands of a call that stay the same from token to token.

    Attributes:
        w13: Interleaved gate and up weights, [E, 2 I, H].
        w2: Down weights, [E, H, I].
        swiglu: Constants of the activation.
        weight_on_input: Whether router weights multiply gate and up instead of the rows.
        configs: Configurations of gate_up and down; None lets `chord.plan.select` choose.
        l2_is_clean: Whether L2 holds little that has yet to be written back to memory.
        scale: Factor of the sum over a token's experts.
    """

    w13: PackedExperts
    w2: PackedExperts
    swiglu: Swiglu = PLAIN_SWIGLU
    weight_on_input: bool = False
    configs: tuple[Config, Config] | None = None
    l2_is_clean: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class Space:
    """Where the buffers lie in the workspace: bytes from its start, and in all."""

    offsets: int
    routes: int
    positions: int
    middle: int
    rows: int
    num_bytes: int


@dataclass(frozen=True)
class _Call:
    """What is known of a legal call from all but addresses and contents."""

    num_tokens: int
    tokens_at_once: int
    top_k: int
    num_ids: int
    wide_ids: int
    wide_map: int
    weight_type: int
    sizes: tuple[int, ...]  # bytes of what _NAMES has
    on_cuda: bool
    kernels: tuple[KernelKey, KernelKey] | None
    space: Space
    num_sms: int


_NAMES = ("hidden", "topk_weights", "topk_ids", "expert_map", "w13", "w2", "out", "shared_output")
"""The tensors of a call, in the order of their addresses and sizes; absent ones have no bytes."""

_calls: dict[Hashable, _Call] = {}


def space_for(num_tokens: int, top_k: int, num_experts: int, hidden: int, middle: int) -> Space:
    """Lay out the workspace of a call with so many tokens.

    Args:
        num_tokens: Tokens T.
        top_k: Experts a token visits.
        num_experts: Local experts E.
        hidden: Hidden size H.
        middle: Intermediate size I.
    """
    num_routes = min(num_tokens, _tokens_at_once(top_k)) * top_k
    sizes = (
        4 * (num_experts + 1),
        4 * num_routes,
        4 * num_routes,
        2 * num_routes * middle,
        2 * num_routes * hidden,
    )
    ends = itertools.accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
    return Space(0, *ends)


def _tokens_at_once(top_k: int) -> int:
    return max(1, MAX_ROUTES // top_k)


def run(
    layer: Layer,
    hidden: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    out: torch.Tensor | None,
    workspace: torch.Tensor | None,
    shared: torch.Tensor | None = None,
    shared_ready: torch.cuda.Event | None = None,
) -> torch.Tensor:
    """Compute the layer; arguments and errors are those of `chord.fused_moe`.

    Args:
        layer: Weights and constants.
        hidden: bf16, [T, H].
        topk_weights: fp32, bf16 or fp16, [T, top_k].
        topk_ids: int32 or int64, [T, top_k].
        expert_map: int32 or int64, [num_ids], or None.
        out: bf16, [T, H], or None.
        workspace: any dtype, any shape, or None.
        shared: bf16, [T, H], added to the result, or None.
        shared_ready: What `shared` has to be awaited by, or None.

    Returns:
        bf16, [T, H]; `out` if it was given.
    """
    facts: tuple[Hashable, ...] | None
    try:
        # fmt: off
        facts = (
            layer.w13.facts, layer.w2.facts, layer.w13.data.get_device(),
            layer.w2.data.get_device(), layer.weight_on_input, layer.configs,
            hidden.shape, hidden.dtype, hidden.device, hidden.is_contiguous(),
            topk_weights.shape, topk_weights.dtype, topk_weights.get_device(),
            topk_weights.is_contiguous(),
            topk_ids.shape, topk_ids.dtype, topk_ids.get_device(), topk_ids.is_contiguous(),
            None if expert_map is None else (
                expert_map.shape, expert_map.dtype, expert_map.get_device(),
                expert_map.is_contiguous()),
            None if out is None else (
                out.shape, out.dtype, out.get_device(), out.is_contiguous(), out.requires_grad),
            None if workspace is None else (
                workspace.nbytes, workspace.get_device(), workspace.is_contiguous()),
            None if shared is None else (
                shared.shape, shared.dtype, shared.get_device(), shared.is_contiguous()),
        )
        # fmt: on
        call = _calls.get(facts)
    except Exception:  # not a tensor or the like: `_check_call` says so
        facts, call = None, None
    if call is None:
        call = _check_call(
            layer, hidden, topk_weights, topk_ids, expert_map, out, workspace, shared
        )
        with_grad = out is not None and out.requires_grad  # asked each time whether it is enabled
        if facts is not None and call.on_cuda and not with_grad:
            if len(_calls) >= _MAX_REMEMBERED:
                _calls.clear()
            _calls[facts] = call
    is_given = out is not None
    if out is None:
        out = torch.empty_like(hidden)
    addresses = (
        hidden.data_ptr(),
        topk_weights.data_ptr(),
        topk_ids.data_ptr(),
        0 if expert_map is None else expert_map.data_ptr(),
        layer.w13.data.data_ptr(),
        layer.w2.data.data_ptr(),
        out.data_ptr(),
        0 if shared is None else shared.data_ptr(),
    )
    _check_addresses(call, addresses, hidden, out, workspace, shared, is_given)
    if not call.on_cuda:
        return _run_reference(layer, hidden, topk_weights, topk_ids, expert_map, out, shared)
    if call.kernels is None:
        if shared_ready is not None:
            shared_ready.wait()  # no tokens, but a stream that a capture wants joined
        return out
    if workspace is None:
        workspace = torch.empty(call.space.num_bytes, dtype=torch.uint8, device=hidden.device)
    _launch(layer, call, call.kernels, (*addresses, workspace.data_ptr()), shared_ready)
    return out


def _run_reference(
    layer: Layer,
    hidden: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    out: torch.Tensor,
    shared: torch.Tensor | None,
) -> torch.Tensor:
    """Compute a checked call on the CPU, into out, bf16, [T, H]."""
    checks.say_reference_once()
    return reference.fused_moe(
        hidden,
        layer.w13,
        layer.w2,
        topk_weights,
        topk_ids,
        expert_map,
        out,
        swiglu=(layer.swiglu.alpha, layer.swiglu.beta, layer.swiglu.limit),
        apply_router_weight_on_input=layer.weight_on_input,
        routed_scaling_factor=layer.scale,
        shared_output=shared,
    )


def _launch(
    layer: Layer,
    call: _Call,
    kernels: tuple[KernelKey, KernelKey],
    pointers: tuple[int, ...],
    shared_ready: torch.cuda.Event | None,
) -> None:
    """Launch the kernels on torch's current stream of their device, part by part."""
    index = kernels[0].index
    if index != launching.current_device():
        with torch.cuda.device(index):
            _launch(layer, call, kernels, pointers, shared_ready)
        return
    # All kernels are there before the first is launched: half a layer would be left otherwise, and
    # scratch that nobody has cleared.
    route.load(index)
    combine = fixed_launcher(COMBINE, index)
    gate_up, down = (launching.launcher(kernel) for kernel in kernels)
    stream = launching.current_stream(index)
    hidden, weights, ids, expert_map, w13_at, w2_at, out, shared, base = pointers
    w13, w2, space, top_k = layer.w13, layer.w2, call.space, call.top_k
    num_experts = w13.num_experts
    offsets, routes, positions = base + space.offsets, base + space.routes, base + space.positions
    middle, rows = base + space.middle, base + space.rows
    # One map for all parts: rows of the buffer behind a part's own are never asked for.
    most = call.tokens_at_once * top_k
    middle_map = launching.map_of_rows(kernels[1], middle, most, w2.k)
    limit = layer.swiglu.limit
    swiglu = (
        -layer.swiglu.alpha * _LOG2_E,
        layer.swiglu.beta,
        math.inf if limit is None else limit,
    )
    gate_up_scratch, down_scratch, uncleared = launching.stages_scratch((gate_up, down), stream)
    if layer.l2_is_clean:
        gate_up_scratch = (*gate_up_scratch[:2], 0)  # no L2 for the stream to clean (eviction.cuh)
    id_bytes, weight_bytes = (8 if call.wide_ids else 4), (4 if call.weight_type == 0 else 2)
    for start in range(0, call.num_tokens, call.tokens_at_once):
        tokens = min(call.tokens_at_once, call.num_tokens - start)
        first, count = start * top_k, tokens * top_k
        # fmt: off
        part_ids = route.RouteIds(
            ids + first * id_bytes, expert_map, call.wide_ids, call.wide_map,
            count, call.num_ids, num_experts,
        )
        buffers = route.Buffers(
            offsets, routes, positions, block_experts=0, num_rows_padded=0,
            block_m=1, capacity=count, num_blocks=0,
        )
        # Counts lie where down's rows will: of over 1,024 routes at most 4 bytes each and 2 KiB
        # (512 experts), where a row has at least 64.
        try:
            route.launch(index, stream, part_ids, call.num_sms, rows, buffers, uncleared)
        except BaseException:
            if uncleared.words:
                launching.forget_captured(index, stream)
            raise
        uncleared = launching.NOTHING_UNCLEARED
        part_weights = weights + first * weight_bytes
        on_input, on_rows = (part_weights, 0) if layer.weight_on_input else (0, part_weights)
        gate_up.launch(stream, (
            hidden + 2 * start * w13.k, w13_at, middle, *gate_up_scratch,
            num_experts, w13.n, w13.k,
            offsets, routes, on_input, call.weight_type, *swiglu, num_experts, top_k,
        ))
        down.launch(stream, (
            middle, w2_at, rows, *down_scratch, num_experts, w2.n, w2.k,
            middle_map, offsets, num_experts,
        ))
        if shared_ready is not None:
            shared_ready.wait()  # by the current stream
            shared_ready = None
        combine.launch(stream, tokens * -(-w2.n // (8 * COMBINE_THREADS)), (
            rows, positions, on_rows, call.weight_type, shared and shared + 2 * start * w2.n,
            out + 2 * start * w2.n, layer.scale, top_k, w2.n,
        ))
        # fmt: on


def _check_call(
    layer: Layer,
    hidden: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    out: torch.Tensor | None,
    workspace: torch.Tensor | None,
    shared: torch.Tensor | None,
) -> _Call:
    """Check all of a call but addresses and contents, and choose its kernels."""
    w13, w2 = layer.w13, layer.w2
    layer_checks.check_weights(w13, w2)
    check_tensor("hidden", hidden)
    if hidden.dtype is not torch.bfloat16 or hidden.dim() != 2 or hidden.shape[1] != w13.k:
        raise InputError(
            f"hidden is {hidden.dtype} {list(hidden.shape)}; it must be bf16 [T, H] with "
            f"H={w13.k}, the reduction length of w13"
        )
    checks.check_contiguous("hidden", hidden)
    if hidden.device.type not in ("cuda", "cpu"):
        raise InputError(
            f"hidden is on {hidden.device}; Chord runs on CUDA, and on the CPU by its reference"
        )
    for name, experts in (("w13", w13), ("w2", w2)):
        layer_checks.check_device(name, experts, hidden)
    layer_checks.check_routing(hidden, topk_weights, topk_ids, expert_map)
    num_tokens, top_k = topk_ids.shape
    if out is not None:
        checks.check_out(out, hidden, tuple(hidden.shape), "the shape of hidden")
    if shared is not None:
        layer_checks.check_shared(shared, hidden)
    space = space_for(num_tokens, top_k, w13.num_experts, w13.k, w2.k)
    if workspace is not None:
        layer_checks.check_workspace(workspace, hidden, space.num_bytes)
    if layer.configs is not None and not hidden.is_cuda:
        raise InputError(
            f"configs names kernels, and hidden is on {hidden.device}, where chord.reference "
            f"computes without one; leave configs out, or move all operands to a GPU"
        )
    num_ids = w13.num_experts if expert_map is None else expert_map.numel()
    parts = max(1, -(-num_tokens // _tokens_at_once(top_k)))
    tokens_at_once = -(-num_tokens // parts)
    kernels, num_sms = None, 0
    if not hidden.is_cuda:
        for problem in problems(layer, tokens_at_once * top_k, num_ids):
            refuse_problem(problem)
    else:
        index = hidden.get_device()
        num_sms = devices.facts_of(index).num_sms
        chosen = choose_kernels(layer, tokens_at_once * top_k, num_ids, index)
        kernels = chosen if num_tokens else None
    return _Call(
        num_tokens=num_tokens,
        tokens_at_once=tokens_at_once,
        top_k=top_k,
        num_ids=num_ids,
        wide_ids=int(topk_ids.dtype is torch.int64),
        wide_map=int(expert_map is not None and expert_map.dtype is torch.int64),
        weight_type=layer_checks.ROUTER_WEIGHT_TYPES[topk_weights.dtype],
        sizes=tuple(
            0 if tensor is None else tensor.nbytes
            for tensor in (
                hidden,
                topk_weights,
                topk_ids,
                expert_map,
                w13.data,
                w2.data,
                hidden,
                shared,
            )
        ),
        on_cuda=hidden.is_cuda,
        kernels=kernels,
        space=space,
        num_sms=num_sms,
    )


def choose_kernels(
    layer: Layer, num_routes: int, num_ids: int, index: int
) -> tuple[KernelKey, KernelKey]:
    """Choose both GEMMs for the rows that come here if all experts are visited alike.

    Args:
        layer: Weights, and perhaps the caller's configurations.
        num_routes: Routes of a part, remote ones included.
        num_ids: Experts of the whole model.
        index: The device.
    """
    gate_up, down = problems(layer, num_routes, num_ids)
    gate_up_config, down_config = layer.configs or (None, None)
    return choose(gate_up, index, gate_up_config), choose(down, index, down_config)


def problems(layer: Layer, num_routes: int, num_ids: int) -> tuple[GemmProblem, GemmProblem]:
    """Return both GEMMs of a part; arguments are those of `choose_kernels`."""
    num_experts = layer.w13.num_experts
    expected = -(-num_routes * num_experts // max(num_ids, num_experts))
    gate_up_addressing = "RoutedGateUpWeighted" if layer.weight_on_input else "RoutedGateUp"
    gate_up, down = (
        GemmProblem(
            num_experts, experts.n, experts.k, num_routes, addressing, expected_rows=expected
        )
        for experts, addressing in ((layer.w13, gate_up_addressing), (layer.w2, "RoutedDown"))
    )
    return gate_up, down


def _check_addresses(
    call: _Call,
    addresses: tuple[int, ...],
    hidden: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor | None,
    shared: torch.Tensor | None,
    is_given: bool,
) -> None:
    """Refuse tensors that lie at odd places or in each other's way; asked in every call.

    Args:
        call: The call.
        addresses: Of its tensors, in the order of `_NAMES`.
        hidden: bf16, [T, H].
        out: bf16, [T, H].
        workspace: any dtype, any shape, or None.
        shared: bf16, [T, H], or None.
        is_given: Whether `out` is the caller's.
    """
    hidden_at, out_at, shared_at = addresses[0], addresses[6], addresses[7]
    # The address 0 of an absent tensor lies further from out than any tensor is long.
    size, apart, beside = call.sizes[0], abs(out_at - hidden_at), abs(out_at - shared_at)
    if (hidden_at | out_at | shared_at) & 15 or 0 < apart < size or 0 < beside < size:
        _refuse_addresses(hidden, out, shared)
    if is_given and call.num_tokens:
        end = out_at + size
        for at, length in zip(addresses[1:6], call.sizes[1:6], strict=True):
            if at < end and out_at < at + length:
                _refuse_out(out, call, addresses)
    if workspace is not None and call.num_tokens:
        space_at = workspace.data_ptr()
        end = space_at + call.space.num_bytes
        if space_at & 15:
            _refuse_workspace(workspace, call, addresses)
        for at, length in zip(addresses, call.sizes, strict=True):  # no generator: it takes longer
            if at < end and space_at < at + length:
                _refuse_workspace(workspace, call, addresses)


def _refuse_workspace(workspace: torch.Tensor, call: _Call, addresses: tuple[int, ...]) -> NoReturn:
    """Say what is wrong with the place of the workspace, any dtype and any shape."""
    begin = workspace.data_ptr()
    if begin % 16:
        raise InputError(
            f"workspace begins at address {begin:#x}; it must be 16-byte aligned (rows are copied "
            f"16 bytes at a time): pass another part of it"
        )
    others = _overlapped(begin, call.space.num_bytes, call, addresses)
    raise InputError(
        f"workspace, whose first {call.space.num_bytes} bytes are written, overlaps "
        f"{' and '.join(others)} in memory; pass one apart from all other tensors"
    )


def _refuse_out(out: torch.Tensor, call: _Call, addresses: tuple[int, ...]) -> NoReturn:
    """Say what lies in the memory of out, bf16, [T, H], and is read while it is written."""
    others = _overlapped(out.data_ptr(), call.sizes[0], call, addresses)
    others = [name for name in others if name not in ("hidden", "out", "shared_output")]
    raise InputError(
        f"out {list(out.shape)} overlaps {' and '.join(others)} in memory, which is read while out "
        f"is written; pass hidden or shared_output itself, or an out apart from all other tensors"
    )


def _overlapped(begin: int, size: int, call: _Call, addresses: tuple[int, ...]) -> list[str]:
    """Return the tensors of a call that share memory with bytes from `begin` on."""
    return [
        name
        for name, at, length in zip(_NAMES, addresses, call.sizes, strict=True)
        if at < begin + size and begin < at + length
    ]


def _refuse_addresses(
    hidden: torch.Tensor, out: torch.Tensor, shared: torch.Tensor | None
) -> NoReturn:
    """Say what is wrong with the places of hidden, out and shared_output, bf16, [T, H]."""
    read = {"hidden": hidden} if shared is None else {"hidden": hidden, "shared_output": shared}
    checks.refuse_misaligned({**read, "out": out})
    name, tensor = next(
        item for item in read.items() if 0 < abs(item[1].data_ptr() - out.data_ptr()) < out.nbytes
    )
    raise InputError(
        f"out {list(out.shape)} overlaps a part of {name} {list(tensor.shape)} in memory; pass "
        f"{name} itself, or an out apart from it"
    )
