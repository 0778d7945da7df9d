"""The end of an expert layer in vLLM, done by the kernel that sums a token's experts.

vLLM multiplies the routed experts' output with the model's routed scaling factor and adds the
shared experts' output, [M, H], each in a pass over memory of its own. Chord's sum over top-k does
both on its way. Who computes them is decided by vLLM's `MoERunner`, and vLLM lets a plugin put a
subclass in the place of a layer class (`PluggableLayer.register_oot`): this one does what vLLM does
wherever another kernel serves the layer, or something stands between the sum and the layer's end.

So it does in code that torch.compile has made, too. There `forward` is not run but what was traced
of it, perhaps by another process and without Chord: vLLM keeps compiled models on disk, under a key
that knows of no plugin, and checks no guards. Such code scales and adds in larger kernels.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor import custom_op
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import (
    MoEPrepareAndFinalizeNoDPEPModular,
)
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts

from chord.integrations.vllm.experts import ChordExperts, LayerEnd
from chord.integrations.vllm.method import ChordMoEMethod

_LOG = init_logger("vllm.chord")

_PARAMETERS = {
    "_apply_quant_method": (
        "hidden_states",
        "router_logits",
        "shared_experts_input",
        "input_ids",
        "shared_experts_overlapping",
    ),
    "_maybe_apply_routed_scale_to_output": ("shared_output", "fused_output"),
    "forward": ("hidden_states", "router_logits", "input_ids", "shared_experts_input"),
}
"""What vLLM's methods take that are overridden here."""


class ChordMoERunner(MoERunner):
    """vLLM's runner of an expert layer, which leaves scaling and adding to Chord's experts."""

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        """Return whether a class is a runner: this one stands for vLLM's where vLLM asks.

        vLLM's LoRA asks the registered class whether a layer is one of it, and would leave the
        runners of other models out.
        """
        return MoERunner in other.__mro__

    _ending: ChordExperts | None = None
    """Those that compute the layer to its end, while `forward` runs; None in compiled code."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layer, bf16 [M, H], as vLLM's runner does."""
        if torch.compiler.is_compiling():
            return super().forward(hidden_states, router_logits, input_ids, shared_experts_input)
        self._ending = self._ending_experts()
        try:
            return super().forward(hidden_states, router_logits, input_ids, shared_experts_input)
        finally:
            self._ending = None

    def _ending_experts(self) -> ChordExperts | None:
        """Return Chord's experts if their sum is followed by nothing but scaling and adding.

        That is so on one rank, and on each rank of tensor or expert parallelism whose tokens are
        the same: outputs, scaled and added, are then summed over ranks.
        """
        method, moe = self._quant_method, self.moe_config
        if not isinstance(method, ChordMoEMethod) or method.moe_kernel is None:
            return None
        kernel = method.moe_kernel
        is_plain = (
            isinstance(kernel.prepare_finalize, MoEPrepareAndFinalizeNoDPEPModular)
            and self.routed_input_transform is None
            and self.routed_output_transform is None
            and moe.hidden_dim == moe.hidden_dim_unpadded
            and moe.pcp_size == 1
            and not moe.is_sequence_parallel
            and not self.enable_dbo  # two batches by turns, and one place for what ends a layer
        )
        experts = kernel.fused_experts
        return experts if is_plain and isinstance(experts, ChordExperts) else None

    def _apply_quant_method(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        shared_experts_input: torch.Tensor | None,
        input_ids: torch.Tensor | None = None,
        shared_experts_overlapping: bool = False,
    ) -> tuple[torch.Tensor | None, Any]:
        """Run shared and routed experts; where Chord ends the layer, the second output is its own.

        Outputs are bf16, [M, H].
        """
        operands = (hidden_states, router_logits, shared_experts_input, input_ids)
        experts = self._ending
        if experts is None:
            return super()._apply_quant_method(*operands, shared_experts_overlapping)
        shared, to_await = self._shared_experts, shared_experts_overlapping
        to_add = shared is not None

        def shared_output() -> tuple[torch.Tensor | None, torch.cuda.Event | None]:
            nonlocal to_await, to_add
            if shared is None:
                return None, None
            output = shared._output[shared._output_idx]
            if output.dtype != hidden_states.dtype or output.shape != hidden_states.shape:
                return None, None
            is_late, to_await, to_add = to_await, False, False
            if output.is_contiguous() and output.data_ptr() % 16 == 0:
                event = shared._output_ready_event[shared._output_idx] if is_late else None
                return output, event
            if is_late:
                shared.wait()
            return output.clone(memory_format=torch.contiguous_format), None

        with experts.ending(LayerEnd(self.routed_scaling_factor, shared_output)):
            shared_rows, rows = super()._apply_quant_method(*operands, False)
        if to_await:
            shared.wait()
        if to_add:
            rows = shared_rows + rows
        return shared_rows, rows

    def _maybe_apply_routed_scale_to_output(
        self, shared_output: torch.Tensor | None, fused_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return what is still to be added, and the routed experts' output, bf16 [M, H], scaled."""
        if self._ending is not None:
            return None, fused_output
        return super()._maybe_apply_routed_scale_to_output(shared_output, fused_output)


def register() -> None:
    """Put the runner in the place of vLLM's, if vLLM is built as it expects and nobody else has."""
    reason = _decline()
    if reason is None:
        MoERunner.register_oot(ChordMoERunner)
    elif reason:
        _LOG.info_once("Chord leaves the end of expert layers to vLLM: %s", reason)


def _decline() -> str | None:
    """Say why vLLM's runner stays; an empty reason if Chord's is there already."""
    known = custom_op.op_registry_oot.get(MoERunner.__name__)
    if known is not None:
        name = f"{known.__module__}.{known.__qualname__}"
        return "" if known is ChordMoERunner else f"{name} runs them"
    for name, parameters in _PARAMETERS.items():
        method = getattr(MoERunner, name, None)
        found = () if method is None else tuple(inspect.signature(method).parameters)[1:]
        if found != parameters:
            return f"MoERunner.{name} takes {list(found)}, Chord knows {list(parameters)}"
    for name in ("_output_idx", "wait"):
        if not hasattr(SharedExperts, name):
            return f"SharedExperts has no {name}"
    for name in ("_output", "_output_ready_event"):
        if name not in SharedExperts.__init__.__code__.co_names:
            return f"SharedExperts sets no {name}"
    return None
