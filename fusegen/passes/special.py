"""Special functions as arithmetic: of the error function, the gamma function and Bessel's."""

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


# Modified Bessel functions of the first kind, by Chebyshev series: of e^(-x) I(x) up to 8, of that by √x beyond, where it is a
# function of 1/x that hardly changes.


_I0_NEAR = (
    3.3307945188222384e-17, -2.431279846547955e-16, 1.715391285555133e-15, -1.1685332877993451e-14, 7.676185498604936e-14,
    -4.85644678311193e-13, 2.95505266312964e-12, -1.7268262914415555e-11, 9.675809035373237e-11, -5.189795601635263e-10,
    2.6598237246823866e-09, -1.300025009986248e-08, 6.046995022541919e-08, -2.670793853940612e-07, 1.1173875391201037e-06,
    -4.4167383584587505e-06, 1.6448448070728896e-05, -5.754195010082104e-05, 0.00018850288509584165, -0.0005763755745385824,
    0.0016394756169413357, -0.004324309995050576, 0.010546460394594998, -0.02373741480589947, 0.049305284239670705,
    -0.09490109704804764, 0.17162090152220877, -0.3046826723431984, 0.6767952744094761,
)  # fmt: skip
_I0_FAR = (
    4.46562142029676e-17, 3.461222867697461e-17, -2.8276239805165836e-16, -3.425485619677219e-16, 1.7725601330565263e-15,
    3.8116806693526224e-15, -9.554846698828307e-15, -4.150569347287222e-14, 1.54008621752141e-14, 3.8527783827421426e-13,
    7.180124451383666e-13, -1.7941785315068062e-12, -1.3215811840447713e-11, -3.1499165279632416e-11, 1.1889147107846437e-11,
    4.94060238822497e-10, 3.396232025708386e-09, 2.266668990498178e-08, 2.0489185894690636e-07, 2.8913705208347567e-06,
    6.889758346916825e-05, 0.0033691164782556943, 0.8044904110141088,
)  # fmt: skip
_I1_NEAR = (
    -2.111421214358166e-17, 1.5536319577362005e-16, -1.1055969477353862e-15, 7.600684294735408e-15, -5.042185504727912e-14,
    3.223793365945575e-13, -1.9839743977649436e-12, 1.1736186298890901e-11, -6.663489723502027e-11, 3.625590281552117e-10,
    -1.8872497517228294e-09, 9.381537386495773e-09, -4.445059128796328e-08, 2.0032947535521353e-07, -8.568720264695455e-07,
    3.4702513081376785e-06, -1.3273163656039436e-05, 4.781565107550054e-05, -0.00016176081582589674, 0.0005122859561685758,
    -0.0015135724506312532, 0.004156422944312888, -0.010564084894626197, 0.024726449030626516, -0.05294598120809499,
    0.1026436586898471, -0.17641651835783406, 0.25258718644363365,
)  # fmt: skip
_I1_FAR = (
    -4.650305368489358e-17, -3.209525921993424e-17, 2.96262899764595e-16, 3.3082023109209285e-16, -1.8803547755107825e-15,
    -3.8144030724370075e-15, 1.0420276984128804e-14, 4.2724400167119517e-14, -2.1015418427726643e-14,
    -4.0835511110921974e-13, -7.198551776245908e-13, 2.0356285441470896e-12, 1.412580743661378e-11, 3.2526035830154884e-11,
    -1.8974958123505413e-11, -5.589743462196584e-10, -3.835380385964237e-09, -2.6314688468895196e-08, -2.512236237870209e-07,
    -3.882564808877691e-06, -0.00011058893876262371, -0.009761097491361469, 0.7785762350182801,
)  # fmt: skip
"""Coefficients, the highest order first, those of order 0 doubled."""

_BOUND = 8.0


def _series(x: Value, coefficients: Sequence[float]) -> Value:
    """By Clenshaw's rule, of twice the argument of Chebyshev's polynomials."""
    first, second, *rest = coefficients
    last, found = x * 0.0 + first, x * first + second
    before = last
    for coefficient in rest:
        before, last, found = last, found, (x * found - last) + coefficient
    return 0.5 * (found - before)


def _scaled(size: Value, near: Sequence[float], far: Sequence[float]) -> tuple[Value, Value]:
    """Both series, of which the one holds up to the bound, the other from there on."""
    return _series(size * 0.5 - 2.0, near), _series(32.0 / size - 2.0, far) * size.apply(Op.RSQRT)


def i0e(x: Value) -> Value:
    """e^(-|x|) I0(x)."""
    size = x.apply(Op.ABS)
    near, far = _scaled(size, _I0_NEAR, _I0_FAR)
    return (size > _BOUND).where(far, near)


def i1e(x: Value) -> Value:
    """e^(-|x|) I1(x)."""
    size = x.apply(Op.ABS)
    near, far = _scaled(size, _I1_NEAR, _I1_FAR)
    found = (size > _BOUND).where(far, near * size)
    return x.apply(Op.LT, 0.0).where(-found, found)


def i0(x: Value) -> Value:
    """I0(x)."""
    return x.apply(Op.ABS).apply(Op.EXP) * i0e(x)


def i1(x: Value) -> Value:
    """I1(x)."""
    return x.apply(Op.ABS).apply(Op.EXP) * i1e(x)
