"""Operators of ATen as calls of the torch functions that mean the same, which have names that a person writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function, its positional arguments, and its named ones."""

_Rule: TypeAlias = Callable[[Sequence[Any], Mapping[str, Any]], Call]


def as_function(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
    """The call of a torch function that an operator of ATen stands for; None where there is none.

    Args:
        name: of the operator, without namespace and overload: ``native_layer_norm``.
        args, kwargs: as of the operator.
    """
    if name in _RULES:
        return _RULES[name](args, kwargs)
    function = next((getattr(home, name) for home in (torch, F, Tensor) if hasattr(home, name)), None)
    return None if function is None else (function, tuple(args), dict(kwargs))


def _first(function: Callable[..., Any], count: int) -> _Rule:
    """A function that takes the first of the operator's arguments alone."""
    return lambda args, kwargs: (function, tuple(args[:count]), dict(kwargs))


def _method(name: str) -> _Rule:
    return lambda args, kwargs: (getattr(Tensor, name), tuple(args), dict(kwargs))


def _slice(args: Sequence[Any], _: Mapping[str, Any]) -> Call:
    defaults: list[Any] = [0, None, None, 1]
    x, dim, start, end, step = [*args, *defaults[len(args) - 1 :]]
    dim = dim % x.dim()
    end = None if isinstance(end, int) and end >= x.shape[dim] else end
    before = [slice(None) for _ in range(dim)]
    return Tensor.__getitem__, (x, (*before, slice(start or None, end, None if step == 1 else step))), {}


def _to(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """A conversion to a dtype; one to a device alone is a copy."""
    dtype = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)), None)
    return (Tensor.clone, (args[0],), {}) if dtype is None else (Tensor.to, (args[0], dtype), {})


def _embedding(args: Sequence[Any], _: Mapping[str, Any]) -> Call:
    return F.embedding, (args[1], args[0]), {}


_RULES: Mapping[str, _Rule] = {
    "_log_softmax": _first(torch.log_softmax, 2),
    "_softmax": _first(torch.softmax, 2),
    "_to_copy": _to,
    "_unsafe_view": _method("reshape"),
    "clone": lambda args, kwargs: (Tensor.clone, (args[0],), {}),
    "dropout": _first(F.dropout, 3),
    "embedding": _embedding,
    "expand": _first(Tensor.expand, 2),
    "layer_norm": _first(F.layer_norm, 5),
    "linear": _first(F.linear, 3),
    "rms_norm": _first(F.rms_norm, 4),
    "silu": _first(F.silu, 1),
    "slice": _slice,
    "split": _method("split"),
    "split_with_sizes": _method("split"),
    "to": _to,
}
