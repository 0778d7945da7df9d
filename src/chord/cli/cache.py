"""`chord cache`: what compiled kernels take on disk, and which of them are of no more use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from chord.cli.console import console

if TYPE_CHECKING:
    from pathlib import Path


def cache(
    prune: Annotated[
        bool,
        typer.Option(
            "--prune", help="Delete what the kernels and the NVRTC of this installation cannot use."
        ),
    ] = False,
) -> None:
    """Print where compiled kernels are kept, how many, and how many this installation can use."""
    from chord.errors import InputError
    from chord.jit import cache as kept
    from chord.jit import place

    found = place.find()
    if found.folder is None:
        console.print(f"no folder: {found.trouble}", soft_wrap=True)
        return
    failed: list[OSError] = []
    try:
        if prune:
            gone, failed = kept.prune(found.folder)
            console.print(f"deleted {_sum_up([entry.size for entry in gone])}")
        console.print(describe(found.folder), soft_wrap=True)
        if failed:
            raise failed[0]
    except OSError as error:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise InputError(
            f"{error.filename or found.folder}: {error.strerror or error}{more}; run this as "
            f"the user whose folder it is, or set CHORD_CACHE_DIR to another"
        ) from None
    trouble = place.trouble()
    if trouble is not None:
        console.print(f"no kernel can be added: {trouble}", soft_wrap=True)


def describe(folder: Path) -> str:
    """Return one line about a folder of kernels: its name, what is of use and what is not."""
    from chord.jit import cache as kept

    entries = kept.entries(folder)
    current = [entry.size for entry in entries if entry.is_current]
    stale = [entry.size for entry in entries if not entry.is_current]
    line = f"{folder}: {_sum_up(current)}"
    if stale:
        line += f"; {_sum_up(stale)} of other kernels or another NVRTC (`chord cache --prune`)"
    return line


def _sum_up(sizes: list[int]) -> str:
    return f"{len(sizes)} file(s), {sum(sizes) / 2**20:.1f} MiB"
