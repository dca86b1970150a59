"""Checks of constructor arguments and of inputs, shared by the modules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real

from torch import Tensor

from fusegen.errors import ArgumentError


def require_one_of(module: str, name: str, value: object, known: Iterable[object]) -> None:
    """Checks that an argument has one of the known values.

    Raises:
        ArgumentError: it has another one.
    """
    choices = tuple(known)
    if value not in choices:
        what = f"{module}: {name}={value!r} is not supported"
        raise ArgumentError(what, hint=f"give one of {', '.join(map(repr, choices))}")


def require_instance(module: str, value: object, kind: type) -> None:
    """Checks that a value is a module of a class of `fusegen.nn`.

    Raises:
        ArgumentError: it is another object.
    """
    if not isinstance(value, kind):
        raise ArgumentError(f"{module}: a {type(value).__name__} is no fusegen.nn.{kind.__name__}", hint="give such a module")


def require_both(module: str, cos: Tensor | None, sin: Tensor | None) -> None:
    """Checks that the tables of a rotation come together.

    Raises:
        ArgumentError: only one is given.
    """
    if (cos is None) is not (sin is None):
        raise ArgumentError(f"{module}: cos and sin come together", hint="give both, or none")


def require_probability(module: str, p: float) -> None:
    """Checks that a dropout probability is between 0 and 1.

    Raises:
        ArgumentError: it is not.
    """
    if not 0 <= p <= 1:
        raise ArgumentError(f"{module}: p={p!r} is no probability", hint="give a number from 0 to 1")


def require_above(module: str, name: str, value: float | None, above: float) -> None:
    """Checks that a number that may be left out is above a bound.

    Raises:
        ArgumentError: it is not.
    """
    if value is not None and not value > above:
        hint = f"give a number above {above}, or None to leave it out"
        raise ArgumentError(f"{module}: {name}={value!r} is not supported", hint=hint)


def require_count(module: str, name: str, value: object) -> None:
    """Checks that a count is an integer, 1 or more.

    Raises:
        ArgumentError: it is not.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < 1:
        raise ArgumentError(f"{module}: {name} is {value!r}", hint="give an int, 1 or more")


def require_not_negative(module: str, name: str, value: object) -> None:
    """Checks that a number is finite, 0 or more.

    Raises:
        ArgumentError: it is not.
    """
    if not isinstance(value, Real) or not math.isfinite(value) or value < 0:
        raise ArgumentError(f"{module}: {name} is {value!r}", hint="give a finite number, 0 or more")


def require_divides(module: str, name: str, value: int, by_name: str, by: int) -> None:
    """Checks that one count is a multiple of another.

    Raises:
        ArgumentError: it is not.
    """
    if by < 1 or value % by:
        raise ArgumentError(f"{module}: {name}={value} is not a multiple of {by_name}={by}", hint=f"give a multiple of {by_name}")


def require_rows(module: str, x: Tensor, shape: Sequence[int]) -> None:
    """Checks that the last dims of an input are those that a module was made for.

    Raises:
        ArgumentError: they are not.
    """
    found = tuple(x.shape[-len(shape) :])
    if found != tuple(shape):
        what = f"{module}: the input has shape {tuple(x.shape)}, and its last dims are not {tuple(shape)}"
        raise ArgumentError(what, hint="give an input of such rows, or make the module for these")


def require_positions(module: str, x: Tensor) -> None:
    """Checks that an input has a batch and positions.

    Raises:
        ArgumentError: it has other dims.
    """
    if x.dim() != 3:
        what = f"{module}: the input has shape {tuple(x.shape)}, and is not (batch, positions, hidden_size)"
        raise ArgumentError(what, hint="add a batch of one by x[None], or flatten the dims in front of positions")
