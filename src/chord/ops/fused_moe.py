"""`chord.fused_moe`: the routed experts of one MoE layer as one operation.

How it is computed is `layer`'s, how it appears to `torch.compile` `torch_library`'s.
"""

from __future__ import annotations

import reprlib

import torch

from chord.arguments import check_tensor, describe, real_number, truth, whole_number
from chord.errors import InputError, UnsupportedError
from chord.ops import checks, layer, layer_checks, torch_library
from chord.plan.config import Config
from chord.weights.packed import PackedExperts


def fused_moe(
    hidden: torch.Tensor,
    w13: PackedExperts,
    w2: PackedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    *,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    swiglu_limit: float | None = None,
    routed_scaling_factor: float = 1.0,
    shared_output: torch.Tensor | None = None,
    shared_ready: torch.cuda.Event | None = None,
    l2_is_clean: bool = False,
    configs: tuple[Config, Config] | None = None,
) -> torch.Tensor:
    """Run the routed experts of one MoE layer.

    For token t and slot j with expert e = topk_ids[t, j], gate and up the halves of
    `hidden[t] @ W13[e].T`:

        middle = bf16(gate * sigmoid(alpha * gate) * (up + beta))
        sum[t] = sum over j of topk_weights[t, j] * bf16(middle @ W2[e].T)
        out[t] = bf16(bf16(routed_scaling_factor * bf16(sum[t])) + shared_output[t])

    Sums are FP32, the order is fixed: same input, same bits. Nothing waits for the device: ids are
    not validated, and one that is no expert's counts as -1. The call can be captured in a CUDA
    graph, once a call with as many tokens has loaded its kernels. It works under
    `torch.compile(fullgraph=True)`, also with a dynamic T. Without a CUDA GPU, with tensors on the
    CPU, `chord.reference` computes the same, and refuses an id of no expert.

    Args:
        hidden: bf16, [T, H], contiguous, 16-byte aligned; any T.
        w13: PackedExperts, [E, 2 I, H], packed with interleave_gate_up=True.
        w2: PackedExperts, [E, H, I].
        topk_weights: fp32, bf16 or fp16, [T, top_k], contiguous.
        topk_ids: int32 or int64, [T, top_k], contiguous; -1 contributes nothing.
        expert_map: int32 or int64, [experts of the model], local index or -1: topk_ids are then
            global, and experts of other ranks contribute nothing. Without it ids are local.
        activation: "silu", the only one: SwiGLU with the constants below.
        apply_router_weight_on_input: Multiply gate and up with the router weight instead of the
            rows of the second GEMM.
        out: bf16, [T, H], contiguous, overwritten entirely: tokens without a local expert become
            zero, or their row of shared_output. May be `hidden` or `shared_output` itself, and lies
            apart from all other tensors.
        workspace: any dtype, contiguous, of at least `chord.fused_moe_workspace` bytes, 16-byte
            aligned, apart from the other tensors; its content is of no meaning. Without it one is
            allocated by torch.
        swiglu_alpha: alpha of the formula.
        swiglu_beta: beta of the formula.
        swiglu_limit: Cut gate off above it, and up beyond plus and minus it; None for no limit.
        routed_scaling_factor: Factor of the sum, of models that have one.
        shared_output: bf16, [T, H], contiguous, 16-byte aligned: what the sum is added to, as the
            output of shared experts. With both the bits are those of scaling and adding afterwards.
        shared_ready: Recorded behind what writes shared_output on another stream. Only the sum
            waits for it: until then both streams run side by side. None if shared_output is
            written on the current stream, on the CPU and under torch.compile. As with any tensor
            of another stream, torch's allocator has to know that this one reads it
            (`shared_output.record_stream`), or it has to be kept until that stream has waited.
        l2_is_clean: Whether what lies in L2 when the call begins has mostly been read, not written,
            as in the decode step of a model. The first part of a long stream of weights then does
            not push that out, which takes up to 1.7 % off a decode layer, and adds 2 to 3 % behind
            a kernel that has written all of L2. Results do not depend on it.
        configs: Run exactly these configurations of gate_up and down; None lets
            `chord.plan.select` choose.

    Returns:
        bf16, [T, H]; `out` if it was given.

    Raises:
        InputError: An argument breaks a rule; nothing has been launched.
        UnsupportedError: No kernel does this shape on this card, or another activation.
        CompileError: A kernel does not compile or load.
        CaptureError: A kernel is not loaded yet and a CUDA graph is being captured.

    Example:
        >>> import torch, chord
        >>> words = torch.randint(-(2**31), 2**31 - 1, (4, 64, 16), dtype=torch.int32)
        >>> scales = torch.full((4, 64, 4), 0.01, dtype=torch.bfloat16)
        >>> w13 = chord.pack_experts(words, scales, interleave_gate_up=True)
        >>> w2 = chord.pack_experts(words.view(4, 256, 4)[:, :128], scales.view(4, 256, 1)[:, :128])
        >>> weights, ids = torch.rand(3, 4).topk(2)
        >>> chord.fused_moe(torch.ones(3, 128, dtype=torch.bfloat16), w13, w2, weights, ids).shape
        torch.Size([3, 128])
    """
    if not isinstance(activation, str) or activation != "silu":
        raise UnsupportedError(
            f"activation={reprlib.repr(activation)} is not supported; 'silu' is, with "
            f"swiglu_alpha, swiglu_beta and swiglu_limit for the constants of models"
        )
    read = {"hidden": hidden, "topk_weights": topk_weights}
    if shared_output is not None:
        read["shared_output"] = shared_output
    for name, tensor in read.items():
        check_tensor(name, tensor)
        checks.refuse_gradients(name, tensor)
    swiglu, scale = _check_constants(swiglu_alpha, swiglu_beta, swiglu_limit, routed_scaling_factor)
    if shared_ready is not None:
        _check_event(shared_ready, hidden, shared_output)
    if torch.compiler.is_compiling():
        for name, value in (("configs", configs), ("shared_ready", shared_ready)):
            if value is not None:
                raise InputError(f"{name} cannot be given under torch.compile; leave it out")
        return torch_library.fused_moe(
            hidden,
            w13,
            w2,
            topk_weights,
            topk_ids,
            expert_map,
            apply_router_weight_on_input,
            out,
            workspace,
            swiglu,
            scale,
            shared_output,
            truth("l2_is_clean", l2_is_clean),
        )
    operands = layer.Layer(
        w13,
        w2,
        layer.Swiglu(*swiglu),
        truth("apply_router_weight_on_input", apply_router_weight_on_input),
        configs,
        truth("l2_is_clean", l2_is_clean),
        scale,
    )
    return layer.run(
        operands,
        hidden,
        topk_weights,
        topk_ids,
        expert_map,
        out,
        workspace,
        shared_output,
        shared_ready,
    )


