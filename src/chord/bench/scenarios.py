"""The benchmark scenarios as data: deployments, projections, token counts, and their routing.

The shapes are those of Kimi K2.x (384 routed experts, top_k 8, hidden 7168, intermediate 2048).
The one place for them; tests and benchmarks read it from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from chord.errors import InputError

TOP_K = 8
GROUP_SIZE = 32


@dataclass(frozen=True)
class Projection:
    """One expert GEMM of a layer on one rank.

    Attributes:
        name: "gate_up" or "down".
        n: Output features.
        k: Reduction length.
    """

    name: str
    n: int
    k: int


@dataclass(frozen=True)
class Suite:
    """One deployment in one phase.

    Attributes:
        name: How the command line and the records call it.
        num_experts: Experts on one rank.
        projections: The two GEMMs of the layer.
        token_counts: The rows of the table, as users count tokens.
        tokens_per_input: How many of those tokens make one input row of this rank's GEMM: 8 where
            the count spans the 8 ranks of the deployment, else 1.
    """

    name: str
    num_experts: int
    projections: tuple[Projection, Projection]
    token_counts: tuple[int, ...]
    tokens_per_input: int = 1


@dataclass(frozen=True)
class Case:
    """One row of a benchmark table.

    Attributes:
        suite: Name of the suite.
        projection: The GEMM.
        num_experts: Experts on this rank.
        tokens: Tokens as the table counts them.
        num_inputs: Tokens that this rank routes.
        num_routes: Routed rows, `num_inputs * TOP_K`.
    """

    suite: str
    projection: Projection
    num_experts: int
    tokens: int
    num_inputs: int
    num_routes: int

    @property
    def num_rows(self) -> int:
        """Rows of the GEMM's input: tokens for gate_up, one a route for down."""
        return self.num_inputs if self.projection.name == "gate_up" else self.num_routes

    @property
    def top_k(self) -> int:
        """Routes that read one input row: TOP_K for gate_up, 1 for down."""
        return TOP_K if self.projection.name == "gate_up" else 1


_EP8 = (Projection("gate_up", 4096, 7168), Projection("down", 7168, 2048))
_TP8 = (Projection("gate_up", 512, 7168), Projection("down", 7168, 256))
_PREFILL = (1024, 2048, 4096, 8192, 16384)

SUITES = {
    suite.name: suite
    for suite in (
        Suite("ep8_prefill", 48, _EP8, _PREFILL, tokens_per_input=8),
        Suite("ep8_decode", 48, _EP8, (20, 30, 40, 50)),
        Suite("tp8", 384, _TP8, _PREFILL),
        Suite("tp8_decode", 384, _TP8, (8, 32, 64, 128)),
    )
}


def suite_named(name: str) -> Suite:
    """Look a suite up by its name.

    Args:
        name: One of `SUITES`.

    Returns:
        The suite.

    Raises:
        InputError: There is no suite of that name.
    """
    if name not in SUITES:
        raise InputError(f"there is no suite {name!r}; there are {', '.join(SUITES)}")
    return SUITES[name]


def cases(suite: Suite, projection: Projection) -> Iterator[Case]:
    """Iterate over the table rows of one projection, smallest first.

    Args:
        suite: The deployment.
        projection: One of its two GEMMs.

    Yields:
        One case a token count.
    """
    for tokens in suite.token_counts:
        num_inputs = tokens // suite.tokens_per_input
        num_routes = num_inputs * TOP_K
        yield Case(suite.name, projection, suite.num_experts, tokens, num_inputs, num_routes)


def route(num_inputs: int, num_experts: int, device: torch.device | str) -> torch.Tensor:
    """Route tokens as every published row was routed: normal scores, the best TOP_K experts.

    The seed is the number of input tokens, so loads are uneven but the same on every run on one
    kind of device (the generators of CPU and CUDA differ).

    Args:
        num_inputs: Tokens.
        num_experts: Experts on this rank.
        device: Where to draw the scores.

    Returns:
        topk_ids: int32, [num_inputs, TOP_K], every id local.
    """
    generator = torch.Generator(device).manual_seed(num_inputs)
    scores = torch.randn(num_inputs, num_experts, generator=generator, device=device)
    return scores.topk(TOP_K, dim=-1).indices.to(torch.int32)
