"""The command line `chord`: one command a file, work left to the other modules."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import chord
from chord.cli import bench, cache, compile, demo, doctor, explain, tune
from chord.cli.console import console, errors

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        console.print(f"chord {chord.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """W4A16 mixture-of-experts expert GEMMs for NVIDIA Hopper and Blackwell."""


app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("compile")(compile.compile_ahead)
app.command("cache")(cache.cache)
app.command("explain")(explain.explain)
app.command("bench")(bench.bench)
app.command("tune")(tune.tune)


def main() -> None:
    """Run the command line; an error of Chord's own ends with its message and exit code 1."""
    from chord.errors import ChordError

    try:
        app()
    except ChordError as error:
        errors.print(f"{type(error).__name__}:", style="bold red", end=" ")
        errors.print(str(error), soft_wrap=True)
        sys.exit(1)
