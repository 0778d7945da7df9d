"""Report records that were measured with other kernels than today's; never fails."""

from __future__ import annotations

from pathlib import Path

from chord.bench.records import stale
from chord.jit.source import kernel_digest

RECORDS = Path(__file__).parent / "records"

if __name__ == "__main__":
    lines = stale(RECORDS, kernel_digest())
    count = len(list(RECORDS.glob("*.json")))
    print(f"{count} record(s), {len(lines)} stale")
    for line in lines:
        print(f"  stale: {line}")
