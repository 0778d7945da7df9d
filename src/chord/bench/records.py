"""Records: what one benchmark run measured, on what, with which kernels. One JSON file a run.

A record is written once and never edited. README and docs show no number that no record holds.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chord.errors import InputError

SCHEMA = 1


@dataclass(frozen=True)
class Entry:
    """What one implementation did on one case.

    Attributes:
        us: Median time of one call.
        p10_us: 10th percentile.
        p90_us: 90th percentile.
        row_error: Largest relative error of an output row.
        choice: What the implementation chose to run.
        host_us: What one warm call costs the CPU; None where it was not measured.
    """

    us: float
    p10_us: float
    p90_us: float
    row_error: float
    choice: str
    host_us: float | None = None


@dataclass(frozen=True)
class Row:
    """One case: its shape, its floor, and one entry an implementation.

    Attributes:
        projection: "gate_up" or "down".
        tokens: The suite's own count, in `unit`.
        routed: Routed rows R.
        experts: Experts on this rank.
        n: Output features.
        k: Reduction length.
        active_experts: Experts with at least one row.
        num_bytes: Bytes that have to move once.
        floor_us: No implementation can be faster.
        bound: "memory" or "math".
        dense_tflops: Dense BF16 rate measured beside it.
        entries: By name of the implementation; "chord" is always there.
        series: Which rows of the suite; "" for its main ones.
        unit: What `tokens` counts.
    """

    projection: str
    tokens: int
    routed: int
    experts: int
    n: int
    k: int
    active_experts: int
    num_bytes: int
    floor_us: float
    bound: str
    dense_tflops: float
    entries: dict[str, Entry]
    series: str = ""
    unit: str = "tokens"

    def parts_us(self) -> float:
        """Return the sum of a layer's GEMMs alone and of its top-k sum at memory speed."""
        wholes = ("chord", "humming")
        return sum(entry.us for name, entry in self.entries.items() if name not in wholes)


@dataclass(frozen=True)
class Record:
    """One run of one suite.

    Attributes:
        suite: Name of the suite.
        date: ISO date of the run.
        card: The GPU as its driver names it.
        versions: Driver, torch, CUDA, NVRTC, chord and each peer.
        kernel_digest: Content digest of the kernel sources that were measured.
        timer: How times were taken.
        floor: How the memory floor is computed.
        rows: The measurements.
        schema: Version of this format.
    """

    suite: str
    date: str
    card: str
    versions: dict[str, str]
    kernel_digest: str
    timer: str
    floor: str
    rows: list[Row]
    schema: int = SCHEMA

    @property
    def file_stem(self) -> str:
        """The file name without its extension: date, card, suite."""
        return f"{self.date}-{card_slug(self.card)}-{self.suite}"


def card_slug(card: str) -> str:
    """Shorten a card's name for file names.

    Args:
        card: For example "NVIDIA H200".

    Returns:
        For example "h200".
    """
    return re.sub(r"[^a-z0-9]+", "-", card.lower().replace("nvidia", "")).strip("-")


def today() -> str:
    """Return the ISO date of today in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def save(record: Record, folder: Path) -> Path:
    """Write a record; the file appears whole or not at all.

    Args:
        record: What to write.
        folder: Where; made if it is missing.

    Returns:
        The path of the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record.file_stem}.json"
    text = json.dumps(dataclasses.asdict(record), indent=1) + "\n"
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False) as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
    return path


def load(path: Path) -> Record:
    """Read a record.

    Args:
        path: A file that `save` wrote.

    Returns:
        The record.

    Raises:
        InputError: The file is not a record of this format.
    """
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        rows = [
            Row(**{**row, "entries": {n: Entry(**e) for n, e in row["entries"].items()}})
            for row in data.pop("rows")
        ]
        record = Record(**data, rows=rows)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"{path} is not a benchmark record ({type(error).__name__}: {error}); write it with "
            "`chord bench`"
        ) from error
    if record.schema != SCHEMA:
        raise InputError(f"{path} has schema {record.schema}, this version reads {SCHEMA}")
    return record


def load_all(folder: Path) -> Iterator[tuple[Path, Record]]:
    """Read every record of a folder, oldest first.

    Args:
        folder: Where the records are; may be missing.

    Yields:
        Path and record.
    """
    for path in sorted(folder.glob("*.json")):
        yield path, load(path)


def newest(folder: Path) -> dict[str, Record]:
    """Read the newest record of each suite.

    Args:
        folder: Where the records are; may be missing.

    Returns:
        Records by the name of their suite, in the order of the names.
    """
    found: dict[str, Record] = {}
    for _, record in load_all(folder):
        if record.suite not in found or record.date >= found[record.suite].date:
            found[record.suite] = record
    return dict(sorted(found.items()))


def stale(folder: Path, kernel_digest: str) -> list[str]:
    """Name the records whose kernels are not today's.

    Args:
        folder: Where the records are.
        kernel_digest: Digest of the kernel sources as they are now.

    Returns:
        One line a stale record: its file name and both digests, shortened.
    """
    return [
        f"{path.name}: measured with kernels {record.kernel_digest[:12]}, "
        f"today's are {kernel_digest[:12]}"
        for path, record in load_all(folder)
        if record.kernel_digest != kernel_digest
    ]
