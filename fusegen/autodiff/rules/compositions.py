"""Derivatives of compositions that are better than those of their primitives: more accurate, fewer reductions, or no NaN where an
infinite factor meets a gradient of 0.

The rules follow torch where a function has no derivative: at a bound, at a zero of a norm, at NaN.
"""

from __future__ import annotations

import math
from typing import cast

from fusegen.autodiff.rules.primitives import GradientRule, Gradients
from fusegen.ir.ops import Op
from fusegen.passes.algebra import Value
from fusegen.passes.expand import normalized_dims, standardized


def _along(y: Value) -> tuple[int, ...]:
    return (cast(int, y.node.attr("dim")),)


def _relu(y: Value, dy: Value) -> Gradients:
    return (y.apply(Op.LE, 0).where(0, dy),)


def _gelu(y: Value, dy: Value) -> Gradients:
    """s + s·(1 − s)·x·u'(x) with y = x·s and s = sigmoid(u), in the tanh form; else s + x·s'(x) with s = (1 + erf(x/√2))/2.

    1 − s is computed as sigmoid(−u), since the difference would cancel where u'(x) is large. s' comes first in its products, since
    it is 0 where the other factors are large.
    """
    x = y.arg(0)
    if y.node.attr("approximate") == "tanh":
        scale = 2.0 * math.sqrt(2.0 / math.pi)
        u = x * (scale + 0.044715 * scale * (x * x))
        s = u.apply(Op.SIGMOID)
        slope = s * (-u).apply(Op.SIGMOID) * x * (scale + 3.0 * 0.044715 * scale * (x * x))
        return (dy * (s + slope),)
    density = (-0.5 * (x * x)).apply(Op.EXP) * (1.0 / math.sqrt(2.0 * math.pi))
    return (dy * (0.5 * (1.0 + (x * math.sqrt(0.5)).apply(Op.ERF)) + x * density),)


def _softplus(y: Value, dy: Value) -> Gradients:
    scaled = y.arg(0) * y.number("beta")
    return ((scaled > y.number("threshold")).where(dy, dy * scaled.apply(Op.SIGMOID)),)


def _elu(y: Value, dy: Value) -> Gradients:
    x = y.arg(0)
    return (x.apply(Op.LE, 0).where(dy * (y.number("alpha") * x.apply(Op.EXP)), dy),)


def _celu(y: Value, dy: Value) -> Gradients:
    x = y.arg(0)
    return (x.apply(Op.LE, 0).where(dy * (x / y.number("alpha")).apply(Op.EXP), dy),)


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


def _clamp(y: Value, dy: Value) -> Gradients:
    """dy for the bound where it clamps, else for x, also where x equals the bound; 0 where either is NaN."""
    x, bound = y.arg(0), y.arg(1)
    inside, beyond = (Op.GE, Op.LT) if y.node.op is Op.CLAMP_MIN else (Op.LE, Op.GT)
    return x.apply(inside, bound).where(dy, 0), x.apply(beyond, bound).where(dy, 0)


def _hardtanh(y: Value, dy: Value) -> Gradients:
    x, low, high = (y.arg(n) for n in range(3))
    return x.apply(Op.LE, low).apply(Op.LOGICAL_OR, x.apply(Op.GE, high)).where(0, dy), None, None


def _prelu(y: Value, dy: Value) -> Gradients:
    x, slope = y.arg(0), y.arg(1)
    return (x > 0).where(dy, slope * dy), (x > 0).where(0, x * dy)


def _fmod(y: Value, dy: Value) -> Gradients:
    return dy, -dy * (y.arg(0) / y.arg(1)).apply(Op.TRUNC)


def _xlogy(y: Value, dy: Value) -> Gradients:
    """dy·log(y), and 0 where x is 0 and y ≤ 0; dy·x/y."""
    a, b = y.arg(0), y.arg(1)
    is_zero = a.apply(Op.EQ, 0).apply(Op.LOGICAL_AND, b.apply(Op.LE, 0))
    return is_zero.where(0, dy.apply(Op.XLOGY, b)), dy * a / b


def _hypot(y: Value, dy: Value) -> Gradients:
    """dy·a/y and dy·b/y."""
    return tuple(dy * (leg / y) for leg in (y.arg(0), y.arg(1)))


def _logit(y: Value, dy: Value) -> Gradients:
    """dy/(x·(1 − x)) in [0, 1], NaN outside."""
    x = y.arg(0)
    is_outside = x.apply(Op.LT, 0).apply(Op.LOGICAL_OR, x > 1)
    return (is_outside.where(math.nan, dy / (x * (1.0 - x))),)


def _xlog1py(y: Value, dy: Value) -> Gradients:
    """dy·log(1 + y), and 0 where x is 0 and y ≤ −1; dy·x/(1 + y)."""
    a, b = y.arg(0), y.arg(1)
    is_zero = a.apply(Op.EQ, 0).apply(Op.LOGICAL_AND, b.apply(Op.LE, -1))
    return is_zero.where(0, dy.apply(Op.XLOG1PY, b)), dy * a / (b + 1.0)


