"""Tracing: a Python function on torch tensors becomes a graph."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class _Running(threading.local):
    """The number of traces that this thread is in."""

    count = 0


RUNNING = _Running()


def is_tracing() -> bool:
    """True if this thread is running a user's function on traced values."""
    return RUNNING.count > 0


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """The function with every kernel that it calls run as that kernel's function: torch runs all of it."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        RUNNING.count += 1
        try:
            return function(*args, **kwargs)
        finally:
            RUNNING.count -= 1

    return call
