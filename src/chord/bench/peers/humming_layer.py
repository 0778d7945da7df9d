"""The whole routed layer built from humming-kernels, in the steps that vLLM 0.33 takes.

Align, GEMM, fused activation, GEMM, weighted sum. The GEMMs and the activation are humming's own
functions, which vLLM calls. vLLM's two others are its own compiled code; here Chord's kernels of
the same purpose stand in, one launch each: the route sort for moe_align_block_size, the top-k sum
for moe_fused_mul_sum. So the baseline is not slowed by a stand-in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

import chord
from chord.bench.operands import Checkpoint
from chord.bench.peers.humming import Humming
from chord.bench.scenarios import Case
from chord.jit import launch as launching
from chord.jit.fixed import fixed_launcher
from chord.jit.params import COMBINE, COMBINE_THREADS

_SILU = "(a / (1.f + expf(-a))) * b"


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
        self.choice = f"indexed, block_shape {blocks[0]} and {blocks[1]}"

        def rows(width: int) -> torch.Tensor:
            return torch.empty(num_routes, width, dtype=torch.bfloat16, device=hidden.device)

        sizes = self._down.layer.shape_k, self._down.layer.shape_n
        sums, middle, last = rows(2 * sizes[0]), rows(sizes[0]), rows(sizes[1])
        # Every route has a row, in the order of the routes.
        positions = torch.arange(num_routes, dtype=torch.int32, device=hidden.device)

        def tables(block_m: int) -> dict[str, torch.Tensor]:
            aligned = chord.align(topk_ids, num_experts=self._num_experts, block_m=block_m)
            return {
                "sorted_ids": aligned.sorted_token_ids,
                "expert_ids": aligned.expert_ids,
                "num_tokens_padded": aligned.num_tokens_post_padded,
            }

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
            return _weighted_sum(last, positions, topk_weights, out)

        return call


def _weighted_sum(
    rows: torch.Tensor, positions: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    index = out.get_device()
    num_tokens, n = out.shape
    fixed_launcher(COMBINE, index).launch(
        launching.current_stream(index),
        num_tokens * -(-n // (8 * COMBINE_THREADS)),
        (
            rows.data_ptr(),
            positions.data_ptr(),
            topk_weights.data_ptr(),
            0,
            out.data_ptr(),
            topk_weights.shape[1],
            n,
        ),
    )
    return out
