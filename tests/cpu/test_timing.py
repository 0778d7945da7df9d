"""The timer: order of flush and events, number of calls, rotation, spread; without a GPU."""

from __future__ import annotations

import pytest
import torch

from chord import timing
from chord.errors import InputError, UnsupportedError


class FakeClock:
    """A device whose calls take the given times in turn, and a log of what was asked of it."""

    def __init__(self, times_us: list[float]) -> None:
        self.times_us = times_us
        self.log: list[str] = []
        self.marked: list[float] = []
        self.calls = 0

    def flush(self) -> None:
        self.log.append("flush")

    def start(self) -> None:
        self.log.append("start")

    def stop(self) -> None:
        self.log.append("stop")
        self.marked.append(self.times_us[self.calls % len(self.times_us)])
        self.calls += 1

    def collect_us(self) -> list[float]:
        marked, self.marked = self.marked, []
        return marked


def test_each_timed_call_follows_its_own_flush() -> None:
    clock = FakeClock([1000.0])
    timing.measure(lambda: clock.log.append("call"), repeat_ms=3, warmup_ms=1, clock=clock)
    timed = clock.log[1 : 1 + 4 * 5]  # one first call, then five calls that estimate the time
    assert timed == ["flush", "start", "call", "stop"] * 5
    assert clock.log[-12:] == ["flush", "start", "call", "stop"] * 3


def test_number_of_calls_fills_the_requested_time() -> None:
    result = timing.measure(lambda: None, warmup_ms=2, repeat_ms=10, clock=FakeClock([500.0]))
    assert result.num_calls == 20
    assert result.num_warmup == 4 + 1 + 5
    assert result.median_us == result.p10_us == result.p90_us == 500.0


def test_median_and_spread() -> None:
    clock = FakeClock([100.0, 200.0, 300.0, 400.0, 1000.0])
    result = timing.measure(lambda: None, repeat_ms=2, clock=clock)
    assert result.num_calls == 5
    assert result.median_us == 300.0
    assert result.p10_us == pytest.approx(140.0)
    assert result.p90_us == pytest.approx(760.0)


def test_inputs_are_rotated_and_each_is_timed() -> None:
    seen: list[int] = []
    calls = [lambda i=i: seen.append(i) for i in range(4)]
    result = timing.measure(calls, warmup_ms=0, repeat_ms=0, clock=FakeClock([50.0]))
    assert result.num_inputs == 4
    assert seen[-4:] == [0, 1, 2, 3]


def test_warm_l2_never_flushes_and_says_so() -> None:
    clock = FakeClock([100.0])
    result = timing.measure(lambda: None, flush_bytes=0, repeat_ms=1, clock=clock)
    assert "flush" not in clock.log
    assert "warm L2" in result.describe()


def test_description_names_what_was_done() -> None:
    result = timing.measure(lambda: None, repeat_ms=1, clock=FakeClock([100.0]))
    assert "cold L2 (256 MiB" in result.describe()
    assert "median of 10 calls" in result.describe()
    assert "cold L2 (256 MiB" in timing.method()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"calls": []}, "calls is empty"),
        ({"calls": lambda: None, "repeat_ms": -1.0}, "repeat_ms=-1.0"),
        ({"calls": lambda: None, "flush_bytes": -4}, "flush_bytes=-4"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        timing.measure(**arguments, clock=FakeClock([1.0]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_without_a_gpu_the_default_clock_refuses() -> None:
    with pytest.raises(UnsupportedError, match="needs an NVIDIA GPU"):
        timing.measure(lambda: None)


def test_host_time_is_positive() -> None:
    assert timing.measure_host_us(lambda: sum(range(100)), num_calls=5, num_warmup=1) > 0


@pytest.mark.gpu
def test_a_copy_takes_about_its_bytes() -> None:
    source = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    result = timing.measure(lambda: target.copy_(source))
    rate = 2 * source.numel() / result.median_us / 1e6
    assert 0.5 < rate < 20, f"a copy at {rate:.2f} TB/s is not believable"


@pytest.mark.gpu
def test_a_graph_replay_is_timed() -> None:
    x = torch.zeros(1 << 20, device="cuda")
    result = timing.measure(lambda: x.add_(1), graph=True)
    assert result.graph
    assert 0.5 < result.median_us < 1000
