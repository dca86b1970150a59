"""Generators of random numbers: a value that is drawn while tracing would be the same in every later call.

torch's own functions that draw are refused where they are called.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from types import BuiltinFunctionType
from typing import Any

import numpy as np

from fusegen.errors import TraceError


class Generators:
    """The generators that a function can reach, and whether it has drawn from one."""

    def __init__(self) -> None:
        self._before = [(name, value, _state(value), _putting_back(value)) for value, name in _OF_ALL]
        self._reached: set[int] = set()
        self._is_alone = threading.active_count() == 1

    def add(self, value: Any, name: str) -> None:
        """Remembers where a generator is that the function can reach, by one of its methods also; anything else is left alone."""
        value = value.__self__ if isinstance(value, BuiltinFunctionType) else value
        state = _state(value)
        if state is not None:
            self._before.append((name, value, state, _putting_back(value)))
            self._reached.add(id(value))

    def add_all(self) -> None:
        """The function can reach those of the whole process."""
        self._reached.update(id(value) for value, _ in _OF_ALL)

    def library_call(self, variables: dict[str, Any]) -> None:
        """A library's function runs: it can reach a generator that is one of its module's variables, or the module itself."""
        if variables is globals():
            return
        for value, name in _OF_ALL:
            if variables.get("random") is value or variables.get("__name__") == value.__name__:
                self.add(value, name)

    def restore(self) -> None:
        """Puts back those that the function has drawn from, so that a function which is refused can run again as it is."""
        others = not self._is_alone or threading.active_count() > 1
        for _, generator, before, put_back in self._before:
            if _state(generator) != before and (id(generator) in self._reached or not others):
                put_back()

    def require_untouched(self) -> None:
        """Raises if one of them has been drawn from; another thread may draw from one that the function does not reach.

        Raises:
            TraceError: naming it.
        """
        others = not self._is_alone or threading.active_count() > 1
        for name, generator, before, _ in self._before:
            if _state(generator) != before and (id(generator) in self._reached or not others):
                what = f"the kernel draws a random number from {name} while it is traced, which every later call would use again"
                mend = "draw it outside of the kernel, and pass it"
                raise TraceError(what, mend=f"{mend}; or let no other thread draw during the first call" if others else mend)


_OF_ALL = ((random, "random"), (np.random, "numpy.random"))
"""The generators of the whole process."""


def _putting_back(value: Any) -> Callable[[], object]:
    """A function that gives a generator the state that it has now."""
    if value is random or isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return partial(value.set_state, value.get_state())


def _state(value: Any) -> object:
    if value is random or isinstance(value, random.Random):
        return value.getstate()
    if value is np.random or isinstance(value, np.random.RandomState):
        return [part.tobytes() if isinstance(part, np.ndarray) else part for part in value.get_state()]
    return repr(value.bit_generator.state) if isinstance(value, np.random.Generator) else None
