"""The calls at run time: weights packed, rows multiplied, SwiGLU between the two projections.

Nothing waits for the device; rows of nobody are left untouched.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from chord.compat.config import GemmType, LayerConfig
from chord.compat.refusals import refuse, required
from chord.compat.schema import HummingWeightSchema, Tensors
from chord.ops.grouped_gemm import indexed
from chord.ops.grouped_rows import contiguous, masked
from chord.weights.pack import PER_CHANNEL, pack_experts
from chord.weights.packed import PackedExperts

# Rows of a routing block by routed rows: small blocks waste few slots where experts have few rows.
# Chord joins the blocks of an expert, so their size changes the length of the tables, not the work.
_BLOCKS = ((0, 4096, 16), (4096, 1 << 31, 64))

# Of inputs; slots of experts lie as they are multiplied, so there is nothing to do for them.
_LAYOUTS = ("normal", "scatter", "grouped_mask")

_SILU = "(a/(1.f+expf(-a)))*b"

_packed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def prepare_and_transform_humming_tensors(
    tensors: Tensors,
    shape_n: int,
    shape_k: int,
    weight_schema: Any,
    input_schema: Any,
    num_experts: int | None = None,
    has_bias: bool = False,
    torch_dtype: torch.dtype = torch.bfloat16,
    **_: Any,
) -> tuple[LayerConfig, Tensors]:
    """Pack the experts of one projection.

    Args:
        tensors: weight: int32, [E, N, K/8]; weight_scale: bf16, [E, N, K/group].
        shape_n: N.
        shape_k: K.
        weight_schema: What the weights are.
        input_schema: What the activations are.
        num_experts: E; None for a dense layer, which is refused.
        has_bias: Refused.
        torch_dtype: dtype of activations.

    Returns:
        The projection's description, and weight: uint8, [E, N/64, K/64, 2304].

    Raises:
        UnsupportedError: Anything but W4A16 experts.
    """
    if num_experts is None:
        refuse(f"a dense layer, N={shape_n}, K={shape_k}")
    if has_bias:
        refuse("experts with biases")
    if torch_dtype != torch.bfloat16:
        refuse(f"activations of {torch_dtype}")
    if not isinstance(weight_schema, HummingWeightSchema):
        refuse(f"weights of {type(weight_schema).__name__}")
    why = f"W4A16 experts have weight and weight_scale, got {', '.join(tensors) or 'nothing'}"
    experts = pack_experts(
        required("weight", tensors.get("weight"), why),
        required("weight_scale", tensors.get("weight_scale"), why),
        group_size=weight_schema.weight_scale_group_size or PER_CHANNEL,
    )
    if (experts.num_experts, experts.n, experts.k) != (num_experts, shape_n, shape_k):
        refuse(
            f"weights of E={experts.num_experts}, N={experts.n}, K={experts.k} for a layer of "
            f"E={num_experts}, N={shape_n}, K={shape_k}"
        )
    config = LayerConfig(shape_n=shape_n, shape_k=shape_k, num_experts=num_experts)
    return config, {"weight": experts.data}


def get_heuristics_config(
    layer_config: LayerConfig,
    use_f16_accum: bool = False,
    use_batch_invariant: bool = False,
    gemm_type: GemmType = GemmType.INDEXED,
    **_: Any,
) -> list[list[Any]]:
    """Return rows from, rows up to, and the size of routing blocks for so many rows.

    Raises:
        UnsupportedError: An accuracy that Chord does not have.
    """
    if use_f16_accum:
        refuse("accumulating in FP16 (VLLM_HUMMING_USE_F16_ACCUM)")
    if use_batch_invariant:
        refuse("a result that does not depend on the batch (VLLM_BATCH_INVARIANT)")
    if _gemm_named(gemm_type) is GemmType.DENSE:
        refuse("a dense layer")
    return [
        [low, high, {"block_shape": [rows, layer_config.shape_n, layer_config.shape_k]}]
        for low, high, rows in _BLOCKS
    ]


def may_process_input(
    config: LayerConfig,
    inputs: torch.Tensor,
    outputs: torch.Tensor | None = None,
    layout: str = "normal",
    scatter_idx: torch.Tensor | None = None,
    activation_type: str | None = None,
    activation_impl: str | None = None,
    hadamard_block_size: int | None = 0,
    token_scales: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None, None]:
    """Apply SwiGLU, or copy tokens to the rows of their routes, or neither.

    Args:
        config: The projection that the result goes to.
        inputs: bf16, [M, K], or gate and up side by side, [R, 2 K], with an activation.
        outputs: bf16, [R, K]; None if there is nothing to do.
        layout: "scatter" copies row m of inputs to rows scatter_idx[m] of outputs; "normal" and
            "grouped_mask" leave rows where they are.
        scatter_idx: int32, [M, top_k].
        activation_type: "binary_split": gate before up.
        activation_impl: The formula of a and b; SiLU of a times b.
        hadamard_block_size: At most 1.
        token_scales: Must be None.

    Returns:
        What goes into the projection, bf16, [R, K], and no scales.

    Raises:
        UnsupportedError: Another activation, quantization, or rotation.
    """
    if layout not in _LAYOUTS:
        refuse(f"the layout {layout!r} of inputs")
    if token_scales is not None or (hadamard_block_size or 0) > 1:
        refuse(f"scaled or rotated activations (hadamard_block_size={hadamard_block_size})")
    if activation_type is not None:
        formula = "".join((activation_impl or "").split())
        if activation_type != "binary_split" or formula != _SILU:
            refuse(f"the activation {activation_type} {activation_impl!r}")
        outputs = required("outputs", outputs, "an activation writes its result there")
        _swiglu(inputs, outputs)
        return outputs, None, None
    if layout == "scatter":
        outputs = required("outputs", outputs, "a scatter writes its rows there")
        scatter_idx = required("scatter_idx", scatter_idx, "a scatter takes its places from there")
        # Places of routes that are not served here lie behind all others, where nobody reads.
        for slot in range(scatter_idx.shape[1]):
            outputs.index_copy_(0, scatter_idx[:, slot].long(), inputs)
        return outputs, None, None
    return inputs, None, None


def humming_forward(
    config: LayerConfig,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    outputs: torch.Tensor,
    compute_config: str | dict[str, Any],
    *,
    sorted_ids: torch.Tensor | None = None,
    expert_ids: torch.Tensor | None = None,
    num_tokens_padded: torch.Tensor | None = None,
    expert_layout: torch.Tensor | None = None,
    valid_shape_m: int = 0,
    top_k: int = 1,
    **operands: Any,
) -> torch.Tensor:
    """Multiply rows with the weights of their experts.

    Args:
        config: The projection.
        inputs: bf16, [M, K].
        weight: uint8, [E, N/64, K/64, 2304], packed.
        outputs: bf16, [M * top_k, N].
        compute_config: Its gemm_type says which of the following describe the rows.
        sorted_ids: int32, [P]: indexed.
        expert_ids: int32, [B]: indexed.
        num_tokens_padded: int32, [1]: indexed.
        expert_layout: int64, [E + 1], offsets: grouped_contiguous; int32, [E], counts of equal
            parts of the rows: grouped_masked.
        valid_shape_m: Rows to expect.
        top_k: Routes that share a row: indexed.
        operands: humming's others; scales are inside the packed weight, so all must be None.

    Returns:
        bf16, [M * top_k, N]: `outputs`.

    Raises:
        UnsupportedError: An operand that Chord has no use for, or a dense layer.
    """
    ignored = ("locks", "tuning_config", "hadamard_block_size")
    for name, value in operands.items():
        if value is not None and name not in ignored:
            refuse(f"the operand {name}")
    experts = _experts_of(weight, config)
    gemm = _gemm_type(
        compute_config if isinstance(compute_config, str) else json.dumps(compute_config)
    )
    if gemm is GemmType.INDEXED:
        why = "indexed rows come with sorted_ids, expert_ids and num_tokens_padded"
        return indexed(
            inputs,
            experts,
            required("sorted_ids", sorted_ids, why),
            required("expert_ids", expert_ids, why),
            required("num_tokens_padded", num_tokens_padded, why),
            top_k,
            block_m=_block_rows(valid_shape_m),
            out=outputs,
            validate=False,
        )
    expert_layout = required(
        "expert_layout", expert_layout, "grouped rows come with offsets or counts of the experts"
    )
    if gemm is GemmType.GROUPED_CONTIGUOUS:
        return contiguous(inputs, experts, expert_layout, outputs, validate=False)
    slots = (experts.num_experts, -1)
    masked(
        inputs.unflatten(0, slots),
        experts,
        expert_layout,
        outputs.unflatten(0, slots),
        expected=-(-valid_shape_m // experts.num_experts),
        validate=False,
    )
    return outputs


def _swiglu(inputs: torch.Tensor, outputs: torch.Tensor) -> None:
    """Write silu(gate) * up; by the engine's own operator where it has one."""
    if inputs.is_cuda and hasattr(torch.ops._C, "silu_and_mul"):
        torch.ops._C.silu_and_mul(outputs, inputs)
        return
    gate, up = inputs.float().chunk(2, dim=-1)
    outputs.copy_(torch.nn.functional.silu(gate) * up)


def _block_rows(rows: int) -> int:
    for low, high, block in _BLOCKS:
        if low < rows <= high:
            return block
    return 64  # what vLLM takes where no row of the table fits


@functools.cache
def _gemm_type(compute_config: str) -> GemmType:
    described = json.loads(compute_config)
    gemm = _gemm_named(described.get("gemm_type", "dense"))
    if gemm is GemmType.DENSE or described.get("use_f16_accum"):
        refuse(f"a GEMM with {compute_config}")
    return gemm


def _gemm_named(name: GemmType | str) -> GemmType:
    try:
        return GemmType(name)
    except ValueError:
        refuse(f"the GEMM type {name!r}")


def _experts_of(weight: torch.Tensor, config: LayerConfig) -> PackedExperts:
    """Return the packed weights behind a parameter, made once while it stays where it is."""
    experts = _packed.get(weight)
    if experts is None or experts.data.data_ptr() != weight.data_ptr():
        experts = PackedExperts(weight.data, n=config.shape_n, k=config.shape_k)
        _packed[weight] = experts
    return experts
