"""Check each peer on one small shape a way to address rows: `python benchmarks/peer_smoke.py`."""

from __future__ import annotations

import sys
import traceback

import torch

from chord.bench.operands import POISON, ROW_ERROR_LIMIT, max_row_error, random_checkpoint
from chord.bench.peers import PEERS, load_peer
from chord.bench.scenarios import Projection, Series, Suite, cases
from chord.bench.work import make_work
from chord.timing import measure

SUITE = Suite(
    "smoke",
    16,
    (Projection("gate_up", 1024, 2048),),
    (
        Series((64,)),
        Series((24,), "contiguous", "uneven", "contiguous"),
        Series((24,), "masked", "balanced", "masked"),
    ),
)


def check(name: str) -> bool:
    """Run one peer once a case and compare every row; say each step before it starts."""
    try:
        (projection,) = SUITE.projections
        print(f"{name}: pack E={SUITE.num_experts} N={projection.n} K={projection.k}", flush=True)
        checkpoint = random_checkpoint(SUITE.num_experts, projection.n, projection.k, "cuda")
        todo = list(cases(SUITE, projection))
        peer = load_peer(name, checkpoint, todo)
        worst = 0.0
        for case in todo:
            what = f"{name} {peer.version} {case.series.addressing}"
            if not peer.handles(case):
                print(f"{what}: not its case", flush=True)
                continue
            print(f"{what}: run (the first call compiles)", flush=True)
            work = make_work(case, "cuda")
            work.out.fill_(POISON)
            call = peer.prepare_call(work)
            call()
            torch.cuda.synchronize()
            error = max_row_error(work.out, work.x, work.owners, case.top_k, checkpoint)
            timing = measure(call)
            print(f"{what}: row error {error:.2e}, {timing.median_us:.1f} us, {peer.choice}")
            worst = max(worst, error)
        # Rounding the weights to BF16 as well doubles the error.
        return worst <= 2 * ROW_ERROR_LIMIT
    except Exception:
        traceback.print_exc()
        return False


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("peers run on a GPU, and PyTorch sees none here")
    results = {name: check(name) for name in PEERS}
    print(", ".join(f"{name}: {'ok' if ok else 'FAILED'}" for name, ok in results.items()))
    sys.exit(not all(results.values()))
