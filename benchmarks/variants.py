"""Time kernels of changed headers beside each other, in turns, on the same operands.

    python benchmarks/variants.py build NAME SRC --config "decode max_tokens=16 ..." [...]
    python benchmarks/variants.py time tp8_decode/down/1,2,4 [...] [--config ...] [--peer humming]
    python benchmarks/variants.py layer tp8_decode/64,128 [...]
    python benchmarks/variants.py energy ep8_prefill/gate_up/2048 [...]

`build` needs no GPU: it compiles the kernels of SRC (the folder that holds `chord/kernels`, of a
copy or a worktree with the change in it) and prints registers and spills. `time` runs on the card
all that was built for a row's addressing, checks every row of the output, and prints medians with
a cold L2. `layer` does so for whole layers, where a variant replaces what was built with
`--addressing RoutedGateUp` or `RoutedDown`. `energy` calls everything that was built for a row with
even loads, and cuBLAS with as many rows, without a pause, and prints what a call takes. A name that
begins with "part" belongs to a kernel with something left out: its result is not looked at. Kernels
are kept in `.variants`, below the working directory.

A configuration is written as `chord explain` prints it. Launch parameters have to be those of the
Chord that runs this.
"""

from __future__ import annotations

import ctypes
import functools
import time as clock
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple
from unittest import mock

import torch
import typer

import chord
from chord.bench import layer as layers
from chord.bench.floors import DENSE, dense_matmul
from chord.bench.operands import POISON, ROW_ERROR_LIMIT, max_row_error, random_checkpoint
from chord.bench.peers import load_peer
from chord.bench.run import Chord, problem_of
from chord.bench.scenarios import Case, Projection, Suite, cases, suite_named
from chord.bench.work import make_work
from chord.device import facts_of
from chord.errors import ChordError
from chord.jit import driver
from chord.jit import launch as launching
from chord.jit.compiler import compile_unit
from chord.jit.source import ENTRY, render
from chord.plan import select
from chord.plan.config import Config, config_from_fields
from chord.timing import Call, GraphCall, Timing, measure_in_turns

VARIANTS = Path(".variants")
PART = "part"
app = typer.Typer(add_completion=False)


def parse_config(text: str) -> Config:
    """Return the configuration that `Config.label` writes as `text`."""
    kernel, *fields = text.split()
    pairs = (field.partition("=") for field in fields)
    return config_from_fields(kernel, {name: int(value) for name, _, value in pairs})


def place(name: str, config: Config, addressing: str) -> Path:
    """Return where a variant's kernel is kept."""
    return VARIANTS / name / f"{config.label()} {addressing}.cubin".replace(" ", "-")


@app.command()
def build(
    name: str,
    src: Path,
    config: Annotated[list[str], typer.Option(help="As `chord explain` prints it.")],
    addressing: str = "Indexed",
    arch: str = "sm_90a",
) -> None:
    """Compile the kernels of SRC as variant NAME."""
    for one in map(parse_config, config):
        cubin = compile_unit(render(one, addressing), arch, src)
        path = place(name, one, addressing)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(cubin.code)
        typer.echo(f"{name}: {one.label()} {addressing}: {cubin.report}, {cubin.seconds:.0f} s")


class Variants:
    """Launchers of built kernels, in the place of the library's own while one is chosen."""

    def __init__(self) -> None:
        self._shipped = launching.launcher
        self._made: dict[tuple[str, launching.KernelKey], launching.Launcher] = {}
        self._chosen: str | None = None

    def launcher(self, key: launching.KernelKey) -> launching.Launcher:
        """Stand in for `chord.jit.launch.launcher`."""
        path = place(self._chosen or "", key.config, key.addressing)
        if self._chosen is None or not path.exists():
            return self._shipped(key)
        own = (self._chosen, key)
        if own not in self._made:
            code = path.read_bytes()
            function = driver.load_function(code, ENTRY, key.config.smem_bytes())
            kernel = launching.LoadedKernel(function, key.config, key.addressing, key.index)
            self._made[own] = launching.Launcher(kernel, facts_of(key.index).num_sms)
        return self._made[own]

    def call(self, name: str | None, call: Callable[[], object]) -> Call:
        """Return `call` with the kernels of variant `name`, None for the library's own."""

        def run() -> None:
            self._chosen = name
            call()

        return run


def rows_of(text: str) -> tuple[Suite, Projection, list[Case]]:
    """Return the cases that "SUITE/PROJECTION/COUNT,COUNT,..." names."""
    suite_name, projection_name, counts = text.split("/")
    suite = suite_named(suite_name)
    projection = next(one for one in suite.projections if one.name == projection_name)
    wanted = [int(count) for count in counts.split(",")]
    return suite, projection, [case for case in cases(suite, projection) if case.tokens in wanted]


def built(config: Config, addressing: str) -> Iterator[str]:
    """Iterate over the variants that have a kernel."""
    for folder in sorted(VARIANTS.iterdir()):
        if place(folder.name, config, addressing).exists():
            yield folder.name


class Row(NamedTuple):
    """A case with all that was built for it, each called once and looked at."""

    title: str
    case: Case
    calls: dict[str, Call]


