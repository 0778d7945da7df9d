"""The whole routed layer on this GPU: `chord.fused_moe`, its parts, and the layer from a peer.

One record for all deployments. Every call is the replay of a CUDA graph with a cold L2, as an
engine decodes; every row is checked against FP64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

import chord
from chord import routing
from chord.bench import floors, machine, records
from chord.bench.operands import POISON, Checkpoint, random_checkpoint, random_rows
from chord.bench.peers.humming_layer import HummingLayer
from chord.bench.run import MAX_BLOCK_M, Contestant
from chord.bench.scenarios import LAYER, Case, Series, Suite, cases, route_case, suite_named
from chord.bench.small_layer import expected_output
from chord.device import facts_of
from chord.errors import ChordError
from chord.jit.params import FIXED_KERNELS
from chord.jit.source import KERNELS, digest_headers, headers_of
from chord.ops import layer as layers
from chord.plan import select
from chord.plan.problem import GemmProblem
from chord.timing import GraphCall, measure_host_us, measure_in_turns, method
from chord.weights.packed import PackedExperts

LAYER_ERROR_LIMIT = 8e-3
"""Largest `||row - reference|| / ||reference||` of a token: three stages round."""

_REPEAT_MS = 60.0
_HOST_CALLS = 60
_HEADERS = (
    *headers_of("RoutedGateUp"),
    *(header for kernel in FIXED_KERNELS for header in headers_of("", kernel)),
)


@dataclass(frozen=True)
class Deployment:
    """Rows of the table that share weights.

    Attributes:
        suite: Suite of the GEMMs alone, which shapes and routing come from.
        series: Names and token counts.
    """

    suite: str
    series: tuple[Series, ...]


DEPLOYMENTS = (
    Deployment("ep8_decode", (Series((20, 30, 40, 50), name="EP8 decode"),)),
    Deployment("ep8_prefill", (Series((1024, 2048, 4096, 8192, 16384), name="EP8 prefill"),)),
    Deployment("tp8_decode", (Series((1, 8, 32, 64, 128), name="TP8 decode"),)),
    Deployment("tp8", (Series((1024, 2048, 4096, 8192, 16384), name="TP8"),)),
)


def run_layer(
    *,
    peers: Sequence[str] = (),
    device: str = "cuda",
    only: Callable[[Case], bool] = lambda case: True,
    on_row: Callable[[records.Row], None] = lambda row: None,
    on_step: Callable[[str], None] = lambda step: None,
    on_fault: Callable[[str], None] = lambda words: None,
) -> records.Record:
    """Measure every layer on the current GPU.

    Args:
        peers: "humming" to measure the layer that vLLM builds from it; others are left out.
        device: Where the tensors live.
        only: Tells which cases to measure.
        on_row: Called with each finished row.
        on_step: Called with a few words before each step that takes time.
        on_fault: Called where a peer could not run a case, which the record then leaves out.

    Returns:
        The record; nothing is written to disk.

    Raises:
        UnsupportedError: There is no GPU, or no memory line for this card.
        ChordError: A row of Chord's output is further from FP64 than the limit.
    """
    card = machine.card()
    memory = machine.memory_model(card)
    versions = machine.versions()
    versions["layer kernels"] = digest_headers(_HEADERS, KERNELS)[:12]
    rows: list[records.Row] = []
    for deployment in DEPLOYMENTS:
        suite = suite_of(deployment)
        todo = [case for p in suite.projections for case in cases(suite, p) if only(case)]
        if not todo:
            continue
        on_step(f"{deployment.suite}: pack {suite.num_experts} experts")
        bench = _Bench(suite, device)
        if "humming" in peers:
            on_step(f"{deployment.suite}: pack for humming")
            try:
                bench.humming = HummingLayer(bench.gate_up, bench.down, todo)
                versions["humming"] = bench.humming.version
            except RuntimeError as error:
                on_fault(f"humming: {type(error).__name__}: {error}")
        for case in todo:
            if case.projection.name != "gate_up":
                continue
            on_step(f"{case.series.name} {case.tokens} tokens")
            row = bench.run(case, memory, on_fault)
            rows.append(row)
            on_row(row)
        del bench
        torch.cuda.empty_cache()
    return records.Record(
        suite=LAYER,
        date=records.today(),
        card=card,
        versions=versions,
        kernel_digest=machine.kernel_digest(),
        timer=f"{method(_REPEAT_MS, _REPEAT_MS / 4)}, each call but cuBLAS's "
        "the replay of a CUDA graph",
        floor=f"{memory.launch_us:g} us + bytes / {memory.bytes_per_us / 1e6:.2f} TB/s "
        f"({memory.measured}; weights of active experts, hidden and output), or the arithmetic of "
        f"both GEMMs at the dense BF16 rate of the same run",
        rows=rows,
    )


def suite_of(deployment: Deployment) -> Suite:
    """Return the suite of a deployment's GEMMs with the layer's own series."""
    suite = suite_named(deployment.suite)
    return Suite(
        LAYER, suite.num_experts, suite.projections, deployment.series, suite.tokens_per_input
    )


def layer_cases() -> Iterator[Case]:
    """Iterate over all rows of the record: their gate_up cases."""
    for deployment in DEPLOYMENTS:
        suite = suite_of(deployment)
        yield from cases(suite, suite.projections[0])


class _Bench:
    """Weights of one deployment, packed for everyone that is measured."""

    def __init__(self, suite: Suite, device: str) -> None:
        gate_up, down = suite.projections
        self.gate_up = random_checkpoint(suite.num_experts, gate_up.n, gate_up.k, device)
        self.down = random_checkpoint(suite.num_experts, down.n, down.k, device, seed=1)
        self.humming: HummingLayer | None = None
        self._w13 = pack(self.gate_up, interleave=True)
        self._w13_plain = pack(self.gate_up)
        self._w2 = pack(self.down)

    def run(
        self, case: Case, memory: floors.MemoryModel, on_fault: Callable[[str], None]
    ) -> records.Row:
        """Check and time one row."""
        device = self.gate_up.weight_packed.device
        hidden, weights, ids = random_tokens(case, self.gate_up.k, device)
        out = torch.empty_like(hidden)
        expected = expected_output(hidden, weights, ids, self.gate_up, self.down)
        call = self._layer(hidden, weights, ids, out)
        ready = {"chord": _check(call, self._choice(ids), out, expected)}
        if self.humming is not None:
            try:
                call = self.humming.prepare_call(hidden, weights, ids, out)
                ready["humming"] = _check(call, self.humming.choice, out, expected)
            except Exception as error:  # a peer's gap must not cost the rows of others
                on_fault(f"humming: {type(error).__name__}: {error}")
        if not ready["chord"].row_error <= LAYER_ERROR_LIMIT:
            raise ChordError(
                f"{case.series.name} with {case.tokens} tokens: a row is off by "
                f"{ready['chord'].row_error:.2e}, more than {LAYER_ERROR_LIMIT:.0e}; no record "
                f"was written"
            )
        ready |= self._parts(hidden, ids)
        calls = {name: one.call for name, one in ready.items()}
        shape = ids.numel(), self.gate_up.n, self.gate_up.k
        calls[floors.DENSE] = floors.dense_matmul(*shape, device)
        times = measure_in_turns(calls, warmup_ms=_REPEAT_MS / 4, repeat_ms=_REPEAT_MS)
        dense = floors.tflops(*shape, times[floors.DENSE].median_us)
        entries = {name: one.entry(times[name]) for name, one in ready.items()}
        entries["top-k sum at memory speed"] = self._sum_at_memory_speed(ids, memory)
        return self._row(case, ids, memory, dense, entries)

    def _layer(
        self, hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, out: torch.Tensor
    ) -> Callable[[], object]:
        size = chord.fused_moe_workspace(len(hidden), self._w13, self._w2, ids.shape[1])
        space = torch.empty(size, dtype=torch.uint8, device=hidden.device)
        return functools.partial(
            chord.fused_moe,
            hidden,
            self._w13,
            self._w2,
            weights,
            ids,
            out=out,
            workspace=space,
        )

    def _choice(self, ids: torch.Tensor) -> str:
        operands = layers.Layer(self._w13, self._w2)
        kernels = layers.choose_kernels(
            operands, ids.numel(), self._w13.num_experts, ids.get_device()
        )
        return " | ".join(kernel.config.label() for kernel in kernels)

    def _parts(self, hidden: torch.Tensor, ids: torch.Tensor) -> dict[str, Contestant]:
        """Prepare both GEMMs alone."""
        num_routes, top_k = ids.numel(), ids.shape[1]
        inner = random_rows(num_routes, self.down.k, hidden.device)
        parts = {}
        for name, x, experts, shared in (
            ("chord gate_up alone", hidden, self._w13_plain, top_k),
            ("chord down alone", inner, self._w2, 1),
        ):
            call, choice = _gemm(x, experts, ids, shared)
            parts[name] = Contestant(GraphCall(call), choice, 0.0, None)
        return parts

    def _sum_at_memory_speed(self, ids: torch.Tensor, memory: floors.MemoryModel) -> records.Entry:
        """Compute what the bytes of the top-k sum take."""
        num_bytes = 2 * (ids.numel() + len(ids)) * self.down.n
        us = round(num_bytes / memory.bytes_per_us, 2)
        words = f"computed: {num_bytes} bytes at {memory.bytes_per_us / 1e6:.2f} TB/s"
        return records.Entry(us, us, us, 0.0, words)

    def _row(
        self,
        case: Case,
        ids: torch.Tensor,
        memory: floors.MemoryModel,
        dense: float,
        entries: dict[str, records.Entry],
    ) -> records.Row:
        gate_up, down, active = self.gate_up, self.down, int(ids.unique().numel())
        weights = gate_up.n * gate_up.k + down.n * down.k
        num_bytes = active * (weights // 2 + weights // 16) + 4 * len(ids) * down.n
        memory_us = memory.time_us(num_bytes)
        math_us = 2 * ids.numel() * weights / dense / 1e6
        return records.Row(
            projection=LAYER,
            tokens=case.tokens,
            routed=ids.numel(),
            experts=gate_up.num_experts,
            n=down.n,
            k=down.k,
            active_experts=active,
            num_bytes=num_bytes,
            floor_us=round(max(memory_us, math_us), 2),
            bound="memory" if memory_us >= math_us else "math",
            dense_tflops=round(dense, 1),
            entries=entries,
            series=case.series.name,
        )


def random_tokens(
    case: Case, hidden_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make the tokens of a case, routed as the case says.

    Args:
        case: Tokens T and their routing.
        hidden_size: Hidden size H.
        device: Where the tensors live.

    Returns:
        hidden, bfloat16, [T, H]; router weights, float32, [T, top_k], that sum to one; topk_ids,
        int32, [T, top_k].
    """
    ids = route_case(case, device)
    tokens, top_k = ids.shape
    hidden = random_rows(tokens, hidden_size, device)
    generator = torch.Generator(device).manual_seed(tokens)
    scores = torch.rand(tokens, top_k, generator=generator, device=device) + 0.05
    return hidden, scores / scores.sum(1, keepdim=True), ids


