"""`chord demo`: one MoE layer from a checkpoint file to checked output, on the best device here."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from chord.cli.console import console, progress

if TYPE_CHECKING:
    from chord.bench.operands import Checkpoint
    from chord.weights.packed import PackedExperts

T = TypeVar("T")
LIMIT = 8e-3
"""Roundings to BF16 before the last one: the activation, and the rows that are summed."""


def demo(
    tokens: Annotated[int, typer.Option(min=1, max=65_536, help="Tokens to route.")] = 64,
    device: Annotated[str, typer.Option(help="cuda or cpu; default: the best here.")] = "",
) -> None:
    """Make a small MoE layer, pack it, route tokens, run it, and compare with FP64."""
    import torch

    import chord
    from chord.bench.operands import Checkpoint
    from chord.bench.small_layer import LayerShape, expected_output, write_checkpoint
    from chord.weights import checkpoints

    where = _choose_device(device)
    name = torch.cuda.get_device_name() if where == "cuda" else "CPU, plain PyTorch (no GPU used)"
    console.print(f"chord {chord.__version__}", style="bold", end="")
    console.print(f" on {name}", soft_wrap=True)
    shape = LayerShape()
    with progress() as bar, tempfile.TemporaryDirectory() as folder:
        task = bar.add_task("demo", total=5)

        def step(label: str, work: Callable[[], T], describe: Callable[[T], str]) -> T:
            bar.update(task, description=label)
            begin = time.perf_counter()
            result = work()
            if where == "cuda":
                torch.cuda.synchronize()
            elapsed = time.perf_counter() - begin
            bar.console.print(
                f"{label:<12}{elapsed * 1e3:8.1f} ms  {describe(result)}", soft_wrap=True
            )
            bar.advance(task)
            return result

        step(
            "checkpoint",
            lambda: write_checkpoint(Path(folder), shape),
            lambda made: (
                f"{made[0]} tensors, {made[1] / 2**20:.1f} MiB of safetensors: "
                f"{shape.num_experts} experts, hidden {shape.hidden}, "
                f"intermediate {shape.intermediate}"
            ),
        )
        layer = step(
            "load",
            lambda: checkpoints.load_moe_layer(Path(folder), 1),
            lambda found: f"layer 1: experts {found.experts.start} to {found.experts.stop - 1}",
        )
        gate_up = Checkpoint(layer.w13_packed, layer.w13_scale)
        down = Checkpoint(layer.w2_packed, layer.w2_scale)
        w13, w2 = step(
            "pack",
            lambda: (_pack(gate_up, where, True), _pack(down, where, False)),
            lambda packed: (
                f"{sum(p.nbytes for p in packed) / 2**20:.1f} MiB, one layout for "
                "decode and prefill"
            ),
        )
        hidden = torch.randn(tokens, shape.hidden, generator=torch.manual_seed(0)).bfloat16()
        scores = torch.randn(tokens, shape.num_experts, generator=torch.manual_seed(1))
        weights, ids = scores.softmax(dim=-1).topk(shape.top_k)
        weights, ids = weights / weights.sum(dim=-1, keepdim=True), ids.int()
        out = step(
            "run",
            lambda: chord.fused_moe(hidden.to(where), w13, w2, weights.to(where), ids.to(where)),
            lambda y: (
                f"chord.fused_moe of {tokens} tokens x top {shape.top_k} = {ids.numel()} "
                f"rows{', kernels loaded or compiled' if where == 'cuda' else ''}"
            ),
        )
        expected = step(
            "check",
            lambda: expected_output(hidden, weights, ids, gate_up, down),
            lambda y: "the same in FP64 from the checkpoint tensors alone",
        )
        error = ((out.cpu().double() - expected).norm(dim=1) / expected.norm(dim=1)).max().item()
    verdict, style = ("correct", "green") if error <= LIMIT else ("WRONG", "red")
    console.print(verdict, style=style, end="")
    console.print(f": worst token is off by {error:.1e} (limit {LIMIT:.0e})")
    if not error <= LIMIT:
        raise typer.Exit(1)


def _pack(weight: Checkpoint, where: str, is_gate_up: bool) -> PackedExperts:
    import chord

    words, scales = weight.weight_packed.to(where), weight.weight_scale.to(where)
    return chord.pack_experts(words, scales, interleave_gate_up=is_gate_up)


def _choose_device(asked: str) -> str:
    import torch

    from chord.errors import InputError, UnsupportedError

    if asked not in ("", "cpu", "cuda"):
        raise InputError(f"device {asked!r} is not one of cpu, cuda")
    if asked == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("PyTorch sees no GPU here; leave --device out, or say --device cpu")
    return asked or ("cuda" if torch.cuda.is_available() else "cpu")
