"""How long a call takes: device time on a GPU with a cold second-level cache, wall time on a CPU; always the median."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], Any]

_FLUSHED_BYTES = 256 << 20  # more than the second-level cache of any GPU
_FEWEST, _MOST = 5, 200  # measured calls


def microseconds(call: Call, device: torch.device, *, quick: bool = False) -> float:
    """The median time of a call in microseconds, after calls that warm it up.

    Args:
        call: the work; on a GPU, on the current stream.
        device: where it runs.
        quick: spend about a fifth of the time on measuring.
    """
    budget = 0.02 if quick else 0.1  # seconds of device time
    if device.type == "cuda":
        return _with_triton(call, budget) or _with_events(call, budget)
    return _wall(call, 5 * budget)


def timer_name(device: torch.device) -> str:
    """What `microseconds` measures with, for a record."""
    if device.type != "cuda":
        return "wall clock"
    return "CUDA events, L2 flushed" if _do_bench() is None else "triton.testing.do_bench"


def _with_triton(call: Call, budget: float) -> float | None:
    do_bench = _do_bench()
    if do_bench is None:
        return None
    return 1e3 * float(do_bench(call, warmup=25, rep=1e3 * budget, return_mode="median"))


def _do_bench() -> Callable[..., Any] | None:
    try:
        module = importlib.import_module("triton.testing")  # optional, and without types
    except ImportError:
        return None
    found: Callable[..., Any] = module.do_bench
    return found


def _with_events(call: Call, budget: float) -> float:
    """What do_bench does: between two events each, with the cache flushed before."""
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(_FEWEST):
        call()
    torch.cuda.synchronize()
    count = _count(_device_seconds(call, flushed), budget)
    return 1e6 * statistics.median(_device_seconds(call, flushed) for _ in range(count))


def _device_seconds(call: Call, flushed: torch.Tensor) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    flushed.zero_()
    start.record()
    call()
    end.record()
    end.synchronize()
    return 1e-3 * float(start.elapsed_time(end))


def _wall(call: Call, budget: float) -> float:
    call()
    count = _count(_wall_seconds(call), budget)
    return 1e6 * statistics.median(_wall_seconds(call) for _ in range(count))


def _wall_seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _count(seconds: float, budget: float) -> int:
    return max(_FEWEST, min(_MOST, int(budget / max(seconds, 1e-7))))
