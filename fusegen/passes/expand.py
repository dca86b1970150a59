"""Expands composite operations to primitives, one rule each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar, cast

from fusegen.dtypes import DType
from fusegen.ir.graph import Node
from fusegen.ir.ops import Op
from fusegen.passes.algebra import Value, ValueLike, number

Expansion: TypeAlias = Callable[[Sequence[Value], Node], Value]
ExpansionT = TypeVar("ExpansionT", bound=Expansion)

_LONGEST_HELD = 32768
"""Longest row, in elements, that every plan reads once and keeps in registers or shared memory."""

EXPANSIONS: dict[Op, Expansion] = {}
"""One rule per operation whose `Op.row.primitive` is False."""


def _expands(op: Op) -> Callable[[ExpansionT], ExpansionT]:
    def register(rule: ExpansionT) -> ExpansionT:
        EXPANSIONS[op] = rule
        return rule

    return register


def _pointwise(op: Op) -> Callable[[Callable[[Value], Value]], Callable[[Value], Value]]:
    def register(rule: Callable[[Value], Value]) -> Callable[[Value], Value]:
        EXPANSIONS[op] = lambda args, node: rule(args[0])
        return rule

    return register


def _float_rule(op: Op, rule: Callable[[Value], Value]) -> None:
    """Registers a rule for floats; integers are converted first."""
    EXPANSIONS[op] = lambda args, node: rule(args[0] if args[0].dtype.is_float else args[0].apply(Op.CAST, dtype=node.dtype))


@_expands(Op.DETACH)
def _detach(args: Sequence[Value], _node: Node) -> Value:
    return args[0]


@_pointwise(Op.RECIPROCAL)
def _reciprocal(x: Value) -> Value:
    return 1.0 / x


@_pointwise(Op.SQUARE)
def _square(x: Value) -> Value:
    return x * x


@_pointwise(Op.RELU)
def _relu(x: Value) -> Value:
    return x.apply(Op.MAXIMUM, 0)


@_pointwise(Op.SILU)
def _silu(x: Value) -> Value:
    return x * x.apply(Op.SIGMOID)


@_expands(Op.GELU)
def _gelu(args: Sequence[Value], node: Node) -> Value:
    """x * Phi(x); "tanh" is Hendrycks and Gimpel's approximation (arXiv 1606.08415), with (1 + tanh(u)) / 2 = sigmoid(2u)."""
    (x,) = args
    if node.attr("approximate") == "tanh":
        x = x.noted("gelu in its tanh form, x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), as x sigmoid(2u).")
        scale = 2.0 * math.sqrt(2.0 / math.pi)
        return x * (x * (scale + 0.044715 * scale * (x * x))).apply(Op.SIGMOID)
    return 0.5 * x * (1.0 + (x * math.sqrt(0.5)).apply(Op.ERF))


@_expands(Op.SOFTPLUS)
def _softplus(args: Sequence[Value], node: Node) -> Value:
    beta, threshold = (number(args, node, name) for name in ("beta", "threshold"))
    x = args[0]
    scaled = x * beta
    return (scaled > threshold).where(x, scaled.apply(Op.EXP).apply(Op.LOG1P) / beta)


@_expands(Op.LEAKY_RELU)
def _leaky_relu(args: Sequence[Value], node: Node) -> Value:
    x = args[0]
    return (x > 0).where(x, x * number(args, node, "negative_slope"))


@_expands(Op.ELU)
def _elu(args: Sequence[Value], node: Node) -> Value:
    x = args[0]
    return (x > 0).where(x, x.apply(Op.EXPM1) * number(args, node, "alpha"))


@_pointwise(Op.MISH)
def _mish(x: Value) -> Value:
    """x tanh(log(1 + e^x)) = x n / (n + 2) with n = e^x (e^x + 2), without cancellation; the quotient is 1 from 20 on."""
    x = x.noted(
        "mish, x tanh(log(1 + e^x)) = x n / (n + 2) with n = e^x (e^x + 2). From 20 on, n / (n + 2) is 1; n must not overflow."
    )
    power = x.apply(Op.MINIMUM, 20.0).apply(Op.EXP)
    n = power * (power + 2.0)
    return x * (n / (n + 2.0))


