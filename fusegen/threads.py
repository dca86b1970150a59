"""State of a process: lazy properties, locks that survive a fork, and the garbage collector.

A plain lock that another thread holds would stay held in a forked child.
"""

from __future__ import annotations

import functools
import gc
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar, overload

T = TypeVar("T")

_LOCKS: weakref.WeakSet[threading.RLock] = weakref.WeakSet()


def new_lock() -> threading.RLock:
    """Returns a reentrant lock that is released in forked children."""
    lock = threading.RLock()
    _LOCKS.add(lock)
    return lock


class cached_property(functools.cached_property[T]):
    """``functools.cached_property`` without its lock, which Python 3.11 shares between all objects of a class.

    If several threads compute the value at once, all get the value that is stored first.
    """

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = None) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type[Any] | None = None) -> T: ...
    def __get__(self, instance: object, owner: type[Any] | None = None) -> Self | T:
        if instance is None:
            return self
        value: T = instance.__dict__.setdefault(str(self.attrname), self.func(instance))
        return value


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disables garbage collection."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _free_locks() -> None:
    for lock in tuple(_LOCKS):
        lock._at_fork_reinit()  # type: ignore[attr-defined]  # as the standard library does with its own locks


os.register_at_fork(after_in_child=_free_locks)
