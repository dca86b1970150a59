"""Losses: a value an element, then the mean, the sum or nothing of them."""

from __future__ import annotations

import math
from typing import Any

from fusegen.errors import TraceError
from fusegen.ir.ops import Op
from fusegen.lang.functions import pointwise, reductions
from fusegen.lang.functions.common import binary, cast, floats, setting, tracer_of, unsupported_argument
from fusegen.lang.functions.views import require_shape, unsqueeze
from fusegen.lang.registry import implements
from fusegen.lang.values import TracedTensor


def collected(x: TracedTensor, reduction: str) -> TracedTensor:
    """The mean of a loss, its sum, or the loss as it is.

    Raises:
        TraceError: another reduction is asked for.
    """
    if reduction not in ("none", "mean", "sum"):
        raise TraceError(f"a loss with reduction={reduction!r}", mend="use 'none', 'mean' or 'sum'")
    return x if reduction == "none" else reductions.mean(x) if reduction == "mean" else reductions.sum(x)


def legacy(reduction: str, size_average: Any, reduce: Any) -> str:
    """The reduction that two old arguments ask for, where one of them is given: not reduce is none, not size_average the sum."""
    if size_average is None and reduce is None:
        return reduction
    if reduce is not None and not reduce:
        return "none"
    return "mean" if size_average is None or size_average else "sum"


def _distance(input: Any, target: Any) -> TracedTensor:
    difference = pointwise.sub(input, target)
    return difference._tracer.add(Op.ABS, difference)


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
    return collected(_distance(input, target), reduction)


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
