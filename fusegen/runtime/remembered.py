"""The programs that a kernel remembers: those bound for exact shapes, by key, and those of the last few calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import RLock
from typing import TypeVar

from torch._C import _len_torch_dispatch_stack as dispatch_modes

from fusegen.errors import TraceError
from fusegen.runtime.bound import Hidden, Program
from fusegen.runtime.keys import Key, Values, key_function
from fusegen.runtime.parameters import Parameters
from fusegen.runtime.recent import Recent
from fusegen.runtime.signature import History

_MOST_BOUND = 1024  # exact shapes that are remembered
_MOST_CANDIDATES = 32  # for one key, which differ in scalars and in what the function read of Python's state
_NO_KEY = (TypeError, RuntimeError, ValueError, TraceError)  # raised by making one for arguments that no kernel takes

T = TypeVar("T")


class Remembered:
    """Bound programs, to be found again.

    Args:
        parameters: of the kernel's function.
        history: what was found out of them.
        lock: that of the kernel, under which all is changed.

    Attributes:
        key: from all arguments of a call to what the choice of a bound program depends on.
        recent: the programs of the last few calls.
    """

    def __init__(self, parameters: Parameters, history: History, lock: RLock) -> None:
        self._parameters, self._history, self._lock = parameters, history, lock
        self._bound: dict[Key, list[Program]] = {}
        self.recent = Recent()
        self.key: Callable[[Values], Key] = self._late_key

    def look_up(self, values: Values, check_again: Callable[[Values], None]) -> tuple[Program, Hidden] | None:
        """The program of an earlier call like this one, and the tensors that the function closes over.

        Args:
            values: all arguments of the call.
            check_again: makes the checks of a first call, where a mode is on that sees torch's operations.
        """
        recent = self.recent  # as it is before the look-up: a program that is forgotten meanwhile must not come back
        for bound in self.known(self._bound, values):
            hidden = bound.find(values)
            if hidden is not None:
                if dispatch_modes():
                    check_again(values)
                else:
                    recent.found(bound, values, self._statics)
                return bound, hidden
        return None

    def known(self, table: Mapping[Key, Sequence[T]], values: Values) -> Sequence[T]:
        """What a table has for calls of this key; nothing for what no kernel takes, or only a trace can."""
        try:
            return table.get(self.key(values), ())
        except _NO_KEY:
            return ()

    def keep(self, bound: Program, values: Values) -> None:
        """Remembers a program, before others of its key; where there are too many, they are forgotten."""
        if len(self._bound) >= _MOST_BOUND:
            self.forget()
        key = self.key(values)
        self._bound[key] = [bound, *self._bound.get(key, ())[: _MOST_CANDIDATES - 1]]

    def forget(self) -> None:
        """Later calls are bound anew, with what was measured since."""
        with self._lock:
            self._bound.clear()
            self.recent = Recent()  # behind the look-ups, one of which may be under way: what it notes stays in what was there

    def forget_keys(self) -> None:
        """Forgets the programs and how keys are made, of which more was found out."""
        self.key = self._late_key
        self.forget()

    def _late_key(self, values: Values) -> Key:
        """Makes `key`, now that all annotations can be resolved; under the lock, since another thread may just find out more."""
        with self._lock:
            self.key = key_function(self._statics())
            return self.key(values)

    def _statics(self) -> list[bool]:
        """For each parameter, whether programs are bound to its value."""
        parameters, history = self._parameters, self._history
        return [name in parameters.static or name in history.static or name in history.sizes for name in parameters.names]
