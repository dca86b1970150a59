"""One bound rule an operation: from enclosures of the operands to an enclosure of the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fusegen.ir.ops import Op
from fusegen.ir.reference import RULES as EXACT
from tests.fuzz.arithmetic import Arithmetic, constant
from tests.fuzz.enclosure import INF, Exact, Float, hull, rounded, where
from tests.fuzz.identity import below_top

Attrs: TypeAlias = Mapping[str, Any]
Rule: TypeAlias = Callable[..., Float]
"""Of an arithmetic, the attributes, and the operands."""

COMPARISONS: dict[Op, Callable[[Arithmetic, Float, Float], Exact]] = {
    Op.EQ: lambda m, a, b: m.equal(a, b),
    Op.NE: lambda m, a, b: negated(m.equal(a, b)),
    Op.LT: lambda m, a, b: m.less(a, b),
    Op.LE: lambda m, a, b: m.less(a, b, equal=True),
    Op.GT: lambda m, a, b: m.less(b, a),
    Op.GE: lambda m, a, b: m.less(b, a, equal=True),
}
LOGICAL = (Op.LOGICAL_NOT, Op.LOGICAL_AND, Op.LOGICAL_OR, Op.LOGICAL_XOR)
BITWISE = (Op.BITWISE_AND, Op.BITWISE_OR, Op.BITWISE_XOR, Op.LEFT_SHIFT, Op.RIGHT_SHIFT)
VIEWS = (Op.EXPAND, Op.PERMUTE, Op.RESHAPE, Op.SLICE, Op.CONCAT, Op.DETACH)
LEAVES = (Op.INPUT, Op.SCALAR, Op.CONSTANT, Op.IOTA, Op.SIZE, Op.RANDOM)
OTHERS = (Op.CAST, Op.WHERE, Op.GATHER, Op.SCATTER_ADD, Op.LAST, Op.LAST_MAX, Op.LAST_MIN, Op.TOPK)
OF_WRITES = {Op.PUT, Op.COPY}  # which `test_writes` draws programs of
OF_STATISTICS = {Op.EXP_BELOW}  # which `test_statistics` does
MADE = (
    Op.MOMENTS,
    Op.NORMALIZER,
    Op.ONE_PLUS_ERF,
    Op.EXP_BELOW,
    Op.SORTED,
    Op.SORT_KEY,
    Op.DESCENDING_KEY,
    Op.SORTED_VALUE,
    Op.DESCENDING_VALUE,
    Op.KEY_INDEX,
    Op.ATTENTION,
    Op.ATTENTION_BACKWARD,
    Op.BLOCKS,
    Op.RUN_SUM,
)  # by the compiler alone, of operations that are traced
"""Together with the tables above and below: every operation."""


def negated(x: Exact) -> Exact:
    """Not x."""
    return Exact(~x.value, x.sure)


def _stepwise(function: Callable[[Tensor], Tensor]) -> Rule:
    """A function that rises in steps: both sides of a step are in the result where the operand is uncertain."""
    return lambda m, attrs, x: Float.of(function(x.lo), function(x.hi), x.nan, x.num)


def _sign(m: Arithmetic, attrs: Attrs, x: Float) -> Float:
    found = Float.of(torch.sign(x.lo), torch.sign(x.hi), torch.zeros_like(x.nan), x.num)
    return where(x.nan, Float.of(found.lo.clamp(max=0.0), found.hi.clamp(min=0.0), x.nan, torch.ones_like(x.num)), found)


def _abs(m: Arithmetic, attrs: Attrs, x: Float) -> Float:
    least = torch.where(x.contains(0.0), 0.0, torch.minimum(x.lo.abs(), x.hi.abs()))
    return Float.of(least, x.magnitude, x.nan, x.num)


def _mul(m: Arithmetic, attrs: Attrs, a: Float, b: Float) -> Float:
    return m.square(a) if a is b else m.mul(a, b)


def _pow(m: Arithmetic, attrs: Attrs, x: Float, y: Float) -> Float:
    """By the corners where the base is positive or the exponent a certain whole number; no claim about other bases."""
    corners = torch.stack(torch.broadcast_tensors(x.lo**y.lo, x.lo**y.hi, x.hi**y.lo, x.hi**y.hi))
    positive = x.num & y.num & ((x.lo > 0) | ((x.lo >= 0) & (y.lo > 0)))
    whole = y.exact & (y.lo == y.lo.floor()) & y.num
    turns = x.contains(0.0) & whole
    corners = torch.where(corners.isnan(), 0.0, corners)
    lo, hi = corners.amin(0), corners.amax(0)
    lo = torch.where(turns, torch.where(y.lo < 0, -INF, lo.clamp(max=0.0)), lo)
    hi = torch.where(turns & (y.lo < 0), INF, hi)
    known = (positive | whole) & x.num & y.num
    lo, hi = torch.where(known, lo, -INF), torch.where(known, hi, INF)
    spread = torch.maximum(y.magnitude, torch.ones(())).clamp(max=1e6)  # of repeated products
    nan = x.nan | y.nan | ~known
    found = rounded(Float.of(lo, hi, nan, torch.ones_like(nan)), m.p, 16.0 + torch.where(whole & (spread <= 4), 2 * spread, 0.0))
    for exponent, root in ((0.5, m.sqrt), (-0.5, m.rsqrt)):  # which torch takes as well, and which differ at -0 and -inf
        found = where(y.exact & (y.lo == exponent), hull(found, root(x)), found)
    return found


def _atan2(m: Arithmetic, attrs: Attrs, y: Float, x: Float) -> Float:
    """By the corners; any angle where the cut along the negative axis may be met."""
    corners = torch.stack(torch.broadcast_tensors(*(torch.atan2(a, b) for a in (y.lo, y.hi) for b in (x.lo, x.hi))))
    met = (x.lo <= 0) & y.contains(0.0)
    lo, hi = torch.where(met, -math.pi, corners.amin(0)), torch.where(met, math.pi, corners.amax(0))
    return rounded(Float.of(lo, hi, y.nan | x.nan, y.num & x.num), m.p, 8.0)


def _floor_divide(m: Arithmetic, attrs: Attrs, a: Float, b: Float) -> Float:
    found = m.div(a, b)
    nan = found.nan | a.may_be_infinite | b.contains(0.0)
    return rounded(Float.of(found.lo.floor(), found.hi.floor(), nan, found.num), m.p, 2.0)


def _remainder(m: Arithmetic, attrs: Attrs, a: Float, b: Float) -> Float:
    """a - b floor(a / b) where the quotient is known, else anything between 0 and b."""
    quotient = _floor_divide(m, attrs, a, b)
    known = (quotient.lo == quotient.hi) & quotient.lo.isfinite() & (quotient.magnitude < 2.0**20)
    exact = m.sub(a, m.mul(b, where(known, quotient, constant(0.0))))
    reach = rounded(Float.of(b.lo.clamp(max=0.0), b.hi.clamp(min=0.0), b.nan, b.num), m.p, 2.0)
    nan = a.nan | b.nan | a.may_be_infinite | b.contains(0.0)
    reach = where(b.may_be_infinite, hull(reach, a), reach)
    loose = Float.of(torch.minimum(reach.lo, reach.hi).expand(nan.shape), reach.hi.expand(nan.shape), nan, a.num & b.num)
    return where(known, exact, loose)


def _gelu(m: Arithmetic, attrs: Attrs, x: Float) -> Float:
    half = m.mul(m.number(0.5), x)
    if attrs["approximate"] == "tanh":
        cubic = m.mul(m.square(x), x)
        inner = m.mul(m.number(math.sqrt(2 / math.pi)), m.add(x, m.mul(m.number(0.044715), cubic)))
        return m.mul(half, m.add(m.number(1.0), m.tanh(inner)))
    return m.mul(half, m.add(m.number(1.0), m.erf(m.mul(x, m.number(math.sqrt(0.5))))))


def _positive(m: Arithmetic, x: Float, threshold: float = 0.0) -> Exact:
    return m.less(m.number(threshold), x)


def _softplus(m: Arithmetic, attrs: Attrs, x: Float) -> Float:
    beta, threshold = float(attrs["beta"]), float(attrs["threshold"])
    scaled = m.mul(x, m.number(beta))
    curve = m.div(m.log1p(m.exp(scaled)), m.number(beta))
    return m.where(m.less(m.number(threshold), scaled), x, curve)


def _lgamma(m: Arithmetic, attrs: Attrs, x: Float) -> Float:
    """Encloses values at certain positive numbers; claims nothing about others."""
    known = x.exact & x.num & (x.lo > 0)
    value = torch.where(known, torch.lgamma(x.lo.abs()), 0.0)
    error = m.p.unit * 16.0 * (1.0 + value.abs().clamp(max=m.p.largest))
    return _anything_but(known, rounded(Float.of(value - error, value + error, ~known, known), m.p, 4.0))


def _leaky_relu(m: Arithmetic, attrs: Attrs, x: Float) -> Float:
    return m.where(_positive(m, x), x, m.mul(x, m.number(float(attrs["negative_slope"]))))


def _elu(m: Arithmetic, attrs: Attrs, x: Float) -> Float:
    return m.where(_positive(m, x), x, m.mul(_expm1(m, attrs, x), m.number(float(attrs["alpha"]))))


def _mish(m: Arithmetic, attrs: Attrs, x: Float) -> Float:
    softplus = m.where(_positive(m, x, 20.0), x, m.log1p(m.exp(x)))
    return m.mul(x, m.tanh(softplus))


def _hardsigmoid(m: Arithmetic, attrs: Attrs, x: Float) -> Float:
    moved = m.minimum(m.maximum(m.add(x, m.number(3.0)), m.number(0.0)), m.number(6.0))
    return m.div(moved, m.number(6.0))


def _logsigmoid(m: Arithmetic, attrs: Attrs, x: Float) -> Float:
    return m.sub(m.minimum(x, m.number(0.0)), m.log1p(m.exp(m.neg(_abs(m, attrs, x)))))


def _expm1(m: Arithmetic, attrs: Attrs, x: Float) -> Float:
    return m.expm1(x)


def _reciprocal(m: Arithmetic, attrs: Attrs, x: Float) -> Float:
    return m.div(m.number(1.0), x)


FLOATS: dict[Op, Rule] = {
    Op.NEG: lambda m, attrs, x: m.neg(x),
    Op.ABS: _abs,
    Op.SIGN: _sign,
    Op.FLOOR: _stepwise(torch.floor),
    Op.CEIL: _stepwise(torch.ceil),
    Op.TRUNC: _stepwise(torch.trunc),
    Op.ROUND: _stepwise(torch.round),
    Op.EXP: lambda m, attrs, x: m.exp(x),
    Op.EXP2: lambda m, attrs, x: m.exp(x, torch.exp2),
    Op.EXPM1: _expm1,
    Op.LOG: lambda m, attrs, x: m.log(x),
    Op.LOG2: lambda m, attrs, x: m.rising(x, torch.log2, 8.0, 0.0),
    Op.LOG1P: lambda m, attrs, x: m.log1p(x),
    Op.SQRT: lambda m, attrs, x: m.sqrt(x),
    Op.RSQRT: lambda m, attrs, x: m.rsqrt(x),
    Op.SIN: lambda m, attrs, x: m.bounded(x, torch.sin),
    Op.COS: lambda m, attrs, x: m.bounded(x, torch.cos),
    Op.TANH: lambda m, attrs, x: m.tanh(x),
    Op.ERF: lambda m, attrs, x: m.erf(x),
    Op.ERFC: lambda m, attrs, x: m.falling(x, torch.erfc, 10.0, -INF),
    Op.LGAMMA: _lgamma,
    Op.SIGMOID: lambda m, attrs, x: m.sigmoid(x),
    Op.ADD: lambda m, attrs, a, b: m.add(a, b),
    Op.SUB: lambda m, attrs, a, b: m.sub(a, b),
    Op.MUL: _mul,
    Op.DIV: lambda m, attrs, a, b: m.div(a, b),
    Op.FLOOR_DIVIDE: _floor_divide,
    Op.REMAINDER: _remainder,
    Op.POW: _pow,
    Op.ATAN2: _atan2,
    Op.MAXIMUM: lambda m, attrs, a, b: m.maximum(a, b),
    Op.MINIMUM: lambda m, attrs, a, b: m.minimum(a, b),
    Op.RECIPROCAL: _reciprocal,
    Op.SQUARE: lambda m, attrs, x: m.square(x),
    Op.RELU: lambda m, attrs, x: m.maximum(x, m.number(0.0)),
    Op.SILU: lambda m, attrs, x: m.mul(x, m.sigmoid(x)),
    Op.GELU: _gelu,
    Op.SOFTPLUS: _softplus,
    Op.LEAKY_RELU: _leaky_relu,
    Op.ELU: _elu,
    Op.MISH: _mish,
    Op.HARDSIGMOID: _hardsigmoid,
    Op.HARDSWISH: lambda m, attrs, x: m.mul(x, _hardsigmoid(m, attrs, x)),
    Op.LOGSIGMOID: _logsigmoid,
}
"""Pointwise operations that give floats."""


def _var(m: Arithmetic, attrs: Attrs, x: Float) -> Float:
    dims = attrs["dims"]
    return m.mean(m.square(m.sub(x, m.mean(x, dims))), dims, float(attrs["correction"]))


def _logsumexp(m: Arithmetic, attrs: Attrs, x: Float) -> Float:
    dims = attrs["dims"]
    peak = m.amax(x, dims)
    finite = m.where(Exact(peak.may_be_infinite, ~peak.may_be_infinite | peak.exact), constant(0.0), peak)
    return m.add(finite, m.log(m.sum(m.exp(m.sub(x, finite)), dims)))


def _weights(m: Arithmetic, attrs: Attrs, x: Float) -> tuple[Float, Float]:
    dims = (attrs["dim"],)
    shifted = m.sub(x, m.amax(x, dims))
    shifted = below_top(shifted, x, dims) if m.one and x.lo.numel() else shifted
    return shifted, m.exp(shifted)


def _total(m: Arithmetic, weights: Float, attrs: Attrs) -> Float:
    """The sum of weights, the greatest of which is 1."""
    total = m.sum(weights, (attrs["dim"],))
    least = 1.0 - 2.0**-12 if m.one else -INF
    return Float.of(total.lo.clamp(min=least), total.hi.clamp(min=least), total.nan, total.num)


def _softmax(m: Arithmetic, attrs: Attrs, x: Float) -> Float:
    _, weights = _weights(m, attrs, x)
    return m.div(weights, _total(m, weights, attrs))


def _safe_softmax(m: Arithmetic, attrs: Attrs, x: Float) -> Float:
    """0 where all of a row are minus infinity."""
    found, zero, dim = _softmax(m, attrs, x), constant(0.0), attrs["dim"]
    may_be_hidden = (x.lo == -INF).all(dim, keepdim=True).expand(x.lo.shape)
    is_hidden = ((x.hi == -INF) & ~x.nan).all(dim, keepdim=True).expand(x.lo.shape)
    return where(is_hidden, zero, where(may_be_hidden, hull(found, zero), found))


def _log_softmax(m: Arithmetic, attrs: Attrs, x: Float) -> Float:
    shifted, weights = _weights(m, attrs, x)
    return m.sub(shifted, m.log(_total(m, weights, attrs)))


def _last(attrs: Attrs, x: Float) -> tuple[int, ...]:
    return tuple(range(x.lo.dim() - attrs["count"], x.lo.dim()))


def _layer_norm(m: Arithmetic, attrs: Attrs, x: Float, *affine: Float) -> Float:
    dims = _last(attrs, x)
    centered = m.sub(x, m.mean(x, dims))
    y = m.mul(centered, m.rsqrt(m.add(m.mean(m.square(centered), dims), m.number(attrs["eps"]))))
    y = m.mul(y, affine[0]) if attrs["has_weight"] else y
    return m.add(y, affine[-1]) if attrs["has_bias"] else y


def _rms_norm(m: Arithmetic, attrs: Attrs, x: Float, *affine: Float) -> Float:
    y = m.mul(x, m.rsqrt(m.add(m.mean(m.square(x), _last(attrs, x)), m.number(attrs["eps"]))))
    return m.mul(y, affine[0]) if affine else y


def _prod(m: Arithmetic, attrs: Attrs, x: Float) -> Float:
    """The product of certain values whose partial products stay in range in any order; no claim about others."""
    dims = attrs["dims"]
    value = exact_values(Op.PROD, [x.lo], attrs)
    known = (x.exact & x.num).all(dims[0], keepdim=True) & (_steps(x).sum(dims, keepdim=True) < 100)
    return _anything_but(known, rounded(Float.point(torch.where(known, value, 0.0)), m.p, 2.0 * x.lo.shape[dims[0]]))


def _anything_but(known: Tensor, found: Float) -> Float:
    """A result where it is known, and no claim elsewhere."""
    anything = torch.ones_like(known)
    return where(known, found, Float.of(torch.full_like(found.lo, -INF), torch.full_like(found.lo, INF), anything, anything))


def _cumsum(m: Arithmetic, attrs: Attrs, x: Float) -> Float:
    """Sums of finite numbers in any order; no claim from the first other one on."""
    count = float(x.lo.shape[-1])
    wild = x.nan | ~x.num | x.magnitude.isinf()
    reach = torch.where(wild, 0.0, x.magnitude).cumsum(-1)
    error = reach * m.p.unit * 2 * min(count, 4.0 * count**0.5) + m.p.tiny * count
    lo, hi = (torch.where(wild, 0.0, border).cumsum(-1) for border in (x.lo, x.hi))
    known = (wild.long().cumsum(-1) == 0) & (reach * 1.001 < m.p.largest)
    return _anything_but(known, rounded(Float.of(lo - error, hi + error, ~known, known), m.p, 2.0))


def _cumprod(m: Arithmetic, attrs: Attrs, x: Float) -> Float:
    """As a product, of each element and those before it."""
    certain = ((x.exact & x.num).long().cumsum(-1) - torch.arange(1, x.lo.shape[-1] + 1)) == 0
    known = certain & (_steps(x).cumsum(-1) < 100)
    value = torch.where(known, x.lo.cumprod(-1), 0.0)
    return _anything_but(known, rounded(Float.point(value), m.p, 2.0 * x.lo.shape[-1]))


def _cummax(m: Arithmetic, attrs: Attrs, x: Float) -> Float:
    """The greatest so far; NaN from the first one on."""
    nan, num = x.nan.long().cumsum(-1) > 0, (~x.num).long().cumsum(-1) == 0
    return Float.of(x.lo.cummax(-1).values, x.hi.cummax(-1).values, nan, num)


def last_place(op: Op, x: Float, attrs: Attrs) -> Exact:
    """The last index of the extreme value so far: certain up to where the row is."""
    return Exact(exact_values(op, [x.values], attrs), (~x.exact).long().cumsum(-1) == 0)


def _logcumsumexp(m: Arithmetic, attrs: Attrs, x: Float) -> Float:
    """Rising in all elements; no claim from the first one on that is not finite."""
    wild = x.nan | ~x.num | x.magnitude.isinf()
    known = wild.long().cumsum(-1) == 0
    lo, hi = (torch.where(wild, 0.0, border).logcumsumexp(-1) for border in (x.lo, x.hi))
    count = float(x.lo.shape[-1])
    reach = torch.maximum(torch.where(wild, 0.0, x.magnitude).cummax(-1).values + math.log(count + 1), torch.ones(()))
    error = reach * m.p.unit * 8 * min(count, 4.0 * count**0.5)
    return _anything_but(known, rounded(Float.of(lo - error, hi + error, ~known, known), m.p, 2.0))


def _steps(x: Float) -> Tensor:
    """How far a factor takes a product along the exponents."""
    return torch.where(x.lo == 0, 0.0, x.lo.abs().log2().abs())


def place(op: Op, x: Float, attrs: Attrs) -> Exact:
    """The index of an extreme value: certain where the row is, or where the value lies apart from all others."""
    dims = attrs["dims"]
    value = exact_values(op, [x.lo if op is Op.MAX else x.hi], attrs)
    lo, hi = (x.lo, x.hi) if op is Op.MAX else (-x.hi, -x.lo)
    others = hi.scatter(dims[0], value, -INF).amax(dims, keepdim=True)
    apart = (lo.gather(dims[0], value) > others) & ~x.nan.any(dims[0], keepdim=True)
    certain = x.exact.all(dims[0], keepdim=True)
    return Exact(torch.where(certain, exact_values(op, [x.values], attrs), value), certain | apart)


OVER_DIMS: dict[Op, Rule] = {
    Op.PROD: _prod,
    Op.CUMSUM: _cumsum,
    Op.CUMPROD: _cumprod,
    Op.CUMMAX: _cummax,
    Op.CUMMIN: lambda m, attrs, x: m.neg(_cummax(m, attrs, m.neg(x))),
    Op.LOGCUMSUMEXP: _logcumsumexp,
    Op.MAX: lambda m, attrs, x: m.amax(x, attrs["dims"]),
    Op.MIN: lambda m, attrs, x: m.neg(m.amax(m.neg(x), attrs["dims"])),
    Op.SUM: lambda m, attrs, x: m.sum(x, attrs["dims"]),
    Op.AMAX: lambda m, attrs, x: m.amax(x, attrs["dims"]),
    Op.AMIN: lambda m, attrs, x: m.neg(m.amax(m.neg(x), attrs["dims"])),
    Op.MEAN: lambda m, attrs, x: m.mean(x, attrs["dims"]),
    Op.VAR: _var,
    Op.LOGSUMEXP: _logsumexp,
    Op.SOFTMAX: _softmax,
    Op.SAFE_SOFTMAX: _safe_softmax,
    Op.LOG_SOFTMAX: _log_softmax,
    Op.LAYER_NORM: _layer_norm,
    Op.RMS_NORM: _rms_norm,
    Op.MATMUL: lambda m, attrs, a, b: m.matmul(a, b),
}
"""Reductions and what is made of them, of floats."""

EXPANDED = (
    Op.CELU, Op.SINH, Op.COSH, Op.CLAMP_MIN, Op.CLAMP_MAX, Op.HARDTANH, Op.PRELU, Op.FMOD, Op.XLOGY, Op.HUBER, Op.STD,
    Op.HYPOT, Op.LOGIT, Op.ENTR, Op.XLOG1PY,
    Op.ERFINV, Op.DIGAMMA,
    Op.VECTOR_NORM, Op.ASIN, Op.ACOS, Op.ASINH, Op.ACOSH, Op.SINC, Op.BINARY_CROSS_ENTROPY,
)  # fmt: skip
"""Compositions whose bound is that of what they are made of."""

COVERED = frozenset({*COMPARISONS, *LOGICAL, *BITWISE, *VIEWS, *LEAVES, *OTHERS, *MADE, *FLOATS, *OVER_DIMS, *EXPANDED})


def exact_values(op: Op, args: list[Tensor], attrs: Attrs) -> Tensor:
    """The oracle's own rule, for operands without uncertainty."""
    value: Tensor = EXACT[op](*args, **attrs)
    return value
