"""What all tests share: GPU tests fail where there is no GPU, stale records are reported."""

from __future__ import annotations

from pathlib import Path

import pytest

RECORDS = Path(__file__).parents[1] / "benchmarks" / "records"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.fail(
            "this test is marked gpu and PyTorch sees no CUDA GPU here; run it on a machine with "
            "one, or leave `-m gpu` out",
            pytrace=False,
        )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    try:
        from chord.bench.records import stale
        from chord.jit.source import kernel_digest

        lines = stale(RECORDS, kernel_digest())
    except Exception as error:  # a broken tree must not hide the tests' own report
        lines = [f"could not be checked: {type(error).__name__}: {error}"]
    if lines:
        terminalreporter.section("stale benchmark records")
        for line in lines:
            terminalreporter.line(line)
