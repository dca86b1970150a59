"""Logarithms of sums of exponentials and capped softmaxes, whose maxima are found otherwise than they are written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.ir.ops import Op
from tests.unit.eager import randn

pytestmark = pytest.mark.usefixtures("emulated")

Function = Callable[[Tensor], Tensor]


def rows_with_infinities(dtype: torch.dtype) -> Tensor:
    x = randn(8, 96) * 4
    x[0] = -torch.inf
    x[1, 5] = torch.inf
    x[2, 5:] = -torch.inf
    x[3, 7] = torch.nan
    x[4] = 100.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logsumexp_of_infinities_is_that_of_torch(dtype: torch.dtype) -> None:
    x = rows_with_infinities(dtype)
    got = fg.kernel(lambda x: torch.logsumexp(x, -1))(x)
    torch.testing.assert_close(got, torch.logsumexp(x.double(), -1).to(dtype), equal_nan=True)


def test_a_softmax_of_the_same_rows_shares_their_maximum() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.log_softmax(x, -1), torch.logsumexp(x.float(), -1)

    x = rows_with_infinities(torch.bfloat16)
    kernel = fg.kernel(function)
    wide = x.double()
    expected = torch.log_softmax(wide, -1).to(x.dtype), torch.logsumexp(wide, -1).float()
    torch.testing.assert_close(kernel(x), expected, equal_nan=True)
    assert kernel.lower(x, target="sm_90a").sources[0].pipeline.count("amax_f32_identity()") == 1


CAPPED: dict[str, Function] = {
    "softmax": lambda x: torch.softmax(30.0 * torch.tanh(x / 30.0), -1),
    "logarithm": lambda x: torch.log_softmax(torch.tanh(x / 5.0) * 5.0, -1),
    "converted": lambda x: torch.log_softmax(torch.tanh(x.float() / -5.0) * -5.0, -1),
    "loss": lambda x: F.cross_entropy(30.0 * torch.tanh(x / 30.0), torch.arange(x.shape[0], device=x.device), reduction="none"),
}


@pytest.mark.parametrize("name", CAPPED)
def test_a_capped_softmax_takes_one_tangent_a_row_for_its_maximum(name: str) -> None:
    x = (randn(8, 96) * 20).bfloat16()
    kernel = fg.kernel(lambda x: CAPPED[name](x))
    exact = CAPPED[name](x.double())
    got = kernel(x)
    torch.testing.assert_close(got, exact.to(got.dtype))
    graph = kernel.lower(x, target="sm_90a").graph
    (peak,) = (node for node in graph.nodes if node.op is Op.AMAX)
    assert graph.nodes[peak.args[0]].op in (Op.INPUT, Op.CAST)


def test_a_maximum_that_is_read_otherwise_is_one_of_its_row() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        capped = 5.0 * torch.tanh(x / 5.0)
        return torch.softmax(capped, -1), (capped.amax(-1, keepdim=True) - capped).sqrt()

    weights, roots = fg.kernel(function)((randn(8, 96) * 20).bfloat16())
    assert bool(weights.isfinite().all()) and not bool(roots.isnan().any())


def test_a_sum_of_logarithms_of_a_softmax_is_taken_at_once() -> None:
    x = (randn(8, 96) * 4).bfloat16()
    kernel = fg.kernel(lambda x: torch.log_softmax(x, -1).sum(-1))
    torch.testing.assert_close(kernel(x), torch.log_softmax(x.double(), -1).sum(-1).bfloat16())
    assert "3 phases" in kernel.lower(x, target="sm_90a").asm["cuda"]


def long_rows(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = (randn(8, 20485) * 4).to(dtype)
    x[0] = -torch.inf
    x[1, 5] = torch.inf
    x[2, 5:] = -torch.inf
    x[3, 20484] = torch.nan
    x[4] = 100.0
    return x, torch.tensor([3, 7, 2, 9, 20484, 0, -100, 20000])


def losses(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target, reduction="none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plans_of_a_loss_that_reads_long_rows_once(dtype: torch.dtype) -> None:
    x, target = long_rows(dtype)
    exact = losses(x.double(), target).to(dtype)
    candidates = fg.kernel(losses).lower(x, target, target="sm_90a").program.launches[0].candidates
    passes = [plan.description for plan in candidates if "single-pass" in plan.description]
    assert len(passes) == 8
    for plan in (passes[0], passes[-1]):  # shifted vectors in a large block, single elements in a small one
        torch.testing.assert_close(fg.kernel(losses, plan=plan)(x, target), exact, equal_nan=True)


def test_a_loss_and_a_softmax_of_the_same_long_rows() -> None:
    def function(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return losses(x, target), torch.softmax(x, -1)

    x, target = long_rows(torch.bfloat16)
    expected = tuple(each.bfloat16() for each in function(x.double(), target))
    torch.testing.assert_close(fg.kernel(function)(x, target), expected, equal_nan=True)
