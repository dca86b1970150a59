"""Tensors that a function closes over: where they come from, so that each call finds the current one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from fusegen.errors import TraceError

Accessor: TypeAlias = Callable[[], Any]


def find(function: Callable[..., Any], tensor: torch.Tensor) -> tuple[str, Accessor]:
    """The name of a closed-over tensor and how to get at it again: a closure variable, a global, or an attribute of one.

    Raises:
        TraceError: when it is none of these; a kernel could not notice that it changed.
    """
    for name, accessor in _candidates(function):
        if accessor() is tensor:
            return name, accessor
    raise TraceError(
        "the kernel uses a tensor that is neither a parameter nor a variable that it closes over",
        where=inspect.getsourcefile(function),
        mend="pass the tensor as a parameter",
    )


def _candidates(function: Callable[..., Any]) -> Iterator[tuple[str, Accessor]]:
    code = function.__code__
    for name, root in _roots(function):
        yield name, root
        for attribute in code.co_names:
            if hasattr(root(), attribute):
                yield f"{name}_{attribute}", lambda root=root, a=attribute: getattr(root(), a)  # type: ignore[misc]


def _roots(function: Callable[..., Any]) -> Iterator[tuple[str, Accessor]]:
    code, cells = function.__code__, function.__closure__ or ()
    for name, cell in zip(code.co_freevars, cells, strict=True):
        yield name, lambda cell=cell: cell.cell_contents  # type: ignore[misc]
    for name in code.co_names:
        if name in function.__globals__:
            yield name, lambda name=name: function.__globals__[name]  # type: ignore[misc]
