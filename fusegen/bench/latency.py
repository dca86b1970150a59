"""How long a user waits: for the first call of a new declaration, and in each later one."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import fusegen as fg
from fusegen.bench.record import Latency

_FRESH = 5  # declarations; the median of their times is kept
_CALLS = 2000
_ELEMENTS = 1024  # few: the host's time is measured, not the device's


def measure(device: torch.device) -> Latency:
    """Times of a pointwise declaration that nobody has compiled before.

    Imports and templates are warm: one other declaration has been called. Cold: neither this process nor the disk knows the
    kernel. Warm: the disk does, the process does not.
    """
    x = torch.randn(_ELEMENTS, device=device)
    _first_call(fg.kernel(_fresh()), x)
    cold, warm = [], []
    for _ in range(_FRESH):
        function = _fresh()
        cold.append(_first_call(fg.kernel(function), x))
        warm.append(_first_call(fg.kernel(function), x))
    return Latency("pointwise, fresh text", 1e3 * statistics.median(cold), 1e3 * statistics.median(warm), 1e6 * _per_call(x))


def _fresh() -> Callable[[torch.Tensor], torch.Tensor]:
    """A function whose text has never been seen: its constant is drawn at random."""
    constant = 1 + secrets.randbelow(10**9) / 10**9
    scope: dict[str, Any] = {"torch": torch}
    exec(f"def fresh(x):\n    return torch.tanh(x * {constant!r}) + x\n", scope)
    function: Callable[[torch.Tensor], torch.Tensor] = scope["fresh"]
    return function


def _first_call(kernel: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    start = time.perf_counter()
    kernel(x)
    _wait(x)
    return time.perf_counter() - start


def _per_call(x: torch.Tensor) -> float:
    """Seconds of the host's time in a call of a compiled kernel."""
    kernel = fg.kernel(_fresh())
    kernel(x)
    _wait(x)
    start = time.perf_counter()
    for _ in range(_CALLS):
        kernel(x)
    seconds = time.perf_counter() - start
    _wait(x)
    return seconds / _CALLS


def _wait(x: torch.Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
