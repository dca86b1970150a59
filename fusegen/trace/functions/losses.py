"""Losses of values, of classes, and of pairs and triples, then the mean, the sum or nothing of them."""

from __future__ import annotations

import math
from typing import Any

from fusegen.dtypes import DType
from fusegen.errors import ShapeError, TraceError
from fusegen.ir.ops import Op
from fusegen.trace.functions import pointwise, reductions
from fusegen.trace.functions.common import binary, cast, dtype_of, floats, setting, tracer_of, unsupported_argument
from fusegen.trace.functions.indexing import gather, taken
from fusegen.trace.functions.normalization import log_softmax
from fusegen.trace.functions.views import require_shape, reshaped, squeeze, unsqueeze
from fusegen.trace.registry import implements
from fusegen.trace.values import TracedTensor


def collected(x: TracedTensor, reduction: str) -> TracedTensor:
    """The mean of a loss, its sum, or the loss as it is.

    Raises:
        TraceError: another reduction is asked for.
    """
    if reduction not in ("none", "mean", "sum"):
        raise TraceError(f"a loss with reduction={reduction!r}", hint="use 'none', 'mean' or 'sum'")
    return x if reduction == "none" else reductions.mean(x) if reduction == "mean" else reductions.sum(x)


def legacy(reduction: str, size_average: Any, reduce: Any) -> str:
    """The reduction that two old arguments ask for, where one of them is given: not reduce is none, not size_average the sum."""
    if size_average is None and reduce is None:
        return reduction
    if reduce is not None and not reduce:
        return "none"
    return "mean" if size_average is None or size_average else "sum"


@implements("mse_loss")
def mse_loss(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", weight: Any = None
) -> TracedTensor:
    """The squared difference."""
    unsupported_argument("mse_loss", weight=weight)
    reduction = legacy(reduction, size_average, reduce)
    difference = pointwise.sub(input, target)
    return collected(difference._tracer.add(Op.MUL, difference, difference), reduction)


@implements("l1_loss")
def l1_loss(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", weight: Any = None
) -> TracedTensor:
    """The difference without its sign."""
    unsupported_argument("l1_loss", weight=weight)
    reduction = legacy(reduction, size_average, reduce)
    difference = pointwise.sub(input, target)
    return collected(difference._tracer.add(Op.ABS, difference), reduction)


@implements("smooth_l1_loss")
def smooth_l1_loss(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", beta: float = 1.0
) -> TracedTensor:
    """d^2 / (2 beta) for a difference d below beta, d - beta / 2 from there on."""
    reduction = legacy(reduction, size_average, reduce)
    if not beta:
        return l1_loss(input, target, reduction=reduction)
    return collected(pointwise.div(_huber("smooth_l1_loss", input, target, beta), beta), reduction)


@implements("huber_loss")
def huber_loss(input: Any, target: Any, reduction: str = "mean", delta: float = 1.0, weight: Any = None) -> TracedTensor:
    """d^2 / 2 for a difference d below delta, delta (d - delta / 2) from there on; in the input's dtype, whatever the target's."""
    unsupported_argument("huber_loss", weight=weight)
    own = floats("huber_loss", tracer_of(input, target).lift(input)).dtype
    return collected(cast(_huber("huber_loss", input, target, delta), own), reduction)


def _huber(name: str, input: Any, target: Any, delta: Any) -> TracedTensor:
    difference = floats(name, pointwise.sub(input, target))
    return difference._tracer.add(Op.HUBER, difference, delta=setting(f"{name}: the width", delta))


@implements("binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    pos_weight: Any = None,
) -> TracedTensor:
    """-target log(sigmoid(x)) - (1 - target) log(sigmoid(-x)), the first part times pos_weight."""
    reduction = legacy(reduction, size_average, reduce)
    tracer = tracer_of(input, target)
    x, y = tracer.lift(input), tracer.lift(target)
    require_shape("binary_cross_entropy_with_logits: the target", y, x._node.shape)
    one, other = (tracer.add(Op.LOGSIGMOID, z) for z in (x, tracer.add(Op.NEG, x)))
    hit = pointwise.mul(y, one) if pos_weight is None else pointwise.mul(pointwise.mul(y, one), pos_weight)
    loss = tracer.add(Op.NEG, pointwise.add(hit, pointwise.mul(pointwise.rsub(y, 1), other)))
    return collected(loss if weight is None else pointwise.mul(loss, weight), reduction)