@_pointwise(Op.HARDSIGMOID)
def _hardsigmoid(x: Value) -> Value:
    return (x + 3.0).apply(Op.MAXIMUM, 0.0).apply(Op.MINIMUM, 6.0) / 6.0


@_pointwise(Op.HARDSWISH)
def _hardswish(x: Value) -> Value:
    return x * _hardsigmoid(x)


@_pointwise(Op.LOGSIGMOID)
def _logsigmoid(x: Value) -> Value:
    return x.apply(Op.MINIMUM, 0.0) - (-x.apply(Op.ABS)).apply(Op.EXP).apply(Op.LOG1P)


@_expands(Op.CELU)
def _celu(args: Sequence[Value], node: Node) -> Value:
    """Barron, Continuously Differentiable Exponential Linear Units (arXiv 1704.07483)."""
    x, alpha = args[0], number(args, node, "alpha")
    return (x > 0).where(x, (x / alpha).apply(Op.EXPM1) * alpha)


@_pointwise(Op.SINH)
def _sinh(x: Value) -> Value:
    """(u - v)/2 · (u + v + 2) with u = e^(x/2) - 1 and v = e^(-x/2) - 1: terms have equal signs, and half the argument avoids
    overflow."""
    u, v = (x * 0.5).apply(Op.EXPM1), (x * -0.5).apply(Op.EXPM1)
    return (u - v) * 0.5 * (u + v + 2.0)


@_pointwise(Op.COSH)
def _cosh(x: Value) -> Value:
    """The squares of e^(x/2) and e^(-x/2), halved before they overflow."""
    u, v = (x * 0.5).apply(Op.EXP), (x * -0.5).apply(Op.EXP)
    return u * (u * 0.5) + v * (v * 0.5)


@_expands(Op.CLAMP_MIN)
def _clamp_min(args: Sequence[Value], _node: Node) -> Value:
    return args[0].apply(Op.MAXIMUM, args[1])


@_expands(Op.CLAMP_MAX)
def _clamp_max(args: Sequence[Value], _node: Node) -> Value:
    return args[0].apply(Op.MINIMUM, args[1])


@_expands(Op.HARDTANH)
def _hardtanh(args: Sequence[Value], _node: Node) -> Value:
    x, low, high = args
    return x.apply(Op.MAXIMUM, low).apply(Op.MINIMUM, high)


@_expands(Op.PRELU)
def _prelu(args: Sequence[Value], _node: Node) -> Value:
    x, slope = args
    return (x > 0).where(x, slope * x)


def _polynomial(x: Value, coefficients: Sequence[float]) -> Value:
    """Horner's rule, the highest power first."""
    first, second, *others = coefficients
    result = x * first + second
    for coefficient in others:
        result = result * x + coefficient
    return result


_HALF_SQRT_PI = math.sqrt(math.pi) / 2.0


def _erfinv(x: Value) -> Value:
    """Rational approximations, then two steps of Halley's method. Above 1/2, 1 - |x| is compared with erfc, which has more
    digits there."""
    magnitude = x.apply(Op.ABS)
    complement = 1.0 - magnitude
    square = magnitude * magnitude
    above = _polynomial(square, (-0.140543331, 0.914624893, -1.645349621, 0.886226899))
    below = _polynomial(square, (0.012229801, -0.329097515, 1.442710462, -2.118377725, 1.0))
    root = (-(complement * 0.5).apply(Op.LOG)).apply(Op.SQRT)
    far_above = _polynomial(root, (1.641345311, 3.429567803, -1.624906493, -1.970840454))
    far_below = _polynomial(root, (1.637067800, 3.543889200, 1.0))
    inverse = (magnitude > 0.7).where(far_above / far_below, magnitude * (above / below))
    for _ in range(2):
        error = (magnitude > 0.5).where(complement - inverse.apply(Op.ERFC), inverse.apply(Op.ERF) - magnitude)
        step = error * (inverse * inverse).apply(Op.EXP) * _HALF_SQRT_PI
        inverse = inverse - step / (1.0 + inverse * step)
    inverse = magnitude.apply(Op.EQ, 1.0).where(math.inf, inverse)
    return x.apply(Op.EQ, 0.0).where(x, (x > 0.0).where(inverse, -inverse))


