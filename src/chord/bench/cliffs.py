"""Time as a function of rows: it must not fall when rows are added, nor leap between neighbours.

Looked for in the rows of a series with nested loads, where more rows never mean fewer experts or
fewer rows of one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chord.bench import machine
from chord.bench.records import Entry, Record, Row

NOISE = 0.03
"""Part of a time by which it may seem to fall; cold-L2 medians of one kernel repeat within 2 %."""

LEAP = 0.15
"""Most that a time may grow by from one count to the next."""

_FLOOR_SHARE = 0.05


@dataclass(frozen=True)
class Cliff:
    """Two rows of a sweep that break the rule.

    Attributes:
        projection: Of the rows.
        kind: "falls" or "leaps".
        before: The row with fewer rows.
        after: The row with more.
    """

    projection: str
    kind: str
    before: Row
    after: Row

    def describe(self) -> str:
        """Return the two counts and times in one line."""
        old, new = self.before.entries["chord"], self.after.entries["chord"]
        return (
            f"{self.projection}: {self.kind} from {old.us:.1f} us at {self.before.tokens} to "
            f"{new.us:.1f} us at {self.after.tokens} {self.after.unit} "
            f"({100 * (new.us / old.us - 1):+.0f} %; {_kernel(old)} -> {_kernel(new)})"
        )


def find_cliffs(record: Record) -> list[Cliff]:
    """Look for falls and leaps in the swept rows of a record.

    A time falls when it is more than NOISE below the time of any smaller count. It leaps when it is
    more than LEAP above the one before; where the floor itself grows by more than that, as from
    one row to two, by more than the floor and a twentieth. For a few rows the floor is the time of
    a dense matmul, which reads 16-bit weights and takes longer than the kernel: there the memory
    bound is what grows.

    Args:
        record: What was measured; rows in tokens or rows per expert are left out.

    Raises:
        UnsupportedError: No memory line was fitted for the record's card.
    """
    found = []
    for projection, rows in _swept(record):
        highest = rows[0]
        for before, after in itertools.pairwise(rows):
            us, floor_ratio = after.entries["chord"].us, _floor_ratio(record, before, after)
            if us < (1 - NOISE) * highest.entries["chord"].us:
                found.append(Cliff(projection, "falls", highest, after))
            allowed = max(1 + LEAP, (1 + _FLOOR_SHARE) * floor_ratio)
            if us > allowed * before.entries["chord"].us:
                found.append(Cliff(projection, "leaps", before, after))
            if us > highest.entries["chord"].us:
                highest = after
    return found


def _floor_ratio(record: Record, before: Row, after: Row) -> float:
    """Return by how much the floor grows, or the memory bound where that grows more."""
    memory = machine.memory_model(record.card)
    memory_ratio = memory.time_us(after.num_bytes) / memory.time_us(before.num_bytes)
    return max(after.floor_us / before.floor_us, memory_ratio)


def is_sweep(record: Record) -> bool:
    """Return whether a record holds a sweep over routed rows."""
    return any(True for _ in _swept(record))


def _kernel(entry: Entry) -> str:
    """Return what ran, without why."""
    return entry.choice.partition(" | ")[0]


def _swept(record: Record) -> Iterator[tuple[str, Sequence[Row]]]:
    swept = [row for row in record.rows if row.unit == "rows"]
    for projection in dict.fromkeys(row.projection for row in swept):
        rows = [row for row in swept if row.projection == projection]
        yield projection, sorted(rows, key=lambda row: row.tokens)
