"""`chord bench`: measure a suite on this card, check every row, write a record, draw a chart."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chord.cli.console import console, errors, progress

if TYPE_CHECKING:
    from chord.bench.records import Record, Row
    from chord.bench.scenarios import Case, Suite


def bench(
    suite: Annotated[
        list[str] | None,
        typer.Option(
            "--suite",
            "-s",
            help="Suite to run, or layer for the whole layer; repeat for several. Default: all.",
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option("--peer", help="Measure this package beside Chord: humming, torch."),
    ] = None,
    records: Annotated[Path, typer.Option(help="Folder for the record and the chart.")] = Path(
        "benchmarks/records"
    ),
    block_m: Annotated[
        int, typer.Option(min=0, help="Rows of a routing block; 0 leaves the choice to Chord.")
    ] = 0,
    projection: Annotated[
        str, typer.Option(help="Measure this projection alone, gate_up or down; writes no record.")
    ] = "",
    count: Annotated[
        list[int] | None,
        typer.Option(help="Measure these counts alone, repeat for several; writes no record."),
    ] = None,
    dry: Annotated[bool, typer.Option("--dry", help="Print only; write no record.")] = False,
    show: Annotated[bool, typer.Option("--list", help="List the suites and measure none.")] = False,
) -> None:
    """Measure the suites on this GPU beside floors of the same run, and check every output row."""
    from chord.bench import chart, machine
    from chord.bench import records as records_module
    from chord.bench.peers import check_peer
    from chord.bench.scenarios import LAYER, SUITES, suite_named
    from chord.errors import InputError
    from chord.timing import FLUSH_BYTES

    names = suite or [*SUITES, LAYER]
    chosen = {name: None if name == LAYER else suite_named(name) for name in names}
    peers = tuple(peer or ())
    for name in peers:
        check_peer(name)
    if show:
        for one in chosen.values():
            console.print(summary(one, len(peers)), soft_wrap=True)
        return

    def only(case: Case) -> bool:
        return projection in ("", case.projection.name) and (not count or case.tokens in count)

    if not any(only(case) for one in chosen.values() for case in _cases(one)):
        raise InputError(
            f"no case of {', '.join(chosen)} has --projection {projection or 'any'} and --count "
            f"{' or '.join(map(str, count or ())) or 'any'}; projections are gate_up and down, and "
            f"counts stand in the tables of docs/performance.md"
        )
    card = machine.card()
    machine.memory_model(card)
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions().items())
    console.print(f"{card}, {versions}, kernels {machine.kernel_digest()[:12]}")
    console.print(f"cold L2: {FLUSH_BYTES >> 20} MiB written before each timed call\n")
    faults: list[str] = []
    for one in chosen.values():
        console.print(summary(one, len(peers)), soft_wrap=True)
        started = time.perf_counter()
        record = _measure(one, peers, block_m, only, faults)
        console.print(f"took {time.perf_counter() - started:.0f} s")
        _tell_cliffs(record)
        if not (dry or projection or count):
            path = records_module.save(record, records)
            picture = chart.draw(record, path.with_suffix(".png"))
            console.print(f"wrote {path} and {picture.name}\n", soft_wrap=True)
    broken = [words for words in faults if "UnsupportedError" not in words]
    if broken:  # a peer that lacks a case is its own affair; one that breaks makes a record a torso
        errors.print(f"{len(broken)} times a peer failed, at last: {broken[-1]}", soft_wrap=True)
        raise typer.Exit(1)


def _tell_cliffs(record: Record) -> None:
    from chord.bench.cliffs import find_cliffs, is_sweep

    if is_sweep(record):
        cliffs = find_cliffs(record)
        for cliff in cliffs:
            console.print(cliff.describe(), soft_wrap=True)
        console.print(f"{len(cliffs)} falls and leaps over {len(record.rows)} rows")


def _cases(suite: Suite | None) -> list[Case]:
    """Return the cases of a suite, or of the whole layer for None."""
    from chord.bench.layer import layer_cases
    from chord.bench.scenarios import cases

    if suite is None:
        return list(layer_cases())
    return [case for projection in suite.projections for case in cases(suite, projection)]


def _measure(
    suite: Suite | None,
    peers: tuple[str, ...],
    block_m: int,
    only: Callable[[Case], bool],
    faults: list[str],
) -> Record:
    from chord.bench.layer import layer_cases, run_layer
    from chord.bench.run import run_suite
    from chord.bench.scenarios import LAYER

    name, total = (suite.name, suite.num_cases) if suite else (LAYER, len(list(layer_cases())))
    with progress() as bar:
        task = bar.add_task(name, total=total)

        def show(row: Row) -> None:
            bar.console.print(line(name, row), soft_wrap=True)
            bar.advance(task)

        def leave_out(words: str) -> None:
            faults.append(words)
            bar.console.print(f"left out: {words}", soft_wrap=True)

        options: dict[str, Any] = {
            "peers": peers,
            "only": only,
            "on_row": show,
            "on_step": lambda step: bar.update(task, description=f"{name} {step}"),
            "on_fault": leave_out,
        }
        if suite is None:
            return run_layer(**options)
        return run_suite(suite, block_m=block_m, **options)


def summary(suite: Suite | None, num_peers: int) -> str:
    """Say in one line what a suite measures and how long it takes on the card.

    Args:
        suite: The suite; None for the whole layer.
        num_peers: Implementations to measure beside Chord.
    """
    if suite is None:
        from chord.bench.layer import DEPLOYMENTS, layer_cases

        places = ", ".join(series.name for each in DEPLOYMENTS for series in each.series)
        rows = len(list(layer_cases()))
        seconds = rows * (0.35 + 0.15 * num_peers) + len(DEPLOYMENTS) * (8 + 6 * num_peers)
        return (
            f"layer: chord.fused_moe for {places}, {rows} rows, about {seconds:.0f} s with "
            f"{num_peers} peer(s), kernels compiled"
        )
    shapes = ", ".join(f"{p.name} {p.n} x {p.k}" for p in suite.projections)
    return (
        f"{suite.name}: {suite.num_experts} experts, {shapes}, {suite.num_cases} rows, about "
        f"{suite.expected_seconds(num_peers):.0f} s with {num_peers} peer(s), kernels compiled"
    )


def line(suite: str, row: Row) -> str:
    """Format one row: the case, the floor, and each implementation beside it.

    Args:
        suite: Name of the suite.
        row: A finished row.

    Returns:
        One line in fixed columns.
    """
    count = f"{row.tokens} {row.unit}"
    parts = [
        f"{suite:<12} {row.projection:<8}{row.series:<22}{count:<20}R={row.routed:<7}"
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
