"""Rows whose sums or squares leave the range of float32: on a CPU variances are as finite as torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import fusegen as fg
from tests.naming import case

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "var": lambda x: x.var(-1),
    "population": lambda x: x.var(-1, correction=0),
    "columns": lambda x: x.std(0),
    "all": lambda x: x.std(),
    "var_mean": lambda x: torch.var_mean(x, -1),
    "std_mean": lambda x: torch.std_mean(x, -1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_variances_are_those_of_float64(name: str) -> None:
    function = FUNCTIONS[name]
    kernel = fg.kernel(function)
    steps = torch.linspace(-1, 1, 6 * 64).reshape(64, 6).T.contiguous()
    for scale, shift in ((1e18, 0.0), (1e19, 0.0), (1e25, 1.0), (1e30, 0.0), (1e37, 1.0)):
        with case(f"{scale} {shift}"):
            x = (steps + shift) * scale
            wanted = tree_map(Tensor.float, function(x.double()))
            torch.testing.assert_close(kernel(x), wanted, rtol=1e-5, atol=0)


def test_gradients_of_a_deviation() -> None:
    x = (torch.linspace(-1, 1, 64) * 1e25).requires_grad_()
    function = FUNCTIONS["all"]
    (found,), (wanted,) = (torch.autograd.grad(run(x), x) for run in (fg.kernel(function), function))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
