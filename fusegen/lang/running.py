"""Whether a trace is under way."""

from __future__ import annotations

import threading


class _Running(threading.local):
    """How many traces this thread is in."""

    count = 0


RUNNING = _Running()


def is_tracing() -> bool:
    """Whether this thread is running a user's function on traced values."""
    return RUNNING.count > 0
