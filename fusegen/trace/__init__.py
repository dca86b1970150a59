"""Tracing: converts a Python function on torch tensors to a graph."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class _Running(threading.local):
    count = 0


RUNNING = _Running()


def is_tracing() -> bool:
    """True if this thread is running a user's function on traced values."""
    return RUNNING.count > 0


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Wraps a function so that every kernel that it calls runs its Python function in torch."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        RUNNING.count += 1
        try:
            return function(*args, **kwargs)
        finally:
            RUNNING.count -= 1

    return call
