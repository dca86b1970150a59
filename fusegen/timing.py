"""Times of calls that are compared: in turn, round by round, so that a machine that drifts drifts for all of them.

On a GPU it is device time: of the replay of a CUDA graph that holds one call, with a cold second-level cache. The host has no part
in it; `fusegen/bench/latency.py` measures that. Training steps are timed with the host: as it makes the calls, one after the other,
and the time that the device waits for it counts. On a CPU it is wall time.
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
"""A round: the median of some calls in microseconds."""

Span: TypeAlias = tuple[torch.cuda.Event, torch.cuda.Event]
"""The events before and behind a call."""

_ROUNDS = 5
_REPLAYS, _QUICK_REPLAYS = 20, 4  # a round
_WARM_CALLS = 3
_FLUSHED_BYTES = 256 << 20  # more than the second-level cache of any GPU
_BUDGET, _QUICK_BUDGET = 0.1, 0.02  # seconds a round on a CPU
_FEWEST, _MOST = 3, 200  # calls a round on a CPU


@dataclass(frozen=True)
class RoundTimes:
    """The time of a call in microseconds: the median, the least and the greatest of the rounds."""

    median: float
    low: float
    high: float


class CaptureError(FusegenError):
    """A call that cannot be part of a CUDA graph."""


def timer_name(device: torch.device, *, quick: bool = False, with_host: bool = False) -> str:
    """The timer of `interleaved`, for a record."""
    if device.type == "cuda":
        clock = "CUDA events around calls, host gaps included" if with_host else "CUDA graphs, cold L2"
        return f"{clock}, {_ROUNDS} rounds of {_QUICK_REPLAYS if quick else _REPLAYS}"
    return f"wall clock, {_ROUNDS} rounds of {_QUICK_BUDGET if quick else _BUDGET} s"


def microseconds(call: TimedCall, device: torch.device) -> float:
    """The time of one call."""
    found = interleaved({"": call}, device)[""]
    if isinstance(found, Exception):
        raise found
    return found.median


def interleaved(
    calls: Mapping[str, TimedCall], device: torch.device, *, quick: bool = False, with_host: bool = False
) -> dict[str, RoundTimes | Exception]:
    """The time of each call, or the error in its place: the others are timed all the same.

    Args:
        calls: the work; on a GPU, on the current stream.
        quick: fewer calls a round.
        with_host: on a GPU, calls as the host makes them, in place of a graph's replay: gaps between launches count.
    """
    timers = {name: attempt(partial(_timer, call, device, quick, with_host)) for name, call in calls.items()}
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        for name, timer in timers.items():
            if not isinstance(timer, Exception):
                rounds[name].append(timer())
    found = {name: RoundTimes(statistics.median(of), min(of), max(of)) for name, of in rounds.items() if of}
    return {name: timer if isinstance(timer, Exception) else found[name] for name, timer in timers.items()}


def attempt(make: Callable[[], T]) -> T | Exception:
    """A result, or why there is none: one call that fails must not hide the times of all others."""
    try:
        return make()
    except Exception as error:
        return error.with_traceback(None)  # whose frames would hold tensors


def _timer(call: TimedCall, device: torch.device, quick: bool, with_host: bool) -> Timer:
    if device.type == "cuda":
        count = _QUICK_REPLAYS if quick else _REPLAYS
        return _event_timer(call, count) if with_host else _graph_timer(call, device, count)
    return _wall_timer(call, _QUICK_BUDGET if quick else _BUDGET)


# A GPU.


def _graph_timer(call: TimedCall, device: torch.device, replays: int) -> Timer:
    graph = _captured(call)
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device=device)
    return lambda: _median([_replay(graph, flushed) for _ in range(replays)])


def _event_timer(call: TimedCall, count: int) -> Timer:
    """A timer of calls that follow one another. The host is ahead of the device where it can be, as in a training loop."""
    for _ in range(_WARM_CALLS):
        call()
    torch.cuda.synchronize()
    return lambda: _median([_span(call) for _ in range(count)])


def _captured(call: TimedCall) -> torch.cuda.CUDAGraph:
    """One call as a graph. What compiles, tunes or loads does so before, on a side stream, as torch asks for."""
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(_WARM_CALLS):
            call()
    current.wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(current), torch.cuda.graph(graph):  # a capture that fails leaves its own stream as the current one
            call()
    except Exception as error:
        cause = error.__context__ or error  # torch's own error at the end of a capture hides what was wrong in it
        raise CaptureError(f"no CUDA graph can hold it: {type(cause).__name__}: {cause}") from error
    return graph


def _replay(graph: torch.cuda.CUDAGraph, flushed: torch.Tensor) -> Span:
    """Queues a replay between two events. The cache is cleared before: long enough for the host to queue all of it meanwhile."""
    flushed.zero_()
    return _span(graph.replay)


def _span(call: TimedCall) -> Span:
    """Queues a call between two events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    return start, end


def _median(spans: Sequence[Span]) -> float:
    torch.cuda.synchronize()
    return 1e3 * statistics.median(float(start.elapsed_time(end)) for start, end in spans)


# A CPU.


def _wall_timer(call: TimedCall, budget: float) -> Timer:
    call()
    count = max(_FEWEST, min(_MOST, int(budget / max(_wall_seconds(call), 1e-7))))
    return lambda: 1e6 * statistics.median(_wall_seconds(call) for _ in range(count))


def _wall_seconds(call: TimedCall) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
