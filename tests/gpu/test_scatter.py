"""Sums at indices that are values, on a GPU: torch sorts the indices and sums in one order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fusegen as fg
from tests.unit.test_scatter import CASES, TABLES, trained


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    function, arguments = CASES[name]
    on_gpu = [a.cuda() for a in arguments]
    found = fg.kernel(function)(*on_gpu)
    exact = function(*(a.double() if a.is_floating_point() else a for a in on_gpu))
    torch.testing.assert_close(found, exact.to(found.dtype))


@pytest.mark.parametrize("name", TABLES)
def test_what_is_chosen_from_has_a_gradient(name: str) -> None:
    function, arguments = TABLES[name]
    on_gpu = [a.cuda() for a in arguments]
    torch.testing.assert_close(trained(fg.kernel(function), *on_gpu), trained(function, *on_gpu))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [40, 2000, 100_000])
def test_two_runs_are_equal_in_every_bit(rows: int, dtype: torch.dtype) -> None:
    ids, table = torch.randint(0, 50, (rows,), device="cuda"), torch.randn(64, 96, device="cuda", dtype=dtype)
    kernel = fg.kernel(lambda i, t: F.layer_norm(F.embedding(i, t), (96,)))
    one, other = (trained(kernel, ids, table) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    wanted = trained(lambda i, t: F.layer_norm(F.embedding(i, t.double()), (96,)), ids, table)[1]
    torch.testing.assert_close(one[1].double(), wanted.double(), rtol=2e-2, atol=2e-2 * wanted.abs().max().item())


def test_a_graph_replays_the_sums() -> None:
    ids, table = torch.randint(0, 50, (9000,), device="cuda"), torch.randn(64, 32, device="cuda")
    kernel = fg.kernel(lambda x, i, s: x.index_add(0, i, s))
    source = torch.randn(9000, 32, device="cuda")
    kernel(table, ids, source)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = kernel(table, ids, source)
    source.mul_(2)
    graph.replay()
    assert torch.equal(result, kernel(table, ids, source))
