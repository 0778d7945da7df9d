"""The timer: order of flush, events and turns, number of rounds, spread; without a GPU."""

from __future__ import annotations

import functools
import time
from unittest.mock import MagicMock

import pytest
import torch

from chord import timing
from chord.errors import InputError, UnsupportedError


class FakeClock:
    """A device whose calls take the given times in turn, and a log of what was asked of it."""

    def __init__(self, times_us: list[float]) -> None:
        self.times_us = times_us
        self.log: list[str] = []
        self.hidden_us: list[float] = []
        self.marked: list[float] = []
        self.calls = 0

    def flush(self, hide_us: float) -> None:
        self.log.append("flush")
        self.hidden_us.append(hide_us)

    def start(self) -> None:
        self.log.append("start")

    def stop(self) -> None:
        self.log.append("stop")
        self.marked.append(self.times_us[self.calls % len(self.times_us)])
        self.calls += 1

    def collect_us(self) -> list[float]:
        marked, self.marked = self.marked, []
        return marked


class FakeCard(FakeClock):
    """A device on which each contestant takes its own time, and which slows down for a while.

    Args:
        times_us: Time of a call, by the contestant's name.
        slow: Calls, counted from the first between events, that take twice as long.
    """

    def __init__(self, times_us: dict[str, float], slow: range = range(0)) -> None:
        super().__init__([])
        self.by_name = times_us
        self.slow = slow
        self.running = ""
        self.order: list[str] = []

    def contestants(self) -> dict[str, timing.Call]:
        def call(name: str) -> None:
            self.running = name

        return {name: functools.partial(call, name) for name in self.by_name}

    def stop(self) -> None:
        factor = 2.0 if len(self.order) in self.slow else 1.0
        self.order.append(self.running)
        self.marked.append(factor * self.by_name[self.running])


