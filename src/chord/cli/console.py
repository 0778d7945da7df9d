"""What the commands share: where they print, and the progress bar of anything over two seconds."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

# No markup: what is printed holds paths, shapes and values, whose brackets are their own.
console = Console(highlight=False, markup=False)
errors = Console(stderr=True, highlight=False, markup=False)


def progress() -> Progress:
    """Make a progress bar that vanishes when it is done and stays silent in a log file.

    Returns:
        A context manager; add one task and advance it.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def table(*columns: str) -> Table:
    """Make a plain table.

    Args:
        columns: Headings; empty ones make a table without a heading line.

    Returns:
        An empty table.
    """
    return Table(*columns, box=None, pad_edge=False, header_style="bold", show_header=any(columns))
