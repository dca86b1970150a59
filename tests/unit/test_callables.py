"""Kernels of what is called and is no function: partials and objects with ``__call__``."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen.errors import ArgumentError
from tests.naming import case

X = torch.arange(8.0)


def affine(x: Tensor, scale: float, *, shift: float = 0.0, halve: bool = False) -> Tensor:
    result = x * scale + shift
    return result / 2 if halve else result


class Scaling:
    """A function with a state."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_partials() -> None:
    for partial in (
        functools.partial(affine, scale=2.0),
        functools.partial(affine, scale=2.0, halve=True),
        functools.partial(functools.partial(affine, scale=2.0), shift=1.0),
        functools.partial(lambda factor, x: x * factor, 3.0),
        functools.partial(lambda table, x: x + table, X),
        functools.partial(Scaling(3.0)),
    ):
        with case(partial):
            kernel: Any = fg.kernel(partial)
            assert torch.equal(kernel(X), partial(X)) and torch.equal(kernel(x=X), partial(x=X))


def test_an_argument_that_a_partial_names_is_a_default() -> None:
    kernel: Any = fg.kernel(functools.partial(affine, scale=2.0))
    assert torch.equal(kernel(X, scale=3.0, halve=True), affine(X, 3.0, halve=True))
    assert kernel.__name__ == "affine"


def test_an_object_is_read_at_each_call() -> None:
    scaling = Scaling(2.0)
    kernel = fg.kernel(scaling)
    assert torch.equal(kernel(X), X * 2)
    scaling.scale = 5.0
    assert torch.equal(kernel(X), X * 5)


def test_what_runs_no_python_function_is_refused() -> None:
    for given, says in (
        (torch.relu, "not a Python function"),
        (Scaling, "not a Python function"),
        (functools.partial(affine, a=1), "affine"),
    ):
        with case(given), pytest.raises(ArgumentError, match=f"(?s){says}.*try: "):
            fg.kernel(given)(X)


def test_out_that_is_none_is_left_out() -> None:
    kernel = fg.kernel(Scaling(2.0))
    assert torch.equal(kernel(X, out=None), X * 2)
    with pytest.raises(ArgumentError, match=r"(?s)out is a float.*try: pass a tensor"):
        kernel(X, out=1.0)
