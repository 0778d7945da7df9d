"""torch's grouped matmul with BF16 weights: what a model pays that was not quantised."""

from __future__ import annotations

from collections.abc import Callable

import torch

from chord.bench.operands import Checkpoint
from chord.bench.scenarios import Case
from chord.bench.work import Work


class Unquantised:
    """`torch._grouped_mm` over rows sorted by expert.

    It has no form for slots: masked work is given to it as the same rows without gaps, and its
    result is copied into the slots by the first call alone, so that the copy is not timed.
    """

    name = "torch"

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.version = str(torch.__version__)
        self.choice = "_grouped_mm, BF16 weights"
        self._weight = torch.empty(
            checkpoint.num_experts,
            checkpoint.n,
            checkpoint.k,
            dtype=torch.bfloat16,
            device=checkpoint.weight_packed.device,
        )
        for expert in range(checkpoint.num_experts):
            self._weight[expert] = checkpoint.dequantize(expert)

    def handles(self, case: Case) -> bool:
        """Return whether the rows are contiguous or masked."""
        return case.series.addressing in ("contiguous", "masked")

    def prepare_call(self, work: Work) -> Callable[[], object]:
        """Prepare one grouped matmul.

        Args:
            work: Grouped rows.

        Returns:
            A function without arguments that computes all rows; its first call fills work.out.
        """
        in_use = (work.owners >= 0).nonzero().squeeze(1)
        rows = work.x.view(-1, work.x.shape[-1])[in_use]
        out = work.out.view(-1, work.out.shape[-1])
        ends = work.offsets[1:].int()
        weight = self._weight.transpose(1, 2)
        filled = False

        def call() -> torch.Tensor:
            nonlocal filled
            result = torch._grouped_mm(rows, weight, offs=ends)
            if not filled:
                out[in_use] = result
                filled = True
            return result

        return call
