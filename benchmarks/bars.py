"""Hold the newest records to the project's bars: `python benchmarks/bars.py [suite ...]`.

A bar is the most that a row may take, as a multiple of its floor; beside it stands what the row has
to be against the peers. Prints a line a row, fails if one misses.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chord.bench.cliffs import find_cliffs, is_sweep
from chord.bench.records import Row, newest
from chord.bench.scenarios import LAYER

RECORDS = Path(__file__).parent / "records"


@dataclass(frozen=True)
class Bar:
    """Rows of a suite that share a bar.

    Attributes:
        suite: Name of the suite.
        projections: Which of them.
        counts: From and to, both included.
        floors: Most that a row may take, as a multiple of its floor.
        series: Which rows of the suite.
    """

    suite: str
    projections: tuple[str, ...]
    counts: tuple[int, int]
    floors: float
    series: str = ""

    def covers(self, suite: str, row: Row) -> bool:
        """Return whether the bar is for a row."""
        return (
            (self.suite, self.series) == (suite, row.series)
            and row.projection in self.projections
            and self.counts[0] <= row.tokens <= self.counts[1]
        )


_GATE_UP, _DOWN, _BOTH = ("gate_up",), ("down",), ("gate_up", "down")
BARS = (
    Bar("ep8_decode", _GATE_UP, (20, 50), 1.10),
    Bar("ep8_decode", _DOWN, (20, 50), 1.12),
    Bar("ep8_decode", _BOTH, (64, 128), 1.18),
    Bar("tp8_decode", _GATE_UP, (32, 128), 1.12),
    Bar("tp8_decode", _DOWN, (32, 128), 1.20),
    Bar("ep8_prefill", _GATE_UP, (8192, 16384), 1.08),
    Bar("ep8_prefill", _GATE_UP, (4096, 4096), 1.12),
    Bar("ep8_prefill", _GATE_UP, (1024, 2048), 1.20),
    Bar("ep8_prefill", _DOWN, (1024, 16384), 1.15),
    Bar("tp8", _GATE_UP, (8192, 16384), 1.08),
    Bar("tp8", _GATE_UP, (4096, 4096), 1.12),
    Bar("tp8", _GATE_UP, (1024, 2048), 1.20),
    Bar("tp8", _DOWN, (1024, 16384), 1.35),
    Bar("grouped", _BOTH, (128, 512), 1.06, "contiguous"),
    Bar("grouped", _BOTH, (128, 512), 1.10, "contiguous, uneven"),
    Bar("grouped", _BOTH, (8, 16), 1.12, "masked"),
    Bar("grouped", _BOTH, (32, 64), 1.22, "masked"),
)
# Times that another project (novitalabs/chord, docs/performance.md, 2026) publishes for an H200.
PUBLISHED_US = {
    ("contiguous", "gate_up"): {128: 607.1, 256: 1186.9, 512: 2318.2},
    ("contiguous", "down"): {128: 310.4, 256: 604.4, 512: 1196.1},
    ("masked", "gate_up"): {8: 248.8, 16: 266.5, 32: 329.2, 64: 435.2},
    ("masked", "down"): {8: 132.5, 16: 138.7, 32: 164.2, 64: 233.0},
}
# How much faster than the layer built from humming the whole layer has to be, by series, and what
# it may take of the sum of its parts.
LAYER_AHEAD = {"EP8 decode": 1.20, "EP8 prefill": 1.25, "TP8": 1.45, "TP8 decode": 1.20}
LAYER_OF_PARTS = 1.08
# Prefill has to be this much faster than humming, unless humming itself is this near the floor.
_AHEAD, _NEAR = 1.1, 1.1
_PREFILL = ("ep8_prefill", "tp8")
# Series whose way to say which rows an expert has humming does not know.
_NOT_IN_HUMMING = ("contiguous, m_indices",)


def misses(suite: str, row: Row) -> Iterator[str]:
    """Yield what a row misses, in words."""
    us = row.entries["chord"].us
    if suite == LAYER:
        yield from _layer_misses(row, us)
        return
    for bar in BARS:
        if bar.covers(suite, row) and us > bar.floors * row.floor_us:
            yield f"bar {bar.floors:.2f}"
    may_lack = row.series in _NOT_IN_HUMMING or suite.endswith("sweep")
    if "humming" in row.entries or not may_lack:
        wanted, near = (_AHEAD, _NEAR * row.floor_us) if suite in _PREFILL else (1.0, 0.0)
        yield from _behind_humming(row, wanted, near)
    published = PUBLISHED_US.get((row.series, row.projection), {}).get(row.tokens)
    if suite == "grouped" and published is not None and us >= published:
        yield f"{us:.0f} us, published elsewhere {published:.0f}"


def _behind_humming(row: Row, wanted: float, excused_us: float = 0.0) -> Iterator[str]:
    """Yield a miss if a row is not `wanted` times faster than a humming above `excused_us`."""
    humming, us = row.entries.get("humming"), row.entries["chord"].us
    if humming is None:
        yield "not measured beside humming"
    elif humming.us > excused_us and humming.us < wanted * us:
        yield f"{humming.us / us:.2f} x faster than humming, bar {wanted:.2f}"


def _layer_misses(row: Row, us: float) -> Iterator[str]:
    yield from _behind_humming(row, LAYER_AHEAD[row.series])
    parts = row.parts_us()
    if us > LAYER_OF_PARTS * parts:
        yield f"{us / parts:.2f} x the sum of the parts, bar {LAYER_OF_PARTS:.2f}"


def main() -> int:
    """Print every row of the suites that were named, or of all; return 1 if one misses."""
    count = missed = 0
    for record in newest(RECORDS).values():
        if sys.argv[1:] and record.suite not in sys.argv[1:]:
            continue
        if is_sweep(record):
            for cliff in find_cliffs(record):
                missed += 1
                print(f"{record.suite} MISS {cliff.describe()}")
        for row in record.rows:
            found = list(misses(record.suite, row))
            count, missed = count + 1, missed + bool(found)
            if not found and is_sweep(record):
                continue
            us = row.entries["chord"].us
            name = f"{record.suite} {row.projection} {row.series}".strip()
            verdict = f"MISS {'; '.join(found)}" if found else "ok"
            print(f"{name} {row.tokens}: {us:.0f} us, {us / row.floor_us:.2f} x floor, {verdict}")
    print(f"{count} rows, {missed} miss")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
