"""The one timer: CUDA events around single calls with a cold L2, and what one call costs the CPU.

Used by the tuner, the command line and the benchmarks, so that every time Chord prints means the
same. What is timed, and on which inputs, is the caller's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from chord.errors import InputError, UnsupportedError

FLUSH_BYTES = 256 * 1024 * 1024
"""Size of the buffer written before each timed call; several times the L2 of any supported card."""

WARMUP_MS = 25.0
REPEAT_MS = 100.0
_ESTIMATE_CALLS = 5

Call = Callable[[], object]


def method(repeat_ms: float = REPEAT_MS, warmup_ms: float = WARMUP_MS) -> str:
    """Say in words how `measure` times with a cold L2, for records.

    Args:
        repeat_ms: Time spent on timed calls.
        warmup_ms: Time spent on calls before them.
    """
    return (
        f"CUDA events around single calls, median over about {repeat_ms:g} ms of calls after "
        f"{warmup_ms:g} ms of warm-up, cold L2 ({FLUSH_BYTES >> 20} MiB written before each call)"
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
        num_inputs: Input sets the calls rotated over.
        flush_bytes: Bytes written before each timed call to empty the L2; 0 means a warm L2.
        graph: Whether each call was the replay of a CUDA graph.
    """

    median_us: float
    p10_us: float
    p90_us: float
    num_calls: int
    num_warmup: int
    num_inputs: int
    flush_bytes: int
    graph: bool

    def describe(self) -> str:
        """Say in one line how the times were taken.

        Returns:
            A sentence without the times themselves: calls, L2 state, inputs, graph.
        """
        l2 = f"cold L2 ({self.flush_bytes >> 20} MiB written before each)"
        return (
            f"CUDA events, median of {self.num_calls} calls after {self.num_warmup}, "
            f"{l2 if self.flush_bytes else 'warm L2'}, {self.num_inputs} input set(s)"
            f"{', CUDA graph' if self.graph else ''}"
        )


class Clock(Protocol):
    """What `measure` needs from a device: an L2 flush and the times of single calls."""

    def flush(self) -> None:
        """Empty the caches, in stream order, outside the timed interval."""

    def start(self) -> None:
        """Mark the beginning of a timed interval in stream order."""

    def stop(self) -> None:
        """Mark its end."""

    def collect_us(self) -> list[float]:
        """Wait for the device; return the intervals marked since the last call, and forget them."""


class CudaClock:
    """CUDA events on the current stream of one device.

    The flush is a kernel that runs for longer than a launch takes, so the launch of the timed call
    is hidden behind it, and the interval holds only what the device does.
    """

    def __init__(self, flush_bytes: int = FLUSH_BYTES) -> None:
        if not torch.cuda.is_available():
            raise UnsupportedError(
                "timing needs an NVIDIA GPU, and PyTorch sees none here; run it on the card that "
                "the numbers are about"
            )
        self._buffer = torch.empty(flush_bytes // 4, dtype=torch.int32, device="cuda")
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def flush(self) -> None:
        """Write the whole flush buffer."""
        if self._buffer.numel():
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


def measure(
    calls: Call | Sequence[Call],
    *,
    warmup_ms: float = WARMUP_MS,
    repeat_ms: float = REPEAT_MS,
    flush_bytes: int = FLUSH_BYTES,
    graph: bool = False,
    clock: Clock | None = None,
) -> Timing:
    """Time one call with a cold L2, as `triton.testing.do_bench` does.

    Each timed call is enclosed by its own event pair; a buffer larger than the L2 is written just
    before it. Several calls (the same work on different inputs) are rotated over.

    Args:
        calls: One function without arguments, or several to rotate over.
        warmup_ms: Time to spend on warm-up calls.
        repeat_ms: Time to spend on timed calls; at least one is made, and each input once.
        flush_bytes: Size of the flush buffer; 0 leaves the L2 warm.
        graph: Capture each call in a CUDA graph and time its replay.
        clock: Another clock than CUDA events; for tests.

    Returns:
        Median, spread and how they were taken.

    Raises:
        InputError: No call was given, or a negative duration or size.
        UnsupportedError: There is no GPU.

    Example:
        >>> timing = measure(lambda: x @ w)        # doctest: +SKIP
        >>> print(timing.median_us, timing.describe())  # doctest: +SKIP
    """
    rotation = [calls] if callable(calls) else list(calls)
    if not rotation:
        raise InputError("calls is empty; give at least one function to time")
    if min(warmup_ms, repeat_ms, flush_bytes) < 0:
        raise InputError(
            f"warmup_ms={warmup_ms}, repeat_ms={repeat_ms} and flush_bytes={flush_bytes} must not "
            "be negative"
        )
    clock = clock or CudaClock(flush_bytes)
    if graph:
        rotation = [_capture(call) for call in rotation]
    for call in rotation:
        call()
    estimate_us = statistics.mean(_time_calls(clock, rotation, _ESTIMATE_CALLS, flush_bytes > 0))
    num_warmup = max(1, int(warmup_ms * 1e3 / max(estimate_us, 0.1)))
    num_calls = max(len(rotation), int(repeat_ms * 1e3 / max(estimate_us, 0.1)))
    for index in range(num_warmup):
        rotation[index % len(rotation)]()
    times = sorted(_time_calls(clock, rotation, num_calls, flush_bytes > 0))
    return Timing(
        median_us=statistics.median(times),
        p10_us=_quantile(times, 0.1),
        p90_us=_quantile(times, 0.9),
        num_calls=num_calls,
        num_warmup=num_warmup + len(rotation) + _ESTIMATE_CALLS,
        num_inputs=len(rotation),
        flush_bytes=flush_bytes,
        graph=graph,
    )


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


def _time_calls(clock: Clock, rotation: list[Call], num_calls: int, cold: bool) -> list[float]:
    for index in range(num_calls):
        if cold:
            clock.flush()
        clock.start()
        rotation[index % len(rotation)]()
        clock.stop()
    return clock.collect_us()


def _capture(call: Call) -> Call:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _quantile(ordered: list[float], q: float) -> float:
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])
