"""Every shipped configuration compiles for its architectures, with no spill and no stack frame.

The units also assert that host and device agree on shared memory, threads and parameters. Compiles
come from Chord's own cache where it holds them, so only changed kernels cost time.
"""

from __future__ import annotations

import pytest

from chord import device as devices
from chord.jit import cubin_for
from chord.jit.params import FIXED_KERNELS, FixedKernel
from chord.plan import select
from chord.plan.config import Config, shipped_archs, shipped_configs
from chord.plan.legality import ADDRESSINGS


def shipped() -> list[tuple[str, Config | FixedKernel, str]]:
    found: list[tuple[str, Config | FixedKernel, str]] = []
    for arch in shipped_archs():
        found += [(arch, kernel, "") for kernel in FIXED_KERNELS]
        profiled = (row.config for row in select.profile_rows(devices.known(arch).card))
        for config in dict.fromkeys((*shipped_configs(arch), *profiled)):
            found += [(arch, config, addressing) for addressing in ADDRESSINGS]
    return found


@pytest.mark.parametrize(
    ("arch", "config", "addressing"),
    [
        pytest.param(*case, id=f"{case[0]}-{case[1].label().replace(' ', '-')}-{case[2]}")
        for case in shipped()
    ],
)
def test_compiles_without_spills(arch: str, config: Config | FixedKernel, addressing: str) -> None:
    report = cubin_for(config, arch, addressing).report
    assert report is not None, "the compiler printed no registers and spills"
    assert report.is_clean, f"{config.label()} {addressing} for {arch}: {report}"
    assert report.registers * config.threads() <= 65536
