"""The whole routed layer built from humming-kernels, in the steps that vLLM 0.33 takes.

Align, GEMM, fused activation, GEMM, weighted sum. The GEMMs and the activation are humming's own
functions, which vLLM calls. The two others are vLLM's own, moe_align_block_size and
moe_fused_mul_sum, where vLLM is installed. Where it is not, Chord's kernels of the same purpose
stand in, one launch each, so that the baseline is not slowed by a stand-in. The record says which.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import chord
from chord.bench.operands import Checkpoint
from chord.bench.peers.humming import Humming
from chord.bench.scenarios import Case
from chord.jit import launch as launching
from chord.jit.fixed import fixed_launcher
from chord.jit.params import COMBINE, COMBINE_THREADS

_SILU = "(a / (1.f + expf(-a))) * b"
_VLLM_LAYER = "vllm.model_executor.layers.fused_moe"


class HummingLayer:
    """humming's two GEMMs and activation over the packed weights of one layer.

    Args:
        w13: Checkpoint form of gate and up, [E, 2 I, H].
        w2: Checkpoint form of down, [E, H, I].
        todo: Cases of both projections, whose configurations it has to compile.
    """

    name = "humming"

    def __init__(self, w13: Checkpoint, w2: Checkpoint, todo: Sequence[Case]) -> None:
        gate_up = [case for case in todo if case.projection.name == "gate_up"]
        down = [case for case in todo if case.projection.name == "down"]
        self._gate_up, self._down = Humming(w13, gate_up), Humming(w2, down)
        self.version = self._gate_up.version
        self._num_experts = w13.num_experts
        self._parts = _vllm_parts() or _chord_parts()
        self.choice = ""

    def prepare_call(
        self,
        hidden: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        out: torch.Tensor,
    ) -> Callable[[], object]:
        """Prepare the layer over one routing.

        Args:
            hidden: bfloat16, [T, H].
            topk_weights: float32, [T, k].
            topk_ids: int32, [T, k], every id local.
            out: bfloat16, [T, H], overwritten by the call.

        Returns:
            A function without arguments that runs the layer once.
        """
        from humming.forward import may_process_input

        num_routes, top_k = topk_ids.numel(), topk_ids.shape[1]
        blocks = [peer.block_shape("indexed", num_routes) for peer in (self._gate_up, self._down)]
        self.choice = (
            f"indexed, block_shape {blocks[0]} and {blocks[1]}; route sort and top-k sum are "
            f"{self._parts.whose}"
        )

        def rows(width: int) -> torch.Tensor:
            return torch.empty(num_routes, width, dtype=torch.bfloat16, device=hidden.device)

        sizes = self._down.layer.shape_k, self._down.layer.shape_n
        sums, middle, last = rows(2 * sizes[0]), rows(sizes[0]), rows(sizes[1])

        def tables(block_m: int) -> dict[str, torch.Tensor]:
            names = "sorted_ids", "expert_ids", "num_tokens_padded"
            made = self._parts.align(topk_ids, self._num_experts, block_m)
            return dict(zip(names, made, strict=True))

        def call() -> object:
            first = tables(blocks[0][0])
            self._gate_up.prepare("indexed", hidden, sums, top_k, num_routes, first)()
            activated, _, _ = may_process_input(
                self._down.layer,
                sums,
                outputs=middle,
                activation_type="binary_split",
                activation_impl=_SILU,
            )
            second = first if blocks[0][0] == blocks[1][0] else tables(blocks[1][0])
            self._down.prepare("indexed", activated, last, 1, num_routes, second)()
            return self._parts.weighted_sum(last, topk_weights, topk_ids, out)

        return call


@dataclass(frozen=True)
class _Parts:
    """What of the layer is not humming's.

    Attributes:
        whose: Whose it is, for the record.
        align: From ids [T, k], experts and rows of a block to sorted routes, experts of the blocks
            and the number of padded routes.
        weighted_sum: From rows [T * k, H], weights and ids [T, k] into out [T, H].
    """

    whose: str
    align: Callable[[torch.Tensor, int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    weighted_sum: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], object]


def _chord_parts() -> _Parts:
    """Return Chord's kernels of the same purpose."""

    def align(
        topk_ids: torch.Tensor, num_experts: int, block_m: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        aligned = chord.align(topk_ids, num_experts=num_experts, block_m=block_m)
        return aligned.sorted_token_ids, aligned.expert_ids, aligned.num_tokens_post_padded

    def weighted_sum(
        rows: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, out: torch.Tensor
    ) -> object:
        index = out.get_device()
        num_tokens, n = out.shape
        fixed_launcher(COMBINE, index).launch(
            launching.current_stream(index),
            num_tokens * -(-n // (8 * COMBINE_THREADS)),
            (
                rows.data_ptr(),
                _positions(topk_ids.numel(), index).data_ptr(),
                topk_weights.data_ptr(),
                0,
                out.data_ptr(),
                topk_weights.shape[1],
                n,
            ),
        )
        return out

    return _Parts("Chord's", align, weighted_sum)


@functools.cache
def _positions(num_routes: int, index: int) -> torch.Tensor:
    """Every route has a row, in the order of the routes; kept, for a graph names its address."""
    return torch.arange(num_routes, dtype=torch.int32, device=torch.device("cuda", index))


def _vllm_parts() -> _Parts | None:
    """Return vLLM's own parts, or None where it is not installed."""
    try:
        version = importlib.metadata.version("vllm")
        aligning = importlib.import_module(f"{_VLLM_LAYER}.moe_align_block_size")
        summing = importlib.import_module(f"{_VLLM_LAYER}.moe_fused_mul_sum")
    except ImportError:  # PackageNotFoundError is one
        return None
    return _Parts(
        f"vLLM {version}'s",
        lambda ids, num_experts, block_m: aligning.moe_align_block_size(
            ids, block_m, num_experts, ignore_invalid_experts=True
        )[:3],
        lambda rows, weights, ids, out: summing.moe_fused_mul_sum(
            rows.view(*ids.shape, -1), weights, outputs=out, topk_ids=ids
        ),
    )
