"""What a kernel computes of tensors that it closes over alone: traced like anything else, and of their values at each call."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen.errors import TraceError
from tests.unit.eager import agree, randn

X = randn(3, 8)
FLOATS, INTS = randn(8) + 3.0, torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])

_ANY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "eq", "ne", "lt", "le", "gt", "ge")
_BITS = ("and_", "or_", "xor", "lshift", "rshift")
BINARY = [*((name, FLOATS) for name in _ANY), *((name, INTS) for name in _BITS)]


@pytest.mark.parametrize("is_swapped", [False, True], ids=["tensor-number", "number-tensor"])
@pytest.mark.parametrize(("name", "tensor"), BINARY, ids=lambda value: value if isinstance(value, str) else "")
def test_an_operator_with_a_number(name: str, tensor: Tensor, is_swapped: bool) -> None:
    apply = getattr(operator, name)

    def function(x: Tensor) -> Tensor:
        return x * (apply(2, tensor) if is_swapped else apply(tensor, 2))

    agree(function, (X,))


@pytest.mark.parametrize("name", _ANY)
def test_an_operator_of_two_of_them(name: str) -> None:
    apply = getattr(operator, name)
    agree(lambda x: x * apply(FLOATS, INTS), (X,))


@pytest.mark.parametrize("apply", [operator.neg, operator.pos, operator.abs, lambda t: ~(t > 3)], ids=["-", "+", "abs", "~"])
def test_an_operator_of_one(apply: Callable[[Any], Any]) -> None:
    agree(lambda x: x * apply(FLOATS), (X,))


def test_a_matrix_from_the_left() -> None:
    agree(lambda x: FLOATS @ x.T, (X,))


def test_its_values_are_those_of_the_call() -> None:
    mask = INTS.clone()
    kernel = fg.kernel(lambda x: x.masked_fill(mask == 0, 0.0) * (1 - mask))
    for _ in range(2):
        torch.testing.assert_close(kernel(X), X.masked_fill(mask == 0, 0.0) * (1 - mask))
        mask.fill_(2)


@pytest.mark.parametrize("other", [None, "none", [1]], ids=repr)
@pytest.mark.parametrize("of", [lambda x: x, lambda x: FLOATS], ids=["traced", "closed-over"])
def test_what_is_no_operand_is_not_equal(of: Callable[[Tensor], Tensor], other: object) -> None:
    def function(x: Tensor) -> Tensor:
        tensor = of(x)
        return x if tensor == other else x * 2 if tensor != other else x + 1

    agree(function, (X,))


def test_a_branch_on_an_equality_is_refused() -> None:
    with pytest.raises(TraceError, match="a branch on a tensor's value"):
        fg.kernel(lambda x: x * 2 if INTS.sum() == 12 else x)(X)
