"""The oracle evaluates graphs as traced, in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import fusegen as fg
from fusegen.ir.reference import evaluate


def test_it_computes_in_float64_from_the_values_as_they_are() -> None:
    x, w = torch.randn(3, 8).bfloat16(), torch.randn(8).bfloat16()
    graph = (
        fg.kernel(lambda x, w: (F.layer_norm(x, (8,), w), F.gelu(x), x.softmax(-1), x > 0, x.int().sum()))
        .lower(x, w, target="cpu")
        .traced
    )
    normed, activated, soft, positive, total = evaluate(graph, {"x": x, "w": w})
    wide = x.double()
    assert normed.dtype is torch.float64 and torch.equal(normed, F.layer_norm(wide, (8,), w.double()))
    assert torch.equal(activated, F.gelu(wide)) and torch.equal(soft, wide.softmax(-1))
    assert positive.dtype is torch.bool and total.dtype is torch.int64 and total == x.int().sum()
