"""Losses: of classes by number and by probability, of pairs and triples, with every reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import FusegenError, IndexRangeError, ShapeError, TraceError
from tests.naming import case
from tests.unit.eager import agree, randn, refused

REDUCTIONS = ["none", "mean", "sum"]
SHAPES = [(7,), (5, 7), (3, 7, 4), (2, 7, 3, 2)]
IDS = ["one row", "rows", "a dim behind", "two behind"]


def classes(shape: tuple[int, ...], *, ignored: bool = True) -> Tensor:
    """Class numbers of scores of a shape, some of which are ignored."""
    y = torch.randint(0, 7, (*shape[:1], *shape[2:]) if len(shape) > 1 else ())
    if ignored and y.ndim:
        y.view(-1)[::3] = -100
    return y


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_cross_entropy(shape: tuple[int, ...]) -> None:
    """By classes and by probabilities, with weights and without, smoothed and not."""

    def losses(x: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
        return [
            F.cross_entropy(x, y, weight, reduction=reduction, label_smoothing=smoothing)
            for reduction in REDUCTIONS
            for smoothing, weight in ((0.0, w), (0.1, w), (0.1, None))
        ]

    x, w = 3 * randn(*shape), torch.rand(7)
    agree(losses, (x, classes(shape), w), (x, torch.softmax(randn(*shape), min(1, len(shape) - 1)), w))


def test_negative_logarithms() -> None:
    def losses(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> list[Tensor]:
        by_class = [F.nll_loss(x, y, weight, reduction=reduction) for reduction in REDUCTIONS for weight in (None, w)]
        return by_class + [F.nll_loss(x, z, w, reduction=reduction, ignore_index=2) for reduction in REDUCTIONS]

    for shape in SHAPES:
        with case(shape):
            agree(losses, (randn(*shape), classes(shape), classes(shape, ignored=False), torch.rand(7)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_losses_of_two_dtypes_have_the_dtype_of_torch(dtype: torch.dtype) -> None:
    def losses(x: Tensor, y: Tensor, n: Tensor) -> list[Tensor]:
        return [
            F.poisson_nll_loss(x, n, full=True, reduction="none"),
            F.binary_cross_entropy_with_logits(x, y, reduction="none"),
            F.binary_cross_entropy_with_logits(y, x, y, reduction="none"),
        ]

    arguments = randn(6, 7, dtype=dtype), torch.rand(6, 7), torch.randint(0, 9, (6, 7))
    got, wanted = fg.kernel(losses)(*arguments), losses(*arguments)
    assert [each.dtype for each in got] == [each.dtype for each in wanted] == [dtype, torch.float32, dtype]
    for ours, torchs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=2e-2, atol=2e-2)


def test_cross_entropy_of_other_dtypes() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        x, y, w = randn(6, 7, dtype=dtype), torch.randint(0, 7, (6,)), torch.rand(7).to(dtype)
        agree(lambda x, y, w: (F.cross_entropy(x, y), F.cross_entropy(x, y, w, label_smoothing=0.2)), (x, y, w))


def test_a_mean_of_nothing_is_nan() -> None:
    agree(lambda x, y: F.cross_entropy(x, y), (randn(4, 5), torch.full((4,), -100)))
    agree(lambda x, y: F.cross_entropy(x, y, reduction="none"), (torch.tensor([[1e4, 9e3], [-1e4, 0.0]]), torch.tensor([1, 0])))


def test_classes_of_bytes() -> None:
    agree(lambda x, y: F.cross_entropy(x, y), (randn(4, 5), torch.tensor([4, 0, 3, 1], dtype=torch.uint8)))


def test_rows_of_run_time_numbers() -> None:
    agree(lambda x, y: F.cross_entropy(x, y), *[(randn(n, 50), torch.randint(0, 50, (n,))) for n in (3, 4, 5, 8)])


def test_scores_are_read_once() -> None:
    """The scores of the right classes are read at their places by a small kernel: no row of logarithms is ever stored."""

    @fg.kernel
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x, y)

    low = loss.lower(randn(4096, 32000, dtype=torch.bfloat16), torch.randint(0, 32000, (4096,)), target="sm_90a")
    assert sum(step.traffic.read(low.sizes) for step in low.program.steps) < 1.01 * 4096 * 32000 * 2


def test_the_gradient_of_scores_is_pointwise() -> None:
    """The largest score of each row is saved, and the gradient of a row sums to a known value, so that nothing is reduced again."""

    @fg.kernel
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x, y)

    x, y = torch.empty(4096, 32000, dtype=torch.bfloat16, device="meta"), torch.empty(4096, dtype=torch.int64, device="meta")
    (step,) = fg.vjp(loss, x, y, wrt="x", target="sm_90a").backward.lower().program.steps
    assert step.group.kind.name == "pointwise"


@pytest.mark.parametrize("columns", [7, 1])
def test_sums_of_one_element_of_each_row(columns: int) -> None:
    """Some indices are out of range, which selects no element, even of infinite values."""

    def chosen(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(torch.arange(columns) == y[:, None], x[:, None], 0.0).sum(1)

    values, indices = torch.tensor([1.5, float("inf"), float("nan"), -2.0, 3.0]), [0, -1, columns, columns - 1, -columns]
    agree(chosen, (values, torch.tensor(indices)))
    agree(chosen, (values, torch.tensor([0.0, 0.5, -0.5, columns - 1, 6.5])))  # fractions equal no position


def test_sums_of_one_element_by_bytes() -> None:
    """A byte cannot hold the number of columns."""

    def chosen(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(torch.arange(256) == y[:, None], x[:, None], 0.0).sum(1)

    agree(chosen, (randn(4), torch.tensor([0, 1, 255, 7], dtype=torch.uint8)))


@pytest.mark.usefixtures("emulated")
def test_cross_entropy_on_a_gpu() -> None:
    agree(lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), (randn(5, 70), torch.randint(0, 70, (5,))))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_losses_of_pairs(reduction: str) -> None:
    dtype = torch.bfloat16 if reduction == "none" else torch.float32

    def losses(x: Tensor, y: Tensor, z: Tensor, p: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        return (
            F.binary_cross_entropy(p, (s + 1) / 2, reduction=reduction),
            F.binary_cross_entropy(p.round(), p, weight=z, reduction=reduction),
            F.poisson_nll_loss(x, p * 4, reduction=reduction),
            F.poisson_nll_loss(p, p * 4, log_input=False, full=True, reduction=reduction),
            F.gaussian_nll_loss(x, y, p, reduction=reduction),
            F.gaussian_nll_loss(x, y, p[:, 0], full=True, reduction=reduction),
            F.soft_margin_loss(x, s, reduction=reduction),
            F.hinge_embedding_loss(x, s, margin=0.5, reduction=reduction),
            F.margin_ranking_loss(x, y, s, margin=0.2, reduction=reduction),
            F.cosine_embedding_loss(x, y, s[:, 0], margin=0.1, reduction=reduction),
            F.triplet_margin_loss(x, y, z, reduction=reduction),
            F.triplet_margin_loss(x, y, z, p=3, swap=True, reduction=reduction),
            F.multilabel_soft_margin_loss(x, (s + 1) / 2, reduction=reduction),
        )

    x, y, z, noise = (randn(4, 6, dtype=dtype) for _ in range(4))
    agree(losses, (x, y, z, torch.rand(4, 6).to(dtype), noise.sign()))


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
def test_old_words_for_the_reduction() -> None:
    words: list[dict[str, bool]] = [{"size_average": False}, {"reduce": False}, {"size_average": True, "reduce": True}]

    def losses(x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
        pairs = [loss(x, y, **old) for old in words for loss in (F.mse_loss, F.soft_margin_loss, F.l1_loss)]
        return pairs + [F.cross_entropy(x, z, **old) for old in words]

    agree(losses, (randn(4, 6), randn(4, 6), torch.randint(0, 6, (4,))))


def test_a_mean_by_the_batch() -> None:
    agree(lambda x, y: F.kl_div(x, y, reduction="batchmean"), (randn(4, 6), torch.rand(4, 6)), (randn(1, 5), torch.rand(6, 5)))
    agree(lambda x, y: F.kl_div(x, y, reduction="batchmean"), (torch.tensor(-0.7), torch.tensor(0.5)))


def test_distances_of_rows() -> None:
    agree(lambda x, y: (F.pairwise_distance(x, y), F.pairwise_distance(x, y, 1, keepdim=True)), (randn(4, 6), randn(4, 6)))


def test_a_class_that_there_is_not() -> None:
    with pytest.raises(IndexRangeError, match=r"out of range \[0, 5\)"):
        fg.kernel(lambda x, y: F.cross_entropy(x, y))(randn(4, 5), torch.tensor([1, 2, 5, 0]))


W = torch.ones(5)
WRONG: list[tuple[Callable[..., Any], tuple[Tensor, ...], type[FusegenError], str]] = [
    (lambda x, y: F.cross_entropy(x, y), (randn(4, 5), torch.tensor([1, 2, 3])), ShapeError, "the target has shape"),
    (lambda x, y: F.cross_entropy(x, y), (randn(4, 5), torch.tensor([1, 2, 3, 0]).int()), TraceError, "class indices is int32"),
    (lambda x, y: F.cross_entropy(x, y), (randn(4, 5), torch.randint(0, 2, (4, 5))), TraceError, "probabilities of int64"),
    (lambda x, y: F.nll_loss(x, y), (randn(()), torch.tensor(0)), ShapeError, "the input has no dims"),
    (lambda x, y: F.cross_entropy(x, y, torch.ones(4)), (randn(4, 5), torch.zeros(4).long()), ShapeError, "the weight"),
    (lambda x, y: F.cross_entropy(x, y, W.half()), (randn(4, 5), torch.zeros(4).long()), TraceError, "weights float16"),
    (lambda x, y: F.cross_entropy(x, y, label_smoothing=1.5), (randn(4, 5), torch.zeros(4).long()), TraceError, "is not in [0, 1]"),
    (lambda x, y: F.cross_entropy(x, y, ignore_index=1), (randn(4, 5), torch.rand(4, 5)), TraceError, "with class probabilities"),
    (lambda x, y: F.binary_cross_entropy(x, y), (torch.rand(4, 5), torch.rand(4, 1)), ShapeError, "the target"),
]  # fmt: skip


def test_what_torch_refuses() -> None:
    for function, arguments, error, says in WRONG:
        with case(says):
            with pytest.raises((RuntimeError, ValueError, IndexError)):
                function(*arguments)
            refused(function, *arguments, error=error, says=says)
