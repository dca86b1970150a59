"""Kernels that overlap with the end of the one before give what they give one after the other, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fusegen as fg
from fusegen.compiler.passes import forget_programs

BF16, F32 = torch.bfloat16, torch.float32
ROUNDS = 4  # of other inputs
TURNS = 100

Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


def columns_then_rows(x: Tensor) -> Tensor:
    return (x - x.mean(0)).softmax(-1)


def there_and_back(x: Tensor) -> Tensor:
    """Sums of rows and of columns in turn, each of all that came before: their workspaces take each other's place."""
    for _ in range(4):
        x = x - x.mean(0)
        x = x.cumsum(-1).tanh().softmax(-1) * 50
    return x


def norm_then_products(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> Tensor:
    hidden = F.rms_norm(x, x.shape[-1:])
    return (F.silu(hidden @ w.mT) * (hidden @ v.mT)) @ u.mT + x


def computed_weight(x: Tensor, w: Tensor) -> Tensor:
    """Matmuls of few rows: the first waits for the weight, the second requests it before it waits."""
    weight = w.tanh()
    return torch.relu(F.rms_norm(F.gelu(x @ weight.mT), x.shape[-1:]) @ weight.mT)


def norm_then_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.rms_norm(F.scaled_dot_product_attention(F.rms_norm(q, q.shape[-1:]), k, v), q.shape[-1:])


CASES: dict[str, tuple[Callable[..., Any], Shapes]] = {
    "columns then rows": (columns_then_rows, (((4096, 1024), F32),)),
    "few columns": (columns_then_rows, (((20000, 64), BF16),)),
    "rows of clusters": (columns_then_rows, (((64, 1 << 17), F32),)),
    "there and back": (there_and_back, (((600, 1001), F32),)),
    "products": (norm_then_products, (((500, 1024), BF16), ((2048, 1024), BF16), ((2048, 1024), BF16), ((1024, 2048), BF16))),
    "few rows": (norm_then_products, (((4, 1024), BF16), ((2048, 1024), BF16), ((2048, 1024), BF16), ((1024, 2048), BF16))),
    "few rows of a computed weight": (computed_weight, (((4, 1024), BF16), ((1024, 1024), BF16))),
    "attention": (norm_then_attention, (((2, 8, 1000, 64), BF16),) * 3),
}


def drawn(shapes: Shapes) -> list[Tensor]:
    return [torch.randn(shape, device="cuda").to(dtype) for shape, dtype in shapes]


def alike(got: Any, wanted: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tree_leaves(got), tree_leaves(wanted), strict=True))


def one_after_the_other(function: Callable[..., Any], inputs: Sequence[Sequence[Tensor]], patch: pytest.MonkeyPatch) -> list[Any]:
    """Results of the same kernels without overlap."""
    with patch.context() as patched:
        patched.setattr("fusegen.compiler.lower.mark_overlaps", lambda steps, _: tuple(steps))
        forget_programs()
        kernel = fg.kernel(function)
        results = [kernel(*each) for each in inputs]
        assert not any(launch.overlaps for launch in kernel.lower(*inputs[0]).program.launches)
    torch.cuda.synchronize()
    forget_programs()
    return results


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many calls in a row, of other inputs in turn; torch writes what each reads right before, and over it right behind."""
    function, shapes = CASES[name]
    inputs = [drawn(shapes) for _ in range(ROUNDS)]
    wanted = one_after_the_other(function, inputs, monkeypatch)
    kernel = fg.kernel(function)
    assert any(launch.overlaps for launch in kernel.lower(*inputs[0]).program.launches)
    given = [torch.empty_like(each) for each in inputs[0]]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(TURNS):
        for to, each in zip(given, inputs[turn % ROUNDS], strict=True):
            to.copy_(each)
        result = kernel(*given)
        for to in given:
            to.fill_(torch.nan)
        for got, right in zip(tree_leaves(result), tree_leaves(wanted[turn % ROUNDS]), strict=True):
            wrong += (got != right).any()
    assert wrong.item() == 0


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_in_a_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls in one graph, the second of which writes over the workspace of the first."""
    function, shapes = CASES[name]
    inputs = [drawn(shapes) for _ in range(ROUNDS)]
    wanted = one_after_the_other(function, inputs, monkeypatch)
    kernel, given = fg.kernel(function), [[torch.zeros_like(each) for each in inputs[0]] for _ in range(2)]
    kernel(*given[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [kernel(*each) for each in given]
    for turn in range(TURNS):
        places = [turn % ROUNDS, (turn + 1) % ROUNDS]
        for to, place in zip(given, places, strict=True):
            torch._foreach_copy_(to, inputs[place])
        graph.replay()
        assert alike(results, [wanted[place] for place in places])


def test_several_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    function, shapes = CASES["columns then rows"]
    inputs = [drawn(shapes) for _ in range(ROUNDS)]
    wanted, kernel = one_after_the_other(function, inputs, monkeypatch), fg.kernel(function)
    streams = [torch.cuda.Stream() for _ in range(ROUNDS)]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[] for _ in streams]
    for _ in range(TURNS // 4):
        for stream, kept, each in zip(streams, results, inputs, strict=True):
            with torch.cuda.stream(stream):
                kept.append(kernel(*each))
    torch.cuda.synchronize()
    assert all(torch.equal(got, right) for kept, right in zip(results, wanted, strict=True) for got in kept)


def test_a_kernel_without_rows_before_it() -> None:
    """It is not launched, and the next one is an ordinary launch."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        weights = x.softmax(-1)
        return weights, y + weights.sum(0)

    x, y = torch.empty(0, 64, device="cuda"), torch.randn(300, 64, device="cuda")
    kernel = fg.kernel(function)
    for _ in range(20):
        z = y * 2
        assert alike(kernel(x, z), (x, z))
