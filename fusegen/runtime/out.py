"""``out=``: the function of a kernel with one more parameter, into which its result is written."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from fusegen.errors import ArgumentError

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
