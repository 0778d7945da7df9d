"""`chord bench`: measure a suite on this card, check every row, write a record, draw a chart."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chord.cli.console import console, progress

if TYPE_CHECKING:
    from chord.bench.records import Record, Row
    from chord.bench.scenarios import Suite


def bench(
    suite: Annotated[
        list[str] | None,
        typer.Option("--suite", "-s", help="Suite to run; repeat for several. Default: all."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option("--peer", help="Measure this package beside Chord: humming."),
    ] = None,
    records: Annotated[Path, typer.Option(help="Folder for the record and the chart.")] = Path(
        "benchmarks/records"
    ),
    block_m: Annotated[
        int, typer.Option(help="Rows of a routing block; 0 leaves the choice to Chord.")
    ] = 0,
    dry: Annotated[bool, typer.Option("--dry", help="Print only; write no record.")] = False,
) -> None:
    """Measure the suites on this GPU beside floors of the same run, and check every output row."""
    from chord.bench import chart, machine
    from chord.bench import records as records_module
    from chord.bench.scenarios import SUITES, suite_named
    from chord.timing import METHOD

    chosen = [suite_named(name) for name in suite or list(SUITES)]
    card = machine.card()
    machine.memory_model(card)
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions().items())
    console.print(f"{card}, {versions}, kernels {machine.kernel_digest()[:12]}")
    console.print(f"{METHOD}\n")
    for one in chosen:
        record = _measure(one, tuple(peer or ()), block_m)
        if not dry:
            path = records_module.save(record, records)
            picture = chart.draw(record, path.with_suffix(".png"))
            console.print(f"wrote {path} and {picture.name}\n")


def _measure(suite: Suite, peers: tuple[str, ...], block_m: int) -> Record:
    from chord.bench.run import run_suite

    with progress() as bar:
        task = bar.add_task(suite.name, total=len(suite.projections) * len(suite.token_counts))

        def show(row: Row) -> None:
            bar.console.print(line(suite.name, row), soft_wrap=True)
            bar.advance(task)

        return run_suite(
            suite,
            peers=peers,
            block_m=block_m,
            on_row=show,
            on_step=lambda step: bar.update(task, description=f"{suite.name} {step}"),
        )


def line(suite: str, row: Row) -> str:
    """Format one row: the case, the floor, and each implementation beside it.

    Args:
        suite: Name of the suite.
        row: A finished row.

    Returns:
        One line in fixed columns.
    """
    parts = [
        f"{suite:<12}{row.projection:<8} T={row.tokens:<6}R={row.routed:<7}"
        f"floor {row.floor_us:7.1f} us ({row.bound}, dense {row.dense_tflops:5.1f})"
    ]
    chord_us = row.entries["chord"].us
    for name, entry in row.entries.items():
        tflops = 2 * row.routed * row.n * row.k / entry.us / 1e6
        gbps = row.num_bytes / entry.us / 1e3
        versus = "" if name == "chord" else f" {entry.us / chord_us:.2f}x chord"
        parts.append(
            f"{name} {entry.us:7.1f} us [{entry.p10_us:.0f}..{entry.p90_us:.0f}] "
            f"{entry.us / row.floor_us:.2f}x floor {tflops:5.0f} TFLOPS {gbps:5.0f} GB/s "
            f"err {entry.row_error:.1e} cpu {entry.host_us or 0:.0f} us{versus}"
        )
    return " | ".join(parts)