_STEPS = 10
"""Arguments are shifted above this bound, where the asymptotic series has all digits of float64."""

_DIGAMMA = (1 / 12, -691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12)
"""Coefficients from Bernoulli numbers of orders 14 to 2: Abramowitz and Stegun 6.3.18."""


def _digamma(x: Value) -> Value:
    """Reflects arguments up to 0. The result is infinite at 0, with the sign opposite to the zero's, and NaN at negative
    integers."""
    is_low = x.apply(Op.LE, 0.0)
    positive = is_low.where(1.0 - x, x)
    slope = _log_gamma_slope(positive)
    angle = _from_nearest(x) * math.pi
    cotangent = angle.apply(Op.COS) / angle.apply(Op.SIN) * math.pi
    reflected = angle.apply(Op.EQ, 0.0).where(math.nan, slope - cotangent)
    return x.apply(Op.EQ, 0.0).where(-(1.0 / x), is_low.where(reflected, slope))


def _from_nearest(x: Value) -> Value:
    """The distance to the nearest integer, which is exact, so that the angle near a pole keeps all digits."""
    return x - x.apply(Op.ROUND)


def _log_gamma_slope(x: Value) -> Value:
    is_small = x.apply(Op.LT, float(_STEPS))
    skipped_terms = _recurrence_sum(x)
    argument = is_small.where(x + float(_STEPS), x)
    inverse = 1.0 / argument
    square = inverse * inverse
    series = argument.apply(Op.LOG) - inverse * 0.5 - square * _polynomial(square, _DIGAMMA)
    return is_small.where(series - skipped_terms, series)


def _recurrence_sum(x: Value) -> Value:
    """The sum of 1/(x + k) for k < _STEPS, smallest terms first."""
    total: Value | None = None
    for k in reversed(range(_STEPS)):
        term = 1.0 / (x + float(k) if k else x)
        total = term if total is None else total + term
    assert total is not None
    return total


_float_rule(Op.ERFINV, _erfinv)
_float_rule(Op.DIGAMMA, _digamma)


@_expands(Op.FMOD)
def _fmod(args: Sequence[Value], node: Node) -> Value:
    """The remainder of the magnitudes, with the sign of the first operand, computed in floats: bools and the least integer have
    no magnitude."""
    a, b = (x if x.node.dtype.is_float else x.apply(Op.CAST, dtype=node.dtype) for x in args)
    remainder = a.apply(Op.ABS).apply(Op.REMAINDER, b.apply(Op.ABS))
    return a.apply(Op.LT, 0).where(-remainder, remainder)


@_expands(Op.XLOGY)
@_expands(Op.XLOG1PY)
def _xlogy(args: Sequence[Value], node: Node) -> Value:
    x, y = args
    if node.dtype is DType.FLOAT64 or not y.node.dtype.is_float:  # the logarithm in a narrower type has too few digits
        y = y.apply(Op.CAST, dtype=node.dtype)
    is_zero = x.apply(Op.EQ, 0).apply(Op.LOGICAL_AND, y.apply(Op.EQ, y))
    return is_zero.where(0.0, x * y.apply(Op.LOG if node.op is Op.XLOGY else Op.LOG1P))


@_expands(Op.HYPOT)
def _hypot(args: Sequence[Value], _node: Node) -> Value:
    """sqrt(x^2 + y^2) without overflow; infinite if either operand is, even next to NaN."""
    x, y = (operand.apply(Op.ABS) for operand in args)
    greater, lesser = x.apply(Op.MAXIMUM, y), x.apply(Op.MINIMUM, y)
    ratio = lesser / greater
    length = greater * (ratio * ratio + 1.0).apply(Op.SQRT)
    is_infinite = x.apply(Op.EQ, math.inf).apply(Op.LOGICAL_OR, y.apply(Op.EQ, math.inf))
    return is_infinite.where(math.inf, greater.apply(Op.EQ, 0).where(greater, length))


@_pointwise(Op.LOGIT)
def _logit(x: Value) -> Value:
    return (x / (1.0 - x)).apply(Op.LOG)


