"""What draws of programs share: the values so far, and choices among numbers, values and partners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

import fusegen as fg
from tests.fuzz.program import Step

T = TypeVar("T")
Draw: TypeAlias = Callable[[st.SearchStrategy[Any]], Any]

_EAGER_REFUSES = (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError, ZeroDivisionError, AttributeError)


@dataclass
class State:
    """What was drawn so far.

    Attributes:
        values: inputs, scalars and the results of steps; by their numbers.
        steps: in order.
        most: elements that a value may have.
    """

    values: list[Any]
    most: int
    steps: list[Step] = field(default_factory=list)

    def tensors(self) -> list[int]:
        """Numbers of the tensors that something can be computed of."""
        return [k for k, value in enumerate(self.values) if isinstance(value, Tensor) and not is_stored_only(value)]

    def add(self, call: str, *operands: int) -> int | None:
        """A step, unless torch refuses it, or its result is too large or has lost everything to overflow."""
        try:
            value = eval(call.format(*(f"v[{o}]" for o in operands)), {"torch": torch, "F": F, "fg": fg, "v": self.values})
        except _EAGER_REFUSES:
            return None
        if not isinstance(value, Tensor) or value.numel() > self.most or value.dim() > 4 or _is_lost(value):
            return None
        self.values.append(value)
        self.steps.append(Step(call, operands))
        return len(self.values) - 1


def _is_lost(value: Tensor) -> bool:
    return value.is_floating_point() and value.numel() > 0 and value.double().isfinite().double().mean().item() < 0.5


# Strategies are made once: making them costs more than drawing.


@lru_cache(maxsize=512)
def _integers(least: int, most: int) -> st.SearchStrategy[int]:
    return st.integers(least, most)


@lru_cache(maxsize=16)
def permutations(count: int) -> st.SearchStrategy[list[int]]:
    return st.permutations(range(count))


def between(draw: Draw, least: int, most: int) -> int:
    """An integer; the least is the simplest."""
    return int(draw(_integers(least, most)))


def pick(draw: Draw, choices: Sequence[T]) -> T:
    """One of some; the first is the simplest."""
    return choices[between(draw, 0, len(choices) - 1)]


def number(draw: Draw, state: State, kind: Callable[[Tensor], bool] = lambda x: True) -> int | None:
    """The number of a value, mostly a late one."""
    fitting = [k for k in state.tensors() if kind(state.values[k])]
    if not fitting:
        return None
    return fitting[-1 - min(pick(draw, (0, 0, 0, 0, 0, 0, 1, 1, 2, 3, 5)), len(fitting) - 1)]


def is_stored_only(x: Any) -> bool:
    """True for a tensor of 8-bit floats."""
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype.itemsize == 1


def is_float(x: Tensor) -> bool:
    return x.is_floating_point()


def partner(draw: Draw, state: State, x: int, kind: Callable[[Tensor], bool] = lambda x: True) -> int:
    """A value, or a run-time scalar, that broadcasts with another one."""
    shape = state.values[x].shape
    scalars = [k for k, value in enumerate(state.values) if not isinstance(value, Tensor)]
    fitting = [k for k in state.tensors() if broadcast(shape, state.values[k].shape) and kind(state.values[k])]
    return pick(draw, [*fitting, *(scalars if kind(torch.zeros(())) else []), x])


def broadcast(a: Sequence[int], b: Sequence[int]) -> bool:
    pairs = zip(reversed(a), reversed(b), strict=False)
    return all(m == n or 1 in (m, n) for m, n in pairs)


def is_integer(x: Tensor) -> bool:
    return not x.is_floating_point() and x.dtype is not torch.bool
