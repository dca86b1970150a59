"""Losses: a value an element, then the mean, the sum or nothing of them."""

from __future__ import annotations

from typing import Any

from fusegen.errors import TraceError
from fusegen.ir.ops import Op
from fusegen.lang.functions import pointwise, reductions
from fusegen.lang.functions.common import floats, setting, tracer_of, unsupported_argument
from fusegen.lang.registry import implements
from fusegen.lang.values import TracedTensor


def _collected(x: TracedTensor, reduction: str) -> TracedTensor:
    if reduction not in ("none", "mean", "sum"):
        raise TraceError(f"a loss with reduction={reduction!r}", mend="use 'none', 'mean' or 'sum'")
    return x if reduction == "none" else reductions.mean(x) if reduction == "mean" else reductions.sum(x)


def _distance(input: Any, target: Any) -> TracedTensor:
    difference = pointwise.sub(input, target)
    return difference._tracer.add(Op.ABS, difference)


@implements("mse_loss")
def mse_loss(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", weight: Any = None
) -> TracedTensor:
    """The squared difference."""
    unsupported_argument("mse_loss", size_average=size_average, reduce=reduce, weight=weight)
    difference = pointwise.sub(input, target)
    return _collected(difference._tracer.add(Op.MUL, difference, difference), reduction)


@implements("l1_loss")
def l1_loss(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", weight: Any = None
) -> TracedTensor:
    """The difference without its sign."""
    unsupported_argument("l1_loss", size_average=size_average, reduce=reduce, weight=weight)
    return _collected(_distance(input, target), reduction)


@implements("smooth_l1_loss")
def smooth_l1_loss(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", beta: float = 1.0
) -> TracedTensor:
    """d^2 / (2 beta) for a difference d below beta, d - beta / 2 from there on."""
    unsupported_argument("smooth_l1_loss", size_average=size_average, reduce=reduce)
    if not beta:
        return l1_loss(input, target, reduction=reduction)
    return _collected(pointwise.div(_huber("smooth_l1_loss", input, target, beta), beta), reduction)


@implements("huber_loss")
def huber_loss(input: Any, target: Any, reduction: str = "mean", delta: float = 1.0, weight: Any = None) -> TracedTensor:
    """d^2 / 2 for a difference d below delta, delta (d - delta / 2) from there on."""
    unsupported_argument("huber_loss", weight=weight)
    return _collected(_huber("huber_loss", input, target, delta), reduction)


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
    unsupported_argument("binary_cross_entropy_with_logits", size_average=size_average, reduce=reduce)
    tracer = tracer_of(input, target)
    x, y = tracer.lift(input), tracer.lift(target)
    one, other = (tracer.add(Op.LOGSIGMOID, z) for z in (x, tracer.add(Op.NEG, x)))
    hit = pointwise.mul(y, one) if pos_weight is None else pointwise.mul(pointwise.mul(y, one), pos_weight)
    loss = tracer.add(Op.NEG, pointwise.add(hit, pointwise.mul(pointwise.rsub(y, 1), other)))
    return _collected(loss if weight is None else pointwise.mul(loss, weight), reduction)


@implements("kl_div")
def kl_div(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", log_target: bool = False
) -> TracedTensor:
    """target (log(target) - input); 0 where the target is 0."""
    unsupported_argument("kl_div", size_average=size_average, reduce=reduce)
    tracer = tracer_of(input, target)
    y = tracer.lift(target)
    for x in (tracer.lift(input), y):
        floats("kl_div", x)
    if log_target:
        loss = pointwise.mul(tracer.add(Op.EXP, y), pointwise.sub(y, input))
    else:
        loss = pointwise.sub(pointwise.xlogy(y, y), pointwise.mul(y, input))
    if reduction == "batchmean":
        return pointwise.div(reductions.sum(loss), loss.shape[0])
    return _collected(loss, reduction)
