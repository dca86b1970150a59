"""What the choice of a program depends on: the part that each argument contributes to a key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled

from fusegen.dtypes import autocast_dtype
from fusegen.guards import exact, has_identity, is_plain
from fusegen.runtime.tensors import has_memory

LEAST, GREATEST = -(2**63), 2**63 - 1
"""Run-time integers have 64 bits."""

Values: TypeAlias = Sequence[Any]
Key: TypeAlias = tuple[object, ...]
_NUMBERS = (int, float, np.float64)
_ODD = "odd"  # a tensor that no kernel takes, likewise
_TOO_WIDE = "too wide"  # an integer that no kernel takes is bound to nothing: the first call's checks see it


def key_function(statics: Sequence[bool]) -> Callable[[Values], Key]:
    """From all arguments of a call to what the choice of a bound program depends on; written for a number of parameters, with what
    ordinary tensors and floats contribute in place.

    Args:
        statics: for each parameter, whether a program is bound to its value.
    """
    names = [f"v{place}" for place in range(len(statics))]
    lines = [f"{', '.join(names)}, = values"] if names else []
    for place, (name, static) in enumerate(zip(names, statics, strict=True)):
        pattern = (*_OF_A_TENSOR, *(() if static else _OF_A_NUMBER), *_OF_ANYTHING)
        lines += [line.format(v=name, k=f"k{place}", static=static) for line in pattern]
    # The default dtype decides what torch.ones(n) gives, and an integer times 0.5; autocast converts operands.
    last = "default_dtype(), any_autocast() and autocast_dtypes()"
    lines.append(f"return ({''.join(f'k{place}, ' for place in range(len(names)))}{last})")
    scope: dict[str, Any] = {"Tensor": Tensor, "part": part}
    scope |= {"recording": torch.is_grad_enabled, "default_dtype": torch.get_default_dtype}
    scope |= {"any_autocast": is_any_autocast_enabled, "autocast_dtypes": _autocast_dtypes}
    exec(compile("\n    ".join(["def key(values):", *lines]), "<key>", "exec"), scope)
    function: Callable[[Values], Key] = scope["key"]
    return function


_OF_A_TENSOR = (
    "if type({v}) is Tensor and (a := {v}.data_ptr()) and not a & 15 and not {v}.is_neg():",
    "    {k} = ({v}.dtype, {v}.device, {v}.shape, {v}.stride(), 0, {v}.requires_grad and recording(), Tensor)",
)
_OF_A_NUMBER = ("elif type({v}) is float:", "    {k} = float")
_OF_ANYTHING = ("else:", "    {k} = part({v}, {static})")
"""The part of an argument, as `part` gives it: of most tensors, and of most numbers that select no code, without asking it."""


def _autocast_dtypes() -> tuple[torch.dtype | None, ...]:
    """The dtypes of autocast on each kind of device."""
    return tuple(map(autocast_dtype, ("cpu", "cuda")))


def part(value: Any, is_static: bool) -> object:
    """What a program for exact shapes depends on of an argument."""
    if isinstance(value, Tensor):
        return tensor_part(value)
    if not is_static and is_scalar(value):
        return type(value) if not isinstance(value, int) or LEAST <= value <= GREATEST else _TOO_WIDE
    return static_part(value)


def tensor_part(value: Tensor) -> object:
    """What it depends on of a tensor."""
    kind = type(value)
    grad = value.requires_grad and torch.is_grad_enabled()
    address = value.data_ptr() if kind is Tensor or has_memory(value) else 0
    low = address & 15
    is_odd = not address or value.is_neg()
    return (value.dtype, value.device, value.shape, value.stride(), _ODD if is_odd else low, grad, kind)


def static_part(value: object) -> object:
    """What an argument that selects code contributes: its value, or for an object its identity, which `State` looks after."""
    return id(value) if not is_plain(value) and has_identity(value) else exact(value)


def is_scalar(value: object) -> bool:
    """Whether a value is passed at run time: of a subclass of numbers, such as an enumeration, the value selects code."""
    return type(value) in _NUMBERS
