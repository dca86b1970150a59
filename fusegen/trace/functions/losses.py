"""Losses: elementwise, classification, pairs and triplets, each with reduction mean, sum or none."""

from __future__ import annotations

import math
from typing import Any

from fusegen.dtypes import DType
from fusegen.errors import ShapeError, TraceError
from fusegen.ir.ops import Op
from fusegen.trace.functions import pointwise, reductions
from fusegen.trace.functions.common import binary, cast, dtype_of, float_setting, require_float, tracer_of, unsupported_argument
from fusegen.trace.functions.indexing import gather, gather_slices
from fusegen.trace.functions.normalization import log_softmax
from fusegen.trace.functions.views import require_shape, reshaped, squeeze, unsqueeze
from fusegen.trace.registry import implements
from fusegen.trace.values import TracedTensor


def reduce_loss(x: TracedTensor, reduction: str) -> TracedTensor:
    """Reduces a loss by mean or sum, or returns it unreduced."""
    if reduction not in ("none", "mean", "sum"):
        raise TraceError(f"reduction={reduction!r} is not supported", hint="use 'none', 'mean' or 'sum'")
    return x if reduction == "none" else reductions.mean(x) if reduction == "mean" else reductions.sum(x)


def legacy_reduction(reduction: str, size_average: Any, reduce: Any) -> str:
    """Returns the reduction that the deprecated arguments `size_average` and `reduce` select."""
    if size_average is None and reduce is None:
        return reduction
    if reduce is not None and not reduce:
        return "none"
    return "mean" if size_average is None or size_average else "sum"


@implements("mse_loss")
def mse_loss(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", weight: Any = None
) -> TracedTensor:
    unsupported_argument("mse_loss", weight=weight)
    reduction = legacy_reduction(reduction, size_average, reduce)
    difference = pointwise.sub(input, target)
    return reduce_loss(difference._tracer.add(Op.MUL, difference, difference), reduction)


@implements("l1_loss")
def l1_loss(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", weight: Any = None
) -> TracedTensor:
    unsupported_argument("l1_loss", weight=weight)
    reduction = legacy_reduction(reduction, size_average, reduce)
    difference = pointwise.sub(input, target)
    return reduce_loss(difference._tracer.add(Op.ABS, difference), reduction)


@implements("smooth_l1_loss")
def smooth_l1_loss(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", beta: float = 1.0
) -> TracedTensor:
    """d^2 / (2 beta) for a difference d below beta, else d - beta / 2."""
    reduction = legacy_reduction(reduction, size_average, reduce)
    if not beta:
        return l1_loss(input, target, reduction=reduction)
    return reduce_loss(pointwise.div(_huber("smooth_l1_loss", input, target, beta), beta), reduction)


@implements("huber_loss")
def huber_loss(input: Any, target: Any, reduction: str = "mean", delta: float = 1.0, weight: Any = None) -> TracedTensor:
    """d^2 / 2 for a difference d below delta, else delta (d - delta / 2). The result has the input's dtype."""
    unsupported_argument("huber_loss", weight=weight)
    dtype = require_float("huber_loss", tracer_of(input, target).lift(input)).dtype
    return reduce_loss(cast(_huber("huber_loss", input, target, delta), dtype), reduction)


def _huber(name: str, input: Any, target: Any, delta: Any) -> TracedTensor:
    difference = require_float(name, pointwise.sub(input, target))
    return difference._tracer.add(Op.HUBER, difference, delta=float_setting(f"{name}: the width", delta))


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
    """-pos_weight target log(sigmoid(x)) - (1 - target) log(sigmoid(-x))."""
    reduction = legacy_reduction(reduction, size_average, reduce)
    tracer = tracer_of(input, target)
    x, y = tracer.lift(input), tracer.lift(target)
    require_shape("binary_cross_entropy_with_logits: the target", y, x._node.shape)
    log_p, log_q = (tracer.add(Op.LOGSIGMOID, z) for z in (x, tracer.add(Op.NEG, x)))
    positive = pointwise.mul(y, log_p) if pos_weight is None else pointwise.mul(pointwise.mul(y, log_p), pos_weight)
    loss = tracer.add(Op.NEG, pointwise.add(positive, pointwise.mul(pointwise.rsub(y, 1), log_q)))
    loss = loss if weight is None else pointwise.mul(loss, weight)
    return reduce_loss(cast(loss, y.dtype if y.dtype.is_floating_point else None), reduction)  # torch computes 1 - target in place