def test_each_timed_call_follows_its_own_flush() -> None:
    clock = FakeClock([1000.0])
    calls = {name: lambda name=name: clock.log.append(name) for name in "ab"}
    timing.measure_in_turns(calls, repeat_ms=3, warmup_ms=1, clock=clock)
    assert clock.log[:2] == ["a", "b"]  # the first calls, which may compile
    timed = clock.log[2:]
    assert timed[0::4] == ["flush"] * (len(timed) // 4)
    assert timed[1::4] == ["start"] * (len(timed) // 4)
    assert timed[3::4] == ["stop"] * (len(timed) // 4)
    assert set(timed[2::4]) == {"a", "b"}


def test_flushing_hides_each_launch() -> None:
    """A call that costs the CPU more than one flush would be timed as its launch."""
    clock = FakeClock([1000.0])

    def slow() -> None:
        until = time.perf_counter_ns() + 2_000_000
        while time.perf_counter_ns() < until:
            pass

    calls = {"slow": slow, "quick": lambda: None}
    timing.measure_in_turns(calls, repeat_ms=3, warmup_ms=1, clock=clock)
    estimated, later = clock.hidden_us[:6], clock.hidden_us[6:]
    assert estimated == [0.0] * 6
    slow_us, quick_us = max(later), min(later)
    assert set(later) == {slow_us, quick_us}
    assert slow_us >= 1.5 * 2000 and quick_us < 1000


class FakeEvent:
    """Events that are 60 us apart."""

    recorded = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        FakeEvent.recorded += 1
        self.at_us = 60.0 * FakeEvent.recorded

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.at_us - self.at_us) / 1e3


@pytest.mark.parametrize(("hide_us", "writes"), [(0, 1), (1, 1), (60, 1), (61, 2), (1000, 17)])
def test_cuda_clock_writes_as_often_as_it_has_to_hide(
    monkeypatch: pytest.MonkeyPatch, hide_us: float, writes: int
) -> None:
    buffer = MagicMock()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch, "empty", lambda *size, **options: buffer)
    clock = timing.CudaClock()
    clock.flush(0.0)
    assert buffer.zero_.call_count == 1
    clock.flush(1.0)  # times the flush first
    buffer.zero_.reset_mock()
    clock.flush(hide_us)
    assert buffer.zero_.call_count == writes
    assert clock.collect_us() == []


def test_every_round_calls_everyone_once_in_rotated_order() -> None:
    card = FakeCard({"a": 100.0, "b": 200.0, "c": 300.0})
    times = timing.measure_in_turns(card.contestants(), repeat_ms=3, warmup_ms=1, clock=card)
    assert list(times) == ["a", "b", "c"]
    assert [one.median_us for one in times.values()] == [100.0, 200.0, 300.0]
    # Rounds of 600 us: 3 to estimate, 5 to warm up and 15 in 3 ms a contestant.
    rounds = ["".join(card.order[at : at + 3]) for at in range(0, len(card.order), 3)]
    assert rounds[:3] == ["abc", "bca", "cab"]
    assert rounds[3:] == (["abc", "bca", "cab"] * 7)[:20]
    assert {one.num_calls for one in times.values()} == {15}
    assert {one.num_warmup for one in times.values()} == {1 + 3 + 5}
    assert "in turns with 2 other(s)" in times["a"].describe()


def test_a_card_that_slows_down_changes_no_order() -> None:
    """Whoever is measured last must not pay for the heat of all before."""
    card = FakeCard({"first": 100.0, "last": 95.0}, slow=range(2 * 30, 1000))
    times = timing.measure_in_turns(card.contestants(), repeat_ms=4, warmup_ms=1, clock=card)
    assert times["first"].p10_us == 100.0
    assert times["first"].p90_us == 2 * 100.0
    assert times["last"].median_us == pytest.approx(0.95 * times["first"].median_us)


def test_warm_up_rounds_are_dropped() -> None:
    card = FakeCard({"a": 100.0, "b": 100.0}, slow=range(2 * 3, 2 * (3 + 10)))
    times = timing.measure_in_turns(card.contestants(), repeat_ms=2, warmup_ms=1, clock=card)
    assert times["a"].num_warmup == 1 + 3 + 10
    assert times["a"].p90_us == times["b"].p90_us == 100.0


@pytest.mark.parametrize(
    ("times_us", "num_rounds", "num_warmup"),
    [
        ({"short": 5.0}, timing.MAX_ROUNDS, timing.MAX_ROUNDS),
        ({"long": 20_000.0}, timing.MIN_ROUNDS, 1),
        # The same time for both together as for two of 2 ms.
        ({"a": 500.0, "b": 3500.0}, 50, 12),
    ],
)
def test_rounds_fill_the_budget_within_limits(
    times_us: dict[str, float], num_rounds: int, num_warmup: int
) -> None:
    card = FakeCard(times_us)
    times = timing.measure_in_turns(card.contestants(), clock=card)
    for name, one in times.items():
        assert one.num_calls == num_rounds
        assert one.num_warmup == 1 + 3 + num_warmup
        assert one.median_us == one.p10_us == one.p90_us == times_us[name]


def test_median_and_spread() -> None:
    clock = FakeClock([100.0, 200.0, 300.0, 400.0, 1000.0])
    result = timing.measure(lambda: None, warmup_ms=0, repeat_ms=4, clock=clock)
    assert result.num_calls == 20
    assert result.median_us == 300.0
    assert result.p10_us == pytest.approx(100.0)
    assert result.p90_us == pytest.approx(1000.0)


def test_warm_l2_never_flushes_and_says_so() -> None:
    clock = FakeClock([100.0])
    result = timing.measure(lambda: None, flush_bytes=0, repeat_ms=1, clock=clock)
    assert "flush" not in clock.log
    assert "warm L2" in result.describe()


def test_description_names_what_was_done() -> None:
    result = timing.measure(lambda: None, repeat_ms=2, clock=FakeClock([100.0]))
    assert "cold L2 (256 MiB" in result.describe()
    assert "median of 20 calls" in result.describe()
    assert timing.IN_TURNS not in result.describe()
    assert "cold L2 (256 MiB" in timing.method()
    assert timing.IN_TURNS in timing.method()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"calls": {}}, "calls is empty"),
        ({"calls": {"a": lambda: None}, "repeat_ms": -1.0}, "repeat_ms=-1.0"),
        ({"calls": {"a": lambda: None}, "flush_bytes": -4}, "flush_bytes=-4"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        timing.measure_in_turns(**arguments, clock=FakeClock([1.0]))


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
def test_a_slow_launch_is_not_timed() -> None:
    x = torch.zeros(1 << 10, device="cuda")

    def launch_late() -> None:
        time.sleep(0.5e-3)
        x.add_(1)

    times = timing.measure_in_turns({"late": launch_late, "at once": lambda: x.add_(1)})
    assert times["late"].median_us < 100, "the launch of 500 us was timed"


@pytest.mark.gpu
def test_a_graph_replay_is_timed() -> None:
    x = torch.zeros(1 << 20, device="cuda")
    before = float(x[0])
    replay = timing.GraphCall(lambda: x.add_(1))
    assert float(x[0]) == before + 1  # the call before the capture
    replay()
    assert float(x[0]) == before + 2
    assert 0.5 < timing.measure(replay).median_us < 1000


@pytest.mark.gpu
def test_turns_tell_one_copy_from_two() -> None:
    source = torch.empty(1 << 27, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def twice() -> None:
        target.copy_(source)
        target.copy_(source)

    calls = {"once": lambda: target.copy_(source), "twice": twice}
    times = timing.measure_in_turns(calls)
    assert 1.5 < times["twice"].median_us / times["once"].median_us < 2.5
