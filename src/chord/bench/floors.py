"""The time that no implementation can beat: bytes at memory speed, or the rate of a dense matmul.

`floor = max(launch + bytes / bandwidth, 2 R N K / dense rate)`, where the dense rate is what
PyTorch's BF16 matmul of the same R, N, K reaches in the same run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chord.bench.scenarios import GROUP_SIZE, Case
from chord.timing import Call

DENSE = "cuBLAS"
"""Name of the dense matmul among the contestants of a row."""


@dataclass(frozen=True)
class MemoryModel:
    """A line fitted to a kernel that only streams memory through bulk copies.

    Attributes:
        launch_us: What a call costs before the first byte.
        bytes_per_us: The slope.
        measured: Card and year of the fit.
    """

    launch_us: float
    bytes_per_us: float
    measured: str

    def time_us(self, num_bytes: int) -> float:
        """Return the time of streaming `num_bytes` once, in microseconds."""
        return self.launch_us + num_bytes / self.bytes_per_us


# H200: fitted over 0.4, 0.77 and 8 GB in copies of 8 KiB or more.
H200_MEMORY = MemoryModel(launch_us=12.0, bytes_per_us=4.70e6, measured="H200, 2026")


@dataclass(frozen=True)
class Floor:
    """The floor of one case.

    Attributes:
        floor_us: The larger of the two bounds.
        bound: "memory" or "math".
        num_bytes: Bytes that have to move once.
        active_experts: Experts that got at least one row.
        memory_us: The memory bound.
        math_us: The math bound.
        dense_tflops: The dense rate measured in this run.
    """

    floor_us: float
    bound: str
    num_bytes: int
    active_experts: int
    memory_us: float
    math_us: float
    dense_tflops: float


def bytes_moved(case: Case, active_experts: int) -> int:
    """Count what a call has to read and write once.

    Args:
        case: Shapes and row counts.
        active_experts: Experts with at least one row.

    Returns:
        Bytes of the active experts' codes and scales, every input row and every output row.
    """
    n, k = case.projection.n, case.projection.k
    weight = active_experts * (n * k // 2 + 2 * n * k // GROUP_SIZE)
    return weight + 2 * case.num_rows * k + 2 * case.num_routes * n


def dense_matmul(num_rows: int, n: int, k: int, device: torch.device | str) -> Call:
    """Prepare one dense BF16 matmul, x [num_rows, k] times w [n, k] transposed, on random data.

    Args:
        num_rows: Rows of x.
        n: Rows of w.
        k: Columns of both.
        device: Where the tensors live.

    Returns:
        A function without arguments that runs it once.
    """
    x = torch.randn(num_rows, k, device=device, dtype=torch.bfloat16)
    w = torch.randn(n, k, device=device, dtype=torch.bfloat16)
    out = torch.empty(num_rows, n, device=device, dtype=torch.bfloat16)
    return lambda: torch.matmul(x, w.T, out=out)


def tflops(num_rows: int, n: int, k: int, us: float) -> float:
    """Return the rate of a matmul in tera floating-point operations a second.

    Args:
        num_rows: Rows of x.
        n: Rows of w.
        k: Columns of both.
        us: Its time in microseconds.
    """
    return 2 * num_rows * n * k / us / 1e6


def floor_of(case: Case, active_experts: int, memory: MemoryModel, dense: float) -> Floor:
    """Combine the two bounds of one case.

    Args:
        case: Shapes and row counts.
        active_experts: Experts with at least one row.
        memory: The card's memory line.
        dense: The dense rate measured in this run, in TFLOP/s.

    Returns:
        The floor and what it is made of.
    """
    num_bytes = bytes_moved(case, active_experts)
    memory_us = memory.time_us(num_bytes)
    flops = 2 * case.num_routes * case.projection.n * case.projection.k
    math_us = flops / dense / 1e6
    return Floor(
        floor_us=max(memory_us, math_us),
        bound="memory" if memory_us >= math_us else "math",
        num_bytes=num_bytes,
        active_experts=active_experts,
        memory_us=memory_us,
        math_us=math_us,
        dense_tflops=dense,
    )
