"""Orders of the elements of a dim: what is sorted, the first few, the middle; in how many kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen import ops
from fusegen.errors import IndexRangeError, ShapeError, TraceError
from fusegen.families.library import LIBRARY_CALL
from fusegen.families.rows.match import ROW
from tests.naming import case
from tests.unit.eager import agree, agree_each, ints, programs, randn, refused

HARD = torch.tensor([[1.0, math.nan, -math.inf, 0.0, -0.0, math.inf, 2.0, 1.0, -1.0], [-math.inf] * 9, [math.nan] * 9])
ROWS = """
    x.topk(3) | x.topk(3, largest=False) | x.topk(3, 0) | x.topk(1, -1, sorted=False) | x.topk(0) | torch.topk(x, 20)
    x.sort() | x.sort(0, True) | x.sort(stable=True, dim=-1) | torch.sort(x, descending=True) | x.argsort() | x.argsort(0)
    x.msort()
    x.kthvalue(2) | x.kthvalue(36) | x.kthvalue(3, 0, True) | x.kthvalue(20, keepdim=True) | x.median(-1) | x.median(0, True)
    x.median() | x.nanmedian() | x.nanmedian(-1) | x[:, :9].median(-1) | x[0].topk(2) | x[0, 0].sort() | x[0, 0].median()
    x[0, 0].topk(0) | x[0, 0].topk(1)
"""
TIES = """
    x.sort(stable=True, dim=-1) | x.argsort(stable=True, dim=-1, descending=True)
    x[:, :9].sort(stable=True) | (x > 0).sort(stable=True)
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8])
def test_what_torch_gives(dtype: torch.dtype) -> None:
    agree_each("x", ROWS, (torch.randperm(185).view(5, 37).to(dtype),))


def test_equal_values_of_whole_rows_keep_their_order() -> None:
    agree_each("x", TIES, (ints(4, 37, low=0, high=3),), (ints(4, 37, low=0, high=3).float(),))


def test_few_of_equal_values_are_the_first() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, -0.0, 0.0]])
    values, indices = fg.kernel(lambda x: x.topk(6))(x)
    assert indices.tolist() == [[1, 2, 4, 3, 0, 5]] and values[0, 5].signbit()


def test_nan_is_the_greatest() -> None:
    def few(x: Tensor) -> Any:
        return x.sort(stable=True), x.sort(stable=True, dim=-1, descending=True), x.topk(9).values, x.kthvalue(2).values

    agree(lambda x: [part for found in few(x) for part in (found if isinstance(found, tuple) else (found,))], (HARD,))
    agree(lambda x: (x.median(-1).values, x.nanmedian(-1).values, x.median(), x.nanmedian()), (HARD,))


