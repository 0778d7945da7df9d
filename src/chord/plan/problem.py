"""What the caller of a grouped GEMM has fixed, as far as the choice of a kernel goes."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from chord.weights.layout import UNIT_BYTES, unit_grid


@dataclass(frozen=True)
class GemmProblem:
    """One grouped GEMM, out[R, N] = x[R, K] @ weight[expert of the row].T.

    Only numbers that the host knows without asking the device: how the rows spread over the
    experts is not among them and is taken as uniformly random where a cost needs it.

    Attributes:
        num_experts: Local experts, E.
        n: Output features, N.
        k: Reduction length, K.
        routed_rows: Rows of the output: M * top_k, R, or E * max_m. None may be in use.
        addressing: How the kernel finds its rows; a type of kernels/addressing.
        expected_rows: Rows that the caller expects to be in use, or None for all of them. It
            changes which kernel is chosen, never what may run.
    """

    num_experts: int
    n: int
    k: int
    routed_rows: int
    addressing: str = "Indexed"
    expected_rows: int | None = None

    @property
    def planned_rows(self) -> int:
        """Rows to plan for: those expected, and at most those that exist."""
        if self.expected_rows is None:
            return self.routed_rows
        return min(self.expected_rows, self.routed_rows)

    @property
    def rows_per_expert(self) -> float:
        """Mean rows of a local expert."""
        return self.planned_rows / max(self.num_experts, 1)

    @property
    def expert_bytes(self) -> int:
        """Packed bytes of one expert, padding included."""
        return math.prod(unit_grid(self.n, self.k)) * UNIT_BYTES

    @property
    def row_bytes(self) -> int:
        """Bytes of one input row and its output row."""
        return 2 * (self.k + self.n)

    @property
    def flop(self) -> int:
        """Floating-point operations without padding."""
        return 2 * self.planned_rows * self.n * self.k

    @functools.cached_property
    def load_histogram(self) -> tuple[tuple[int, float], ...]:
        """Pairs (rows, expected number of experts with that many rows), rows > 0.

        Every routed row picks its expert uniformly at random, so loads are close to Poisson. From
        a mean of 64 on nine evenly spread quantile points of the normal approximation do.
        """
        mean = self.rows_per_expert
        if mean <= 0:
            return ()
        if mean >= 64:
            spread = math.sqrt(mean)
            steps = (-1.6, -1.0, -0.7, -0.3, 0.0, 0.3, 0.7, 1.0, 1.6)
            share = self.num_experts / len(steps)
            return tuple((round(mean + step * spread), share) for step in steps)
        histogram = []
        probability = math.exp(-mean)
        for rows in range(1, int(mean + 6 * math.sqrt(mean)) + 8):
            probability *= mean / rows
            histogram.append((rows, self.num_experts * probability))
        return tuple(histogram)

    @property
    def active_experts(self) -> float:
        """Expected number of experts that get at least one row."""
        return sum(experts for _, experts in self.load_histogram)
