"""Changes that a function makes while it is traced, of objects and containers that were there before: later calls would not make
them again. Where they are looked for, they are refused and undone."""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fusegen.errors import UnsupportedError

_SEQUENCES = (list, deque)
_MAPPINGS = (dict, OrderedDict, defaultdict)
_KEYS = (torch.device, torch.dtype)  # of arguments, which tell kernels apart


class _Thread(threading.local):
    refuses = False


_THREAD = _Thread()


@contextmanager
def refusing_changes() -> Iterator[None]:
    """Traces of this thread refuse functions that change what is there before they run."""
    given, _THREAD.refuses = _THREAD.refuses, True
    try:
        yield
    finally:
        _THREAD.refuses = given


def refuses_changes() -> bool:
    """True if traces of this thread refuse such functions."""
    return _THREAD.refuses


class Changes:
    """Looks for changes, if this is wanted (`refusing_changes`)."""

    def __init__(self) -> None:
        self.are_refused = _THREAD.refuses
        self._before: list[tuple[Any, tuple[Any, ...]]] = []  # each container, and its elements, or keys and values

    def add(self, container: Any) -> None:
        """Remembers what a container holds, where it is of a type that can be changed and put back."""
        if self.are_refused and type(container) in (*_SEQUENCES, *_MAPPINGS, set):
            self._before.append((container, _elements(container)))

    def require_same(self, owner: Any, name: str, value: Any, where: str | None) -> None:
        """Refuses an attribute that is about to be set.

        Raises:
            UnsupportedError: the object has something else there.
        """
        if self.are_refused and not isinstance(value, _KEYS) and inspect.getattr_static(owner, name, None) is not value:
            what = f"the attribute {name!r} of a {type(owner).__name__} is set, which a kernel's later calls would not do again"
            raise UnsupportedError(what, where=where, mend="return the value, and set the attribute outside")

    def undo(self) -> UnsupportedError | None:
        """Puts back what the containers held: the error that says so, or None if nothing had changed.

        A dictionary may get new entries that hold no value of the trace, as caches do.
        """
        refusal = None
        for container, before in self._before:
            if _is_changed(container, before):
                _restore(container, before)
                what = f"a {type(container).__name__} is changed, which a kernel's later calls would not do again"
                refusal = UnsupportedError(what, mend="return the value, and store it outside")
        return refusal


def _elements(container: Any) -> tuple[Any, ...]:
    return tuple(container.items()) if isinstance(container, dict) else tuple(container)


def _is_changed(container: Any, before: tuple[Any, ...]) -> bool:
    if isinstance(container, dict):
        old = dict(before)
        added = [value for key, value in container.items() if key not in old]
        return not all(key in container and container[key] is value for key, value in before) or any(map(_is_traced, added))
    if isinstance(container, set):
        return container != set(before)
    return len(container) != len(before) or not all(map(is_, container, before))


def _is_traced(value: Any) -> bool:
    """True if a value holds one of a trace, which means nothing afterwards."""
    return any(type(leaf).__module__.startswith("fusegen.lang") for leaf in tree_leaves(value))


def _restore(container: Any, before: tuple[Any, ...]) -> None:
    container.clear()
    if isinstance(container, _SEQUENCES):
        container.extend(before)
    else:
        container.update(before)
