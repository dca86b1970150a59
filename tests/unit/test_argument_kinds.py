"""A tensor argument is an object of the caller's: its class answers as in torch, attributes that it carries are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusegen as fg
from fusegen.errors import TraceError
from tests.naming import case


class Marked(Tensor):
    """A subclass without operations of its own."""


def kinds(x: Any) -> Tensor:
    scale = 2.0 if isinstance(x, nn.Parameter) else 3.0 if isinstance(x, Marked) else 5.0 if x.__class__ is Tensor else 7.0
    return x * scale


def carries(x: Any) -> Tensor:
    return x * 2 if hasattr(x, "is_quantizable") else x * 3


def test_isinstance_answers_as_torch_does() -> None:
    kernel, plain = fg.kernel(kinds), torch.ones(4)
    parameter = nn.Parameter(torch.ones(4), requires_grad=False)
    for given in (parameter, plain, plain.as_subclass(Marked), parameter, plain):
        with case(type(given)):
            assert torch.equal(kernel(given), kinds(given).as_subclass(Tensor))


def test_what_the_function_computes_is_a_plain_tensor() -> None:
    parameter = nn.Parameter(torch.ones(4), requires_grad=False)
    assert torch.equal(fg.kernel(lambda x: kinds(x + 1))(parameter), kinds(parameter + 1))


def test_an_attribute_of_the_callers_is_refused() -> None:
    kernel, x = fg.kernel(carries), torch.ones(4)
    assert torch.equal(kernel(x), carries(x))
    x.is_quantizable = True  # type: ignore[attr-defined]
    with pytest.raises(TraceError, match=r"(?s)'is_quantizable' of the argument 'x'.*at: .*try: pass x.is_quantizable"):
        kernel(x)
    assert torch.equal(kernel(torch.ones(5)), carries(torch.ones(5)))


@pytest.mark.parametrize("name", ["grad", "grad_fn", "is_leaf"])
def test_the_history_of_gradients_is_refused(name: str) -> None:
    with pytest.raises(TraceError, match=f"(?s)Tensor.{name} cannot be traced.*at: .*try: "):
        fg.kernel(lambda x: x * 2 if getattr(x, name) is None else x)(torch.ones(4))
