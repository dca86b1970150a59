"""The native module: parts of a call in C++, each beside the Python that does the same, slower.

`fusegen.extension.native` builds it. Until it is loaded, and where it cannot be built, the Python runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar

from fusegen.threads import new_lock

F = TypeVar("F")

SOURCES = tuple(sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".h")))
NAME = "fusegen_native"

_lock = new_lock()
_waiting: weakref.WeakSet[NativeChoice] = weakref.WeakSet()  # type: ignore[type-arg]
_module: ModuleType | None = None


class NativeChoice(Generic[F]):
    """A function that is Python until the native module is loaded.

    Args:
        native: makes it of the native module.
        python: makes it without.
    """

    def __init__(self, native: Callable[[ModuleType], F], python: Callable[[], F]) -> None:
        self._native = native
        with _lock:
            module = _module
            if module is None:
                self.call: F = python()
                _waiting.add(self)
                return
        try:
            self.call = native(module)
        except Exception:  # Python says what is wrong, or does it
            self.call = python()

    def made(self, module: ModuleType) -> F:
        """The function of a native module."""
        return self._native(module)

    def take(self, module: ModuleType) -> None:
        """Takes the function of the native module from now on, where that can be made."""
        with suppress(Exception):  # one that cannot be is Python
            self.call = self._native(module)


def use(module: ModuleType | None) -> None:
    """Has later calls use the native module, and those functions that wait for it; None: later ones use Python."""
    global _module
    with _lock:
        _module = module
        if module is not None:
            for each in list(_waiting):
                each.take(module)
            _waiting.clear()


def loaded() -> ModuleType | None:
    """The native module; None where it is not there, or not yet."""
    return _module
