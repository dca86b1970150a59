"""The native module: parts of a call in C++, each with an equivalent in Python.

`fusegen.extension.native` builds it. Python runs until it is loaded, and if it cannot be built.
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
_in_python: weakref.WeakSet[NativeChoice] = weakref.WeakSet()  # type: ignore[type-arg]
_module: ModuleType | None = None


class NativeChoice(Generic[F]):
    """A function that runs in Python until the native module is loaded.

    Args:
        native: creates it from the native module.
        python: creates the Python equivalent.
    """

    def __init__(self, native: Callable[[ModuleType], F], python: Callable[[], F]) -> None:
        self._native = native
        with _lock:
            module = _module
            if module is None:
                self.call: F = python()
                _in_python.add(self)
                return
        try:
            self.call = native(module)
        except Exception:  # Python raises the error, or works
            self.call = python()

    def native_call(self, module: ModuleType) -> F:
        return self._native(module)

    def switch_to(self, module: ModuleType) -> None:
        """Uses the native module from now on; keeps Python if that fails."""
        with suppress(Exception):
            self.call = self._native(module)


def use(module: ModuleType | None) -> None:
    """Switches existing and later functions to the native module; None: later ones use Python."""
    global _module
    with _lock:
        _module = module
        if module is not None:
            for choice in list(_in_python):
                choice.switch_to(module)
            _in_python.clear()


def loaded() -> ModuleType | None:
    """Returns the native module, or None if it is not loaded (yet)."""
    return _module
