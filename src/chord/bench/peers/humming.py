"""humming-kernels on the same checkpoint tensors, called the way vLLM calls it.

Packing, tile choice and launch are humming's own. Only the routing buffers are made here: for
indexed rows by `chord.routing.align` for the block size that humming asks for; contiguous rows are
described by int64 offsets, masked ones by int32 counts. Its tile choice goes by the rows in use,
which it is told.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from chord import routing
from chord.bench.operands import Checkpoint
from chord.bench.scenarios import GROUP_SIZE, Case
from chord.bench.work import Work
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
_LOCKS_PER_SM = 16
_GEMM_TYPES = {
    "indexed": "indexed",
    "contiguous": "grouped_contiguous",
    "masked": "grouped_masked",
}


class Humming:
    """humming's expert GEMM over one packed weight."""

    name = "humming"

    def __init__(self, checkpoint: Checkpoint, todo: Sequence[Case]) -> None:
        try:
            # The distribution, not the module: Chord has an import root of the same name.
            self.version = importlib.metadata.version("humming-kernels")
        except importlib.metadata.PackageNotFoundError as error:
            raise UnsupportedError(
                "the peer humming needs the package humming-kernels, which is not installed; "
                "pip install humming-kernels[cu13]"
            ) from error
        from humming import schema, transform

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
        self.layer, self._tensors = transform.prepare_and_transform_humming_tensors(
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
        self._device = device
        self._todo = [case for case in todo if self.handles(case)]
        self._tuning: dict[str, list[Any]] = {}
        self.choice = ""
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._locks = torch.zeros(num_sms * _LOCKS_PER_SM, dtype=torch.int32, device=device)
        self._num_experts = checkpoint.num_experts

    def handles(self, case: Case) -> bool:
        """Return whether it has the case's way to say which rows an expert has."""
        return case.series.addressing in _GEMM_TYPES

    def prepare_call(self, work: Work) -> Callable[[], object]:
        """Prepare one expert GEMM.

        Args:
            work: Operands.

        Returns:
            A function without arguments that runs humming's kernel once.
        """
        case = work.case
        gemm_type = _GEMM_TYPES[case.series.addressing]
        block_shape = self.block_shape(gemm_type, case.num_routes)
        self.choice = f"{gemm_type}, block_shape {block_shape}"
        x, out = (rows.view(-1, rows.shape[-1]) for rows in (work.x, work.out))
        tables = self._tables(work, block_shape[0])
        return self.prepare(gemm_type, x, out, case.top_k, case.num_routes, tables)

    def prepare(
        self,
        gemm_type: str,
        x: torch.Tensor,
        out: torch.Tensor,
        top_k: int,
        num_routes: int,
        tables: dict[str, torch.Tensor],
    ) -> Callable[[], object]:
        """Prepare a call of its kernel.

        Args:
            gemm_type: How rows are found, in its words.
            x: bfloat16, [rows, K].
            out: bfloat16, [output rows, N].
            top_k: Output rows that read one row of x.
            num_routes: Output rows in use, which its tile choice goes by.
            tables: Its routing arguments by name.

        Returns:
            A function without arguments that runs humming's kernel once.
        """
        from humming.forward import humming_forward

        compute = {"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": gemm_type}
        return functools.partial(
            humming_forward,
            self.layer,
            inputs=x,
            weight=self._tensors["weight"],
            weight_scale=self._tensors["weight_scale"],
            weight_scale_2=self._tensors.get("weight_scale_2"),
            outputs=out,
            locks=self._locks,
            top_k=top_k,
            valid_shape_m=num_routes,
            compute_config=json.dumps(compute),
            tuning_config=json.dumps(self._tuning_of(gemm_type)),
            **tables,
        )

    def _tables(self, work: Work, block_m: int) -> dict[str, torch.Tensor]:
        if work.topk_ids is None:
            masked = work.case.series.addressing == "masked"
            return {"expert_layout": work.offsets.diff().int() if masked else work.offsets}
        aligned = routing.align(work.topk_ids, num_experts=self._num_experts, block_m=block_m)
        return {
            "sorted_ids": aligned.sorted_token_ids,
            "expert_ids": aligned.expert_ids,
            "num_tokens_padded": aligned.num_tokens_post_padded,
        }

    def _tuning_of(self, gemm_type: str) -> list[Any]:
        """Return its tuning table, (from, to, configuration) each, without what no case needs.

        It compiles a whole table at the first call, in parallel.
        """
        from humming import tune

        if gemm_type not in self._tuning:
            table = tune.get_heuristics_config(
                layer_config=self.layer,
                use_f16_accum=False,
                use_batch_invariant=False,
                gemm_type=gemm_type,
                device=self._device,
            )
            rows = {
                case.num_routes
                for case in self._todo
                if _GEMM_TYPES[case.series.addressing] == gemm_type
            }
            rows.add(1)  # its launcher looks up one row, whatever the call
            self._tuning[gemm_type] = [
                entry for entry in table if any(entry[0] < count <= entry[1] for count in rows)
            ]
        return self._tuning[gemm_type]

    def block_shape(self, gemm_type: str, num_routes: int) -> tuple[int, ...]:
        """Return rows, features and K of the tile that its launcher takes.

        Args:
            gemm_type: How rows are found, in its words.
            num_routes: Rows in use.
        """
        for low, high, config in self._tuning_of(gemm_type):
            if low < num_routes <= high:
                return tuple(config["block_shape"])
        raise UnsupportedError(
            f"humming {self.version} has no {gemm_type} configuration for {num_routes} rows of "
            f"this shape; measure it without the peer"
        )