@implements("binary_cross_entropy")
def binary_cross_entropy(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, reduce: Any = None, reduction: str = "mean"
) -> TracedTensor:
    """-target log(x) - (1 - target) log(1 - x); as in torch, a logarithm is -100 at the least."""
    reduction = legacy(reduction, size_average, reduce)
    tracer = tracer_of(input, target)
    x, y = floats("binary_cross_entropy", tracer.lift(input)), tracer.lift(target)
    require_shape("binary_cross_entropy: the target", y, x._node.shape)
    loss = tracer.add(Op.BINARY_CROSS_ENTROPY, x, y)
    return collected(loss if weight is None else pointwise.mul(loss, weight), reduction)


@implements("F.poisson_nll_loss")
def poisson_nll_loss(
    input: Any,
    target: Any,
    log_input: bool = True,
    full: bool = False,
    size_average: Any = None,
    eps: float = 1e-8,
    reduce: Any = None,
    reduction: str = "mean",
) -> TracedTensor:
    """exp(x) - target x of the logarithm x of a rate, or x - target log(x + eps) of the rate; with ``full`` also what Stirling's
    formula gives of the logarithm of target!, where the target is above 1."""
    reduction = legacy(reduction, size_average, reduce)
    tracer = tracer_of(input, target)
    x, y = tracer.lift(input), tracer.lift(target)
    if log_input:
        loss = pointwise.sub(tracer.add(Op.EXP, x), pointwise.mul(y, x))
    else:
        loss = pointwise.sub(x, pointwise.mul(y, tracer.add(Op.LOG, pointwise.add(x, setting("eps", eps)))))
    if full:
        logarithm = tracer.add(Op.LOG, pointwise.mul(y, 2 * math.pi))
        stirling = pointwise.add(pointwise.sub(pointwise.mul(y, tracer.add(Op.LOG, y)), y), pointwise.mul(logarithm, 0.5))
        loss = pointwise.add(loss, pointwise.where(binary(Op.GT, y, 1), stirling, 0.0))
    return collected(loss, reduction)


