"""The computation of Chord's expert layers in vLLM, for both of its activation formats.

`ChordExperts` serves Standard, [M, H] with expert ids: TP, EP, all-gather, DeepEP high-throughput
and v2. `ChordBatchedExperts` serves BatchedExperts, [E, T, H] with counts: DeepEP low-latency and
nixl. Inputs stay BF16 (`expects_unquantized_inputs` is vLLM's False: there is nothing to defer).

Weights come in as vLLM's parameters, uint8 [E, N / 64, K / 64, 2304]; what they stand for follows
from the layer's config. Nothing here waits for the device.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey
from vllm.platforms import current_platform
from vllm.scalar_type import scalar_types

import chord
from chord.integrations.vllm import warmup
from chord.jit.fixed import fixed_launcher
from chord.jit.launch import KernelKey
from chord.jit.params import FIXED_KERNELS, FixedKernel
from chord.ops import grouped_gemm, layer
from chord.plan.config import shipped_archs
from chord.plan.problem import GemmProblem
from chord.weights.layout import buffer_shape
from chord.weights.packed import PackedExperts

SCALE_DTYPE = torch.bfloat16


class _PackedWeights:
    """The weights of one layer as Chord takes them, made anew only if their place has changed.

    vLLM may exchange a layer's parameters (a reload puts back the ones that CUDA graphs know), so
    what is remembered is checked against the parameters of each call.
    """

    def __init__(self, hidden: int, inner: int, interleaved: bool) -> None:
        self._shapes = ((2 * inner, hidden, interleaved), (hidden, inner, False))
        self._kept: tuple[PackedExperts, PackedExperts] | None = None

    def of(self, w13: torch.Tensor, w2: torch.Tensor) -> tuple[PackedExperts, PackedExperts]:
        """Return both projections.

        Args:
            w13: uint8, [E, 2I / 64, H / 64, 2304].
            w2: uint8, [E, H / 64, I / 64, 2304].
        """
        kept = self._kept
        if (
            kept is None
            or kept[0].data.data_ptr() != w13.data_ptr()
            or kept[1].data.data_ptr() != w2.data_ptr()
        ):
            first, second = (
                PackedExperts(weight.data, n=n, k=k, gate_up_interleaved=interleaved)
                for weight, (n, k, interleaved) in zip((w13, w2), self._shapes, strict=True)
            )
            kept = self._kept = (first, second)
        return kept


def _no_shared() -> tuple[torch.Tensor | None, torch.cuda.Event | None]:
    """Say that nothing, bf16 [M, H], is to be added."""
    return None, None


@dataclass(frozen=True)
class LayerEnd:
    """What is left to do when a token's experts are summed: scale times the sum, plus shared.

    Attributes:
        scale: The model's routed scaling factor.
        shared: Asked when the routed experts are about to run: the shared experts' output, bf16
            [M, H], or None; and what it has to be awaited by, if another stream writes it.
    """

    scale: float = 1.0
    shared: Callable[[], tuple[torch.Tensor | None, torch.cuda.Event | None]] = _no_shared


@dataclass(frozen=True)
class LayerShape:
    """What the choice of a layer's kernels looks at.

    Attributes:
        moe: Sizes of the layer and of its batches.
        w13: Gate and up weights; of their data the shape is looked at, no more.
        w2: Down weights, likewise.
        index: The device.
        slots: Rows that an expert has room for, of BatchedExperts; None if not known yet.
    """

    moe: FusedMoEConfig
    w13: PackedExperts
    w2: PackedExperts
    index: int
    slots: int | None = None

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest batch, of all ranks."""
        return self.moe.max_num_tokens * self.moe.dp_size


