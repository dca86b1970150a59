"""Modules whose weights are computed of other parameters at each call, and what torch computes in ways that no trace sees."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils.parametrizations import weight_norm

import fusegen as fg
from fusegen.errors import UnsupportedError
from tests.unit.eager import randn

X = randn(4, 8)


@pytest.mark.parametrize("dim", [0, 1, None])
def test_weight_norm(dim: int | None) -> None:
    module = weight_norm(nn.Linear(8, 16), dim=dim)
    kernel = fg.kernel(module)
    for _ in range(2):
        found, wanted = kernel(X), module(X)
        torch.testing.assert_close(found, wanted)
        parameters = list(module.parameters())
        gradients = [torch.autograd.grad(y.square().sum(), parameters) for y in (found, wanted)]
        torch.testing.assert_close(*gradients)
        with torch.no_grad():
            module.parametrizations.weight.original0.mul_(1.5)


def test_flex_attention_is_refused() -> None:
    query = randn(1, 2, 16, 8)
    with pytest.raises(UnsupportedError, match=r"(?s)flex_attention cannot be traced.*test_parametriz.*try: call F.scaled_dot"):
        fg.kernel(lambda q: flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + i - j))(query)