@implements("gaussian_nll_loss")
def gaussian_nll_loss(
    input: Any, target: Any, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> TracedTensor:
    """(log(var) + (x - target)^2 / var) / 2 with a variance of eps at the least; with ``full`` also log(2 pi) / 2."""
    tracer = tracer_of(input, target, var)
    x, variance = floats("gaussian_nll_loss", tracer.lift(input)), tracer.lift(var)
    if variance.ndim == x.ndim - 1:  # one of each row
        variance = unsqueeze(variance, -1)
    least = setting("eps", eps)
    raised = pointwise.add(pointwise.sub(variance, tracer.add(Op.DETACH, variance)), least)  # of which it keeps the derivative
    variance = pointwise.where(binary(Op.LT, variance, least), raised, variance)
    difference = pointwise.sub(x, target)
    squared = pointwise.div(tracer.add(Op.MUL, difference, difference), variance)
    loss = pointwise.mul(pointwise.add(tracer.add(Op.LOG, variance), squared), 0.5)
    return collected(pointwise.add(loss, 0.5 * math.log(2 * math.pi)) if full else loss, reduction)


@implements("kl_div")
def kl_div(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", log_target: bool = False
) -> TracedTensor:
    """target (log(target) - input); 0 where the target is 0."""
    reduction = legacy(reduction, size_average, reduce)
    tracer = tracer_of(input, target)
    x, y = (floats("kl_div", tracer.lift(value)) for value in (input, target))
    if log_target:
        loss = pointwise.mul(tracer.add(Op.EXP, y), pointwise.sub(y, input))
    else:
        loss = pointwise.sub(pointwise.xlogy(y, y), pointwise.mul(y, input))
    if reduction == "batchmean":
        return pointwise.div(reductions.sum(loss), x.shape[0]) if x.ndim else reductions.sum(loss)
    return collected(loss, reduction)


# Losses of classes: the score of the right class in a row of scores.


@implements("cross_entropy")
def cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> TracedTensor:
    """The negative logarithm of the softmax at the right class, or its mean by probabilities of the classes.

    With smoothing s, the right one of C classes has the probability 1 - s + s / C, each other one s / C (Szegedy et al.,
    Rethinking the Inception Architecture for Computer Vision, arXiv 1512.00567, section 7).
    """
    reduction = legacy(reduction, size_average, reduce)
    tracer = tracer_of(input, target)
    x, y = floats("cross_entropy", _scores("cross_entropy", tracer.lift(input))), tracer.lift(target)
    share = setting("label_smoothing", label_smoothing)
    if not 0.0 <= share <= 1.0:
        raise TraceError(f"cross_entropy: label_smoothing={share} is no share", hint="give a number from 0 to 1")
    logarithms = log_softmax(x, _class_dim(x))
    if x.ndim == y.ndim:
        if ignore_index >= 0:
            what = f"cross_entropy: ignore_index={ignore_index} beside probabilities, of which torch ignores none"
            raise TraceError(what, hint="leave it out, or give classes by their numbers")
        return _of_probabilities(logarithms, y, weight, share, reduction)
    return _of_classes("cross_entropy", logarithms, y, weight, ignore_index, share, reduction)


@implements("nll_loss")
def nll_loss(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> TracedTensor:
    """The negative value at the right class, times its weight; a mean is by the weights of what is not ignored."""
    reduction = legacy(reduction, size_average, reduce)
    tracer = tracer_of(input, target)
    x = floats("nll_loss", _scores("nll_loss", tracer.lift(input)))
    return _of_classes("nll_loss", x, tracer.lift(target), weight, ignore_index, 0.0, reduction)


def _scores(name: str, x: TracedTensor) -> TracedTensor:
    if not x.ndim:
        raise ShapeError(f"{name} of one number", hint="give scores of shape (classes,), (rows, classes) or (rows, classes, ...)")
    return x


def _class_dim(x: TracedTensor) -> int:
    """Behind the rows, if there are any."""
    return min(1, x.ndim - 1)


def _of_classes(
    name: str, logarithms: TracedTensor, target: TracedTensor, weight: Any, ignore_index: int, share: float, reduction: str
) -> TracedTensor:
    """By the number of the right class; ``share`` is what all classes have in equal parts."""
    tracer, dim = logarithms._tracer, _class_dim(logarithms)
    if dtype_of(target) is DType.UINT8:
        target = tracer.add(Op.CAST, target, dtype=DType.INT64)
    if dtype_of(target) is not DType.INT64:
        raise TraceError(f"{name}: classes of {dtype_of(target)}", hint="convert them to torch.int64")
    shape = logarithms._node.shape
    require_shape(name, target, (*shape[:dim], *shape[dim + 1 :]))
    weights = None if weight is None else _weights(name, logarithms, weight)
    is_kept = binary(Op.NE, target, ignore_index)
    right = pointwise.where(is_kept, target, 0)
    loss = tracer.add(Op.NEG, squeeze(gather(logarithms, dim, unsqueeze(right, dim)), dim))
    part = tracer.lift(1.0) if weights is None else taken(weights, 0, right, wraps=False)
    if weights is not None:
        loss = pointwise.mul(loss, part)
    if share:
        loss = pointwise.add(pointwise.mul(loss, 1 - share), pointwise.mul(_mean_over_classes(logarithms, weights), share))
    loss = pointwise.where(is_kept, loss, 0.0)
    if reduction != "mean":
        return collected(loss, reduction)
    parts = pointwise.where(is_kept, cast(part, logarithms.dtype), 0.0)
    return pointwise.div(reductions.sum(loss), reductions.sum(parts))


def _mean_over_classes(logarithms: TracedTensor, weights: TracedTensor | None) -> TracedTensor:
    weighed = logarithms if weights is None else pointwise.mul(logarithms, _along_classes(logarithms, weights))
    return logarithms._tracer.add(Op.NEG, reductions.mean(weighed, _class_dim(logarithms)))


def _of_probabilities(logarithms: TracedTensor, target: TracedTensor, weight: Any, share: float, reduction: str) -> TracedTensor:
    """By a probability of each class."""
    tracer, dim = logarithms._tracer, _class_dim(logarithms)
    floats("cross_entropy: probabilities", target)
    require_shape("cross_entropy", target, logarithms._node.shape)
    count = tracer.size(logarithms._node.shape[dim])
    if share:
        target = pointwise.add(pointwise.mul(target, 1 - share), share / count)
    products = pointwise.mul(logarithms, target)
    if weight is not None:
        products = pointwise.mul(products, _along_classes(logarithms, _weights("cross_entropy", logarithms, weight)))
    return collected(tracer.add(Op.NEG, reductions.sum(products, dim)), reduction)


def _weights(name: str, x: TracedTensor, weight: Any) -> TracedTensor:
    weights = x._tracer.lift(weight)
    require_shape(f"{name}: the weight", weights, (x._node.shape[_class_dim(x)],))
    if weights.dtype is not x.dtype:
        raise TraceError(f"{name} of {dtype_of(x)} with weights of {dtype_of(weights)}", hint="convert them to the input's dtype")
    return weights


def _along_classes(x: TracedTensor, weights: TracedTensor) -> TracedTensor:
    behind = x.ndim - 1 - _class_dim(x)
    return reshaped(weights, (*weights._node.shape, *(1,) * behind))


# Losses of pairs and triples: distances within a class, and margins between classes.

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