@implements("binary_cross_entropy")
def binary_cross_entropy(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, reduce: Any = None, reduction: str = "mean"
) -> TracedTensor:
    """-target log(x) - (1 - target) log(1 - x), with logarithms clamped to -100, as in torch."""
    reduction = legacy_reduction(reduction, size_average, reduce)
    tracer = tracer_of(input, target)
    x, y = require_float("binary_cross_entropy", tracer.lift(input)), tracer.lift(target)
    require_shape("binary_cross_entropy: the target", y, x._node.shape)
    loss = tracer.add(Op.BINARY_CROSS_ENTROPY, x, y)
    return reduce_loss(loss if weight is None else pointwise.mul(loss, weight), reduction)


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
    """exp(x) - target x for a log rate x, or x - target log(x + eps) for a rate x. `full` adds Stirling's approximation of
    log(target!) where target > 1."""
    reduction = legacy_reduction(reduction, size_average, reduce)
    tracer = tracer_of(input, target)
    x, y = tracer.lift(input), tracer.lift(target)
    if log_input:
        loss = pointwise.sub(tracer.add(Op.EXP, x), pointwise.mul(y, x))
    else:
        loss = pointwise.sub(x, pointwise.mul(y, tracer.add(Op.LOG, pointwise.add(x, float_setting("eps", eps)))))
    if full:
        logarithm = tracer.add(Op.LOG, pointwise.mul(y, 2 * math.pi))
        stirling = pointwise.add(pointwise.sub(pointwise.mul(y, tracer.add(Op.LOG, y)), y), pointwise.mul(logarithm, 0.5))
        loss = cast(pointwise.add(loss, pointwise.where(binary(Op.GT, y, 1), stirling, 0.0)), loss.dtype)
    return reduce_loss(loss, reduction)


