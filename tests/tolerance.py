"""How far a kernel may be from the reference, and where the bounds come from.

bf16 keeps 8 significant bits, so rounding to it changes a value by at most u = 2^-9 of itself.
A GEMM kernel may round twice: the dequantised weight (4-bit times 8-bit factors need up to 12
bits) and the output. Rounding the output moves a row by at most u of its norm. Rounding the
weights changes each of the K products by at most u of itself, with either sign; as such errors add
like the products themselves, random ones move a row by about u / sqrt(3) of its norm, and hardly
ever by u. fp32 accumulation in any order adds a random walk, sqrt(K) steps of 2^-24.

So `gemm_bound(k)` = 2 u + sqrt(K) 2^-24, about 0.0039. Correct kernels measure 0.0017 to 0.0024;
the smallest real fault, one dropped group at K=7168, gives 0.06. `ROW_LIMIT`, 5e-3, is the limit
that the project states everywhere, and is above the bound.

The fused layer rounds gate_up, the activation, and perhaps the rows before the top-k sum as well.
Errors of the first GEMM pass through SwiGLU, which at most about doubles them in relative size for
values of that spread, and the second GEMM averages them: against a computation in FP64 without any
rounding the project states `LAYER_LIMIT`, 8e-3.

On EXACT inputs (`cases.py`) there is no tolerance: `assert_exact`.
"""

from __future__ import annotations

import math

import torch

BF16_ROUNDING = 2.0**-9
FP32_ROUNDING = 2.0**-24
ROW_LIMIT = 5e-3
LAYER_LIMIT = 8e-3


def gemm_bound(k: int) -> float:
    """Bound of the row error of one GEMM with reduction length k."""
    return 2 * BF16_ROUNDING + math.sqrt(k) * FP32_ROUNDING


def row_errors(out: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return ||out - reference|| / ||reference|| for each row, fp64, [rows].

    out and reference are [..., N]. A row whose reference is zero has error 0 if out is zero too,
    else infinity; NaN in out gives infinity.
    """
    out = out.double().flatten(0, -2)
    reference = reference.to(out.device).double().flatten(0, -2)
    difference = (out - reference).norm(dim=-1)
    size = reference.norm(dim=-1)
    relative = torch.where(size > 0, difference / size, difference * math.inf)
    relative = torch.where((size == 0) & (difference == 0), 0.0, relative)
    return relative.nan_to_num(nan=math.inf, posinf=math.inf)


def assert_rows_close(
    out: torch.Tensor, reference: torch.Tensor, limit: float = ROW_LIMIT, what: str = "out"
) -> None:
    """Fail with the worst row unless every row error is at most `limit`."""
    assert out.shape == reference.shape, f"{what}: {list(out.shape)} != {list(reference.shape)}"
    if out.numel() == 0:
        return
    errors = row_errors(out, reference)
    worst = int(errors.argmax())
    bad = int((errors > limit).sum())
    assert bad == 0, (
        f"{what}: {bad} of {len(errors)} rows exceed {limit:g}; worst row {worst} has error "
        f"{errors[worst].item():.4g}"
    )


def assert_exact(out: torch.Tensor, reference: torch.Tensor, what: str = "out") -> None:
    """Fail with the first differing element unless both hold the same values (NaN differs)."""
    assert out.shape == reference.shape, f"{what}: {list(out.shape)} != {list(reference.shape)}"
    reference = reference.to(out.device)
    wrong = ~(out == reference)
    count = int(wrong.sum())
    if count:
        first = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {count} of {out.numel()} values differ; first at {list(first)}: "
            f"{out[first].item()} instead of {reference[first].item()}"
        )


def assert_within_ulp(
    out: torch.Tensor, reference: torch.Tensor, ulps: int = 1, what: str = "out"
) -> None:
    """Fail unless bf16 values are at most `ulps` apart, counted in representable numbers."""
    assert out.dtype == reference.dtype == torch.bfloat16, f"{what}: both must be bf16"
    distance = (_rank(out) - _rank(reference.to(out.device))).abs()
    worst = int(distance.max()) if distance.numel() else 0
    assert worst <= ulps, f"{what}: values are up to {worst} bf16 steps apart, allowed {ulps}"


def _rank(values: torch.Tensor) -> torch.Tensor:
    """Number bf16 values in ascending order; both zeros are 0."""
    bits = values.contiguous().view(torch.int16).int()
    return torch.where(bits >= 0, bits, -(bits & 0x7FFF))
