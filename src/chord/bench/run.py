"""Run one suite on this GPU: floors, Chord and peers on the same tensors, every row checked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import chord
from chord import routing
from chord.bench import floors, machine, records
from chord.bench.operands import (
    POISON,
    ROW_ERROR_LIMIT,
    Checkpoint,
    max_row_error,
    random_checkpoint,
    rows_of_nobody_changed,
)
from chord.bench.peers import Peer, load_peer
from chord.bench.scenarios import Case, Suite, cases
from chord.bench.work import Work, make_work
from chord.device import facts_of
from chord.errors import ChordError
from chord.plan import select
from chord.plan.config import Config
from chord.plan.problem import GemmProblem
from chord.timing import Call, Timing, measure_host_us, measure_in_turns, method

MAX_BLOCK_M = 16
_HOST_CALLS = 60


@dataclass(frozen=True)
class Contestant:
    """A call whose result was checked, ready to be timed beside others.

    Attributes:
        call: A function without arguments.
        choice: What the implementation chose to run.
        row_error: Largest relative error of an output row.
        host_us: What one warm call costs the CPU; None where it was not measured.
    """

    call: Call
    choice: str
    row_error: float
    host_us: float | None

    def entry(self, timing: Timing) -> records.Entry:
        """Return what the record keeps.

        Args:
            timing: Times of the call.
        """
        return records.Entry(
            us=round(timing.median_us, 2),
            p10_us=round(timing.p10_us, 2),
            p90_us=round(timing.p90_us, 2),
            row_error=self.row_error,
            choice=self.choice,
            host_us=None if self.host_us is None else round(self.host_us, 2),
        )


class Chord:
    """Chord's expert GEMMs over one packed weight, in the shape of a peer."""

    name = "chord"

    def __init__(self, checkpoint: Checkpoint, block_m: int = 0) -> None:
        self.version = chord.__version__
        self._block_m = block_m
        self._experts = chord.pack_experts(checkpoint.weight_packed, checkpoint.weight_scale)
        self.choice = ""

    def handles(self, case: Case) -> bool:
        """Return True: every case is Chord's."""
        return True

    def prepare_call(self, work: Work, config: Config | None = None) -> Callable[[], object]:
        """Prepare one expert GEMM, without checks of values, as an engine calls it.

        Args:
            work: Operands.
            config: Run exactly this configuration; None leaves the choice to the planner.

        Returns:
            A function without arguments that runs the kernel once.
        """
        experts = self._experts
        decision = select.decide(problem_of(work), facts_of(work.x.device.index))
        chosen = config or decision.config
        self.choice = f"{chosen.label()} | {decision.reason}"
        given: dict[str, Any] = {"config": config, "validate": False}
        if work.case.series.addressing == "masked":
            expected = work.case.tokens
            counts = work.offsets.diff().int()
            return functools.partial(
                chord.masked, work.x, experts, counts, work.out, expected=expected, **given
            )
        if work.topk_ids is None:
            indices = work.case.series.addressing == "indices"
            given |= {"m_indices": work.owners} if indices else {"expert_offsets": work.offsets}
            return functools.partial(chord.contiguous, work.x, experts, out=work.out, **given)
        # The kernels join blocks of one expert: small ones cost no time and pad few rows.
        block_m = self._block_m or min(chosen.tile_rows, MAX_BLOCK_M)
        self.choice += f" | routing blocks of {block_m}"
        aligned = routing.align(work.topk_ids, num_experts=experts.num_experts, block_m=block_m)
        return functools.partial(
            chord.indexed,
            work.x,
            experts,
            aligned.sorted_token_ids,
            aligned.expert_ids,
            aligned.num_tokens_post_padded,
            work.case.top_k,
            block_m=block_m,
            out=work.out,
            **given,
        )


def problem_of(work: Work) -> GemmProblem:
    """Return what the planner sees of a piece of work; masked rows come with the expected count.

    Args:
        work: Operands.
    """
    case = work.case
    name = {
        "indexed": "Indexed",
        "contiguous": "ContiguousOffsets",
        "indices": "ContiguousIndices",
        "masked": "Masked",
    }
    return GemmProblem(
        case.num_experts,
        case.projection.n,
        case.projection.k,
        len(work.owners),
        name[case.series.addressing],
        case.num_routes if case.series.addressing == "masked" else None,
    )


