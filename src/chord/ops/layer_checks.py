"""What the operands of the whole layer must be like, all but addresses and contents."""

from __future__ import annotations

import torch

from chord.arguments import check_tensor
from chord.errors import InputError, UnsupportedError
from chord.jit.params import WEIGHT_TYPES
from chord.ops import checks
from chord.weights.packed import PackedExperts, check_packed, check_pair

ROUTER_WEIGHT_TYPES = {getattr(torch, name): number for number, name in enumerate(WEIGHT_TYPES)}
"""The number by which kernels know each dtype of router weights."""


def check_device(name: str, operand: torch.Tensor | PackedExperts, hidden: torch.Tensor) -> None:
    """Refuse an operand, of any dtype and any shape, on another device than hidden, bf16 [T, H]."""
    if operand.device != hidden.device:
        raise InputError(
            f"{name} is on {operand.device}, hidden is on {hidden.device}; move one of them"
        )


def check_weights(w13: PackedExperts, w2: PackedExperts) -> None:
    """Refuse weights that are not the two of one layer."""
    check_packed("w13", w13)
    check_packed("w2", w2)
    check_pair(w13, w2)
    if not w13.gate_up_interleaved:
        raise UnsupportedError(
            "w13 was packed without interleave_gate_up; SwiGLU is applied where gate and up of a "
            "feature meet in one thread: pack it with "
            "chord.pack_experts(..., interleave_gate_up=True)"
        )
    if w2.gate_up_interleaved:
        raise UnsupportedError(
            "w2 was packed with interleave_gate_up=True, which is for w13 only; pack it without"
        )


def check_routing(
    hidden: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> None:
    """Refuse router weights, ids or a map that do not fit hidden, bf16 [T, H]."""
    integers = (torch.int32, torch.int64)
    check_tensor("topk_ids", topk_ids)
    if topk_ids.dtype not in integers or topk_ids.dim() != 2 or topk_ids.shape[1] < 1:
        raise InputError(
            f"topk_ids is {topk_ids.dtype} {list(topk_ids.shape)}; it must be int32 or int64 "
            f"[T, top_k]"
        )
    if topk_ids.shape[0] != hidden.shape[0]:
        raise InputError(
            f"topk_ids is {list(topk_ids.shape)}, hidden {list(hidden.shape)}; they must agree in "
            f"T, their first dimension"
        )
    check_tensor("topk_weights", topk_weights)
    if topk_weights.dtype not in ROUTER_WEIGHT_TYPES or topk_weights.shape != topk_ids.shape:
        raise InputError(
            f"topk_weights is {topk_weights.dtype} {list(topk_weights.shape)}; it must be float32, "
            f"bfloat16 or float16 {list(topk_ids.shape)}, the shape of topk_ids"
        )
    for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        checks.check_contiguous(name, tensor)
        check_device(name, tensor, hidden)
    if topk_ids.numel() >= 1 << 31:
        raise InputError(
            f"topk_ids {list(topk_ids.shape)} makes {topk_ids.numel()} routes; routes are counted "
            f"in 32 bits, below 2^31"
        )
    if expert_map is not None:
        checks.check_table("expert_map", expert_map, hidden, integers)
        if not expert_map.numel():
            raise InputError(
                "expert_map has no elements; it must have one for each expert of the model"
            )


def check_shared(shared: torch.Tensor, hidden: torch.Tensor) -> None:
    """Refuse a shared_output that is not like hidden, bf16 [T, H]."""
    check_tensor("shared_output", shared)
    if shared.dtype is not torch.bfloat16 or shared.shape != hidden.shape:
        raise InputError(
            f"shared_output is {shared.dtype} {list(shared.shape)}; it must be bf16 "
            f"{list(hidden.shape)}, the shape of hidden"
        )
    checks.check_contiguous("shared_output", shared)
    check_device("shared_output", shared, hidden)


def check_workspace(workspace: torch.Tensor, hidden: torch.Tensor, num_bytes: int) -> None:
    """Refuse a workspace, any dtype, any shape, of fewer bytes or elsewhere than hidden."""
    check_tensor("workspace", workspace)
    checks.check_contiguous("workspace", workspace)
    check_device("workspace", workspace, hidden)
    if workspace.nbytes < num_bytes:
        raise InputError(
            f"workspace has {workspace.nbytes} bytes, {hidden.shape[0]} tokens need "
            f"{num_bytes}; chord.fused_moe_workspace tells the size"
        )