@_pointwise(Op.ENTR)
def _entr(x: Value) -> Value:
    """-x log(x): 0 at 0, -inf below."""
    above = -(x * x.apply(Op.LOG))
    return x.apply(Op.LT, 0).where(-math.inf, x.apply(Op.EQ, 0).where(0.0, above))


@_expands(Op.HUBER)
def _huber(args: Sequence[Value], node: Node) -> Value:
    """Huber, Robust Estimation of a Location Parameter (1964), equation 2.3."""
    delta, distance = number(args, node, "delta"), args[0].apply(Op.ABS)
    return distance.apply(Op.LT, delta).where(distance * distance / 2, (distance - delta / 2) * delta)


@_pointwise(Op.ASIN)
def _asin(x: Value) -> Value:
    return x.apply(Op.ATAN2, _sqrt_one_minus_square(x))


@_pointwise(Op.ACOS)
def _acos(x: Value) -> Value:
    return _sqrt_one_minus_square(x).apply(Op.ATAN2, x)


def _sqrt_one_minus_square(x: Value) -> Value:
    """sqrt(1 - x^2), without cancellation near 1."""
    return ((1.0 - x) * (x + 1.0)).apply(Op.SQRT)


def _is_far(x: Value) -> Value:
    """True if x^2 + 1 rounds to x^2 in the value's dtype; below, squares do not overflow."""
    return x > (1e4 if x.dtype.is_half else 1e9)


@_pointwise(Op.ASINH)
def _asinh(x: Value) -> Value:
    """log(x + sqrt(x^2 + 1)) as log1p of the magnitude; log(2 x) if the square would overflow."""
    magnitude = x.apply(Op.ABS)
    square = magnitude * magnitude
    near = (magnitude + square / ((square + 1.0).apply(Op.SQRT) + 1.0)).apply(Op.LOG1P)
    angle = _is_far(magnitude).where(magnitude.apply(Op.LOG) + math.log(2.0), near)
    return x.apply(Op.EQ, 0).where(x, x.apply(Op.LT, 0).where(-angle, angle))


@_pointwise(Op.ACOSH)
def _acosh(x: Value) -> Value:
    """log(x + sqrt(x^2 - 1)) in terms of x - 1; log(2 x) if the square would overflow."""
    excess = x - 1.0
    near = (excess + (excess * (excess + 2.0)).apply(Op.SQRT)).apply(Op.LOG1P)
    angle = _is_far(x).where(x.apply(Op.LOG) + math.log(2.0), near)
    return x.apply(Op.LT, 1.0).where(math.nan, angle)


@_pointwise(Op.SINC)
def _sinc(x: Value) -> Value:
    angle = x * math.pi
    return x.apply(Op.EQ, 0).where(1.0, angle.apply(Op.SIN) / angle)


@_expands(Op.BINARY_CROSS_ENTROPY)
def _binary_cross_entropy(args: Sequence[Value], _node: Node) -> Value:
    """-y log(x) - (1 - y) log(1 - x); like torch, clamps logarithms to -100."""
    x, y = args
    log_x, log_complement = (z.apply(Op.MAXIMUM, -100.0) for z in (x.apply(Op.LOG), (-x).apply(Op.LOG1P)))
    return (y - 1.0) * log_complement - y * log_x


def _dims(node: Node) -> tuple[int, ...]:
    return cast(tuple[int, ...], node.attr("dims"))


@_expands(Op.MEAN)
def _mean(args: Sequence[Value], node: Node) -> Value:
    return args[0].mean(_dims(node))


@_expands(Op.VAR)
def _var(args: Sequence[Value], node: Node) -> Value:
    """The sum of squares around the mean; never E[x^2] - mean^2, which cancels.

    Rows that a kernel keeps on chip are summed twice; other rows combine moments, in one pass over memory instead of two.
    """
    x, dims, correction = args[0], _dims(node), number(args, node, "correction")
    if not _is_held(x, dims):
        return x.reduce(Op.MOMENTS, dims, part="m2").per(x.count(dims), correction)
    centered = x - x.mean(dims)
    return (centered * centered).mean(dims, correction)


def _is_held(x: Value, dims: tuple[int, ...]) -> bool:
    """True for rows short enough to stay on chip; columns never do."""
    rank = len(x.node.shape)
    count = x.count(dims)
    return dims == tuple(range(rank - len(dims), rank)) and isinstance(count, int) and count <= _LONGEST_HELD


