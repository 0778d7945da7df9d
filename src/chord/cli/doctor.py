"""`chord doctor`: what this machine has, what would run on it, and why something would not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from chord.cli.cache import describe
from chord.cli.console import console, table

if TYPE_CHECKING:
    from pathlib import Path


def doctor() -> None:
    """Print card, driver, versions, cache state, what would run here and what would not."""
    from chord import device, env
    from chord.bench import machine

    facts = table("", "")
    for name, value in _card_lines():
        facts.add_row(name, value)
    driver = device.driver_version()
    speaks = f", speaks CUDA {driver[0]}.{driver[1]}" if driver else ""
    versions = machine.versions()
    facts.add_row("driver", versions.pop("driver") + speaks)
    for name, value in versions.items():
        facts.add_row(name, value)
    facts.add_row("vllm", _vllm_state(machine.distribution("vllm")))
    facts.add_row("kernels", machine.kernel_digest()[:12])
    facts.add_row("cache", _said(_cache_state))
    facts.add_row("CHORD_JIT", _said(env.jit_mode))
    facts.add_row("CHORD_VLLM", _said(lambda: "1" if env.vllm_enabled() else "0"))
    console.print(facts)
    console.print()
    for line in _what_runs():
        console.print(line, soft_wrap=True)
    console.print("\nEnvironment variables:")
    variables = table("name", "default", "meaning")
    for variable in env.VARIABLES:
        variables.add_row(variable.name, variable.default, variable.meaning)
    console.print(variables)


def _said(ask: Callable[[], str]) -> str:
    """Return an answer, or what is wrong with the variable that it comes from."""
    from chord.errors import InputError

    try:
        return ask()
    except InputError as error:
        return f"WRONG: {error}"


def _vllm_state(version: str) -> str:
    """Say whether vLLM is installed and will find Chord; imports nothing of it."""
    import importlib.metadata

    plugins = importlib.metadata.entry_points(group="vllm.general_plugins", name="chord")
    if not plugins:
        return (
            f"{version}; Chord's entry point in vllm.general_plugins is NOT INSTALLED, so vLLM "
            f"does not find Chord: install Chord with pip in this environment"
        )
    return f"{version}; Chord's plugin is installed for it: {next(iter(plugins)).value}"


def _card_lines() -> list[tuple[str, str]]:
    import torch

    from chord import device
    from chord.errors import UnsupportedError

    if not torch.cuda.is_available():
        return [("card", "none that PyTorch sees")]
    lines = []
    for index in range(torch.cuda.device_count()):
        try:
            facts = device.facts_of(index)
        except UnsupportedError as error:
            lines.append((f"card {index}", str(error)))
            continue
        lines.append(
            (
                f"card {index}",
                f"{facts.name}, {facts.arch}, {facts.num_sms} SMs, "
                f"{facts.smem_per_block_optin >> 10} KiB of shared memory a block, "
                f"{facts.l2_bytes >> 20} MiB of L2",
            )
        )
    return lines


def _cache_state() -> str:
    from chord.jit import place

    found = place.find()
    trouble = place.trouble()
    kept = None if found.folder is None else _read(found.folder)
    if trouble is not None and kept is not None:
        return (
            f"{kept}; READ ONLY ({trouble}): kernels that are there are used, every process "
            f"compiles the others for itself"
        )
    if found.folder is None or trouble is not None:
        where = "" if found.folder is None else f"{found.folder} "
        return (
            f"{where}CANNOT BE USED ({trouble}): kernels stay in memory and every process compiles "
            f"its own; set CHORD_CACHE_DIR to a folder that you can write"
        )
    line = describe(found.folder)
    return line if found.trouble is None else f"{line} ({found.trouble})"


def _read(folder: Path) -> str | None:
    """Describe a folder of kernels of which this installation can use some, else return None."""
    from chord.jit import cache

    try:
        usable = any(entry.is_current for entry in cache.entries(folder))
    except OSError:
        return None
    return describe(folder) if usable else None


def _what_runs() -> list[str]:
    import torch

    from chord import device
    from chord.bench import machine
    from chord.errors import ChordError
    from chord.jit import compiler
    from chord.plan.config import shipped_configs
    from chord.plan.legality import reject_on_device

    if not torch.cuda.is_available():
        return [
            "Runs here: chord.reference in plain PyTorch, which the public functions use too.",
            f"Compiles here: {_compiles(machine.nvrtc())}",
        ]
    lines = []
    for index in range(torch.cuda.device_count()):
        try:
            facts = device.facts_of(index)
            compiler.check_driver(facts.driver)
        except ChordError as error:
            lines.append(f"card {index} runs no kernel: {error}")
            continue
        lines.append(f"Compiles here: {_compiles(machine.nvrtc())}")
        shipped = shipped_configs(facts.arch) or shipped_configs("sm_90a")
        for config in shipped:
            reason = reject_on_device(config, facts)
            lines.append(
                f"card {index} {'runs' if reason is None else 'does not run'} "
                f"{config.label()}{'' if reason is None else ': ' + reason}"
            )
    return lines


def _compiles(nvrtc: str) -> str:
    if nvrtc == "none":
        return "nothing: NVRTC is missing; pip install 'chord-kernels[cu13]'"
    return f"kernels for every architecture, by NVRTC {nvrtc} (no toolkit needed)"
