"""`chord tune`: measure every shipped configuration on this card and write its profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chord.cli.console import console, progress

if TYPE_CHECKING:
    from chord.bench.tune import Measured


def tune(
    out: Annotated[
        Path | None, typer.Option(help="File to write. Default: this card's file in the package.")
    ] = None,
) -> None:
    """Measure all candidates for the shapes of the benchmark suites; the fastest become rows."""
    import torch

    from chord.bench import tune as search
    from chord.device import facts_of
    from chord.errors import UnsupportedError
    from chord.plan.select import PROFILES

    if not torch.cuda.is_available():
        raise UnsupportedError("tuning measures on a GPU, and PyTorch sees none here")
    facts = facts_of(torch.cuda.current_device())
    rows: list[dict[str, object]] = []
    tasks = search.tasks()
    with progress() as bar:
        task = bar.add_task("tune", total=sum(len(search.TOKENS[experts]) for experts, _ in tasks))

        def show(row: Measured) -> None:
            bar.console.print(line(row), soft_wrap=True)
            bar.advance(task)

        for experts, projection in tasks:
            rows += search.profile_rows(search.search(experts, projection, show))
    path = search.write_profile(rows, facts.card, out or PROFILES / f"{facts.card}.json")
    console.print(f"wrote {len(rows)} rows to {path}")


def line(row: Measured) -> str:
    """Format one row: the problem and every candidate, fastest first.

    Args:
        row: A finished row.
    """
    problem = row.problem
    times = " | ".join(f"{us:.1f} us {config.label()}" for config, us in row.all_us)
    return f"E={problem.num_experts} N={problem.n} K={problem.k} R={problem.routed_rows}: {times}"