def prepared(
    rows: list[str],
    configs: list[str] | None,
    *,
    peer: str = "",
    only: Callable[[Case], bool] = lambda case: True,
) -> Iterator[Row]:
    """Iterate over the rows that something was built for, each SUITE/PROJECTION/COUNT,COUNT,..."""
    variants = Variants()
    with mock.patch.object(launching, "launcher", variants.launcher):
        for suite, projection, todo in map(rows_of, rows):
            checkpoint = random_checkpoint(
                suite.num_experts, projection.n, projection.k, torch.device("cuda")
            )
            packed = Chord(checkpoint)
            other = load_peer(peer, checkpoint, todo) if peer else None
            for case in filter(only, todo):
                work = make_work(case, torch.device("cuda"))
                problem = problem_of(work)
                planned = select.decide(problem, facts_of(0)).config
                calls: dict[str, Call] = {}
                for one in [parse_config(text) for text in configs or ()] or [planned]:
                    for name in built(one, problem.addressing):
                        call = variants.call(name, packed.prepare_call(work, one))
                        work.out.fill_(POISON)
                        call()
                        error = max_row_error(work.out, work.x, work.owners, case.top_k, checkpoint)
                        if not name.startswith(PART) and not error <= ROW_ERROR_LIMIT:
                            raise ChordError(f"{name}: a row is off by {error:.1e}")
                        calls[f"{name} ({one.label()})"] = call
                if other is not None and other.handles(case):
                    calls[peer] = variants.call(None, other.prepare_call(work))
                title = f"{suite.name} {projection.name} {case.series.name} {case.tokens}"
                if calls:
                    yield Row(title, case, calls)


@app.command()
def time(
    row: list[str],
    config: Annotated[list[str] | None, typer.Option(help="Default: the planner's.")] = None,
    peer: str = "",
    repeat_ms: float = 60.0,
) -> None:
    """Time all variants of the rows, each SUITE/PROJECTION/COUNT,COUNT,..."""
    for title, _, calls in prepared(row, config, peer=peer):
        show(title, measure_in_turns(calls, warmup_ms=repeat_ms / 4, repeat_ms=repeat_ms))


class EnergyCounter:
    """What the GPU has taken since the driver was loaded, in mJ; it moves on now and then."""

    def __init__(self) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        self._nvml.nvmlInit_v2()
        self._nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._device))

    def read(self) -> int:
        """Return the counter."""
        value = ctypes.c_ulonglong()
        status = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(value))
        if status != 0:
            raise ChordError(f"NVML has no energy counter for this GPU (status {status})")
        return value.value

    def calls_to_next(self, call: Call) -> tuple[int, int]:
        """Call until the counter moves; return how often, and the counter."""
        before, count = self.read(), 0
        while (now := self.read()) == before:
            repeat(call, 1)
            count += 1
        return count, now


def repeat(call: Call, count: int) -> float:
    """Call without a pause and wait for the device; return the seconds."""
    begin = clock.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return clock.perf_counter() - begin


def has_even_loads(case: Case) -> bool:
    """Return whether no expert of a case was made to have far more rows than others."""
    return case.series.loads in ("random", "balanced")


@app.command()
def energy(
    row: list[str],
    config: Annotated[list[str] | None, typer.Option(help="Default: the planner's.")] = None,
    seconds: float = 0.7,
) -> None:
    """Print time, energy and power of all variants of the rows and of cuBLAS."""
    counter = EnergyCounter()
    for title, case, calls in prepared(row, config, only=has_even_loads):
        n, k = case.projection.n, case.projection.k
        calls[DENSE] = dense_matmul(case.num_routes, n, k, torch.device("cuda"))
        typer.echo(f"{title}:")
        for name, call in calls.items():
            count = 20
            for _ in range(3):  # until the clock is what the power limit leaves
                count = max(20, int(count * seconds / repeat(call, count) / 2))
            _, first = counter.calls_to_next(call)
            begin = clock.perf_counter()
            repeat(call, 2 * count)
            more, last = counter.calls_to_next(call)
            took, count = clock.perf_counter() - begin, 2 * count + more
            us, taken = took / count * 1e6, (last - first) / count
            typer.echo(f"  {us:8.1f} us {taken:8.1f} mJ {taken / us * 1e3:6.0f} W  {name}")


@app.command()
def layer(row: list[str], repeat_ms: float = 60.0) -> None:
    """Time whole layers with each variant's kernels, each row SUITE/COUNT,COUNT,..."""
    variants = Variants()
    device = torch.device("cuda")
    with mock.patch.object(launching, "launcher", variants.launcher):
        for suite, gate_up, todo in (rows_of(text.replace("/", "/gate_up/")) for text in row):
            down = next(one for one in suite.projections if one.name == "down")
            checkpoint = random_checkpoint(suite.num_experts, gate_up.n, gate_up.k, device)
            w13 = layers.pack(checkpoint, interleave=True)
            w2 = layers.pack(random_checkpoint(suite.num_experts, down.n, down.k, device, seed=1))
            for case in (one for one in todo if one.series.loads == "random"):
                hidden, weights, ids = layers.random_tokens(case, gate_up.k, device)
                run = functools.partial(chord.fused_moe, hidden, w13, w2, weights, ids)
                shipped = torch.empty_like(hidden)
                call = variants.call(None, functools.partial(run, out=shipped))
                calls: dict[str, Call] = {"shipped": GraphCall(call)}
                call()
                expected = shipped.double()
                for name in sorted(folder.name for folder in VARIANTS.iterdir()):
                    out = torch.full_like(hidden, POISON)
                    call = variants.call(name, functools.partial(run, out=out))
                    call()
                    error = layers.worst_token(out, expected)
                    if not name.startswith(PART) and not error <= layers.LAYER_ERROR_LIMIT:
                        raise ChordError(f"{name}: a row is off by {error:.1e}")
                    calls[name] = GraphCall(call)
                times = measure_in_turns(calls, warmup_ms=repeat_ms / 4, repeat_ms=repeat_ms)
                show(f"{suite.name} layer {case.tokens}", times)


def show(title: str, times: Mapping[str, Timing]) -> None:
    """Print the medians of one row."""
    typer.echo(f"{title}:")
    for name, timing in times.items():
        typer.echo(f"  {timing.median_us:8.1f} us  {name}")


if __name__ == "__main__":
    app()
