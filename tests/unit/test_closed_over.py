"""What a kernel computes of tensors that it closes over alone: traced like anything else, and of their values at each call."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen.errors import TraceError
from tests.unit.eager import agree, expressions, function_of, randn

X = randn(3, 8)
FLOATS, INTS = randn(8) + 3.0, torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])

OPERATORS = """
    t + 2 | t - 2 | t * 2 | t / 2 | t // 2 | t % 2 | t ** 2 | t == 2 | t != 2 | t < 2 | t <= 2 | t > 2 | t >= 2
    2 + t | 2 - t | 2 * t | 2 / t | 2 // t | 2 % t | 2 ** t | 2 == t | 2 < t | 2 >= t
    t + i | t - i | t * i | t / i | t // (i + 1) | t % (i + 1) | t ** i | t == i | t != i | t < i | t <= i | t > i | t >= i
    i & 2 | i ^ 2 | i << 2 | i >> 2 | 2 & i | 2 ^ i | 2 << i | 2 >> i | operator.or_(i, 2) | operator.or_(2, i)
    -t | +t | abs(t) | ~(t > 3) | (t @ x.T).sum() | t.data | torch.stack([t, t * 2]).sum(0) | torch.cat((t[:4], t[4:]))
"""


def test_operators() -> None:
    texts = expressions(OPERATORS)
    for part in range(4):
        some = ", ".join(f"x * ({text})" for text in texts[part::4])
        agree(function_of(f"({some})", "x", t=FLOATS, i=INTS, operator=operator, torch=torch), (X,))


def test_its_values_are_those_of_the_call() -> None:
    mask = INTS.clone()
    kernel = fg.kernel(lambda x: x.masked_fill(mask == 0, 0.0) * (1 - mask))
    for _ in range(2):
        torch.testing.assert_close(kernel(X), X.masked_fill(mask == 0, 0.0) * (1 - mask))
        mask.fill_(2)


def test_what_is_no_operand_is_not_equal() -> None:
    def chosen(x: Tensor, tensor: Tensor, other: object) -> Tensor:
        return x if tensor == other else x * 2 if tensor != other else x + 1

    agree(lambda x: [chosen(x, tensor, other) for tensor in (x, FLOATS) for other in (None, "none", [1])], (X,))


def test_a_branch_on_an_equality_is_refused() -> None:
    with pytest.raises(TraceError, match="a branch on a tensor's value"):
        fg.kernel(lambda x: x * 2 if INTS.sum() == 12 else x)(X)
