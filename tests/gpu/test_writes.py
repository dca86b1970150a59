"""Writes to parameters, on hardware: what the CPU's tests leave, caches of models, products and attention beside them."""

from __future__ import annotations

import torch
from torch import Tensor

import fusegen as fg
from tests.gpu.test_indexing import on_gpu
from tests.unit import written
from tests.unit.written import agree_in_place

BF16 = torch.bfloat16


def test_the_caches_of_a_model() -> None:
    tokens, heads, dim, slots = 513, 32, 128, 8192
    tables = [torch.randn(4096, dim, dtype=BF16) for _ in range(2)]
    caches = [torch.randn(slots, heads, dim, dtype=BF16) for _ in range(2)]
    qkv, positions, at = (
        torch.randn(tokens, 3 * heads * dim, dtype=BF16),
        torch.randint(4096, (tokens,)),
        torch.randperm(slots)[:tokens],
    )
    agree_in_place(written.split_rotate_write, ("k_cache", "v_cache"), on_gpu((qkv, *tables, *caches, positions, at)))


def test_a_cache_that_needs_64_bits() -> None:
    def write(cache: Tensor, at: Tensor, k: Tensor) -> None:
        cache[at] = k

    cache, at = torch.zeros(1 << 20, 2304, dtype=BF16, device="cuda"), torch.tensor([0, (1 << 20) - 1], device="cuda")
    fg.kernel(mutates=("cache",))(write)(cache, at, torch.ones(2, 2304, dtype=BF16, device="cuda"))
    assert cache[0].eq(1).all() and cache[-1].eq(1).all() and not cache[1:-1].any()


def test_a_graph_of_launches_writes_again() -> None:
    x, y, w = torch.zeros(64, 1024, device="cuda"), torch.ones(64, 1024, device="cuda"), torch.ones(1024, device="cuda")
    kernel = fg.kernel(mutates=("residual",))(written.add_norm)
    kernel(x, y, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(x, y, w)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert x.eq(4).all()
