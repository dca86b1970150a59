"""Results never share memory: neither with each other, nor with an argument, nor with what the function closes over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.families.attention.match import ATTENTION
from fusegen.families.gemm.epilogue import CONTRACTION
from fusegen.families.library import LIBRARY_MATMUL
from fusegen.families.pointwise.lower import POINTWISE
from fusegen.families.rows.match import COLUMN, ROW, ROW_COLUMN
from fusegen.fusion import GroupKind
from tests.naming import case
from tests.unit.eager import randn, same

W = randn(6, 8)


def copies(y: Tensor, again: Tensor) -> tuple[Tensor, ...]:
    """A value three times, and once more as a view."""
    return y, again, y.clone(), y.flatten()


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "zeros": lambda x: (torch.zeros_like(x), torch.zeros_like(x)),
    "sums": lambda x: (x + 1, x + 1, x + 1),
    "clone": lambda x: (y := x * 2, y.clone()),
    "number": lambda x: (x * 1, x * 1.0, x + 0),
    "same-object": lambda x: (y := x * 2, y, y),
    "views": lambda x: (y := x * 2, y.view(-1), y.view(8, 6), y.T, y[None], y.T.T),
    "pieces": lambda x: (y := x * 2, y[:3], y[:, 1:], y[::2], *y.split(3)),
    "expanded": lambda x: (x[:1].expand(4, 8), x[:, :1].expand(6, 5), x.sum().expand(3)),
    "argument": lambda x: x,
    "argument-as-a-view": lambda x: (x.view(-1), x.T, x.view(6, 8), x[:], x.expand(6, 8)),
    "argument-twice": lambda x: (x, x, x.view(-1), x.view(-1)),
    "argument-and-more": lambda x: (x, x + 1),
    "detached": lambda x: (x.detach(), x.contiguous(), x.to(x.dtype), x.float(), x.reshape(6, 8), x.clone()),
    "closed-over": lambda x: (W, W, W.T, x + W),
    "read-later": lambda x: (y := x.softmax(-1), y.clone(), y.sum(0), y.sum(0), (y * 2).sum(0).exp()),
    "rows": lambda x: (x.sum(-1), x.sum(-1), x.sum(-1, keepdim=True), x.softmax(-1), x.softmax(-1)),
    "columns": lambda x: (x.sum(0), x.sum(0), x.sum(0, keepdim=True)),
    "rows-and-columns": lambda x: (y := F.layer_norm(x, (8,)), y.sum(0), y, y.sum(0)),
}


def apart(function: Callable[..., Any], *args: Tensor, others: tuple[Tensor, ...] = ()) -> fg.Kernel[..., Any]:
    """Each result is contiguous memory of its own, in a first and a second call; nothing that goes in changes."""
    kernel, before = fg.kernel(function), [t.clone() for t in (*args, *others)]
    for _ in range(2):
        wanted = function(*args)
        results = kernel(*args)
        same(results, wanted)
        parts = results if isinstance(results, tuple) else (results,)
        addresses = [t.untyped_storage().data_ptr() for t in (*parts, *args, *others) if t.numel()]
        assert len({*addresses}) == len(addresses) and all(t.is_contiguous() for t in parts)
        kept = [t.clone() for t in parts]
        for number, part in enumerate(parts):
            part.fill_(77)
            assert all(torch.equal(t, k) for t, k in zip(parts[number + 1 :], kept[number + 1 :], strict=True))
        assert all(torch.equal(t, b) for t, b in zip((*args, *others), before, strict=True))
    return kernel


def test_results_in_memory_of_their_own() -> None:
    for name, function in FUNCTIONS.items():
        with case(name):
            apart(function, randn(6, 8), others=(W,))


@pytest.mark.usefixtures("emulated")
def test_results_in_memory_of_their_own_on_a_gpu() -> None:
    for name in ("argument-as-a-view", "closed-over", "read-later"):
        with case(name):
            apart(FUNCTIONS[name], randn(6, 8), others=(W,))


def test_results_of_an_empty_argument() -> None:
    for shape in ((0, 8), (6, 0)):
        with case(shape):
            apart(lambda x, y: (y, y, y.view(-1), x, W, x.sum()), randn(*shape), randn(3), others=(W,))


def test_an_argument_is_not_written_to_where_another_one_is_empty() -> None:
    y = torch.zeros(3)
    fg.kernel(lambda x, y: y.add_(1) if x.numel() == 0 else y)(torch.empty(0), y)
    assert torch.equal(y, torch.zeros(3))


def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return copies(F.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v))


def halves(count: int, *shape: int) -> tuple[Tensor, ...]:
    return tuple(randn(*shape, dtype=torch.bfloat16) for _ in range(count))


GROUPS: dict[GroupKind, tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]] = {
    POINTWISE: (lambda x: copies(x.exp(), x.exp()), lambda: (randn(6, 8),)),
    ROW: (lambda x: copies(x.softmax(-1), x.softmax(-1)), lambda: (randn(6, 8),)),
    COLUMN: (lambda x: copies(x.sum(0), x.sum(0)), lambda: (randn(6, 8),)),
    ROW_COLUMN: (lambda x: copies(x.softmax(-1).sum(0), x.softmax(-1).sum(0)), lambda: (randn(6, 8),)),
    LIBRARY_MATMUL: (lambda a, b: copies(a @ b, a @ b), lambda: (randn(6, 8), randn(8, 4))),
    CONTRACTION: (lambda a, b: copies((a @ b).relu(), (a @ b).relu()), lambda: halves(2, 64, 64)),
    ATTENTION: (attention, lambda: halves(3, 1, 1, 64, 64)),
}


@pytest.mark.parametrize("emulates", [False, True], ids=["cpu", "emulator"])
def test_equal_results_of_each_kind_of_group(emulates: bool, request: pytest.FixtureRequest) -> None:
    if emulates:
        request.getfixturevalue("emulated")
    for kind, (function, make) in GROUPS.items():
        if emulates and kind is LIBRARY_MATMUL:
            continue
        with case(kind):
            args = make()
            kernel = apart(function, *args)
            target = "sm_80" if kind is ROW_COLUMN else "sm_90a"  # the other target runs few rows as two kernels
            assert kind in [group.kind for group in kernel.lower(*args, target=target).groups]
