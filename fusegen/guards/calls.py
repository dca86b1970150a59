"""Notice of the calls of Python functions in this thread, by the interpreter's hooks for debuggers and profilers."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Self, TypeAlias

from fusegen.threads import new_lock

Notice: TypeAlias = Callable[[FrameType], None]


class _Collector:
    """The garbage collector, which is the whole process's: it waits while any thread traces."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._pauses = 0
        self._was_on = False

    def pause(self) -> None:
        """Has it wait."""
        with self._lock:
            if not self._pauses:
                self._was_on = gc.isenabled()
                gc.disable()
            self._pauses += 1

    def resume(self) -> None:
        """Ends one pause; the last one leaves it as it was before the first."""
        with self._lock:
            self._pauses = max(self._pauses - 1, 0)
            if not self._pauses and self._was_on:
                gc.enable()

    def end_all(self) -> None:
        """Ends all pauses: of threads that a forked child does not have."""
        if self._pauses:
            self._pauses = 1
            self.resume()


_COLLECTOR = _Collector()
os.register_at_fork(after_in_child=_COLLECTOR.end_all)


class Calls:
    """Tells of every call while it is entered, before the function's first line.

    The hook of debuggers is taken where it is free, since it is asked least; else that of profilers, and a profiler that is there
    is told as before. What was there is put back. The garbage collector waits: what it calls (finalizers, callbacks of other
    libraries) would count as calls of the function.

    Args:
        notice: is given the frame of the call.
    """

    def __init__(self, notice: Notice) -> None:
        self._notice = notice
        self._traces = sys.gettrace() is None
        self._before: Any = None

    def __enter__(self) -> Self:
        _COLLECTOR.pause()
        if self._traces:
            sys.settrace(self._traced)
        else:
            self._before = sys.getprofile()
            sys.setprofile(self._profiled)
        return self

    def __exit__(self, *_: object) -> None:
        if self._traces:
            sys.settrace(None)
        else:
            sys.setprofile(self._before if callable(self._before) else None)
        _COLLECTOR.resume()

    def _traced(self, frame: FrameType, event: str, argument: Any) -> None:
        self._notice(frame)

    _traced.follows_users = True  # type: ignore[attr-defined]

    def _profiled(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._notice(frame)
        if callable(self._before):
            self._before(frame, event, argument)