@_expands(Op.STD)
def _std(args: Sequence[Value], node: Node) -> Value:
    return args[0].apply(Op.VAR, *args[1:], **dict(node.attrs)).apply(Op.SQRT)


@_expands(Op.VECTOR_NORM)
def _vector_norm(args: Sequence[Value], node: Node) -> Value:
    """(sum |x|^ord)^(1/ord)."""
    x, ord = args[0], number(args, node, "ord")
    if ord == 2:
        return (x * x).reduce(Op.SUM, _dims(node)).apply(Op.SQRT)
    return x.apply(Op.ABS).apply(Op.POW, ord).reduce(Op.SUM, _dims(node)).apply(Op.POW, 1.0 / ord)


@_expands(Op.LOGSUMEXP)
def _logsumexp(args: Sequence[Value], node: Node) -> Value:
    (x,) = args
    peak, mass = (x.reduce(Op.NORMALIZER, _dims(node), part=part) for part in ("peak", "mass"))
    return peak + mass.apply(Op.LOG)


@_expands(Op.SOFTMAX)
def _softmax(args: Sequence[Value], node: Node) -> Value:
    (x,) = args
    dims = (cast(int, node.attr("dim")),)
    weights = (x - x.reduce(Op.AMAX, dims)).apply(Op.EXP)
    return weights / weights.reduce(Op.SUM, dims)


@_expands(Op.SAFE_SOFTMAX)
def _safe_softmax(args: Sequence[Value], node: Node) -> Value:
    """Attention weights: 0 in fully masked rows."""
    (x,) = args
    is_masked = x.reduce(Op.AMAX, (cast(int, node.attr("dim")),)).apply(Op.EQ, -math.inf)
    return is_masked.where(0.0, _softmax(args, node))


@_expands(Op.LOG_SOFTMAX)
def _log_softmax(args: Sequence[Value], node: Node) -> Value:
    (x,) = args
    dims = (cast(int, node.attr("dim")),)
    shifted = x - x.reduce(Op.AMAX, dims)
    return shifted - shifted.apply(Op.EXP).reduce(Op.SUM, dims).apply(Op.LOG)


def normalized_dims(node: Node) -> tuple[int, ...]:
    """Returns the dims that a norm reduces."""
    rank = len(node.shape)
    return tuple(range(rank - cast(int, node.attr("count")), rank))


def standardized(x: Value, node: Node, eps: ValueLike) -> tuple[Value, Value]:
    """Returns the two factors of a norm: its operand (for layer norm minus the mean), and the reciprocal standard deviation or
    root mean square."""
    dims = normalized_dims(node)
    centered = x - x.mean(dims) if node.op is Op.LAYER_NORM else x
    return centered, ((centered * centered).mean(dims) + eps).apply(Op.RSQRT)


@_expands(Op.LAYER_NORM)
def _layer_norm(args: Sequence[Value], node: Node) -> Value:
    """Ba et al., Layer Normalization (arXiv 1607.06450)."""
    x, *affine = args[: len(node.tensors)]
    centered, rstd = standardized(x, node, number(args, node, "eps"))
    y = centered * rstd
    if node.attr("has_weight"):
        y = y * affine[0]
    return _in_dtype(y + affine[-1] if node.attr("has_bias") else y, node)


def _in_dtype(value: Value, node: Node) -> Value:
    """Casts to the node's dtype, since wider weights do not change it."""
    return value if value.dtype is node.dtype else value.apply(Op.CAST, dtype=node.dtype)


@_expands(Op.RMS_NORM)
def _rms_norm(args: Sequence[Value], node: Node) -> Value:
    """Zhang and Sennrich, Root Mean Square Layer Normalization (arXiv 1910.07467)."""
    x, *affine = args[: len(node.tensors)]
    x, rstd = standardized(x, node, number(args, node, "eps"))
    y = x * rstd
    return _in_dtype(y * affine[0] if affine else y, node)


def expand(value: Value) -> Value:
    """Returns a composite node as primitives; a primitive is unchanged."""
    rule = EXPANSIONS.get(value.node.op)
    if rule is None:
        return value
    return rule(value.args, value.node)