class ChordExpertsBase(mk.FusedMoEExpertsModular):
    """What both formats share: what is supported, and the sizes of a layer.

    Attributes:
        interleave_gate_up: How the layer's w13 has to be packed.
        fixed_kernels: Kernels beside the GEMMs.
    """

    interleave_gate_up: ClassVar[bool]
    fixed_kernels: ClassVar[tuple[FixedKernel, ...]] = ()

    def __init__(
        self,
        moe_config: FusedMoEConfig,
        quant_config: mk.FusedMoEQuantConfig,
        max_num_tokens: int | None = None,
        num_dispatchers: int | None = None,
    ) -> None:
        super().__init__(moe_config, quant_config, max_num_tokens, num_dispatchers)
        self._hidden = moe_config.hidden_dim
        self._inner = moe_config.intermediate_size_per_partition
        self._weights = _PackedWeights(self._hidden, self._inner, self.interleave_gate_up)

    @staticmethod
    def _supports_current_device() -> bool:
        capability = current_platform.get_device_capability()
        if not current_platform.is_cuda() or capability is None:
            return False
        return f"sm_{capability.major}{capability.minor}a" in shipped_archs()

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(
        weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> bool:
        if weight_key is None or activation_key is not None:
            return False
        return weight_key.dtype == scalar_types.uint4b8 and weight_key.symmetric

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation == MoEActivation.SILU

    def moe_problem_size(
        self, a1: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor
    ) -> tuple[int, int, int, int, int]:
        """Return E, M, N, K, top_k of a call; the packed weights do not show N and K.

        Args:
            a1: bf16, [M, H] or [E, M, H].
            w1: uint8, [E, 2I / 64, H / 64, 2304].
            w2: uint8, [E, H / 64, I / 64, 2304].
            topk_ids: int32 or int64, [tokens, top_k].
        """
        return w1.size(0), a1.size(-2), 2 * self._inner, a1.size(-1), topk_ids.size(1)

    def load_kernels(self, w1: torch.Tensor, w2: torch.Tensor) -> None:
        """Compile and load what the layer may need; nothing to do for weights on the CPU.

        Args:
            w1: uint8, [E, 2I / 64, H / 64, 2304].
            w2: uint8, [E, H / 64, I / 64, 2304].

        Raises:
            CompileError: A kernel does not compile, or CHORD_JIT=cached forbids compiling.
        """
        if w1.is_cuda:
            index = w1.get_device()
            with torch.cuda.device(index):
                for kernel in self.fixed_kernels:
                    fixed_launcher(kernel, index)
            w13, down = self._weights.of(w1, w2)
            shape = LayerShape(self.moe_config, w13, down, index, self._slots)
            warmup.load_kernels(self._kernels(shape))

    @classmethod
    def begin_kernels(cls, moe: FusedMoEConfig, num_experts: int, index: int) -> None:
        """Begin to compile, in the background, what a layer without weights yet may need.

        Args:
            moe: Sizes of the layer.
            num_experts: E, experts of this rank.
            index: The device.
        """
        hidden, inner = moe.hidden_dim, moe.intermediate_size_per_partition
        with contextlib.suppress(chord.ChordError):  # `load_kernels` says what it is
            w13, w2 = (
                PackedExperts(
                    torch.empty(buffer_shape(num_experts, n, k), dtype=torch.uint8, device="meta"),
                    n=n,
                    k=k,
                )
                for n, k in ((2 * inner, hidden), (hidden, inner))
            )
            warmup.begin(cls._kernels(LayerShape(moe, w13, w2, index)))

    @property
    def _slots(self) -> int | None:
        """Rows that an expert has room for; None in a format without slots."""
        return None

    @staticmethod
    def _kernels(shape: LayerShape) -> Iterator[KernelKey]:
        """Yield the kernels for any number of tokens up to the largest batch."""
        raise NotImplementedError("each format asks for its own kernels")


class ChordExperts(ChordExpertsBase):
    """Routed experts over tokens with expert ids: the whole layer is `chord.fused_moe`."""

    interleave_gate_up: ClassVar[bool] = True
    fixed_kernels: ClassVar[tuple[FixedKernel, ...]] = FIXED_KERNELS
    _end = LayerEnd()

    @contextlib.contextmanager
    def ending(self, end: LayerEnd) -> Iterator[None]:
        """Let calls within compute the layer to its end."""
        self._end = end
        try:
            yield
        finally:
            self._end = LayerEnd()

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        """Return the format that it takes."""
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        parallel = moe_parallel_config
        if parallel.use_passthrough_all2all:
            return False
        return (
            not parallel.use_all2all_kernels
            or parallel.use_ag_rs_all2all_kernels
            or parallel.use_deepep_ht_kernels
            or parallel.use_deepep_v2_kernels
        )

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        """Return that nothing is left to weight or sum."""
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of both workspaces, in BF16 elements, and of the output.

        The first workspace may lie in the output's memory, so all goes into the second.
        """
        space = layer.space_for(M, topk, local_num_experts, self._hidden, self._inner)
        return (0,), (-(-space.num_bytes // SCALE_DTYPE.itemsize),), (M, K)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Compute the layer into output, bf16 [M, H], from hidden_states, bf16 [M, H].

        Within `ending` scaled, and with the shared experts' output.
        """
        if apply_router_weight_on_input:  # vLLM has: the tokens come in weighted
            topk_weights = torch.ones_like(topk_weights)
        w13, down = self._weights.of(w1, w2)
        shared_output, shared_ready = self._end.shared()
        chord.fused_moe(
            hidden_states,
            w13,
            down,
            topk_weights,
            topk_ids,
            expert_map=expert_map,
            out=output,
            workspace=workspace2,
            swiglu_limit=self.activation_config.clamp_limit,
            routed_scaling_factor=self._end.scale,
            shared_output=shared_output,
            shared_ready=shared_ready,
            l2_is_clean=True,  # in decode: attention has read its weights and the cache
        )

    @staticmethod
    def _kernels(shape: LayerShape) -> Iterator[KernelKey]:
        moe, top_k = shape.moe, shape.moe.experts_per_token
        num_ids = moe.num_experts if moe.use_ep else shape.w13.num_experts
        operands = layer.Layer(shape.w13, shape.w2)
        for tokens in warmup.token_counts(min(shape.most_tokens, layer.MAX_ROUTES // top_k)):
            yield from layer.choose_kernels(operands, tokens * top_k, num_ids, shape.index)


class ChordBatchedExperts(ChordExpertsBase):
    """Routed experts over slots of their expert: two calls of `chord.masked` around SwiGLU.

    Router weights and the sum over top-k belong to the combine step of the all-to-all.
    """

    interleave_gate_up: ClassVar[bool] = False

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        """Return the format that it takes."""
        return mk.FusedMoEActivationFormat.BatchedExperts

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        return moe_parallel_config.use_deepep_ll_kernels or moe_parallel_config.use_nixl_ep_kernels

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        """Return that the combine step weights and sums."""
        return TopKWeightAndReduceDelegate()

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of gate_up's output, the activation's and the layer's."""
        slots = self._slots
        return (
            (local_num_experts, slots, N),
            (local_num_experts, slots, N // 2),
            (local_num_experts, slots, K),
        )

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Compute the rows in use of output, bf16 [E, T, H], from hidden_states, bf16 [E, T, H]."""
        counts = None if expert_tokens_meta is None else expert_tokens_meta.expert_num_tokens
        if counts is None:
            raise RuntimeError(
                f"batched experts got {list(hidden_states.shape)} without expert_num_tokens; the "
                f"prepare step has to say how many rows of each expert are in use"
            )
        experts, slots, _ = hidden_states.shape
        gate_up = workspace13.view(experts, slots, 2 * self._inner)
        middle = workspace2.view(experts, slots, self._inner)
        w13, down = self._weights.of(w1, w2)
        expected = self._expected_rows(slots, topk_ids.size(1), global_num_experts)
        # The output may lie in gate_up's memory: by then gate_up has been read.
        chord.masked(hidden_states, w13, counts, gate_up, expected=expected, validate=False)
        self.activation(activation, middle, gate_up, valid_token_counts=counts)
        chord.masked(middle, down, counts, output, expected=expected, validate=False)

    @property
    def _slots(self) -> int:
        assert self.max_num_tokens is not None, "vLLM gives batched experts their slots"
        assert self.num_dispatchers is not None, "vLLM gives batched experts their dispatchers"
        return self.max_num_tokens * self.num_dispatchers

    @staticmethod
    def _kernels(shape: LayerShape) -> Iterator[KernelKey]:
        slots, experts = shape.slots or shape.most_tokens, shape.w13.num_experts
        for expected in {min(slots, 1 << bits) for bits in range(slots.bit_length() + 1)}:
            for w in (shape.w13, shape.w2):
                problem = GemmProblem(
                    experts, w.n, w.k, experts * slots, "Masked", experts * expected
                )
                yield grouped_gemm.choose(problem, shape.index)

    def _expected_rows(self, slots: int, top_k: int, num_experts: int) -> int:
        """Return the usual rows of an expert, a power of two, from the tokens of all ranks.

        It only steers the choice of kernels; the powers of two keep these few.
        """
        metadata = get_forward_context().dp_metadata if is_forward_context_available() else None
        if metadata is None:
            return slots
        tokens = int(metadata.num_tokens_across_dp_cpu.sum())
        rows = max(1, math.ceil(tokens * top_k / num_experts))
        return min(slots, 1 << (rows - 1).bit_length())


def experts_class(moe: FusedMoEConfig) -> type[ChordExpertsBase]:
    """Return the class for a deployment: by the form in which it hands tokens to experts."""
    batched = moe.moe_parallel_config.use_batched_activation_format
    return ChordBatchedExperts if batched else ChordExperts
