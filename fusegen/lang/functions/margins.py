"""Losses of pairs and triples: how far what belongs together lies apart, and what does not, too near."""

from __future__ import annotations

from typing import Any

from fusegen.ir.ops import Op
from fusegen.lang.functions import pointwise, reductions
from fusegen.lang.functions.common import binary, floats, setting, tracer_of
from fusegen.lang.functions.losses import binary_cross_entropy_with_logits, collected, legacy
from fusegen.lang.registry import implements
from fusegen.lang.values import TracedTensor

_LEAST_SQUARE = 1e-12  # torch's, added to the squares of lengths


def _beyond(x: Any) -> TracedTensor:
    """The value, or 0 where it is negative."""
    return pointwise.clamp(x, 0)


@implements("soft_margin_loss")
def soft_margin_loss(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean"
) -> TracedTensor:
    """log(1 + exp(-target x)) for targets of 1 and -1."""
    reduction = legacy(reduction, size_average, reduce)
    product = floats("soft_margin_loss", pointwise.mul(input, target))
    tracer = product._tracer
    return collected(tracer.add(Op.LOG1P, tracer.add(Op.EXP, tracer.add(Op.NEG, product))), reduction)


@implements("F.hinge_embedding_loss")
def hinge_embedding_loss(
    input: Any, target: Any, margin: float = 1.0, size_average: Any = None, reduce: Any = None, reduction: str = "mean"
) -> TracedTensor:
    """x where the target is 1, what x lacks to the margin where it is -1, both for any other target."""
    reduction = legacy(reduction, size_average, reduce)
    floats("hinge_embedding_loss", tracer_of(input, target).lift(input))
    apart = pointwise.where(binary(Op.NE, target, 1), _beyond(pointwise.rsub(input, setting("margin", margin))), 0.0)
    together = pointwise.where(binary(Op.NE, target, -1), input, 0.0)
    return collected(pointwise.add(apart, together), reduction)


@implements("F.margin_ranking_loss")
def margin_ranking_loss(
    input1: Any,
    input2: Any,
    target: Any,
    margin: float = 0,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> TracedTensor:
    """max(0, -target (x1 - x2) + margin)."""
    reduction = legacy(reduction, size_average, reduce)
    ranked = pointwise.mul(target, pointwise.sub(input2, input1))
    return collected(_beyond(pointwise.add(ranked, setting("margin", margin))), reduction)


@implements("F.cosine_embedding_loss")
def cosine_embedding_loss(
    input1: Any,
    input2: Any,
    target: Any,
    margin: float = 0,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> TracedTensor:
    """1 - cos(x1, x2) where the target is 1, what the cosine has above the margin where it is -1."""
    reduction = legacy(reduction, size_average, reduce)
    tracer = tracer_of(input1, input2, target)
    x, y = tracer.lift(input1), tracer.lift(input2)

    def dot(a: TracedTensor, b: TracedTensor) -> TracedTensor:
        return reductions.sum(tracer.add(Op.MUL, a, b), -1)

    squares = pointwise.mul(pointwise.add(dot(x, x), _LEAST_SQUARE), pointwise.add(dot(y, y), _LEAST_SQUARE))
    cosine = pointwise.div(dot(x, y), tracer.add(Op.SQRT, squares))
    apart = _beyond(pointwise.sub(cosine, setting("margin", margin)))
    together = pointwise.where(binary(Op.EQ, target, 1), pointwise.rsub(cosine, 1), 0.0)
    return collected(pointwise.add(together, pointwise.where(binary(Op.EQ, target, -1), apart, 0.0)), reduction)


@implements("pairwise_distance")
def pairwise_distance(x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> TracedTensor:
    """The p-norm of x1 - x2 + eps along the last dim."""
    difference = floats("pairwise_distance", pointwise.add(pointwise.sub(x1, x2), setting("eps", eps)))
    return reductions.vector_norm(difference, setting("p", p), -1, keepdim)


@implements("F.triplet_margin_loss")
def triplet_margin_loss(
    anchor: Any,
    positive: Any,
    negative: Any,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> TracedTensor:
    """max(0, d(anchor, positive) - d(anchor, negative) + margin) (Balntas et al., Learning Local Feature Descriptors with
    Triplets and Shallow Convolutional Neural Networks, 2016; there also ``swap``)."""
    reduction = legacy(reduction, size_average, reduce)
    near, far = (pairwise_distance(anchor, other, p, eps) for other in (positive, negative))
    if swap:
        far = binary(Op.MINIMUM, far, pairwise_distance(positive, negative, p, eps))
    return collected(_beyond(pointwise.sub(pointwise.add(near, setting("margin", margin)), far)), reduction)


@implements("multilabel_soft_margin_loss")
def multilabel_soft_margin_loss(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, reduce: Any = None, reduction: str = "mean"
) -> TracedTensor:
    """-target log(sigmoid(x)) - (1 - target) log(sigmoid(-x)), the mean along the last dim."""
    reduction = legacy(reduction, size_average, reduce)
    losses = binary_cross_entropy_with_logits(input, target, weight, reduction="none")
    return collected(reductions.mean(losses, -1), reduction)
