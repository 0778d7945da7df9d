"""humming-kernels on the same checkpoint tensors, called the way vLLM calls it.

Packing, tile choice and launch are humming's own. Only the routing buffers are made here, by
`chord.routing.align` for the block size that humming asks for.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from typing import Any

import torch

from chord import routing
from chord.bench.operands import Checkpoint
from chord.bench.scenarios import GROUP_SIZE
from chord.errors import UnsupportedError

_CHECKPOINT_FORMAT = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "type": "int",
    "num_bits": 4,
    "strategy": "group",
    "group_size": GROUP_SIZE,
    "symmetric": True,
}
# vLLM pads to these multiples before it packs.
_PAD_N, _PAD_K = 256, 128
_LOCKS_PER_SM = 8


class Humming:
    """humming's indexed expert GEMM over one packed weight."""

    name = "humming"

    def __init__(self, checkpoint: Checkpoint) -> None:
        try:
            # The distribution, not the module: Chord has an import root of the same name.
            self.version = importlib.metadata.version("humming-kernels")
        except importlib.metadata.PackageNotFoundError as error:
            raise UnsupportedError(
                "the peer humming needs the package humming-kernels, which is not installed; "
                "pip install humming-kernels[cu13]"
            ) from error
        from humming import schema, transform, tune

        device = checkpoint.weight_packed.device
        shared: dict[str, Any] = {
            "shape_n_stacks": [checkpoint.n],
            "shape_k_stacks": [checkpoint.k],
            "param_dtype": torch.bfloat16,
            "num_experts": checkpoint.num_experts,
            "device": device,
        }
        weight_schema, tensors = schema.BaseWeightSchema.from_config(
            _CHECKPOINT_FORMAT
        ).convert_humming(
            tensors={
                "weight_packed": checkpoint.weight_packed,
                "weight_scale": checkpoint.weight_scale,
            },
            **shared,
        )
        self._layer, self._tensors = transform.prepare_and_transform_humming_tensors(
            tensors=tensors,
            shape_n=checkpoint.n,
            shape_k=checkpoint.k,
            weight_schema=weight_schema,
            input_schema=schema.HummingInputSchema(),
            num_experts=checkpoint.num_experts,
            pad_n_to_multiple=_PAD_N,
            pad_k_to_multiple=_PAD_K,
            torch_dtype=torch.bfloat16,
            device=device,
        )
        self._tuning = tune.get_heuristics_config(
            layer_config=self._layer,
            use_f16_accum=False,
            use_batch_invariant=False,
            gemm_type="indexed",
            device=device,
        )
        self.choice = ""
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._locks = torch.zeros(num_sms * _LOCKS_PER_SM, dtype=torch.int32, device=device)
        self._num_experts = checkpoint.num_experts

    def block_shape(self, num_routes: int) -> tuple[int, ...]:
        """Return humming's own tile for a number of routed rows.

        Args:
            num_routes: Routed rows R.

        Returns:
            Rows, features and K of a tile; rows alone, 64, where no entry matches, as in vLLM.
        """
        for low, high, config in self._tuning:
            if low < num_routes <= high:
                return tuple(config["block_shape"])
        return (64,)

    def prepare_call(
        self, x: torch.Tensor, topk_ids: torch.Tensor, top_k: int, out: torch.Tensor
    ) -> Callable[[], object]:
        """Prepare one expert GEMM over one routing.

        Args:
            x: bfloat16, [R / top_k, K].
            topk_ids: int32, [T, k], R expert ids in route order.
            top_k: Routes that read one row of x.
            out: bfloat16, [R, N], overwritten by the call.

        Returns:
            A function without arguments that runs humming's kernel once.
        """
        from humming.forward import humming_forward

        num_routes = topk_ids.numel()
        block_shape = self.block_shape(num_routes)
        self.choice = f"block_shape {block_shape}"
        aligned = routing.align(topk_ids, num_experts=self._num_experts, block_m=block_shape[0])
        compute = json.dumps(
            {"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": "indexed"}
        )
        tuning = json.dumps(self._tuning)

        def call() -> object:
            return humming_forward(
                self._layer,
                inputs=x,
                weight=self._tensors["weight"],
                weight_scale=self._tensors["weight_scale"],
                weight_scale_2=self._tensors.get("weight_scale_2"),
                outputs=out,
                locks=self._locks,
                sorted_ids=aligned.sorted_token_ids,
                expert_ids=aligned.expert_ids,
                num_tokens_padded=aligned.num_tokens_post_padded,
                top_k=top_k,
                valid_shape_m=num_routes,
                compute_config=compute,
                tuning_config=tuning,
            )

        return call
