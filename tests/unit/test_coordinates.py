"""Several tensors between brackets, with torch's rules for where their dims go: on the CPU target and in the emulated CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import IndexRangeError, ShapeError, TraceError, UnsupportedError
from tests.naming import case
from tests.unit.eager import agree, agree_each, randn, refused
from tests.unit.test_scatter import trained
from tests.unit.written import agree_in_place

X = randn(5, 6, 7)
AT, BESIDE = torch.tensor([0, -1, 3, 3]), torch.tensor([5, 0, -6, 2])

CHOSEN = """
    x[i, j] | x[:, i, j] | x[i, :, j] | x[i[:, None], j] | x[i, None, j] | x[..., i, j] | x[i, 2, j] | x[1:4, i[:, None] * 0, j]
    x[i, j, [0, 1, 2, -1]] | x[[0, 1], [1, -2]] | x[i, j, :2] | x[i, j, i] | x[i.int(), 2:5, j[0]] | x[i[0], i, j] | x[i, i[0], j]
    x[None, i, j] | x[i, j[:, None], None] | x[i[None], j] | x[i[:0], j[:0]] | x[[0], j] | x.flatten(1)[i, j[1]]
    x[torch.arange(5), [0, 1, 5, 2, 3]] | x[[0, 1, 4, 2, 3, 4], torch.arange(6)] | (x * 2)[i, j] | x.transpose(0, 2)[i, j]
"""


@pytest.mark.usefixtures("either")
def test_values() -> None:
    agree_each("x, i, j", CHOSEN, (X, AT, BESIDE))


@pytest.mark.usefixtures("either")
def test_an_index_of_literal_size_beside_one_of_a_run_time_size() -> None:
    agree(lambda x: x[torch.arange(6)[:, None], x.argmax(-1, keepdim=True)], (randn(6, 9),))
    agree(lambda x: torch.take_along_dim(x, torch.arange(12).view(6, 2) % 9, -1), (randn(6, 9),))
    agree(lambda x: torch.broadcast_tensors(x, torch.zeros(6, 1))[1] + x, (randn(6, 9),))


GRADIENTS: dict[str, Callable[..., Tensor]] = {
    "two": lambda x, i, j: x[i, j].sin(),
    "behind": lambda x, i, j: x[:, i, j] * 2,
    "apart": lambda x, i, j: x[i, :, j] * 2,
    "broadcast": lambda x, i, j: x[i[:, None], j] * 2,
    "three": lambda x, i, j: x[i, j, i.int()] * 2,
    "computed": lambda x, i, j: x.exp()[i, j] * x[i, j],
    "every row": lambda x, i, j: x.flatten(1).log_softmax(-1)[torch.arange(x.shape[0]), (x[:, 0, 0] > 0).long() + 1],
    "added": lambda x, i, j: x.index_put((i, j), x[0, :4] * 2, accumulate=True),
    "added at three": lambda x, i, j: x.index_put((i[:, None], j, i), x[0, :4, :4].exp(), accumulate=True),
    "added and spread": lambda x, i, j: x.index_put((i, j), x[0, 0, 0], accumulate=True),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str) -> None:
    function = GRADIENTS[name]
    torch.testing.assert_close(trained(fg.kernel(function), X, AT, BESIDE), trained(function, X, AT, BESIDE))


def test_a_gradient_is_one_sum() -> None:
    """No tensor of a slice for each index is made."""
    for name, sums in {"two": 1, "three": 1, "every row": 0}.items():
        with case(name):
            graph = fg.vjp(fg.kernel(GRADIENTS[name]), X, AT, BESIDE).backward.lower().graph
            assert str(graph).count("scatter_add(") == sums


def test_the_targets_of_a_loss() -> None:
    def loss(x: Tensor, t: Tensor) -> Tensor:
        return -x.log_softmax(-1)[torch.arange(x.shape[0]), t].mean()

    x, t = randn(9, 12), torch.randint(0, 12, (9,))
    torch.testing.assert_close(fg.kernel(loss)(x, t), F.cross_entropy(x, t))
    torch.testing.assert_close(trained(fg.kernel(loss), x, t), trained(loss, x, t))


def written(cache: Tensor, block: Tensor, offset: Tensor, k: Tensor) -> None:
    cache[block, offset] = k * 2


@pytest.mark.usefixtures("either")
def test_a_cache_of_blocks() -> None:
    block, offset = torch.tensor([0, 1, 4]), torch.tensor([2, -1, 3])
    agree_in_place(
        written, ("cache",), (X, block, offset, randn(3, 7)), (X.transpose(0, 1).contiguous(), block, offset, randn(3, 7))
    )

    def heads(cache: Tensor, block: Tensor, offset: Tensor, k: Tensor) -> Tensor:
        cache[block, :, offset] = k
        return cache[block] + 1

    agree_in_place(heads, ("cache",), (X, block, offset, randn(3, 6)))
    agree_in_place(lambda c, b, o, k: c.index_put_((b, o), k), ("c",), (X, block, offset, randn(3, 7)))
    low = fg.kernel(mutates=("cache",))(written).lower(X, block, offset, randn(3, 7), target="sm_90a")
    assert len(low.program.launches) == 1


@pytest.mark.usefixtures("either")
def test_an_index_out_of_range() -> None:
    for i, j, says in [(5, 0, r"'x' out of range \[-5, 5\)"), (0, -7, r"'x' out of range \[-6, 6\)")]:
        with case(says), pytest.raises(IndexRangeError, match=says):
            fg.kernel(lambda x, i, j: x[i, j])(X, torch.tensor([1, i]), torch.tensor([1, j]))
    with pytest.raises(IndexRangeError, match=r"out of range \[-6, 6\)"):
        fg.kernel(lambda x, i, j: x.index_put((i, j), x[0, 0], accumulate=True))(X, torch.tensor([1]), torch.tensor([6]))


REFUSED: list[tuple[Callable[..., Any], type[Exception], str]] = [
    (lambda x, i, j: x[i, j > 2], UnsupportedError, "indexing by a mask"),
    (lambda x, i, j: x[i, j.float()], TraceError, "index tensor is float32"),
    (lambda x, i, j: x[i, j[:3]], ShapeError, "do not broadcast"),
    (lambda x, i, j: x[i, j, i, j], ShapeError, "4 indices for a tensor of 3 dims"),
    (lambda x, i, j: x.index_put((i, j, i, j), x, accumulate=True), ShapeError, "4 indices for 3 dims"),
]


def test_what_is_refused() -> None:
    for function, error, says in REFUSED:
        with case(says):
            refused(function, X, AT, BESIDE, error=error, says=says)
