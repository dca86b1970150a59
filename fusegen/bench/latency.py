"""How long a user waits: for the first call of a new declaration, and in each later one."""

from __future__ import annotations

import itertools
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

import fusegen as fg
from fusegen.bench.record import Latency
from fusegen.timing import Call

Function: TypeAlias = Callable[[Tensor], Tensor]

_FRESH = 5  # declarations; the median of their times is kept
_CALLS = 2000
_SIZES = (1024, 1536, 2048, 3072)  # few elements: the host's time is measured, not the device's


def measure(device: torch.device) -> tuple[Latency, ...]:
    """Times of pointwise declarations that nobody has compiled before, and of torch's own call for comparison."""
    tensors = [torch.randn(size, device=device) for size in _SIZES]
    x = tensors[0]
    kernels = [fg.kernel(_fresh()) for _ in tensors]
    return (
        _first_calls(x),
        _later("eager, one operation of torch", [partial(torch.tanh, x)], x),
        _later(f"{len(kernels)} kernels in turn", [partial(kernel, x) for kernel in kernels], x),
        _later("one kernel, called from C++ (compiler='extension')", [partial(fg.kernel(_known, compiler="extension"), x)], x),
        _later(f"one kernel, {len(tensors)} shapes in turn", [partial(kernels[0], each) for each in tensors], x),
    )


def _first_calls(x: Tensor) -> Latency:
    """Of new declarations, and of one in each later call.

    Imports and templates are warm: one other declaration has been called. Cold: neither this process nor the disk knows the
    kernel. Warm: the disk does, the process does not.
    """
    _first_call(fg.kernel(_fresh()), x)
    cold, warm = [], []
    for _ in range(_FRESH):
        function = _fresh()
        cold.append(_first_call(fg.kernel(function), x))
        warm.append(_first_call(fg.kernel(function), x))
    later = _per_call([partial(fg.kernel(_fresh()), x)], x)
    return Latency("pointwise, fresh text", 1e3 * statistics.median(cold), 1e3 * statistics.median(warm), later)


def _later(name: str, calls: Sequence[Call], x: Tensor) -> Latency:
    return Latency(name, None, None, _per_call(calls, x))


def _known(x: Tensor) -> Tensor:
    """A function as fresh ones are, but the disk may know its extension, which takes long to build."""
    return torch.tanh(x * 1.5) + x


def _fresh() -> Function:
    """A function whose text has never been seen: its constant is drawn at random."""
    constant = 1 + secrets.randbelow(10**9) / 10**9
    scope: dict[str, Any] = {"torch": torch}
    exec(f"def fresh(x):\n    return torch.tanh(x * {constant!r}) + x\n", scope)
    function: Function = scope["fresh"]
    return function


def _first_call(kernel: Function, x: Tensor) -> float:
    start = time.perf_counter()
    kernel(x)
    _wait(x)
    return time.perf_counter() - start


def _per_call(calls: Sequence[Call], x: Tensor) -> float:
    """Microseconds of the host's time in a call, where calls that are compiled take turns."""
    for call in calls:
        call()
    _wait(x)
    turns = list(itertools.islice(itertools.cycle(calls), _CALLS))
    start = time.perf_counter()
    for call in turns:
        call()
    seconds = time.perf_counter() - start
    _wait(x)
    return 1e6 * seconds / _CALLS


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
