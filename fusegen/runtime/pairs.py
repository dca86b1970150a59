"""Complex arguments: a kernel takes them as the pairs of real numbers that lie in their memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from fusegen.runtime.keys import Values


def is_complex(value: object) -> bool:
    """Returns True if a value is a complex tensor."""
    if not isinstance(value, Tensor):
        return False
    with torch._C.DisableTorchFunctionSubclass():  # a class of the user's may answer for itself
        return value.is_complex()


def in_pairs(values: Values) -> list[Any]:
    """Values, complex tensors among them as real ones with a last dim of two; autograd knows them as views."""
    return [torch.view_as_real(value.resolve_conj()) if is_complex(value) else value for value in values]


def of_pairs(function: Callable[..., Any], names: Collection[str]) -> Callable[..., Any]:
    """The function of real tensors with a last dim of two in the place of some complex ones.

    Args:
        names: the parameters that are complex.
    """
    declared = tuple(inspect.signature(function).parameters)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = [torch.view_as_complex(a) if name in names else a for name, a in zip(declared, args, strict=False)]
        return function(*given, **{name: torch.view_as_complex(a) if name in names else a for name, a in kwargs.items()})

    return call