def _huber(y: Value, dy: Value) -> Gradients:
    delta = y.number("delta")
    return (dy * y.arg(0).apply(Op.MAXIMUM, -delta).apply(Op.MINIMUM, delta),)


def _asin(y: Value, dy: Value) -> Gradients:
    x = y.arg(0)
    slope = dy * ((1.0 - x) * (x + 1.0)).apply(Op.RSQRT)
    return (-slope if y.node.op is Op.ACOS else slope,)


def _asinh(y: Value, dy: Value) -> Gradients:
    x = y.arg(0)
    return (dy * (x * x + 1.0).apply(Op.RSQRT),)


def _acosh(y: Value, dy: Value) -> Gradients:
    x = y.arg(0)
    return (dy * ((x - 1.0) * (x + 1.0)).apply(Op.RSQRT),)


def _sinc(y: Value, dy: Value) -> Gradients:
    """(cos(πx) − y)/x, and 0 at 0."""
    x = y.arg(0)
    slope = ((x * math.pi).apply(Op.COS) - y) / x
    return (x.apply(Op.EQ, 0).where(0, dy * slope),)


def _binary_cross_entropy(y: Value, dy: Value) -> Gradients:
    """(x − t)/(x·(1 − x)), with the divisor at least 1e-12; log(1 − x) − log(x)."""
    x, target = y.arg(0), y.arg(1)
    divisor = ((1.0 - x) * x).apply(Op.MAXIMUM, 1e-12)
    return dy * (x - target) / divisor, dy * ((-x).apply(Op.LOG1P) - x.apply(Op.LOG))


def _softmax(y: Value, dy: Value) -> Gradients:
    return (y * (dy - (dy * y).reduce(Op.SUM, _along(y))),)


def _log_softmax(y: Value, dy: Value) -> Gradients:
    return (dy - y.apply(Op.EXP) * dy.reduce(Op.SUM, _along(y)),)


def _norm(y: Value, dy: Value) -> Gradients:
    """r·(g − mean(g) − x̂·mean(g·x̂)) with x̂ = (x − μ)·r and g = dy·γ; Σ dy·x̂; Σ dy. rms_norm has neither μ nor mean(g).

    An invertible norm computes x̂ = (y − β)/γ.
    """
    has_bias = y.node.op is Op.LAYER_NORM and bool(y.node.attr("has_bias"))
    has_weight = len(y.node.tensors) > 1 + has_bias
    centered, rstd = standardized(y.arg(0), y.node, y.number("eps"))
    normal, dims = centered * rstd, normalized_dims(y.node)
    if "invertible" in dict(y.node.attrs):
        normal = (y - y.arg(2)) / y.arg(1)
    g = dy * y.arg(1) if has_weight else dy
    less = g - g.mean(dims) if y.node.op is Op.LAYER_NORM else g
    by_x = rstd * (less - normal * (g * normal).mean(dims))
    return (by_x, *((dy * normal,) if has_weight else ()), *((dy,) if has_bias else ()))


COMPOSITIONS: dict[Op, GradientRule] = {
    Op.RELU: _relu,
    Op.GELU: _gelu,
    Op.SOFTPLUS: _softplus,
    Op.ELU: _elu,
    Op.MISH: _mish,
    Op.HARDSIGMOID: _hardsigmoid,
    Op.HARDSWISH: _hardswish,
    Op.CELU: _celu,
    Op.SINH: lambda y, dy: (dy * y.arg(0).apply(Op.COSH),),
    Op.COSH: lambda y, dy: (dy * y.arg(0).apply(Op.SINH),),
    Op.ERFINV: lambda y, dy: (dy * (math.sqrt(math.pi) / 2.0 * (y * y).apply(Op.EXP)),),
    Op.CLAMP_MIN: _clamp,
    Op.CLAMP_MAX: _clamp,
    Op.HARDTANH: _hardtanh,
    Op.PRELU: _prelu,
    Op.FMOD: _fmod,
    Op.XLOGY: _xlogy,
    Op.ASIN: _asin,
    Op.ACOS: _asin,
    Op.ASINH: _asinh,
    Op.ACOSH: _acosh,
    Op.SINC: _sinc,
    Op.XLOG1PY: _xlog1py,
    Op.HYPOT: _hypot,
    Op.LOGIT: _logit,
    Op.ENTR: lambda y, dy: (dy * (-y.arg(0).apply(Op.LOG) - 1.0),),
    Op.BINARY_CROSS_ENTROPY: _binary_cross_entropy,
    Op.HUBER: _huber,
    Op.LOGSIGMOID: lambda y, dy: (dy * (-y.arg(0)).apply(Op.SIGMOID),),
    Op.SOFTMAX: _softmax,
    Op.SAFE_SOFTMAX: _softmax,  # from its own result, which is 0 in fully masked rows, where softmax is NaN
    Op.LOG_SOFTMAX: _log_softmax,
    Op.LAYER_NORM: _norm,
    Op.RMS_NORM: _norm,
}
