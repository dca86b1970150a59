"""``out=``: the function of a kernel with one more parameter, into which its result is written."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from fusegen.errors import ArgumentError
from fusegen.runtime.keys import Values

OUT = "out"


def filled(name: str, out: Any, result: Any) -> Tensor:
    """``out``, with the result of a function written to it.

    Raises:
        ArgumentError: one of them is no tensor, or they differ in shape or dtype.
    """
    if not isinstance(out, Tensor):
        raise ArgumentError(f"{name}: out is a {type(out).__name__}", mend="pass a tensor of the result's shape and dtype")
    if not isinstance(result, Tensor):
        what = f"{name}: out= of a function that does not return one tensor"
        raise ArgumentError(what, mend="declare parameters for the results, and write to them: mutates=(...)")
    if result.dtype is not out.dtype or tuple(result.shape) != tuple(out.shape):
        kinds = [f"{tensor.dtype} of shape {tuple(tensor.shape)}" for tensor in (out, result)]
        what = f"{name}: out is {kinds[0]}, the result {kinds[1]}"
        raise ArgumentError(what, mend="pass a tensor of the result's shape and dtype")
    return out.copy_(result)


def with_out(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function with a parameter ``out``, to be named: a tensor of the result's shape and dtype, which it fills and returns.

    Raises:
        ArgumentError: when it is called, the function returns no single tensor, or one of another shape or dtype.
    """

    @wraps(function)
    def call(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        return filled(function.__name__, out, function(*args, **kwargs))

    declared = inspect.signature(function)
    parameter = inspect.Parameter(OUT, inspect.Parameter.KEYWORD_ONLY)
    call.__signature__ = declared.replace(parameters=[*declared.parameters.values(), parameter])  # type: ignore[attr-defined]
    return call


# Complex arguments: a kernel takes them as the pairs of real numbers that lie in their memory.


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