def _check_constants(
    alpha: float, beta: float, limit: float | None, scale: float
) -> tuple[tuple[float, float, float | None], float]:
    """Return SwiGLU's constants and the routed scaling factor as numbers that kernels take."""
    if not torch.compiler.is_compiling():  # where these may be symbols
        alpha, beta = real_number("swiglu_alpha", alpha), real_number("swiglu_beta", beta)
        limit = None if limit is None else real_number("swiglu_limit", limit)
        scale = real_number("routed_scaling_factor", scale)
    for name, constant in (
        ("swiglu_alpha", alpha),
        ("swiglu_beta", beta),
        ("swiglu_limit", limit),
        ("routed_scaling_factor", scale),
    ):
        if constant is not None and not abs(constant) <= layer.MAX_CONSTANT:  # NaN is not
            no_limit = " (no limit at all is swiglu_limit=None)" if name == "swiglu_limit" else ""
            raise InputError(
                f"{name}={constant!r} is beyond {layer.MAX_CONSTANT:.0e}, and it is applied in "
                f"FP32; pass a smaller one{no_limit}"
            )
    if limit is not None and not limit > 0:
        raise InputError(f"swiglu_limit={limit!r} must be positive, or None for no limit")
    return (alpha, beta, limit), scale


def _check_event(
    shared_ready: object, hidden: torch.Tensor, shared_output: torch.Tensor | None
) -> None:
    if not isinstance(shared_ready, torch.cuda.Event):
        raise InputError(f"shared_ready is {describe(shared_ready)}, not a torch.cuda.Event")
    if shared_output is None:
        raise InputError(
            "shared_ready says when shared_output is there, which is None; pass shared_output "
            "too, or leave shared_ready out"
        )
    if not hidden.is_cuda:
        raise InputError(
            f"shared_ready is an event of CUDA, hidden is on {hidden.device}; leave it out"
        )


def fused_moe_workspace(num_tokens: int, w13: PackedExperts, w2: PackedExperts, top_k: int) -> int:
    """Return the bytes of workspace that `fused_moe` needs for up to `num_tokens` tokens.

    It never falls as tokens grow, so an engine allocates once for its largest batch; beyond
    131,072 routes it stays the same.

    Args:
        num_tokens: Tokens T.
        w13: PackedExperts, uint8, [E, 2 I, H] inside.
        w2: PackedExperts, uint8, [E, H, I] inside.
        top_k: Experts a token visits.

    Raises:
        InputError: A number is out of range, or the weights are not of one layer.
    """
    tokens, slots = whole_number("num_tokens", num_tokens), whole_number("top_k", top_k)
    if tokens < 0 or slots < 1:
        raise InputError(
            f"num_tokens is {describe(num_tokens)}, top_k {describe(top_k)}; there are at least 0 "
            f"tokens and 1 expert a token"
        )
    layer_checks.check_weights(w13, w2)
    return layer.space_for(tokens, slots, w13.num_experts, w13.k, w2.k).num_bytes