@implements("gaussian_nll_loss")
def gaussian_nll_loss(
    input: Any, target: Any, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> TracedTensor:
    """(log(var) + (x - target)^2 / var) / 2 with var >= eps. `full` adds log(2 pi) / 2."""
    tracer = tracer_of(input, target, var)
    x, variance = require_float("gaussian_nll_loss", tracer.lift(input)), tracer.lift(var)
    if variance.ndim == x.ndim - 1:  # one variance per row
        variance = unsqueeze(variance, -1)
    lower_bound = float_setting("eps", eps)
    clamped = pointwise.add(pointwise.sub(variance, tracer.add(Op.DETACH, variance)), lower_bound)  # has the variance's gradient
    variance = pointwise.where(binary(Op.LT, variance, lower_bound), clamped, variance)
    difference = pointwise.sub(x, target)
    squared = pointwise.div(tracer.add(Op.MUL, difference, difference), variance)
    loss = pointwise.mul(pointwise.add(tracer.add(Op.LOG, variance), squared), 0.5)
    return reduce_loss(pointwise.add(loss, 0.5 * math.log(2 * math.pi)) if full else loss, reduction)


@implements("kl_div")
def kl_div(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", log_target: bool = False
) -> TracedTensor:
    """target (log(target) - input); 0 where the target is 0."""
    reduction = legacy_reduction(reduction, size_average, reduce)
    tracer = tracer_of(input, target)
    x, y = (require_float("kl_div", tracer.lift(value)) for value in (input, target))
    if log_target:
        loss = pointwise.mul(tracer.add(Op.EXP, y), pointwise.sub(y, input))
    else:
        loss = pointwise.sub(pointwise.xlogy(y, y), pointwise.mul(y, input))
    if reduction == "batchmean":
        return pointwise.div(reductions.sum(loss), x.shape[0]) if x.ndim else reductions.sum(loss)
    return reduce_loss(loss, reduction)


# Classification losses.


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
    """The negative log softmax at the target class, or its mean weighted by class probabilities.

    With C classes and smoothing s, the target class has the probability 1 - s + s / C, and each other class s / C. Szegedy et al.,
    Rethinking the Inception Architecture for Computer Vision (arXiv 1512.00567), section 7.
    """
    reduction = legacy_reduction(reduction, size_average, reduce)
    tracer = tracer_of(input, target)
    x, y = require_float("cross_entropy", _require_scores("cross_entropy", tracer.lift(input))), tracer.lift(target)
    smoothing = float_setting("label_smoothing", label_smoothing)
    if not 0.0 <= smoothing <= 1.0:
        raise TraceError(f"cross_entropy: label_smoothing={smoothing} is not in [0, 1]", hint="give a number from 0 to 1")
    log_probs = log_softmax(x, _class_dim(x))
    if x.ndim == y.ndim:
        if ignore_index >= 0:
            message = f"cross_entropy: ignore_index={ignore_index} has no meaning with class probabilities"
            raise TraceError(message, hint="leave it out, or give class indices")
        return _probability_loss(log_probs, y, weight, smoothing, reduction)
    return _class_index_loss("cross_entropy", log_probs, y, weight, ignore_index, smoothing, reduction)


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
    """The negative input at the target class, times its weight. The mean divides by the weights of targets not ignored."""
    reduction = legacy_reduction(reduction, size_average, reduce)
    tracer = tracer_of(input, target)
    x = require_float("nll_loss", _require_scores("nll_loss", tracer.lift(input)))
    return _class_index_loss("nll_loss", x, tracer.lift(target), weight, ignore_index, 0.0, reduction)


def _require_scores(name: str, x: TracedTensor) -> TracedTensor:
    if not x.ndim:
        raise ShapeError(f"{name}: the input has no dims", hint="give shape (classes,), (rows, classes) or (rows, classes, ...)")
    return x


def _class_dim(x: TracedTensor) -> int:
    """Returns 1 if the input has rows, else 0."""
    return min(1, x.ndim - 1)


def _class_index_loss(
    name: str, log_probs: TracedTensor, target: TracedTensor, weight: Any, ignore_index: int, smoothing: float, reduction: str
) -> TracedTensor:
    """The loss for class indices. `smoothing` is spread evenly over all classes."""
    tracer, dim = log_probs._tracer, _class_dim(log_probs)
    if dtype_of(target) is DType.UINT8:
        target = tracer.add(Op.CAST, target, dtype=DType.INT64)
    if dtype_of(target) is not DType.INT64:
        raise TraceError(f"{name}: the target of class indices is {dtype_of(target)}", hint="convert it to torch.int64")
    shape = log_probs._node.shape
    require_shape(f"{name}: the target", target, (*shape[:dim], *shape[dim + 1 :]))
    weights = None if weight is None else _class_weights(name, log_probs, weight)
    counts = binary(Op.NE, target, ignore_index)
    classes = pointwise.where(counts, target, 0)
    loss = tracer.add(Op.NEG, squeeze(gather(log_probs, dim, unsqueeze(classes, dim)), dim))
    class_weight = tracer.lift(1.0) if weights is None else gather_slices(weights, 0, classes, wraps=False)
    if weights is not None:
        loss = pointwise.mul(loss, class_weight)
    if smoothing:
        loss = pointwise.add(pointwise.mul(loss, 1 - smoothing), pointwise.mul(_mean_over_classes(log_probs, weights), smoothing))
    loss = pointwise.where(counts, loss, 0.0)
    if reduction != "mean":
        return reduce_loss(loss, reduction)
    counted_weights = pointwise.where(counts, cast(class_weight, log_probs.dtype), 0.0)
    return pointwise.div(reductions.sum(loss), reductions.sum(counted_weights))


def _mean_over_classes(log_probs: TracedTensor, weights: TracedTensor | None) -> TracedTensor:
    weighted = log_probs if weights is None else pointwise.mul(log_probs, _along_classes(log_probs, weights))
    return log_probs._tracer.add(Op.NEG, reductions.mean(weighted, _class_dim(log_probs)))


def _probability_loss(log_probs: TracedTensor, target: TracedTensor, weight: Any, smoothing: float, reduction: str) -> TracedTensor:
    tracer, dim = log_probs._tracer, _class_dim(log_probs)
    require_float("cross_entropy: probabilities", target)
    require_shape("cross_entropy: the target", target, log_probs._node.shape)
    count = tracer.size(log_probs._node.shape[dim])
    if smoothing:
        target = pointwise.add(pointwise.mul(target, 1 - smoothing), smoothing / count)
    terms = pointwise.mul(log_probs, target)
    if weight is not None:
        terms = pointwise.mul(terms, _along_classes(log_probs, _class_weights("cross_entropy", log_probs, weight)))
    return reduce_loss(tracer.add(Op.NEG, reductions.sum(terms, dim)), reduction)


def _class_weights(name: str, x: TracedTensor, weight: Any) -> TracedTensor:
    weights = x._tracer.lift(weight)
    require_shape(f"{name}: the weight", weights, (x._node.shape[_class_dim(x)],))
    if weights.dtype is not x.dtype:
        raise TraceError(
            f"{name}: the input is {dtype_of(x)}, the weights {dtype_of(weights)}", hint="convert the weights to the input's dtype"
        )
    return weights


def _along_classes(x: TracedTensor, weights: TracedTensor) -> TracedTensor:
    trailing = x.ndim - 1 - _class_dim(x)
    return reshaped(weights, (*weights._node.shape, *(1,) * trailing))


# Losses of pairs and triplets.

_SQUARE_EPS = 1e-12  # as in torch, added to squared norms


def _relu(x: Any) -> TracedTensor:
    return pointwise.clamp(x, 0)


@implements("soft_margin_loss")
def soft_margin_loss(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean"
) -> TracedTensor:
    reduction = legacy_reduction(reduction, size_average, reduce)
    product = require_float("soft_margin_loss", pointwise.mul(input, target))
    tracer = product._tracer
    return reduce_loss(tracer.add(Op.LOG1P, tracer.add(Op.EXP, tracer.add(Op.NEG, product))), reduction)


@implements("F.hinge_embedding_loss")
def hinge_embedding_loss(
    input: Any, target: Any, margin: float = 1.0, size_average: Any = None, reduce: Any = None, reduction: str = "mean"
) -> TracedTensor:
    """x where the target is 1, max(0, margin - x) where it is -1; their sum for other targets."""
    reduction = legacy_reduction(reduction, size_average, reduce)
    require_float("hinge_embedding_loss", tracer_of(input, target).lift(input))
    negative = pointwise.where(binary(Op.NE, target, 1), _relu(pointwise.rsub(input, float_setting("margin", margin))), 0.0)
    positive = pointwise.where(binary(Op.NE, target, -1), input, 0.0)
    return reduce_loss(pointwise.add(negative, positive), reduction)


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
    reduction = legacy_reduction(reduction, size_average, reduce)
    ranked = pointwise.mul(target, pointwise.sub(input2, input1))
    return reduce_loss(_relu(pointwise.add(ranked, float_setting("margin", margin))), reduction)


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
    """1 - cos(x1, x2) where the target is 1, max(0, cos(x1, x2) - margin) where it is -1."""
    reduction = legacy_reduction(reduction, size_average, reduce)
    tracer = tracer_of(input1, input2, target)
    x, y = tracer.lift(input1), tracer.lift(input2)

    def dot(a: TracedTensor, b: TracedTensor) -> TracedTensor:
        return reductions.sum(tracer.add(Op.MUL, a, b), -1)

    squares = pointwise.mul(pointwise.add(dot(x, x), _SQUARE_EPS), pointwise.add(dot(y, y), _SQUARE_EPS))
    cosine = pointwise.div(dot(x, y), tracer.add(Op.SQRT, squares))
    negative = _relu(pointwise.sub(cosine, float_setting("margin", margin)))
    positive = pointwise.where(binary(Op.EQ, target, 1), pointwise.rsub(cosine, 1), 0.0)
    return reduce_loss(pointwise.add(positive, pointwise.where(binary(Op.EQ, target, -1), negative, 0.0)), reduction)


@implements("pairwise_distance")
def pairwise_distance(x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> TracedTensor:
    """The p-norm of x1 - x2 + eps along the last dim."""
    difference = require_float("pairwise_distance", pointwise.add(pointwise.sub(x1, x2), float_setting("eps", eps)))
    return reductions.vector_norm(difference, float_setting("p", p), -1, keepdim)


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
    """max(0, d(anchor, positive) - d(anchor, negative) + margin), and `swap` (Balntas et al., Learning Local Feature Descriptors
    with Triplets and Shallow Convolutional Neural Networks, 2016)."""
    reduction = legacy_reduction(reduction, size_average, reduce)
    near, far = (pairwise_distance(anchor, example, p, eps) for example in (positive, negative))
    if swap:
        far = binary(Op.MINIMUM, far, pairwise_distance(positive, negative, p, eps))
    return reduce_loss(_relu(pointwise.sub(pointwise.add(near, float_setting("margin", margin)), far)), reduction)


@implements("multilabel_soft_margin_loss")
def multilabel_soft_margin_loss(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, reduce: Any = None, reduction: str = "mean"
) -> TracedTensor:
    reduction = legacy_reduction(reduction, size_average, reduce)
    losses = binary_cross_entropy_with_logits(input, target, weight, reduction="none")
    return reduce_loss(reductions.mean(losses, -1), reduction)
