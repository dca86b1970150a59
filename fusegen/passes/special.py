"""Special functions as arithmetic: of the error function and of the gamma function."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fusegen.dtypes import DType
from fusegen.ir.ops import Op
from fusegen.passes.algebra import Value


def _polynomial(x: Value, coefficients: Sequence[float]) -> Value:
    """By Horner's rule, the highest power first."""
    first, second, *rest = coefficients
    found = x * first + second
    for coefficient in rest:
        found = found * x + coefficient
    return found


_SHARE = math.sqrt(math.pi) / 2.0


def erfinv(x: Value) -> Value:
    """Rational approximations, and two steps of Halley's method. Beyond 1/2 the distance from 1 is compared with erfc: it is exact,
    and has digits that erf has not."""
    size = x.apply(Op.ABS)
    beyond = 1.0 - size
    square = size * size
    above = _polynomial(square, (-0.140543331, 0.914624893, -1.645349621, 0.886226899))
    below = _polynomial(square, (0.012229801, -0.329097515, 1.442710462, -2.118377725, 1.0))
    root = (-(beyond * 0.5).apply(Op.LOG)).apply(Op.SQRT)
    far_above = _polynomial(root, (1.641345311, 3.429567803, -1.624906493, -1.970840454))
    far_below = _polynomial(root, (1.637067800, 3.543889200, 1.0))
    found = (size > 0.7).where(far_above / far_below, size * (above / below))
    for _ in range(2):
        missed = (size > 0.5).where(beyond - found.apply(Op.ERFC), found.apply(Op.ERF) - size)
        step = missed * (found * found).apply(Op.EXP) * _SHARE
        found = found - step / (1.0 + found * step)
    found = size.apply(Op.EQ, 1.0).where(math.inf, found)
    return x.apply(Op.EQ, 0.0).where(x, (x > 0.0).where(found, -found))


def erfcx(x: Value) -> Value:
    """e^(x²) erfc(x): with the square in two parts (Dekker 1971), as its rounding would be as large as the exponential's exponent;
    of large numbers the asymptotic series (Abramowitz and Stegun 7.1.23)."""
    is_double = x.dtype.compute is DType.FLOAT64
    head = x * (2.0**27 + 1.0 if is_double else 2.0**12 + 1.0)
    head = head - (head - x)
    tail = x - head
    square = x * x
    rest = ((head * head - square) + head * tail * 2.0) + tail * tail
    near = square.apply(Op.EXP) * x.apply(Op.ERFC)
    corrected = near.apply(Op.EQ, math.inf).where(near, near + near * rest)
    share = 0.5 / square
    terms = [1.0]
    for k in range(1, 9):
        terms.append(-terms[-1] * (2 * k - 1))
    far = _polynomial(share, terms[::-1]) / (x * math.sqrt(math.pi))
    return (x > (20.0 if is_double else 8.0)).where(far, corrected)


def log_ndtr(x: Value) -> Value:
    """The logarithm of the normal distribution: by erfcx, where its values are small."""
    turned = x * -math.sqrt(0.5)
    low = (erfcx(turned) * 0.5).apply(Op.LOG) - turned * turned
    high = ((-turned).apply(Op.ERFC) * -0.5).apply(Op.LOG1P)
    return x.apply(Op.LT, -1.0).where(low, high)


_STEPS = 10
"""The bound up to which arguments are moved, where asymptotic series have all digits of float64."""

_DIGAMMA = (1 / 12, -691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12)
"""Bernoulli numbers by their orders, of 14 to 2: Abramowitz and Stegun 6.3.18."""

_TRIGAMMA = (7 / 6, -691 / 2730, 5 / 66, -1 / 30, 1 / 42, -1 / 30, 1 / 6)
"""Bernoulli numbers, of 14 to 2: Abramowitz and Stegun 6.4.12."""


def digamma(x: Value) -> Value:
    """Takes positive numbers; others are reflected. Minus infinity with the other sign at 0, NaN at negative integers."""
    is_low = x.apply(Op.LE, 0.0)
    positive = is_low.where(1.0 - x, x)
    found = _log_gamma_slope(positive)
    part = _from_nearest(x) * math.pi
    cotangent = part.apply(Op.COS) / part.apply(Op.SIN) * math.pi
    reflected = part.apply(Op.EQ, 0.0).where(math.nan, found - cotangent)
    return x.apply(Op.EQ, 0.0).where(-(1.0 / x), is_low.where(reflected, found))


def _from_nearest(x: Value) -> Value:
    """The distance from the nearest integer, which is exact: near a pole its angle has all digits."""
    return x - x.apply(Op.ROUND)


def _log_gamma_slope(x: Value) -> Value:
    is_small = x.apply(Op.LT, float(_STEPS))
    passed = _sum_of_shares(x, 1)
    moved = is_small.where(x + float(_STEPS), x)
    share = 1.0 / moved
    square = share * share
    found = moved.apply(Op.LOG) - share * 0.5 - square * _polynomial(square, _DIGAMMA)
    return is_small.where(found - passed, found)


def _sum_of_shares(x: Value, power: int) -> Value:
    """The sum of 1/(x + k)^power over the steps, the least terms first."""
    total: Value | None = None
    for k in reversed(range(_STEPS)):
        share = 1.0 / (x + float(k) if k else x)
        share = share if power == 1 else share * share
        total = share if total is None else total + share
    assert total is not None
    return total


def trigamma(x: Value) -> Value:
    """The derivative of `digamma`; of numbers below 1/2 by reflection."""
    is_low = x.apply(Op.LT, 0.5)
    positive = is_low.where(1.0 - x, x)
    moved = positive + float(_STEPS)
    share = 1.0 / moved
    square = share * share
    series = share + square * 0.5 + share * (square * _polynomial(square, _TRIGAMMA))
    found = series + _sum_of_shares(positive, 2)
    sine = (_from_nearest(x) * math.pi).apply(Op.SIN)
    return is_low.where(math.pi * math.pi / (sine * sine) - found, found)
