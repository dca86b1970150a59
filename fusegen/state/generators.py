"""Generators of random numbers: a value that is drawn while tracing would be the same in every later call.

torch's own functions that draw are refused where they are called.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from fusegen.errors import TraceError


class Generators:
    """The generators that a function can reach, and whether it has drawn from one."""

    def __init__(self) -> None:
        self._before: list[tuple[str, Any, object]] = []
        self.add(random, "random")
        self.add(np.random, "numpy.random")

    def add(self, value: Any, name: str) -> None:
        """Remembers where a generator is; anything else is left alone."""
        state = _state(value)
        if state is not None:
            self._before.append((name, value, state))

    def require_untouched(self) -> None:
        """Raises if one of them has been drawn from.

        Raises:
            TraceError: naming it.
        """
        for name, generator, before in self._before:
            if _state(generator) != before:
                what = f"the kernel draws a random number from {name} while it is traced, which every later call would use again"
                raise TraceError(what, mend="draw it outside of the kernel, and pass it")


def _state(value: Any) -> object:
    if value is random or isinstance(value, random.Random):
        return value.getstate()
    if value is np.random or isinstance(value, np.random.RandomState):
        return [part.tobytes() if isinstance(part, np.ndarray) else part for part in value.get_state()]
    return repr(value.bit_generator.state) if isinstance(value, np.random.Generator) else None
