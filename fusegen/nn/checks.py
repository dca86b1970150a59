"""Checks of constructor arguments and inputs, shared by the modules. Each raises `ArgumentError`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real

from torch import Tensor

from fusegen.errors import ArgumentError


def require_one_of(module: str, name: str, value: object, known: Iterable[object]) -> None:
    choices = tuple(known)
    if value not in choices:
        message = f"{module}: {name}={value!r} is not supported"
        raise ArgumentError(message, hint=f"give one of {', '.join(map(repr, choices))}")


def require_instance(module: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise ArgumentError(
            f"{module}: a {type(value).__name__} is not a fusegen.nn.{kind.__name__}", hint=f"give a fusegen.nn.{kind.__name__}"
        )


def require_both(module: str, cos: Tensor | None, sin: Tensor | None) -> None:
    """Checks that cos and sin are both tensors or both None."""
    if (cos is None) is not (sin is None):
        raise ArgumentError(f"{module}: only one of cos and sin is given", hint="give both, or neither")


def require_probability(module: str, p: float) -> None:
    if not 0 <= p <= 1:
        raise ArgumentError(f"{module}: p={p!r} is not in [0, 1]", hint="give a number from 0 to 1")


def require_above(module: str, name: str, value: float | None, above: float) -> None:
    """Checks that a number is above a bound, or None."""
    if value is not None and not value > above:
        hint = f"give a number above {above}, or None to leave it out"
        raise ArgumentError(f"{module}: {name}={value!r} is not supported", hint=hint)


def require_count(module: str, name: str, value: object) -> None:
    """Checks that a count is an int, 1 or more."""
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < 1:
        raise ArgumentError(f"{module}: {name} is {value!r}", hint="give an int, 1 or more")


def require_not_negative(module: str, name: str, value: object) -> None:
    """Checks that a number is finite and not negative."""
    if not isinstance(value, Real) or not math.isfinite(value) or value < 0:
        raise ArgumentError(f"{module}: {name} is {value!r}", hint="give a finite number, 0 or more")


def require_divides(module: str, name: str, value: int, by_name: str, by: int) -> None:
    if by < 1 or value % by:
        raise ArgumentError(f"{module}: {name}={value} is not a multiple of {by_name}={by}", hint=f"give a multiple of {by_name}")


def require_rows(module: str, x: Tensor, shape: Sequence[int]) -> None:
    """Checks that an input's last dims have the sizes that the module was made for."""
    last_dims = tuple(x.shape[-len(shape) :])
    if last_dims != tuple(shape):
        message = f"{module}: the input has shape {tuple(x.shape)}, but its last dims must be {tuple(shape)}"
        raise ArgumentError(message, hint="give an input of that size, or make the module for this one")


def require_positions(module: str, x: Tensor) -> None:
    if x.dim() != 3:
        message = f"{module}: the input has shape {tuple(x.shape)}, but must be (batch, positions, hidden_size)"
        raise ArgumentError(message, hint="add a batch of one by x[None], or flatten the dims before positions")
