"""`chord tune`: measure every shipped configuration on this card and write its profiles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chord.cli.console import console, progress

if TYPE_CHECKING:
    from chord.bench.tune import Measured
    from chord.plan.config import Config


def tune(
    profile: Annotated[
        list[str] | None,
        typer.Option(
            help="Profile to measure: indexed, grouped_prefill (rows sorted by expert), "
            "grouped_decode (rows in slots) or layer (both GEMMs inside of chord.fused_moe); "
            "repeat for several. Default: all."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to. Default: the package's profiles.")
    ] = None,
) -> None:
    """Measure all candidates over Kimi K2's shapes and row counts; the best become rows."""
    import torch

    from chord.bench import tune as search
    from chord.device import facts_of
    from chord.errors import InputError, UnsupportedError
    from chord.plan.select import PROFILES

    known = {name or "indexed": name for name in search.PROFILE_NAMES}
    for name in profile or []:
        if name not in known:
            raise InputError(f"there is no profile {name!r}; there are {', '.join(known)}")
    if not torch.cuda.is_available():
        raise UnsupportedError("tuning measures on a GPU, and PyTorch sees none here")
    facts = facts_of(torch.cuda.current_device())
    for name in profile or known:
        rows = _measure(name, known[name])
        path = (out or PROFILES) / search.file_name(facts.card, known[name])
        search.write_profile(rows, facts.card, path)
        console.print(f"wrote {len(rows)} rows to {path}", soft_wrap=True)


def _measure(name: str, profile: str) -> list[dict[str, object]]:
    import torch

    from chord.bench import tune as search
    from chord.bench import tune_layer

    tasks: Sequence[search.Task | tune_layer.Task]
    tasks = tune_layer.tasks() if profile == search.LAYER_PROFILE else search.tasks(profile)
    rows: list[dict[str, object]] = []
    with progress() as bar:
        shown = bar.add_task(name, total=sum(task.num_shown() for task in tasks))

        def show(row: Measured) -> None:
            bar.console.print(line(row), soft_wrap=True)
            bar.advance(shown)

        for task in tasks:
            rows += task.measure(show)
            torch.cuda.empty_cache()
    return rows


def line(row: Measured) -> str:
    """Format one row: the problem and every candidate, fastest first, the choice with a star.

    Args:
        row: A finished row.
    """
    problem = row.problem

    def one(config: Config, us: float) -> str:
        star = "*" if config == row.config else ""
        mean = row.scores.get(config, us)
        both = f" ({mean:.1f} with skewed loads)" if mean != us else ""
        return f"{star}{us:.1f} us{both} {config.label()}"

    times = " | ".join(one(config, us) for config, us in row.all_us)
    return (
        f"{problem.addressing} E={problem.num_experts} N={problem.n} K={problem.k} "
        f"R={problem.routed_rows}: {times}"
    )