def run_suite(
    suite: Suite,
    *,
    peers: Sequence[str] = (),
    block_m: int = 0,
    device: str = "cuda",
    only: Callable[[Case], bool] = lambda case: True,
    on_row: Callable[[records.Row], None] = lambda row: None,
    on_step: Callable[[str], None] = lambda step: None,
    on_fault: Callable[[str], None] = lambda words: None,
) -> records.Record:
    """Measure every case of a suite on the current GPU.

    Args:
        suite: The deployment and its row counts.
        peers: Names of peers to measure beside Chord, where they can run the case.
        block_m: Rows of a routing block for Chord; 0 leaves the choice to it.
        device: Where the tensors live.
        only: Tells which cases to measure.
        on_row: Called with each finished row.
        on_step: Called with a few words before each step that takes time.
        on_fault: Called where a peer could not run a case, which the record then leaves out.

    Returns:
        The record; nothing is written to disk.

    Raises:
        UnsupportedError: There is no GPU, or no memory line for this card.
        ChordError: A row of Chord's output is further from the reference than the limit, or a row
            of nobody was written.
    """
    card = machine.card()
    memory = machine.memory_model(card)
    rows: list[records.Row] = []
    versions = machine.versions()
    for projection in suite.projections:
        todo = [case for case in cases(suite, projection) if only(case)]
        if not todo:
            continue
        on_step(f"{projection.name}: pack {suite.num_experts} experts")
        checkpoint = random_checkpoint(suite.num_experts, projection.n, projection.k, device)
        contenders: list[Chord | Peer] = [Chord(checkpoint, block_m)]
        for name in peers:
            on_step(f"{projection.name}: pack for {name}")
            try:
                peer = load_peer(name, checkpoint, todo)
            except RuntimeError as error:  # out of memory, most likely
                on_fault(f"{name}: {type(error).__name__}: {error}")
                continue
            if any(peer.handles(case) for case in todo):
                contenders.append(peer)
                versions[name] = peer.version
        for case in todo:
            on_step(f"{projection.name}: {case.series.name} {case.tokens} {case.series.unit}")
            row = _run_case(case, checkpoint, contenders, memory, suite.repeat_ms, on_fault)
            rows.append(row)
            on_row(row)
        del contenders, checkpoint
        torch.cuda.empty_cache()
    return records.Record(
        suite=suite.name,
        date=records.today(),
        card=card,
        versions=versions,
        kernel_digest=machine.kernel_digest(),
        timer=method(suite.repeat_ms, suite.repeat_ms / 4),
        floor=f"{memory.launch_us:g} us + bytes / {memory.bytes_per_us / 1e6:.2f} TB/s "
        f"({memory.measured}), or 2 R N K at the dense BF16 rate of the same run",
        rows=rows,
    )


def _run_case(
    case: Case,
    checkpoint: Checkpoint,
    contenders: Sequence[Chord | Peer],
    memory: floors.MemoryModel,
    repeat_ms: float,
    on_fault: Callable[[str], None],
) -> records.Row:
    device = checkpoint.weight_packed.device
    work = make_work(case, device)
    active = work.active_experts
    n, k = case.projection.n, case.projection.k
    ready = {}
    for contender in contenders:
        if not contender.handles(case):
            continue
        try:
            ready[contender.name] = _check(contender, work, checkpoint)
        except Exception as error:
            if contender.name == "chord":
                raise
            # A peer's gap must not cost the rows that were measured, nor those to come.
            on_fault(f"{contender.name}: {type(error).__name__}: {error}")
    calls = {name: one.call for name, one in ready.items()}
    calls[floors.DENSE] = floors.dense_matmul(case.num_routes, n, k, device)
    times = measure_in_turns(calls, warmup_ms=repeat_ms / 4, repeat_ms=repeat_ms)
    dense = floors.tflops(case.num_routes, n, k, times[floors.DENSE].median_us)
    floor = floors.floor_of(case, active, memory, dense)
    return records.Row(
        projection=case.projection.name,
        tokens=case.tokens,
        routed=case.num_routes,
        experts=case.num_experts,
        n=n,
        k=k,
        active_experts=active,
        num_bytes=floor.num_bytes,
        floor_us=round(floor.floor_us, 2),
        bound=floor.bound,
        dense_tflops=round(dense, 1),
        entries={name: one.entry(times[name]) for name, one in ready.items()},
        series=case.series.name,
        unit=case.series.unit,
    )


def _check(contender: Chord | Peer, work: Work, checkpoint: Checkpoint) -> Contestant:
    """Run one implementation on one case and compare every row."""
    case = work.case
    call = contender.prepare_call(work)
    work.out.fill_(POISON)
    call()
    error = max_row_error(work.out, work.x, work.owners, case.top_k, checkpoint)
    if contender.name == "chord":
        where = f"{case.suite} {case.projection.name} {case.series.name}".strip()
        where += f" with {case.tokens} {case.series.unit}"
        if not error <= ROW_ERROR_LIMIT:
            raise ChordError(
                f"{where}: a row is off by {error:.2e}, more than {ROW_ERROR_LIMIT:.0e}; no record "
                f"was written"
            )
        changed = rows_of_nobody_changed(work.out, work.owners)
        if changed:
            raise ChordError(f"{where}: {changed} rows of nobody were written; no record was made")
    host_us = measure_host_us(call, num_calls=_HOST_CALLS)
    return Contestant(call, contender.choice, error, host_us)
