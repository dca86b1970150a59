"""Losses of classes: what a row of scores says of the class that is right."""

from __future__ import annotations

from typing import Any

from fusegen.dtypes import DType
from fusegen.errors import ShapeError, TraceError
from fusegen.ir.ops import Op
from fusegen.lang.functions import pointwise, reductions
from fusegen.lang.functions.common import binary, cast, dtype_of, floats, setting, tracer_of
from fusegen.lang.functions.indexing import gather, taken
from fusegen.lang.functions.losses import collected, legacy
from fusegen.lang.functions.normalization import log_softmax
from fusegen.lang.functions.views import require_shape, reshaped, squeeze, unsqueeze
from fusegen.lang.registry import implements
from fusegen.lang.values import TracedTensor


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
        raise TraceError(f"cross_entropy: label_smoothing={share} is no share", mend="give a number from 0 to 1")
    logarithms = log_softmax(x, _class_dim(x))
    if x.ndim == y.ndim:
        if ignore_index >= 0:
            what = f"cross_entropy: ignore_index={ignore_index} beside probabilities, of which torch ignores none"
            raise TraceError(what, mend="leave it out, or give classes by their numbers")
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
        raise ShapeError(f"{name} of one number", mend="give scores of shape (classes,), (rows, classes) or (rows, classes, ...)")
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
        raise TraceError(f"{name}: classes of {dtype_of(target)}", mend="convert them to torch.int64")
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
        raise TraceError(f"{name} of {dtype_of(x)} with weights of {dtype_of(weights)}", mend="convert them to the input's dtype")
    return weights


def _along_classes(x: TracedTensor, weights: TracedTensor) -> TracedTensor:
    behind = x.ndim - 1 - _class_dim(x)
    return reshaped(weights, (*weights._node.shape, *(1,) * behind))
