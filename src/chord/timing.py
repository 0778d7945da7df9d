"""The one timer: CUDA events around single calls with a cold L2, and what one call costs the CPU.

Used by the tuner, the command line and the benchmarks, so that every time Chord prints means the
same. What is timed, and on which inputs, is the caller's.

Times that are compared are taken in turns: power limit and heat change the speed of a card while
it works, so that calls measured one after another are not measured under the same conditions.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from chord.errors import InputError, UnsupportedError

FLUSH_BYTES = 256 * 1024 * 1024
"""Size of the buffer written before each timed call; several times the L2 of any supported card."""

WARMUP_MS = 25.0
REPEAT_MS = 100.0
MIN_ROUNDS, MAX_ROUNDS = 12, 60
"""Timed calls of each contestant: enough for a median, and no more than it takes."""

IN_TURNS = "in turns"
"""The words of `method` by which a record shows that its times were taken so."""

_ESTIMATE_ROUNDS = 3
_HIDE_FACTOR = 1.5  # flushing against what a launch was seen to take

Call = Callable[[], object]
Name = TypeVar("Name")


def method(repeat_ms: float = REPEAT_MS, warmup_ms: float = WARMUP_MS) -> str:
    """Say in words how `measure_in_turns` times, for records.

    Args:
        repeat_ms: Time spent on timed calls of each contestant, within the limits of rounds.
        warmup_ms: Time spent on calls before them.
    """
    return (
        f"CUDA events around single calls {IN_TURNS}: each round calls every contestant of a row "
        f"once, in rotated order; median over {MIN_ROUNDS} to {MAX_ROUNDS} rounds, as many as "
        f"{repeat_ms:g} ms a contestant allow, after up to {MAX_ROUNDS} rounds of warm-up "
        f"({warmup_ms:g} ms a contestant); cold L2 ({FLUSH_BYTES >> 20} MiB written before each "
        f"call, for {_HIDE_FACTOR:g} times as long as its launch takes)"
    )


@dataclass(frozen=True)
class Timing:
    """Times of one call, and how they were taken.

    Attributes:
        median_us: Median over the timed calls, in microseconds.
        p10_us: 10th percentile.
        p90_us: 90th percentile.
        num_calls: Timed calls.
        num_warmup: Calls made before the first timed one.
        flush_bytes: Bytes written before each timed call to empty the L2; 0 means a warm L2.
        num_contestants: Calls that took turns, this one included.
    """

    median_us: float
    p10_us: float
    p90_us: float
    num_calls: int
    num_warmup: int
    flush_bytes: int
    num_contestants: int = 1

    def describe(self) -> str:
        """Say in one line how the times were taken.

        Returns:
            A sentence without the times themselves: calls, L2 state, turns.
        """
        l2 = f"cold L2 ({self.flush_bytes >> 20} MiB written before each)"
        others = self.num_contestants - 1
        return (
            f"CUDA events, median of {self.num_calls} calls after {self.num_warmup}, "
            f"{l2 if self.flush_bytes else 'warm L2'}"
            f"{f', {IN_TURNS} with {others} other(s)' if others else ''}"
        )


class Clock(Protocol):
    """What `measure_in_turns` needs from a device: an L2 flush and the times of single calls."""

    def flush(self, hide_us: float) -> None:
        """Empty the caches, in stream order, outside the timed interval, for at least `hide_us`."""

    def start(self) -> None:
        """Mark the beginning of a timed interval in stream order."""

    def stop(self) -> None:
        """Mark its end."""

    def collect_us(self) -> list[float]:
        """Wait for the device; return the intervals marked since the last call, and forget them."""


class CudaClock:
    """CUDA events on the current stream of one device.

    The launch of the timed call is hidden behind the flush, so the interval holds only what the
    device does: a buffer is written once, and again for as long as a slow launch takes. (Peers'
    calls cost a slow CPU 70 us, where one flush takes 60: a kernel of 10 us then looked like 80.)
    """

    def __init__(self, flush_bytes: int = FLUSH_BYTES) -> None:
        if not torch.cuda.is_available():
            raise UnsupportedError(
                "timing needs an NVIDIA GPU, and PyTorch sees none here; run it on the card that "
                "the numbers are about"
            )
        self._buffer = torch.empty(flush_bytes // 4, dtype=torch.int32, device="cuda")
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._flush_us: float | None = None

    def _time_flush(self) -> float:
        for _ in range(_ESTIMATE_ROUNDS):
            self._buffer.zero_()
            self.start()
            self._buffer.zero_()
            self.stop()
        return min(self.collect_us())

    def flush(self, hide_us: float) -> None:
        """Write the whole flush buffer, at least once and for at least `hide_us`."""
        if not self._buffer.numel():
            return
        num_writes = 1
        if hide_us > 0:
            # Not before: a card that has been idle is slow at first.
            if self._flush_us is None:
                self._flush_us = self._time_flush()
            num_writes = math.ceil(hide_us / self._flush_us)
        for _ in range(num_writes):
            self._buffer.zero_()

    def start(self) -> None:
        """Record the start event."""
        pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        self._events.append(pair)
        pair[0].record()

    def stop(self) -> None:
        """Record the end event."""
        self._events[-1][1].record()

    def collect_us(self) -> list[float]:
        """Synchronise and return the recorded intervals in microseconds."""
        torch.cuda.synchronize()
        times = [start.elapsed_time(end) * 1e3 for start, end in self._events]
        self._events.clear()
        return times


class GraphCall:
    """A call captured in a CUDA graph: calling this replays it.

    It keeps the captured call, and with it the tensors that the graph reads and writes.

    Args:
        call: Launches on the current stream alone; made once before the capture, to warm it up.
    """

    def __init__(self, call: Call) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        self._call = call
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            call()

    def __call__(self) -> None:
        """Replay the graph once."""
        self._graph.replay()


def measure_in_turns(
    calls: Mapping[Name, Call],
    *,
    warmup_ms: float = WARMUP_MS,
    repeat_ms: float = REPEAT_MS,
    flush_bytes: int = FLUSH_BYTES,
    clock: Clock | None = None,
) -> dict[Name, Timing]:
    """Time several calls side by side: each round makes every call once, each with a cold L2.

    So all of them see the card as hot and as fast as it is at that time. The order rotates from
    round to round. Each timed call is enclosed by its own event pair; a buffer larger than the L2
    is written just before it, for longer than the launch takes, which would count else. The number
    of rounds is the same for all, from MIN_ROUNDS to MAX_ROUNDS, and follows from the time of a
    whole round.

    Args:
        calls: A function without arguments for each contestant, which does not wait for the device:
            a wait could not be hidden.
        warmup_ms: Time to spend on warm-up calls, times the number of contestants.
        repeat_ms: Time to spend on timed calls, times the number of contestants.
        flush_bytes: Size of the flush buffer, a multiple of the L2; 0 leaves the L2 warm, and hides
            no launch: then a call that the device finishes sooner is timed as its launch.
        clock: Another clock than CUDA events; for tests.

    Returns:
        Median, spread and how they were taken, for each contestant.

    Raises:
        InputError: No call was given, or a negative duration or size.
        UnsupportedError: There is no GPU.
    """
    if not calls:
        raise InputError("calls is empty; give at least one function to time")
    if min(warmup_ms, repeat_ms, flush_bytes) < 0:
        raise InputError(
            f"warmup_ms={warmup_ms}, repeat_ms={repeat_ms} and flush_bytes={flush_bytes} must not "
            "be negative"
        )
    clock = clock or CudaClock(flush_bytes)
    contestants = list(calls.values())
    for call in contestants:
        call()
    cold = flush_bytes > 0
    hide_us = [0.0] * len(contestants) if cold else None
    estimates, launches = _time_rounds(clock, contestants, _ESTIMATE_ROUNDS, hide_us, pause=True)
    if cold:
        hide_us = [_HIDE_FACTOR * statistics.median(one) for one in launches]
    mean_us = max(statistics.mean(statistics.median(times) for times in estimates), 0.1)
    num_warmup = min(max(1, int(warmup_ms * 1e3 / mean_us)), MAX_ROUNDS)
    num_rounds = min(max(MIN_ROUNDS, int(repeat_ms * 1e3 / mean_us)), MAX_ROUNDS)
    # Without a pause between warm-up and the rest, in which the card would cool down.
    times, _ = _time_rounds(clock, contestants, num_warmup + num_rounds, hide_us)
    return {
        name: _summarise(
            sorted(one[num_warmup:]),
            1 + _ESTIMATE_ROUNDS + num_warmup,
            flush_bytes,
            len(contestants),
        )
        for name, one in zip(calls, times, strict=True)
    }


def measure(
    call: Call,
    *,
    warmup_ms: float = WARMUP_MS,
    repeat_ms: float = REPEAT_MS,
    flush_bytes: int = FLUSH_BYTES,
    clock: Clock | None = None,
) -> Timing:
    """Time one call alone; to compare it with another, take both to `measure_in_turns`.

    Args:
        call: A function without arguments.
        warmup_ms: Time to spend on warm-up calls.
        repeat_ms: Time to spend on timed calls, of which there are MIN_ROUNDS to MAX_ROUNDS.
        flush_bytes: Size of the flush buffer; 0 leaves the L2 warm.
        clock: Another clock than CUDA events; for tests.

    Returns:
        Median, spread and how they were taken.

    Raises:
        InputError: A negative duration or size.
        UnsupportedError: There is no GPU.

    Example:
        >>> timing = measure(lambda: x @ w)        # doctest: +SKIP
        >>> print(timing.median_us, timing.describe())  # doctest: +SKIP
    """
    (timing,) = measure_in_turns(
        {"": call},
        warmup_ms=warmup_ms,
        repeat_ms=repeat_ms,
        flush_bytes=flush_bytes,
        clock=clock,
    ).values()
    return timing


def measure_host_us(call: Call, *, num_calls: int = 200, num_warmup: int = 20) -> float:
    """Time what one warm call costs the CPU, launches included and device work excluded.

    The device is waited for before each call, outside the timed interval, so that a full launch
    queue never blocks the caller.

    Args:
        call: A function without arguments.
        num_calls: Timed calls.
        num_warmup: Calls before the first timed one.

    Returns:
        The median in microseconds.
    """
    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    for _ in range(num_warmup):
        call()
    times = []
    for _ in range(num_calls):
        wait()
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    wait()
    return statistics.median(times)


def _time_rounds(
    clock: Clock,
    calls: Sequence[Call],
    num_rounds: int,
    hide_us: Sequence[float] | None,
    *,
    pause: bool = False,
) -> tuple[list[list[float]], list[list[float]]]:
    """Return the times of each call, round by round, and what the CPU took for it.

    That is for the launches of the flush, of the events and of the call.

    Args:
        clock: Marks and collects the times.
        calls: The contestants.
        num_rounds: Rounds, in each of which every contestant is called once.
        hide_us: How long to flush at least before each call; None leaves the L2 warm.
        pause: Wait for the device after each round: then no launch waits for room in its queue.
    """
    times: list[list[float]] = [[] for _ in calls]
    launches: list[list[float]] = [[] for _ in calls]
    order: list[int] = []

    def collect() -> None:
        for which, us in zip(order, clock.collect_us(), strict=True):
            times[which].append(us)
        order.clear()

    for number in range(num_rounds):
        for place in range(len(calls)):
            which = (number + place) % len(calls)
            order.append(which)
            begin = time.perf_counter_ns()
            if hide_us is not None:
                clock.flush(hide_us[which])
            clock.start()
            calls[which]()
            clock.stop()
            launches[which].append((time.perf_counter_ns() - begin) / 1e3)
        if pause:
            collect()
    collect()
    return times, launches


def _summarise(
    times: list[float], num_warmup: int, flush_bytes: int, num_contestants: int
) -> Timing:
    """Summarise the sorted times of one call."""
    return Timing(
        median_us=statistics.median(times),
        p10_us=_quantile(times, 0.1),
        p90_us=_quantile(times, 0.9),
        num_calls=len(times),
        num_warmup=num_warmup,
        flush_bytes=flush_bytes,
        num_contestants=num_contestants,
    )


def _quantile(ordered: list[float], q: float) -> float:
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])
