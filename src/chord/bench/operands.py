"""Random layers in checkpoint form, and the error of every output row against a plain computation.

The check starts from the checkpoint tensors, not from the packed weight, so it also covers packing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chord.bench.scenarios import GROUP_SIZE

POISON = 12345.0
"""What an output buffer holds before a checked call; a row left unwritten fails the check."""

ROW_ERROR_LIMIT = 5e-3
"""Largest `||row - reference|| / ||reference||`; BF16 rounding of the output alone gives 1.7e-3."""

_CHUNK_ROWS = 16384


@dataclass(frozen=True)
class Checkpoint:
    """The weight of one expert GEMM as a pack-quantized checkpoint stores it.

    Attributes:
        weight_packed: int32, [E, N, K/8]; element j of a row in bits 4 (j mod 8) of word j div 8.
        weight_scale: bfloat16, [E, N, K/32].
    """

    weight_packed: torch.Tensor
    weight_scale: torch.Tensor

    @property
    def num_experts(self) -> int:
        """Experts E."""
        return self.weight_packed.shape[0]

    @property
    def n(self) -> int:
        """Output features N."""
        return self.weight_packed.shape[1]

    @property
    def k(self) -> int:
        """Reduction length K."""
        return self.weight_packed.shape[2] * 8

    def dequantize(self, expert: int) -> torch.Tensor:
        """Dequantize one expert.

        Args:
            expert: Index in 0..E-1.

        Returns:
            float32, [N, K].
        """
        shifts = torch.arange(0, 32, 4, device=self.weight_packed.device, dtype=torch.int32)
        codes = (self.weight_packed[expert].unsqueeze(-1) >> shifts) & 15
        values = (codes - 8).view(self.n, self.k // GROUP_SIZE, GROUP_SIZE).float()
        return (values * self.weight_scale[expert].float().unsqueeze(-1)).view(self.n, self.k)


def random_checkpoint(
    num_experts: int, n: int, k: int, device: torch.device | str, seed: int = 0
) -> Checkpoint:
    """Make random weights: codes uniform in 0..15, scales uniform in 0.002 to 0.02.

    Args:
        num_experts: Experts E.
        n: Output features N.
        k: Reduction length K, a multiple of 32.
        device: Where the tensors live.
        seed: Seed of the generator.

    Returns:
        The checkpoint tensors.
    """
    generator = torch.Generator(device).manual_seed(seed)
    words = torch.empty(num_experts, n, k // 8, dtype=torch.int32, device=device)
    scales = torch.empty(num_experts, n, k // GROUP_SIZE, dtype=torch.bfloat16, device=device)
    for expert in range(num_experts):
        words[expert].random_(-(2**31), 2**31 - 1, generator=generator)
        drawn = torch.rand(n, k // GROUP_SIZE, generator=generator, device=device)
        scales[expert] = (0.002 + 0.018 * drawn).to(torch.bfloat16)
    return Checkpoint(words, scales)


def random_rows(num_rows: int, k: int, device: torch.device | str, seed: int = 1) -> torch.Tensor:
    """Make activations from a standard normal distribution.

    Args:
        num_rows: Rows.
        k: Columns.
        device: Where the tensor lives.
        seed: Seed of the generator.

    Returns:
        bfloat16, [num_rows, k].
    """
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.empty(num_rows, k, dtype=torch.bfloat16, device=device)
    return x.normal_(generator=generator)


def max_row_error(
    out: torch.Tensor, x: torch.Tensor, owners: torch.Tensor, top_k: int, checkpoint: Checkpoint
) -> float:
    """Compare every row that an expert owns with an FP32 computation, expert by expert.

    Args:
        out: bfloat16, [..., N], R rows.
        x: bfloat16, [..., K], R / top_k rows; row r of out reads row `r // top_k`.
        owners: int32, any shape, R experts in the order of out's rows; -1 for a row of nobody.
        top_k: Rows of out that read one row of x.
        checkpoint: The weights.

    Returns:
        The largest relative error `||out - ref|| / ||ref||` of a row; infinity if one is not
        finite.
    """
    out, x, owners = out.view(-1, checkpoint.n), x.view(-1, checkpoint.k), owners.reshape(-1)
    worst = torch.zeros((), device=out.device)
    for expert in owners.unique().tolist():
        if expert < 0:
            continue
        weight = checkpoint.dequantize(expert)
        for rows in (owners == expert).nonzero().squeeze(1).split(_CHUNK_ROWS):
            reference = x[rows // top_k].float() @ weight.T
            difference = torch.linalg.vector_norm(out[rows].float() - reference, dim=1)
            error = difference / torch.linalg.vector_norm(reference, dim=1).clamp_min(1e-30)
            worst = torch.maximum(worst, torch.nan_to_num(error, nan=torch.inf).max())
    return float(worst)


def rows_of_nobody_changed(out: torch.Tensor, owners: torch.Tensor) -> int:
    """Count the rows of an output that nobody owns and that no longer hold POISON.

    Args:
        out: bfloat16, [..., N], filled with POISON before the call.
        owners: int32, [R], one for each row of out; -1 for a row of nobody.
    """
    left = out.view(len(owners), -1)[owners < 0]
    poison = torch.tensor(POISON, dtype=out.dtype, device=out.device)
    return int((left != poison).any(dim=1).sum())
