"""The whole layer as `torch.library` operators, for torch.compile; `chord.fused_moe` calls them.

An operator takes plain tensors and numbers: the packed bytes and what the containers know besides.
Importing this module defines them, which the first use of `chord.fused_moe` does.
"""

from __future__ import annotations

import torch

from chord.ops import layer, layer_checks
from chord.weights.packed import PackedExperts

_OPERANDS = (
    "Tensor hidden, Tensor w13, Tensor w2, int intermediate, Tensor topk_weights, Tensor topk_ids, "
    "Tensor? expert_map, bool apply_router_weight_on_input, float swiglu_alpha, "
    "float swiglu_beta, float? swiglu_limit, float routed_scaling_factor, Tensor? shared_output, "
    "bool l2_is_clean"
)


def _run(
    hidden: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    intermediate: int,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    apply_router_weight_on_input: bool,
    swiglu_alpha: float,
    swiglu_beta: float,
    swiglu_limit: float | None,
    routed_scaling_factor: float,
    shared_output: torch.Tensor | None,
    l2_is_clean: bool,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    size = hidden.shape[1]
    operands = layer.Layer(
        PackedExperts(w13, n=2 * intermediate, k=size, gate_up_interleaved=True),
        PackedExperts(w2, n=size, k=intermediate),
        layer.Swiglu(swiglu_alpha, swiglu_beta, swiglu_limit),
        apply_router_weight_on_input,
        l2_is_clean=l2_is_clean,
        scale=routed_scaling_factor,
    )
    # Compiled code may hand over views of other strides than a caller of the function would.
    return layer.run(
        operands,
        hidden.contiguous(),
        topk_weights.contiguous(),
        topk_ids.contiguous(),
        expert_map,
        out,
        workspace,
        None if shared_output is None else shared_output.contiguous(),
    )


@torch.library.custom_op("chord::fused_moe", mutates_args=(), schema=f"({_OPERANDS}) -> Tensor")
def _fused_moe(*operands):  # type: ignore[no-untyped-def]
    return _run(*operands)


@_fused_moe.register_fake
def _(hidden, *_):  # type: ignore[no-untyped-def]
    return hidden.new_empty(hidden.shape)


@torch.library.custom_op(
    "chord::fused_moe_out",
    mutates_args=("out", "workspace"),
    schema=f"({_OPERANDS}, Tensor(a!) out, Tensor(b!)? workspace) -> ()",
)
def _fused_moe_out(*operands):  # type: ignore[no-untyped-def]
    _run(*operands)


@_fused_moe_out.register_fake
def _(*_):  # type: ignore[no-untyped-def]
    return None


def fused_moe(
    hidden: torch.Tensor,
    w13: PackedExperts,
    w2: PackedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    apply_router_weight_on_input: bool,
    out: torch.Tensor | None,
    workspace: torch.Tensor | None,
    swiglu: tuple[float, float, float | None],
    routed_scaling_factor: float,
    shared_output: torch.Tensor | None,
    l2_is_clean: bool,
) -> torch.Tensor:
    """Call the operator that fits; arguments as `chord.fused_moe` takes them.

    Args:
        hidden: bf16, [T, H].
        w13: PackedExperts, [E, 2 I, H].
        w2: PackedExperts, [E, H, I].
        topk_weights: fp32, bf16 or fp16, [T, top_k].
        topk_ids: int32 or int64, [T, top_k].
        expert_map: int32 or int64, [experts of the model], or None.
        apply_router_weight_on_input: Where router weights are applied.
        out: bf16, [T, H], or None.
        workspace: any dtype, any shape, or None.
        swiglu: alpha, beta and limit.
        routed_scaling_factor: Factor of the sum.
        shared_output: bf16, [T, H], or None.
        l2_is_clean: What lies in L2.

    Returns:
        bf16, [T, H]; `out` if it was given.
    """
    layer_checks.check_weights(w13, w2)
    operands = (
        hidden,
        w13.data,
        w2.data,
        w2.k,
        topk_weights,
        topk_ids,
        expert_map,
        apply_router_weight_on_input,
        *swiglu,
        routed_scaling_factor,
        shared_output,
        l2_is_clean,
    )
    if out is None and workspace is None:
        return torch.ops.chord.fused_moe(*operands)
    if out is None:
        out = torch.empty_like(hidden)
    torch.ops.chord.fused_moe_out(*operands, out, workspace)
    return out
