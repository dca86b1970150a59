"""Losses from logits. None of them materializes probabilities."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.specs.checks import require_shapes, widened
from fusegen.specs.elementwise import capped
from fusegen.specs.linear import projected
from fusegen.specs.spec import SpecFamily, VariantOperands, indices, positive, tensor

FAMILY = SpecFamily("loss")

SIZES = {"rows": 8192, "features": 4096}
OPTIONS: VariantOperands = {
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "label_smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-4},
    "softcap": {"softcap": 30.0},
    "ignore_index": {"ignore_index": 1},
}


def loss_of(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> Tensor:
    """Cross entropy, plus z_loss times the squared logsumexp of each row that is not ignored."""
    target = target.long() if target.dtype == torch.uint8 else target  # so that a negative ignore_index compares correctly
    logits = capped(logits, softcap)
    loss = F.cross_entropy(logits, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
    if z_loss == 0.0:
        return loss
    classes = min(1, logits.dim() - 1)
    if target.is_floating_point():  # probabilities: no row is ignored
        squares = z_loss * torch.logsumexp(widened(logits), classes).square()
        return loss + (squares if reduction == "none" else squares.sum() if reduction == "sum" else squares.mean()).to(loss.dtype)
    counts = target != ignore_index
    squares = torch.where(counts, z_loss * torch.logsumexp(widened(logits), classes).square(), 0.0)
    if reduction == "none":
        return loss + squares.to(loss.dtype)
    return loss + (squares.sum() if reduction == "sum" else squares.sum() / counts.sum()).to(loss.dtype)


@FAMILY.spec(
    {"input": tensor("rows vocabulary"), "target": indices("rows", below="vocabulary")},
    sizes=SIZES,
    variants={**OPTIONS, "weight": {"weight": positive("vocabulary")}, "probabilities": {"target": tensor("rows vocabulary")}},
    aliases=["CrossEntropyLoss"],
    gradients=("input",),
)
@fg.kernel
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: fg.Static[float] = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """−log softmax(x)[target], and z_loss·logsumexp(x)²

    input: (rows, classes); target: (rows) of indices, or probabilities of the shape of input; weight: (classes); the rest as in
    `torch.nn.functional.cross_entropy`. softcap: x becomes cap·tanh(x/cap) first (Gemma Team, arXiv 2408.00118); z_loss:
    Chowdhery et al., "PaLM" (arXiv 2204.02311). Neither pass stores probabilities.
    """
    return loss_of(input, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap)


@FAMILY.spec(
    {"x": tensor("rows features"), "weight": tensor("vocabulary features"), "target": indices("rows", below="vocabulary")},
    sizes={**SIZES, "rows": 4096},
    variants={**OPTIONS, "bias": {"bias": tensor("vocabulary")}},
    aliases=["fused_linear_cross_entropy", "LinearCrossEntropyLoss"],
    gradients=("x", "weight"),
)
@fg.kernel
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: fg.Static[float] = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """cross_entropy(x·weightᵀ + bias, target), without the logits in memory

    x: (rows, features); weight: (classes, features); bias: (classes); target: (rows) of indices; the rest as in
    `cross_entropy`. Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (arXiv 2411.09009); here the logits
    are computed in blocks of rows.
    """
    require_shapes(x=(x, "* features"), target=(target, "*"))
    return loss_of(projected(x, weight, bias), target, None, ignore_index, reduction, label_smoothing, z_loss, softcap)


PAIR = {"input": tensor("rows features"), "target": tensor("rows features")}


@FAMILY.spec(PAIR, variants={"sum": {"reduction": "sum"}, "none": {"reduction": "none"}})
@fg.kernel
def binary_cross_entropy_with_logits(
    input: Tensor, target: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    """−(t·log σ(x) + (1 − t)·log(1 − σ(x)))

    input, target: the same shape; the rest as in `torch.nn.functional.binary_cross_entropy_with_logits`.
    """
    return F.binary_cross_entropy_with_logits(input, target, weight, reduction=reduction, pos_weight=pos_weight)
