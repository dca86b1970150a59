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


def test_sizes_scalars_and_views_take_their_values() -> None:
    x = torch.randn(4, 6)
    graph = (
        fg.kernel(lambda x, s: (x.reshape(-1, 3) * s + x.shape[0], torch.cat([x[1:], x[:1, :]]))).lower(x, 2.5, target="cpu").traced
    )
    scaled, rolled = evaluate(graph, {"x": x}, {"s": 2.5})
    assert torch.equal(scaled, x.double().reshape(-1, 3) * 2.5 + 4) and torch.equal(rolled, x.double().roll(-1, 0))


def test_integers_wrap_and_comparisons_round_as_in_torch() -> None:
    x, h = torch.tensor([200, 100], dtype=torch.uint8), torch.tensor([0.1, 0.2]).bfloat16()
    graph = fg.kernel(lambda x, h: ((x + x).float(), h == 0.1)).lower(x, h, target="cpu").traced
    doubled, equal = evaluate(graph, {"x": x, "h": h})
    assert doubled.tolist() == [144.0, 200.0] and equal.tolist() == (h == 0.1).tolist()
