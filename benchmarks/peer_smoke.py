"""Check one peer on one small shape and print what happened: `python benchmarks/peer_smoke.py`."""

from __future__ import annotations

import sys
import traceback

import torch

from chord.bench.operands import (
    POISON,
    ROW_ERROR_LIMIT,
    max_row_error,
    random_checkpoint,
    random_rows,
)
from chord.bench.peers import PEERS, load_peer
from chord.bench.scenarios import route
from chord.timing import measure

EXPERTS, N, K, TOKENS, TOP_K = 16, 1024, 2048, 64, 8


def check(name: str) -> bool:
    """Run one peer once and compare every row; say each step before it starts."""
    try:
        print(f"{name}: pack E={EXPERTS} N={N} K={K}", flush=True)
        checkpoint = random_checkpoint(EXPERTS, N, K, "cuda")
        peer = load_peer(name, checkpoint)
        print(f"{name} {peer.version}: prepare T={TOKENS} top_k={TOP_K}", flush=True)
        topk_ids = route(TOKENS, EXPERTS, "cuda")
        x = random_rows(TOKENS, K, "cuda")
        out = torch.full((TOKENS * TOP_K, N), POISON, dtype=torch.bfloat16, device="cuda")
        call = peer.prepare_call(x, topk_ids, TOP_K, out)
        print(f"{name}: run (the first call compiles)", flush=True)
        call()
        torch.cuda.synchronize()
        error = max_row_error(out, x, topk_ids, TOP_K, checkpoint)
        timing = measure(call)
        print(f"{name}: row error {error:.2e}, {timing.median_us:.1f} us ({timing.describe()})")
        return error <= ROW_ERROR_LIMIT
    except Exception:
        traceback.print_exc()
        return False


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("peers run on a GPU, and PyTorch sees none here")
    results = {name: check(name) for name in PEERS}
    print(", ".join(f"{name}: {'ok' if ok else 'FAILED'}" for name, ok in results.items()))
    sys.exit(not all(results.values()))
