"""`chord explain`: what would run for a shape on a card, what was considered, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from chord.cli.console import console

if TYPE_CHECKING:
    from chord.device import DeviceFacts


def explain(
    experts: Annotated[int, typer.Option("--experts", "-e", help="Local experts E.")],
    n: Annotated[int, typer.Option("--n", help="Output features N.")],
    k: Annotated[int, typer.Option("--k", help="Reduction length K.")],
    rows: Annotated[
        int,
        typer.Option(
            "--rows", "-r", help="Rows of the output: tokens x top_k, rows of x, or E x max_m."
        ),
    ],
    card: Annotated[
        str, typer.Option(help="h100, h200, b200, b300 or sm_90a, ...; default: the card here.")
    ] = "",
    addressing: Annotated[
        str,
        typer.Option(
            help="Indexed, ContiguousOffsets, ContiguousIndices or Masked; RoutedGateUp (or, with "
            "router weights on the input, RoutedGateUpWeighted) and RoutedDown for the two GEMMs "
            "of `chord.fused_moe`."
        ),
    ] = "Indexed",
    expected: Annotated[
        int | None,
        typer.Option(help="Masked: rows in use per expert, as `chord.masked(expected=...)`."),
    ] = None,
) -> None:
    """Print the kernel that would run for E, N, K and R, why, and what else was considered."""
    from chord import device
    from chord.errors import InputError
    from chord.plan import cost, select
    from chord.plan.legality import ADDRESSINGS
    from chord.plan.problem import GemmProblem

    addressing = {name.lower(): name for name in ADDRESSINGS}.get(addressing.lower(), addressing)
    if expected is not None and (addressing != "Masked" or expected < 0):
        raise InputError(
            f"--expected {expected} is the rows in use per expert, at least 0, and goes with "
            f"--addressing Masked; the addressing is {addressing}"
        )
    facts = device.known(card) if card else _card_here()
    hint = None if expected is None else experts * expected
    problem = GemmProblem(experts, n, k, rows, addressing, hint)
    decision = select.decide(problem, facts)
    floor_us = cost.floor_us(problem, facts)
    console.print(
        f"{facts.card} {addressing} E={experts} N={n} K={k} routed={rows} "
        f"({problem.rows_per_expert:.1f} rows an expert), floor {floor_us:.0f} us"
    )
    console.print(decision.config.label(), style="bold", end="", soft_wrap=True)
    console.print(
        f" | {decision.reason} | "
        f"{len(decision.considered)} can run, {len(decision.rejected)} rejected",
        soft_wrap=True,
    )
    is_best = decision.config == decision.considered[0][0]
    order = "best first; -> would run" if is_best else "which the measured choice (->) overrules"
    console.print(f"Predictions of the cost model, {order}:", soft_wrap=True)
    console.print("    predicted us  smem bytes  configuration", style="bold")
    for config, predicted_us in decision.considered:
        mark = "->" if config == decision.config else "  "
        console.print(
            f"{mark}  {predicted_us:>12.1f}  {config.smem_bytes():>10}  {config.label()}",
            soft_wrap=True,
        )
    for config, reason in decision.rejected:
        console.print(f"rejected: {config.label()}: {reason}", style="dim", soft_wrap=True)


def _card_here() -> DeviceFacts:
    import torch

    from chord import device

    if torch.cuda.is_available():
        return device.facts_of(torch.cuda.current_device())
    console.print("no GPU here: explaining for an h200; choose another with --card")
    return device.known("h200")
