"""`chord compile`: fill the kernel cache ahead, also for cards that are not in this machine."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import TYPE_CHECKING, Annotated

import typer

from chord.cli.console import console, progress

if TYPE_CHECKING:
    from pathlib import Path

    from chord.jit.compiler import Cubin
    from chord.jit.params import FixedKernel
    from chord.plan.config import Config

Job = tuple[str, "Config | FixedKernel", str]  # architecture, configuration, addressing


def compile_ahead(
    arch: Annotated[str, typer.Option(help="sm_90a, sm_100a, sm_103a, or all.")] = "all",
    jobs: Annotated[int, typer.Option(min=0, help="Worker processes; 0 takes one a core.")] = 0,
) -> None:
    """Compile every shipped configuration; fail where one is not clean or is not kept.

    Clean means: no spill, no stack, and no wgmma that ptxas serialises. Compiles with
    CHORD_JIT=cached too: that forbids compiling late, and this is ahead.
    """
    work = _work(arch)
    folder = _folder()
    results: dict[Job, Cubin | Exception] = {}
    workers = min(len(work), jobs or os.cpu_count() or 1)
    with progress() as bar, ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        task = bar.add_task(f"compile for {arch}", total=len(work))
        futures = {pool.submit(_compile_one, job): job for job in work}
        for future in as_completed(futures):
            job = futures[future]
            results[job] = future.exception() or future.result()  # type: ignore[assignment]
            bar.advance(task)
    kept = _kept(work)
    is_clean = _report(work, results)
    console.print(f"{len(kept)} of {len(work)} kernels are kept in {folder}", soft_wrap=True)
    if not is_clean or len(kept) < len(work):
        raise typer.Exit(1)


def _work(arch: str) -> list[Job]:
    from chord.errors import InputError
    from chord.jit.params import FIXED_KERNELS
    from chord.plan.config import shipped_archs, shipped_configs
    from chord.plan.legality import ADDRESSINGS

    archs = shipped_archs() if arch == "all" else (arch,)
    work: list[Job] = []
    for one in archs:
        configs = shipped_configs(one)
        work += [(one, config, addressing) for config in configs for addressing in ADDRESSINGS]
        work += [(one, kernel, "") for kernel in FIXED_KERNELS if configs]
    if not work:
        raise InputError(
            f"nothing is shipped for --arch {arch}; there are {', '.join(shipped_archs())} and all"
        )
    return work


def _folder() -> Path:
    """Return where the kernels will be kept; refuse to compile for nothing."""
    from chord import env
    from chord.errors import InputError
    from chord.jit import place

    env.jit_mode()
    folder, trouble = place.find().folder, place.trouble()
    if folder is not None and trouble is None:
        try:
            place.make(folder)
        except OSError as error:
            trouble = f"{folder}: {error.strerror or error}"
    if folder is None or trouble is not None:
        raise InputError(
            f"compiled kernels cannot be kept ({trouble}), and to keep them is what `chord "
            f"compile` is for; set CHORD_CACHE_DIR to a folder that you can write"
        )
    return folder


def _kept(work: list[Job]) -> list[Job]:
    """Return what later processes will find: a disk may have become full meanwhile."""
    from chord.jit import cache

    return [job for job in work if cache.is_kept(job[1], job[0], job[2])]


def _compile_one(job: Job) -> Cubin:
    from chord.jit import cache

    arch, config, addressing = job
    return cache.cubin_for(config, arch, addressing, ahead=True)


def _report(work: list[Job], results: dict[Job, Cubin | Exception]) -> bool:
    console.print("arch     registers  stack  spills  seconds  kernel", style="bold")
    clean: dict[str, int] = {}
    failures: list[str] = []
    for arch, config, addressing in work:
        result = results[arch, config, addressing]
        name = f"{config.label()} {addressing}".rstrip()
        clean.setdefault(arch, 0)
        if isinstance(result, Exception):
            failures.append(f"{arch} {name}: {result}")
            continue
        report = result.report
        if report is None:
            failures.append(f"{arch} {name}: the compiler printed no registers and spills")
            continue
        spills = report.spill_store_bytes + report.spill_load_bytes
        seconds = f"{result.seconds:.1f}" if result.seconds else "cached"
        console.print(
            f"{arch:<9}{report.registers:>9}  {report.stack_bytes:>5}  {spills:>6}  {seconds:>7}  "
            f"{name}",
            soft_wrap=True,
        )
        if report.is_clean:
            clean[arch] += 1
        else:
            failures.append(
                f"{arch} {name}: {spills} bytes of spills, {report.stack_bytes} of stack"
                + (", serialised wgmma" if report.serialised else "")
            )
    for arch, count in clean.items():
        total = sum(job[0] == arch for job in work)
        console.print(f"{arch}: {count} of {total} kernels compiled, clean")
    for failure in failures:
        console.print(failure, style="red", soft_wrap=True)
    return not failures
