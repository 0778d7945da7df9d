"""The operands of one benchmark row, the same for every implementation that runs it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chord.bench.operands import random_rows
from chord.bench.scenarios import MASKED_SLOTS, Case, expert_counts, route_case


@dataclass(frozen=True, eq=False)
class Work:
    """One expert GEMM, ready to be run.

    Attributes:
        case: What it is.
        x: bfloat16, [rows, K]; masked: [E, slots, K], and NaN in slots not in use.
        out: bfloat16, [output rows, N]; masked: [E, slots, N]. Every call overwrites it.
        owners: int32, [output rows], expert of each row of out, -1 for a row of nobody.
        topk_ids: int32, [T, TOP_K], expert of each route, -1 for none; only where indexed.
        counts: int32, [E], rows of each expert; only where grouped.
    """

    case: Case
    x: torch.Tensor
    out: torch.Tensor
    owners: torch.Tensor
    topk_ids: torch.Tensor | None = None
    counts: torch.Tensor | None = None

    @property
    def active_experts(self) -> int:
        """Experts with at least one row; waits for the device."""
        return int(self.owners[self.owners >= 0].unique().numel())

    @property
    def offsets(self) -> torch.Tensor:
        """int64, [E + 1]: expert e owns rows offsets[e] to offsets[e + 1] - 1, where contiguous."""
        assert self.counts is not None, "offsets describe grouped rows, these are indexed"
        return torch.nn.functional.pad(self.counts.long().cumsum(0), (1, 0))


def make_work(case: Case, device: torch.device | str) -> Work:
    """Make the operands of a case.

    Args:
        case: A row of a suite.
        device: Where the tensors live.

    Returns:
        Random x, an output of any contents, and who owns which row.
    """
    n, k = case.projection.n, case.projection.k
    if case.series.addressing == "indexed":
        topk_ids = route_case(case, device)
        num_rows = topk_ids.numel() // case.top_k
        x = random_rows(num_rows, k, device)
        out = torch.empty(topk_ids.numel(), n, dtype=torch.bfloat16, device=device)
        return Work(case, x, out, topk_ids.view(-1), topk_ids=topk_ids)
    counts = torch.tensor(
        expert_counts(case.num_experts, case.tokens, case.series.loads),
        dtype=torch.int32,
        device=device,
    )
    experts = torch.arange(case.num_experts, dtype=torch.int32, device=device)
    if case.series.addressing != "masked":
        owners = torch.repeat_interleave(experts, counts)
        x = random_rows(len(owners), k, device)
        out = torch.empty(len(owners), n, dtype=torch.bfloat16, device=device)
        return Work(case, x, out, owners, counts=counts)
    slots = max(MASKED_SLOTS, case.tokens)
    in_use = torch.arange(slots, device=device) < counts.unsqueeze(1)
    owners = torch.where(in_use, experts.unsqueeze(1), -1).view(-1)
    x = random_rows(len(owners), k, device)
    x[owners < 0] = torch.nan
    shape = (case.num_experts, slots)
    out = torch.empty(*shape, n, dtype=torch.bfloat16, device=device)
    return Work(case, x.view(*shape, k), out, owners, counts=counts)
