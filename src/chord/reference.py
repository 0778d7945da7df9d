"""What every function of Chord computes, in plain PyTorch on any device. Read this file first.

A 4-bit weight stands for `(code - 8) * scale`, with one scale for 32 values along K. Everything
below multiplies dequantised weights, accumulates in `dtype` (fp32, or fp64 on request) and rounds
to bf16 once, at the end. It is slow on purpose; the kernels are measured against it.

With validate=False wrong offsets, counts and routes do what they do in the kernels: what lies
outside x or the slots is nobody's.
"""

from __future__ import annotations

import torch

from chord.arguments import check_readable, check_tensor, describe, truth
from chord.errors import InputError
from chord.routing import Contiguous, Indexed, Masked, local_experts
from chord.weights.layout import CODE_OFFSET, GROUP_SIZE
from chord.weights.pack import unpack
from chord.weights.packed import PackedExperts, check_packed, check_pair


def dequantize(experts: PackedExperts, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the weights as numbers: `(code - 8) * scale`.

    Args:
        experts: PackedExperts, [E, N, K] inside.
        dtype: fp32 or fp64; both hold every product exactly.

    Returns:
        dtype, [E, N, K], in the checkpoint's order. Eight times the packed size in fp32.
    """
    check_packed("experts", experts)
    _check_dtype(dtype)
    weights = torch.empty(
        experts.num_experts, experts.n, experts.k, dtype=dtype, device=experts.device
    )
    for e in range(experts.num_experts):
        weights[e] = _dequantize_expert(experts, e, dtype)
    return weights


def _dequantize_expert(experts: PackedExperts, e: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight of one expert, dtype, [N, K]."""
    codes, scales = unpack(experts.expert_range(e, e + 1))
    values = codes[0].to(dtype).unflatten(-1, (-1, GROUP_SIZE)) - CODE_OFFSET
    return (values * scales[0].to(dtype).unsqueeze(-1)).flatten(-2)


def indexed(
    x: torch.Tensor,
    experts: PackedExperts,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    top_k: int,
    out: torch.Tensor | None = None,
    *,
    block_m: int,
    validate: bool = True,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Multiply each route's row with its expert's weight: `out[r] = x[r // top_k] @ W[e(r)].T`.

    Args:
        x: bf16, [M, K].
        experts: PackedExperts, [E, N, K] inside.
        sorted_token_ids: int32, [P], see `chord.routing.Indexed`.
        expert_ids: int32, [B], local ids, -1 for a block to skip.
        num_tokens_post_padded: int32, [1].
        top_k: routes per row of x.
        out: bf16, [M * top_k, N]; rows that no block names are left untouched. Without it a new
            tensor is returned, in which they are zero.
        block_m: slots of a block.
        validate: check all routing values first.
        dtype: fp32 or fp64, to accumulate in.

    Returns:
        bf16, [M * top_k, N]; `out` if it was given.
    """
    routing = Indexed(sorted_token_ids, expert_ids, num_tokens_post_padded, top_k, block_m)
    _check_x(x, experts, ("M", "K"))
    _check_table("sorted_token_ids", sorted_token_ids, x)
    _check_dtype(dtype)
    num_routes = x.shape[0] * top_k
    out = _prepare_out(out, x, (num_routes, experts.n))
    if truth("validate", validate):
        routing.validate(x.shape[0], experts.num_experts)
    room = min(len(expert_ids), len(sorted_token_ids) // block_m)
    num_blocks = max(0, min(int(num_tokens_post_padded) // block_m, room))
    blocks = sorted_token_ids[: num_blocks * block_m].view(num_blocks, block_m).long()
    for e in range(experts.num_experts):
        routes = blocks[expert_ids[:num_blocks] == e].flatten()
        routes = routes[(routes >= 0) & (routes < num_routes)]
        if len(routes):
            out[routes] = _multiply(x[routes // top_k], experts, e, dtype).bfloat16()
    return out


def contiguous(
    x: torch.Tensor,
    experts: PackedExperts,
    expert_offsets: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    m_indices: torch.Tensor | None = None,
    validate: bool = True,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Multiply rows that are sorted by expert: `out[r] = x[r] @ W[e(r)].T`.

    Args:
        x: bf16, [R, K].
        experts: PackedExperts, [E, N, K] inside.
        expert_offsets: int32 or int64, [E + 1]: expert e owns rows offsets[e]..offsets[e+1]-1.
        out: bf16, [R, N]; rows that no expert owns are left untouched. Without it a new tensor is
            returned, in which they are zero.
        m_indices: int32 or int64, [R], the expert of each row or -1, instead of expert_offsets.
        validate: check all routing values first.
        dtype: fp32 or fp64, to accumulate in.

    Returns:
        bf16, [R, N]; `out` if it was given.
    """
    routing = Contiguous(expert_offsets, m_indices)
    _check_x(x, experts, ("R", "K"))
    for name, table in (("expert_offsets", expert_offsets), ("m_indices", m_indices)):
        if table is not None:
            _check_table(name, table, x)
    _check_dtype(dtype)
    out = _prepare_out(out, x, (x.shape[0], experts.n))
    if truth("validate", validate):
        routing.validate(x.shape[0], experts.num_experts)
    for e in range(experts.num_experts):
        if expert_offsets is not None:
            first, last = expert_offsets[e : e + 2].clamp(0, x.shape[0]).tolist()
            rows = torch.arange(first, max(first, last), device=x.device)
        else:
            assert m_indices is not None, "Contiguous holds offsets or indices"
            rows = (m_indices == e).nonzero().flatten()
        if len(rows):
            out[rows] = _multiply(x[rows], experts, e, dtype).bfloat16()
    return out


def masked(
    x: torch.Tensor,
    experts: PackedExperts,
    tokens_per_expert: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    expected: int | None = None,
    validate: bool = True,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Multiply the first rows of each expert's own block: `out[e, i] = x[e, i] @ W[e].T`.

    Args:
        x: bf16, [E, max_m, K].
        experts: PackedExperts, [E, N, K] inside.
        tokens_per_expert: int32, [E], valid rows of each expert, 0..max_m.
        out: bf16, [E, max_m, N]; rows beyond the valid ones are left untouched. Without it a new
            tensor is returned, in which they are zero.
        expected: a hint for the kernels; changes nothing here.
        validate: check all routing values first.
        dtype: fp32 or fp64, to accumulate in.

    Returns:
        bf16, [E, max_m, N]; `out` if it was given.
    """
    routing = Masked(tokens_per_expert, expected)
    _check_x(x, experts, ("E", "max_m", "K"))
    _check_table("tokens_per_expert", tokens_per_expert, x)
    _check_dtype(dtype)
    out = _prepare_out(out, x, (*x.shape[:2], experts.n))
    if truth("validate", validate):
        routing.validate(x.shape[1], experts.num_experts)
    for e, rows in enumerate(tokens_per_expert.clamp(0, x.shape[1]).tolist()):
        if rows:
            out[e, :rows] = _multiply(x[e, :rows], experts, e, dtype).bfloat16()
    return out


def fused_moe(
    hidden: torch.Tensor,
    w13: PackedExperts,
    w2: PackedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    swiglu: tuple[float, float, float | None] = (1.0, 0.0, None),
    apply_router_weight_on_input: bool = False,
    routed_scaling_factor: float = 1.0,
    shared_output: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Run the routed experts of one MoE layer.

    For token t and slot j with expert e = topk_ids[t, j]:

        gate, up = bf16(hidden[t] @ W13[e].T)               two halves of I values
        middle   = bf16(gate * sigmoid(alpha * gate) * (up + beta))
        sum[t]   = sum over j of topk_weights[t, j] * (middle @ W2[e].T)
        out[t]   = bf16(bf16(routed_scaling_factor * bf16(sum[t])) + shared_output[t])

    With a limit, gate is cut off above it and up beyond plus and minus it. With
    apply_router_weight_on_input the weight multiplies gate and up, and nothing afterwards.

    These are all the roundings: gate_up and the activation are stored in bf16, as an engine that
    runs the two GEMMs apart stores them; the rows of the second GEMM are summed unrounded. A
    kernel that keeps gate_up in registers or rounds the rows before the sum differs from this by
    bf16 roundings only.

    Args:
        hidden: bf16, [T, H].
        w13: PackedExperts, [E, 2 * I, H] inside: gate rows, then up rows (interleaved or not).
        w2: PackedExperts, [E, H, I] inside.
        topk_weights: fp32, bf16 or fp16, [T, top_k].
        topk_ids: int32 or int64, [T, top_k]. -1 contributes nothing.
        expert_map: int32 or int64, [num_global_experts], local index or -1: topk_ids are then
            global, and experts of other ranks contribute nothing. Without it ids are local.
        out: bf16, [T, H], overwritten entirely: tokens without a local expert become zero, or
            their row of shared_output. May be `shared_output` itself.
        swiglu: alpha, beta and limit; None for no limit.
        apply_router_weight_on_input: where router weights are applied.
        routed_scaling_factor: factor of the sum.
        shared_output: bf16, [T, H], added to the sum, or None.
        dtype: fp32 or fp64, to accumulate in.

    Returns:
        bf16, [T, H]; `out` if it was given.
    """
    check_packed("w13", w13)
    _check_x(hidden, w13, ("T", "H"), "hidden")
    _check_dtype(dtype)
    _check_layer(hidden, w13, w2, topk_weights, topk_ids)
    for name, table in (("topk_ids", topk_ids), ("expert_map", expert_map)):
        if table is not None:
            check_tensor(name, table)
            _check_table(name, table, hidden)
    _check_table("topk_weights", topk_weights, hidden)
    if shared_output is not None:
        _check_shared(shared_output, hidden)
    num_ids = w13.num_experts if expert_map is None else expert_map.numel()
    _check_ids(topk_ids, num_ids, expert_map, w13.num_experts)
    out = _prepare_out(out, hidden, tuple(hidden.shape))
    experts_of_routes = local_experts(topk_ids, num_ids, expert_map)
    total = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    for e in range(w13.num_experts):
        tokens, slots = (experts_of_routes == e).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        weights = topk_weights[tokens, slots].to(dtype).unsqueeze(-1)
        gate_up = _multiply(hidden[tokens], w13, e, dtype)
        if apply_router_weight_on_input:
            gate_up *= weights
        middle = _swiglu(gate_up.bfloat16().to(dtype), *swiglu).bfloat16()
        rows = _multiply(middle, w2, e, dtype)
        if not apply_router_weight_on_input:
            rows *= weights
        # One slot at a time: a token may name an expert twice, and += adds to a row only once.
        for slot in range(topk_ids.shape[1]):
            chosen = slots == slot
            total[tokens[chosen]] += rows[chosen]
    total = total.bfloat16()
    if routed_scaling_factor != 1:
        total *= routed_scaling_factor
    return out.copy_(total if shared_output is None else total + shared_output)


def _swiglu(gate_up: torch.Tensor, alpha: float, beta: float, limit: float | None) -> torch.Tensor:
    """Return the activated half of gate_up, any dtype, [M, 2 I] -> [M, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def _multiply(
    rows: torch.Tensor, experts: PackedExperts, e: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return rows, bf16 [M, K], times the weight of expert e, unrounded: dtype, [M, N]."""
    with torch.autocast(rows.device.type, enabled=False):  # which would multiply in bf16
        return rows.to(dtype) @ _dequantize_expert(experts, e, dtype).T


def _check_x(
    x: torch.Tensor, experts: PackedExperts, dims: tuple[str, ...], name: str = "x"
) -> None:
    check_tensor(name, x)
    check_packed("experts", experts)
    if x.dtype != torch.bfloat16 or x.dim() != len(dims) or x.shape[-1] != experts.k:
        raise InputError(
            f"{name} is {x.dtype} {list(x.shape)}; it must be torch.bfloat16 [{', '.join(dims)}] "
            f"with {dims[-1]}={experts.k}, the weight's reduction length"
        )
    if x.device != experts.device:
        raise InputError(
            f"{name} is on {x.device}, the weights on {experts.device}; move one of them"
        )
    if dims[0] == "E" and x.shape[0] != experts.num_experts:
        raise InputError(
            f"{name} has shape {list(x.shape)}; its first dimension must be the number of experts, "
            f"{experts.num_experts}"
        )


def _check_table(name: str, table: torch.Tensor, x: torch.Tensor) -> None:
    """Refuse a table that the host cannot read, or of another device."""
    check_readable(name, table)
    if table.device != x.device:
        raise InputError(
            f"{name} is on {table.device}, the rows are on {x.device}; move one of them"
        )


def _check_shared(shared: torch.Tensor, hidden: torch.Tensor) -> None:
    check_tensor("shared_output", shared)
    if (shared.dtype, shared.shape, shared.device) != (hidden.dtype, hidden.shape, hidden.device):
        raise InputError(
            f"shared_output is {shared.dtype} {list(shared.shape)} on {shared.device}; it must be "
            f"like hidden, {hidden.dtype} {list(hidden.shape)} on {hidden.device}"
        )


def _check_dtype(dtype: torch.dtype) -> None:
    if not isinstance(dtype, torch.dtype) or dtype not in (torch.float32, torch.float64):
        raise InputError(
            f"dtype is {describe(dtype)}; sums are kept in torch.float32 or torch.float64"
        )


def _prepare_out(out: torch.Tensor | None, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if out is None:
        return torch.zeros(shape, dtype=torch.bfloat16, device=x.device)
    check_tensor("out", out)
    if out.dtype != torch.bfloat16 or out.shape != shape or out.device != x.device:
        raise InputError(
            f"out is {out.dtype} {list(out.shape)} on {out.device}; it must be torch.bfloat16 "
            f"{list(shape)} on {x.device}"
        )
    return out


def _check_layer(
    hidden: torch.Tensor,
    w13: PackedExperts,
    w2: PackedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> None:
    check_packed("w2", w2)
    check_tensor("topk_weights", topk_weights)
    check_tensor("topk_ids", topk_ids)
    check_pair(w13, w2)
    if w2.gate_up_interleaved:
        raise InputError("w2 was packed with interleave_gate_up, which is for w13 only; repack it")
    if topk_ids.dim() != 2 or topk_ids.shape[0] != hidden.shape[0]:
        raise InputError(
            f"topk_ids has shape {list(topk_ids.shape)}; hidden {list(hidden.shape)} needs "
            f"[{hidden.shape[0]}, top_k]"
        )
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise InputError(f"topk_ids is {topk_ids.dtype}; it must be int32 or int64")
    floats = (torch.float32, torch.bfloat16, torch.float16)
    if topk_weights.shape != topk_ids.shape or topk_weights.dtype not in floats:
        raise InputError(
            f"topk_weights is {topk_weights.dtype} {list(topk_weights.shape)}; it must be "
            f"float32, bfloat16 or float16 {list(topk_ids.shape)}, the shape of topk_ids"
        )


def _check_ids(
    topk_ids: torch.Tensor, num_ids: int, expert_map: torch.Tensor | None, num_experts: int
) -> None:
    for name, ids, limit in (
        ("topk_ids", topk_ids, num_ids),
        ("expert_map", expert_map, num_experts),
    ):
        if ids is None or not ids.numel():
            continue
        low, high = ids.min().item(), ids.max().item()
        if low < -1 or high >= limit:
            raise InputError(
                f"{name} holds values from {low} to {high}; they must lie in -1..{limit - 1}"
            )
