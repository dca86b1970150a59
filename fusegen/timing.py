"""Timing of several calls, interleaved in rounds so that clock drift affects all of them equally.

On a GPU it is device time: the replay of a CUDA graph of one call with a cold L2 cache, without the host;
`fusegen/bench/latency.py` measures host time. Training steps include the host: gaps between launches count. On a CPU it is wall
time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch

from fusegen.errors import FusegenError

T = TypeVar("T")
TimedCall: TypeAlias = Callable[[], Any]

Timer: TypeAlias = Callable[[], float]
"""Runs one round; returns the median of its calls in µs."""

Span: TypeAlias = tuple[torch.cuda.Event, torch.cuda.Event]
"""The events before and after a call."""

_ROUNDS = 5
_REPLAYS, _QUICK_REPLAYS = 20, 4  # per round
_WARM_CALLS = 3
_FLUSHED_BYTES = 256 << 20  # exceeds the L2 cache of any GPU
_BUDGET, _QUICK_BUDGET = 0.1, 0.02  # seconds per round on a CPU
_FEWEST, _MOST = 3, 200  # calls per round on a CPU


@dataclass(frozen=True)
class RoundTimes:
    """Median, minimum and maximum of the rounds, in µs."""

    median: float
    low: float
    high: float


class CaptureError(FusegenError):
    """A call cannot be captured in a CUDA graph."""


def timer_name(device: torch.device, *, quick: bool = False, with_host: bool = False) -> str:
    """Describes the timer of `interleaved`, for a record."""
    if device.type == "cuda":
        clock = "CUDA events around calls, host gaps included" if with_host else "CUDA graphs, cold L2"
        return f"{clock}, {_ROUNDS} rounds of {_QUICK_REPLAYS if quick else _REPLAYS}"
    return f"wall clock, {_ROUNDS} rounds of {_QUICK_BUDGET if quick else _BUDGET} s"


def microseconds(call: TimedCall, device: torch.device) -> float:
    times = interleaved({"": call}, device)[""]
    if isinstance(times, Exception):
        raise times
    return times.median


def interleaved(
    calls: Mapping[str, TimedCall], device: torch.device, *, quick: bool = False, with_host: bool = False
) -> dict[str, RoundTimes | Exception]:
    """Times each call; a call that fails gets its error instead of a time, and does not affect the others.

    Args:
        calls: calls by name; on a GPU, they run on the current stream.
        quick: fewer calls per round.
        with_host: on a GPU, times eager calls instead of a graph's replay, so that gaps between launches count.
    """
    timers = {name: attempt(partial(_timer, call, device, quick, with_host)) for name, call in calls.items()}
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        for name, timer in timers.items():
            if not isinstance(timer, Exception):
                rounds[name].append(timer())
    times = {
        name: RoundTimes(statistics.median(samples), min(samples), max(samples)) for name, samples in rounds.items() if samples
    }
    return {name: timer if isinstance(timer, Exception) else times[name] for name, timer in timers.items()}


def attempt(make: Callable[[], T]) -> T | Exception:
    """Returns a result, or the exception."""
    try:
        return make()
    except Exception as error:
        return error.with_traceback(None)  # a traceback would keep tensors alive


def _timer(call: TimedCall, device: torch.device, quick: bool, with_host: bool) -> Timer:
    if device.type == "cuda":
        count = _QUICK_REPLAYS if quick else _REPLAYS
        return _event_timer(call, count) if with_host else _graph_timer(call, device, count)
    return _wall_timer(call, _QUICK_BUDGET if quick else _BUDGET)


def _graph_timer(call: TimedCall, device: torch.device, replays: int) -> Timer:
    graph = _captured(call)
    buffer = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device=device)
    return lambda: _median([_replay(graph, buffer) for _ in range(replays)])


def _event_timer(call: TimedCall, count: int) -> Timer:
    """Times consecutive calls. The host runs ahead of the device if it can, as in a training loop."""
    for _ in range(_WARM_CALLS):
        call()
    torch.cuda.synchronize()
    return lambda: _median([_span(call) for _ in range(count)])


def _captured(call: TimedCall) -> torch.cuda.CUDAGraph:
    """Captures one call, after warm-up calls on a side stream, as torch recommends."""
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(_WARM_CALLS):
            call()
    current.wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(current), torch.cuda.graph(graph):  # restores the current stream if the capture fails
            call()
    except Exception as error:
        cause = error.__context__ or error  # torch's error at the end of a capture hides the original one
        raise CaptureError(f"it cannot be captured in a CUDA graph: {type(cause).__name__}: {cause}") from error
    return graph


def _replay(graph: torch.cuda.CUDAGraph, buffer: torch.Tensor) -> Span:
    """Queues a replay between two events. The GPU first clears its cache, so that the host has time to queue the whole replay."""
    buffer.zero_()
    return _span(graph.replay)


def _span(call: TimedCall) -> Span:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    return start, end


def _median(spans: Sequence[Span]) -> float:
    torch.cuda.synchronize()
    return 1e3 * statistics.median(float(start.elapsed_time(end)) for start, end in spans)


def _wall_timer(call: TimedCall, budget: float) -> Timer:
    call()
    count = max(_FEWEST, min(_MOST, int(budget / max(_wall_seconds(call), 1e-7))))
    return lambda: 1e6 * statistics.median(_wall_seconds(call) for _ in range(count))


def _wall_seconds(call: TimedCall) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
