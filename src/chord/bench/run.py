"""Run one suite on this GPU: floors, Chord and peers on the same tensors, every row checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    random_rows,
)
from chord.bench.peers import Peer, load_peer
from chord.bench.scenarios import Case, Suite, cases, route
from chord.device import facts_of
from chord.errors import ChordError
from chord.plan import select
from chord.plan.problem import GemmProblem
from chord.timing import METHOD, measure, measure_host_us

_MAX_BLOCK_M = 16


class Chord:
    """Chord's indexed expert GEMM over one packed weight, in the shape of a peer."""

    name = "chord"

    def __init__(self, checkpoint: Checkpoint, block_m: int = 0) -> None:
        self.version = chord.__version__
        self._block_m = block_m
        self._experts = chord.pack_experts(checkpoint.weight_packed, checkpoint.weight_scale)
        self.choice = ""

    def prepare_call(
        self, x: torch.Tensor, topk_ids: torch.Tensor, top_k: int, out: torch.Tensor
    ) -> Callable[[], object]:
        """Prepare one expert GEMM over one routing.

        Args:
            x: bfloat16, [R / top_k, K].
            topk_ids: int32, [T, k], R expert ids in route order.
            top_k: Routes that read one row of x.
            out: bfloat16, [R, N], overwritten by the call.

        Returns:
            A function without arguments that runs the kernel once.
        """
        experts = self._experts
        problem = GemmProblem(experts.num_experts, experts.n, experts.k, topk_ids.numel())
        decision = select.decide(problem, facts_of(x.device.index))
        # The kernels join blocks of one expert: small ones cost no time and pad few rows.
        block_m = self._block_m or min(decision.config.tile_rows, _MAX_BLOCK_M)
        self.choice = f"{decision.config.label()}, routing blocks of {block_m}"
        aligned = routing.align(topk_ids, num_experts=experts.num_experts, block_m=block_m)
        return lambda: chord.indexed(
            x,
            experts,
            aligned.sorted_token_ids,
            aligned.expert_ids,
            aligned.num_tokens_post_padded,
            top_k,
            block_m=block_m,
            out=out,
            validate=False,
        )


def run_suite(
    suite: Suite,
    *,
    peers: Sequence[str] = (),
    block_m: int = 0,
    device: str = "cuda",
    on_row: Callable[[records.Row], None] = lambda row: None,
    on_step: Callable[[str], None] = lambda step: None,
) -> records.Record:
    """Measure every case of a suite on the current GPU.

    Args:
        suite: The deployment and its token counts.
        peers: Names of peers to measure beside Chord.
        block_m: Rows of a routing block for Chord; 0 leaves the choice to it.
        device: Where the tensors live.
        on_row: Called with each finished row.
        on_step: Called with a few words before each step that takes time.

    Returns:
        The record; nothing is written to disk.

    Raises:
        UnsupportedError: There is no GPU, or no memory line for this card.
        ChordError: A row of Chord's output is further from the reference than the limit.
    """
    card = machine.card()
    memory = machine.memory_model(card)
    rows: list[records.Row] = []
    versions = machine.versions()
    for projection in suite.projections:
        on_step(f"{projection.name}: pack {suite.num_experts} experts")
        checkpoint = random_checkpoint(suite.num_experts, projection.n, projection.k, device)
        contenders: list[Chord | Peer] = [Chord(checkpoint, block_m)]
        contenders += [load_peer(name, checkpoint) for name in peers]
        versions |= {peer.name: peer.version for peer in contenders}
        for case in cases(suite, projection):
            on_step(f"{projection.name}: {case.tokens} tokens")
            row = _run_case(case, checkpoint, contenders, memory)
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
        timer=METHOD,
        floor=f"{memory.launch_us:g} us + bytes / {memory.bytes_per_us / 1e6:.2f} TB/s "
        f"({memory.measured}), or 2 R N K at the dense BF16 rate of the same run",
        rows=rows,
    )


def _run_case(
    case: Case,
    checkpoint: Checkpoint,
    contenders: Sequence[Chord | Peer],
    memory: floors.MemoryModel,
) -> records.Row:
    n, k = case.projection.n, case.projection.k
    device = checkpoint.weight_packed.device
    topk_ids = route(case.num_inputs, case.num_experts, device)
    active = int(topk_ids.unique().numel())
    dense = floors.dense_tflops(case.num_routes, n, k)
    floor = floors.floor_of(case, active, memory, dense)
    x = random_rows(case.num_rows, k, device)
    out = torch.empty(case.num_routes, n, dtype=torch.bfloat16, device=device)
    entries = {}
    for contender in contenders:
        call = contender.prepare_call(x, topk_ids, case.top_k, out)
        out.fill_(POISON)
        call()
        error = max_row_error(out, x, topk_ids, case.top_k, checkpoint)
        if contender.name == "chord" and not error <= ROW_ERROR_LIMIT:
            raise ChordError(
                f"{case.suite} {case.projection.name} with {case.tokens} tokens: a row is off by "
                f"{error:.2e}, more than {ROW_ERROR_LIMIT:.0e}; no record was written"
            )
        timing = measure(call)
        entries[contender.name] = records.Entry(
            us=round(timing.median_us, 2),
            p10_us=round(timing.p10_us, 2),
            p90_us=round(timing.p90_us, 2),
            row_error=error,
            choice=getattr(contender, "choice", ""),
            host_us=round(measure_host_us(call), 2),
        )
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
        entries=entries,
    )
