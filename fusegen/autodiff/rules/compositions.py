"""Derivatives of compositions that are better than those of what they are made of: more accurate, or with fewer reductions."""

from __future__ import annotations

import math
from typing import cast

from fusegen.autodiff.rules.rule import Gradients, Rule
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import product
from fusegen.passes.algebra import Value
from fusegen.passes.expand import normalized_dims, standardized


def _number(y: Value, name: str) -> float:
    return float(cast(float, y.node.attr(name)))


def _along(y: Value) -> tuple[int, ...]:
    return (cast(int, y.node.attr("dim")),)


def _relu(y: Value, dy: Value) -> Gradients:
    return (y.apply(Op.LE, 0).where(0, dy),)


def _gelu(y: Value, dy: Value) -> Gradients:
    """s·(1 + x·(1 − s)·u'(x)) with y = x·s and s = sigmoid(u), of the tanh form; else s + x·s'(x) with s = (1 + erf(x/√2))/2.

    1 − s is sigmoid(−u): the difference would cancel where u'(x) is large.
    """
    x = y.arg(0)
    if y.node.attr("approximate") == "tanh":
        scale = 2.0 * math.sqrt(2.0 / math.pi)
        u = x * (scale + 0.044715 * scale * (x * x))
        slope = x * (-u).apply(Op.SIGMOID) * (scale + 3.0 * 0.044715 * scale * (x * x))
        return (dy * (u.apply(Op.SIGMOID) * (1.0 + slope)),)
    density = (-0.5 * (x * x)).apply(Op.EXP) * (1.0 / math.sqrt(2.0 * math.pi))
    return (dy * (0.5 * (1.0 + (x * math.sqrt(0.5)).apply(Op.ERF)) + x * density),)


def _softplus(y: Value, dy: Value) -> Gradients:
    scaled = y.arg(0) * _number(y, "beta")
    return ((scaled > _number(y, "threshold")).where(dy, dy * scaled.apply(Op.SIGMOID)),)


def _elu(y: Value, dy: Value) -> Gradients:
    x = y.arg(0)
    return ((x > 0).where(dy, dy * (_number(y, "alpha") * x.apply(Op.EXP))),)


def _mish(y: Value, dy: Value) -> Gradients:
    """tanh(s) + x·sigmoid(x)·(1 − tanh(s)²) with s = softplus(x)."""
    x = y.arg(0)
    gate = (x > 20.0).where(x, x.apply(Op.EXP).apply(Op.LOG1P)).apply(Op.TANH)
    return (dy * (gate + x * x.apply(Op.SIGMOID) * (1.0 - gate * gate)),)


def _hardsigmoid(y: Value, dy: Value) -> Gradients:
    x = y.arg(0)
    return (x.apply(Op.ABS).apply(Op.LT, 3.0).where(dy / 6.0, 0),)


def _hardswish(y: Value, dy: Value) -> Gradients:
    x = y.arg(0)
    inside = x.apply(Op.LT, 3.0).where(dy * (x / 3.0 + 0.5), dy)
    return (x.apply(Op.LE, -3.0).where(0, inside),)


def _var(y: Value, dy: Value) -> Gradients:
    x, dims = y.arg(0), cast(tuple[int, ...], y.node.attr("dims"))
    count = product(x.node.shape[d] for d in dims)
    return ((2.0 * dy * (x - x.mean(dims))).per(count, _number(y, "correction")),)


def _softmax(y: Value, dy: Value) -> Gradients:
    return (y * (dy - (dy * y).reduce(Op.SUM, _along(y))),)


def _log_softmax(y: Value, dy: Value) -> Gradients:
    return (dy - y.apply(Op.EXP) * dy.reduce(Op.SUM, _along(y)),)


def _norm(y: Value, dy: Value) -> Gradients:
    """r·(g − mean(g) − x̂·mean(g·x̂)) with x̂ = (x − μ)·r and g = dy·γ; Σ dy·x̂; Σ dy. rms_norm has neither μ nor mean(g)."""
    has_bias = y.node.op is Op.LAYER_NORM and bool(y.node.attr("has_bias"))
    has_weight = len(y.node.args) > 1 + has_bias
    centered, rstd = standardized(y.arg(0), y.node)
    normal, dims = centered * rstd, normalized_dims(y.node)
    g = dy * y.arg(1) if has_weight else dy
    less = g - g.mean(dims) if y.node.op is Op.LAYER_NORM else g
    by_x = rstd * (less - normal * (g * normal).mean(dims))
    return (by_x, *((dy * normal,) if has_weight else ()), *((dy,) if has_bias else ()))


COMPOSITIONS: dict[Op, Rule] = {
    Op.RELU: _relu,
    Op.GELU: _gelu,
    Op.SOFTPLUS: _softplus,
    Op.ELU: _elu,
    Op.MISH: _mish,
    Op.HARDSIGMOID: _hardsigmoid,
    Op.HARDSWISH: _hardswish,
    Op.LOGSIGMOID: lambda y, dy: (dy * (-y.arg(0)).apply(Op.SIGMOID),),
    Op.VAR: _var,
    Op.LOGSUMEXP: lambda y, dy: (dy * (y.arg(0) - y).apply(Op.EXP),),
    Op.SOFTMAX: _softmax,
    Op.LOG_SOFTMAX: _log_softmax,
    Op.LAYER_NORM: _norm,
    Op.RMS_NORM: _norm,
}