def worst_token(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest `||row - expected|| / ||expected||`; infinity if one is not a number.

    Args:
        out: bfloat16, [T, H].
        expected: float64, [T, H].
    """
    difference = torch.linalg.vector_norm(out.double() - expected, dim=1)
    error = difference / torch.linalg.vector_norm(expected, dim=1)
    return float(error.nan_to_num(nan=torch.inf).max())


def pack(checkpoint: Checkpoint, *, interleave: bool = False) -> PackedExperts:
    """Pack one GEMM of a layer; `interleave` for the gate_up of `chord.fused_moe`."""
    return chord.pack_experts(
        checkpoint.weight_packed, checkpoint.weight_scale, interleave_gate_up=interleave
    )


def _gemm(
    x: torch.Tensor, experts: PackedExperts, ids: torch.Tensor, top_k: int
) -> tuple[Callable[[], object], str]:
    problem = GemmProblem(experts.num_experts, experts.n, experts.k, ids.numel())
    decision = select.decide(problem, facts_of(x.get_device()))
    block_m = min(decision.config.tile_rows, MAX_BLOCK_M)
    where = routing.align(ids, num_experts=experts.num_experts, block_m=block_m)
    call = functools.partial(
        chord.indexed,
        x,
        experts,
        where.sorted_token_ids,
        where.expert_ids,
        where.num_tokens_post_padded,
        top_k,
        block_m=block_m,
        out=torch.empty(ids.numel(), experts.n, dtype=torch.bfloat16, device=x.device),
        validate=False,
    )
    return call, f"{decision.config.label()} | {decision.reason}"


def _check(
    call: Callable[[], object], choice: str, out: torch.Tensor, expected: torch.Tensor
) -> Contestant:
    """Run a layer, compare every row with FP64, and capture it in a graph."""
    out.fill_(POISON)
    call()
    worst = worst_token(out, expected)
    host_us = measure_host_us(call, num_calls=_HOST_CALLS)
    return Contestant(GraphCall(call), choice, worst, host_us)
