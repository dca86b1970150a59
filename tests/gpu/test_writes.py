"""Writes to parameters, on hardware: what the CPU's tests leave, caches of models, products and attention beside them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from tests.fuzz.test_writes import COLUMNS, ROWS, drawn, program
from tests.gpu.test_indexing import on_gpu
from tests.unit import written
from tests.unit.written import CASES, agree_in_place

BF16 = torch.bfloat16


@pytest.mark.parametrize("name", CASES)
def test_what_torch_leaves(name: str) -> None:
    function, mutates, arguments = CASES[name]
    agree_in_place(function, mutates, on_gpu(arguments))


@pytest.mark.parametrize("seed", range(30))
def test_random_sequences(seed: int) -> None:
    torch.manual_seed(seed)
    arguments = torch.randn(ROWS, COLUMNS), torch.randn(ROWS, COLUMNS), torch.randperm(ROWS)[:3]
    agree_in_place(program(drawn(seed)), ("x", "y"), on_gpu(arguments))


def test_the_caches_of_a_model() -> None:
    tokens, heads, dim, stage_vectors = 513, 32, 128, 8192
    tables = [torch.randn(4096, dim, dtype=BF16) for _ in range(2)]
    caches = [torch.randn(stage_vectors, heads, dim, dtype=BF16) for _ in range(2)]
    qkv, positions, at = (
        torch.randn(tokens, 3 * heads * dim, dtype=BF16),
        torch.randint(4096, (tokens,)),
        torch.randperm(stage_vectors)[:tokens],
    )
    agree_in_place(written.split_rotate_write, ("k_cache", "v_cache"), on_gpu((qkv, *tables, *caches, positions, at)))


def test_attention_reads_what_was_written() -> None:
    q, k, v, *caches = (torch.randn(2, 4, n, 64, dtype=BF16, device="cuda") for n in (128, 128, 128, 1024, 1024))
    at = torch.randperm(1024, device="cuda")[:128]
    kernel = fg.kernel(mutates=("k_cache", "v_cache"))(written.attend_to_what_was_written)
    theirs = [cache.clone() for cache in caches]
    got, wanted = kernel(q, k, v, *caches, at), written.attend_to_what_was_written(q, k, v, *theirs, at)
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
    for ours, other in zip(caches, theirs, strict=True):
        assert torch.equal(ours, other)


def test_products_write() -> None:
    def project(x: Tensor, w: Tensor, cache: Tensor, residual: Tensor) -> Tensor:
        cache[:, 3 : 3 + x.shape[1]] = F.linear(x, w)
        residual += F.linear(x, w)
        return F.gelu(F.linear(residual, w))

    x, w = torch.randn(2, 128, 256, dtype=BF16), torch.randn(256, 256, dtype=BF16) / 16
    cache, residual = torch.zeros(2, 200, 256, dtype=BF16), torch.randn(2, 128, 256, dtype=BF16)
    agree_in_place(project, ("cache", "residual"), on_gpu((x, w, cache, residual)))


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