def router(x: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = x.softmax(-1).topk(2)
    return values / values.sum(-1, keepdim=True), indices


def biased(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = x.sigmoid()
    indices = (scores + bias).topk(3).indices
    weights = scores.gather(-1, indices)
    return 2.5 * weights / weights.sum(-1, keepdim=True), indices


FUSED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "a router": (router, (randn(7, 64),)),
    "a router of a batch": (router, (randn(3, 5, 16),)),
    "chosen by other numbers": (biased, (randn(7, 32), randn(32))),
    "softmax of the chosen": (lambda x: x.topk(2).values.softmax(-1), (randn(7, 8),)),
    "a mask before": (lambda x: x.masked_fill(x > 0, -9.0).sort(-1, True).values[:, :4].exp(), (randn(7, 12),)),
    "the row itself beside": (lambda x: (x - x.topk(3).values[:, 2:], x.amax(-1)), (randn(7, 40),)),
    "a middle": (lambda x: x.median(-1), (randn(7, 21),)),
    "sorted": (lambda x: x.sort(-1), (randn(7, 16),)),
}


def test_few_of_a_row_are_one_kernel_with_all_around() -> None:
    for name, (function, given) in FUSED.items():
        with case(name):
            kernel = agree(function, given)
            assert [group.kind for group in kernel.lower(*given).groups] == [ROW]


def test_rows_of_several_short_lengths_are_one_kernel_each() -> None:
    kernel = agree(router, (randn(7, 64),), (randn(7, 8),), (randn(9, 128),))
    assert programs(kernel) == 3
    for length in (8, 64):
        assert [group.kind for group in kernel.lower(randn(7, length)).groups] == [ROW]


def test_whole_rows_are_put_in_order_by_the_kernel_on_gpus() -> None:
    for before in (lambda x: 2 * x.softmax(-1), lambda x: F.layer_norm(x, (640,), x[0], x[0])):
        low = fg.kernel(lambda x, before=before: before(x).sort(-1).values).lower(randn(7, 640), target="sm_90a")
        assert [group.kind for group in low.groups] == [ROW]


def test_longer_rows_are_sorted_by_torch_with_all_around_fused() -> None:
    def nucleus(x: Tensor, temperature: Tensor) -> Tensor:
        logits, _ = (x / temperature).sort(-1, descending=True)
        weights = logits.softmax(-1)
        return torch.where(weights.cumsum(-1) - weights < 0.9, logits, -math.inf)

    given = randn(3, 5000), torch.rand(3, 1) + 0.5
    kinds = [group.kind for group in agree(nucleus, given).lower(*given).groups]
    assert kinds.count(LIBRARY_CALL) == 1 and len(kinds) <= 4


def test_rows_of_any_length_at_run_time() -> None:
    kernel = agree(lambda x: x.sort(0).values.exp(), (randn(9, 3),), (randn(21, 3),))
    assert programs(kernel) == 1


GRADIENTS = """
    x.topk(5).values | x.topk(12).values.exp() | x.sort(-1).values.cumsum(-1) | x.kthvalue(4).values | x.median(-1).values
    x.median() | x.softmax(-1).topk(3).values.sum(-1) | x.sort(0, True).values * x | x.gather(-1, x.topk(2).indices).prod(-1)
"""


@pytest.mark.parametrize("text", [t for line in GRADIENTS.strip().splitlines() for t in line.split(" | ")])
def test_gradients_go_back_to_the_chosen(text: str) -> None:
    function = eval(f"lambda x: {text}", {"F": F})
    x = torch.randn(4, 33, dtype=torch.float64, requires_grad=True)
    wanted, got = function(x), fg.kernel(function)(x)
    seed = torch.randn_like(wanted)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, seed)[0] for y in (got, wanted)))


def test_what_is_not_there() -> None:
    x = randn(4, 8)
    refused(lambda x: x.topk(9), x, error=ShapeError, says="topk: k=9")
    refused(lambda x: x.kthvalue(0), x, error=ShapeError, says="k=0")
    refused(lambda x: x.topk(2.0), x, error=TraceError, says="k=2.0")


def test_an_index_that_is_made_of_the_first_few_is_checked() -> None:
    with pytest.raises(IndexRangeError, match=r"out of range \[0, 20\)"):
        fg.kernel(lambda x: x.gather(-1, x.topk(3).indices + 19))(randn(6, 20))


def test_the_first_few_are_written_over() -> None:
    def masked(x: Tensor) -> Tensor:
        values, indices = x.topk(2)
        x.scatter_(-1, indices, -math.inf)
        return values

    ours, theirs = (x := randn(5, 20)).clone(), x.clone()
    torch.testing.assert_close(fg.kernel(mutates=("x",))(masked)(ours), masked(theirs))
    assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("either")
def test_an_order_that_is_read_at_other_places_too() -> None:
    def both(x: Tensor) -> Tensor:
        s = x.sort(stable=True, dim=-1).values
        return s + s.flip(-1)

    agree(both, (randn(5, 32),))


def test_a_request_of_temperature_0_takes_the_likeliest_token() -> None:
    logits, seeds = randn(6, 50), torch.arange(6)[:, None]
    temperature = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 1.0])[:, None]
    tokens, logarithms = ops.sample(logits, temperature, seeds)
    assert torch.equal(tokens[::2], logits.argmax(-1)[::2]) and not torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logarithms, logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0])
    assert torch.equal(tokens, ops.sample(logits, temperature, seeds.int())[0])
