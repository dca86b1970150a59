"""Arithmetic of enclosures in a precision: every operation widens its result by the rounding that a kernel's may have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.fuzz.enclosure import INF, Exact, Float, Precision, anything, hull, rounded, where

Function = Callable[[Tensor], Tensor]


def constant(value: float) -> Float:
    """A certain number."""
    return Float.point(torch.tensor(value, dtype=torch.float64))


@dataclass(frozen=True)
class Arithmetic:
    """Operations on enclosures.

    Attributes:
        p: the computing precision.
        fast: whether functions of 16-bit results may be approximate.
        factor: of the error of sums of products: tensor cores do not round to nearest.
        one: whether a value is the same number wherever it is used.
    """

    p: Precision
    fast: bool = False
    factor: float = 1.0
    one: bool = False

    def number(self, value: float) -> Float:
        """A constant of a formula, which is rounded to the precision."""
        return rounded(constant(value), self.p, 0.0 if float(torch.tensor(value).float()) == value else 1.0)

    def neg(self, x: Float) -> Float:
        return Float.of(-x.hi, -x.lo, x.nan, x.num)

    def add(self, a: Float, b: Float) -> Float:
        nan = a.nan | b.nan | (a.num & b.num & (((a.hi == INF) & (b.lo == -INF)) | ((a.lo == -INF) & (b.hi == INF))))
        opposite = ((a.lo == INF) & (b.hi == -INF)) | ((a.hi == -INF) & (b.lo == INF))
        return rounded(Float.of(a.lo + b.lo, a.hi + b.hi, nan, a.num & b.num & ~opposite), self.p, 2.0)

    def sub(self, a: Float, b: Float) -> Float:
        return self.add(a, self.neg(b))

    def _products(self, a: Float, b: Float) -> tuple[Tensor, Tensor]:
        products = torch.stack(torch.broadcast_tensors(a.lo * b.lo, a.lo * b.hi, a.hi * b.lo, a.hi * b.hi))
        products = torch.where(products.isnan(), 0.0, products)
        return products.amin(0), products.amax(0)

    def mul(self, a: Float, b: Float) -> Float:
        lo, hi = self._products(a, b)
        nan = a.nan | b.nan | (a.contains(0.0) & b.may_be_infinite) | (b.contains(0.0) & a.may_be_infinite)
        return rounded(Float.of(lo, hi, nan, a.num & b.num), self.p, 2.0)

    def square(self, x: Float) -> Float:
        least = torch.where(x.contains(0.0), 0.0, torch.minimum(x.lo.abs(), x.hi.abs()))
        return rounded(Float.of(least * least, x.magnitude * x.magnitude, x.nan, x.num), self.p, 2.0)

    def div(self, a: Float, b: Float) -> Float:
        zero = b.contains(0.0)
        safe_lo, safe_hi = torch.where(zero, 1.0, b.lo), torch.where(zero, 1.0, b.hi)
        quotients = torch.stack(torch.broadcast_tensors(a.lo / safe_lo, a.lo / safe_hi, a.hi / safe_lo, a.hi / safe_hi))
        low = torch.where(quotients.isnan(), INF, quotients).amin(0)
        high = torch.where(quotients.isnan(), -INF, quotients).amax(0)
        lo, hi = torch.minimum(low, high), torch.maximum(low, high)
        infinite = a.may_be_infinite & b.may_be_infinite
        wide = zero | infinite
        nan = a.nan | b.nan | (a.contains(0.0) & zero) | infinite
        result = Float.of(torch.where(wide, -INF, lo), torch.where(wide, INF, hi), nan, a.num & b.num)
        return rounded(result, self.p, 8.0 if self.fast else 2.0)

    def maximum(self, a: Float, b: Float) -> Float:
        """The greater one; NaN if one is."""
        return Float.of(torch.maximum(a.lo, b.lo), torch.maximum(a.hi, b.hi), a.nan | b.nan, a.num & b.num)

    def minimum(self, a: Float, b: Float) -> Float:
        return Float.of(torch.minimum(a.lo, b.lo), torch.minimum(a.hi, b.hi), a.nan | b.nan, a.num & b.num)

    def rising(self, x: Float, function: Function, units: Tensor | float, least: float = -INF, top: float = INF) -> Float:
        """A function that never falls, from ``least`` on; NaN below."""
        outside = x.num & (x.lo < least)
        inside = x.num & (x.hi >= least)
        lo, hi = function(x.lo.clamp(min=least)), function(x.hi.clamp(min=least))
        return rounded(Float.of(lo, hi.clamp(max=top), x.nan | outside, inside), self.p, units)

    def falling(self, x: Float, function: Function, units: Tensor | float, least: float) -> Float:
        """A function that never rises, from ``least`` on; NaN below."""
        return self.neg(self.rising(x, lambda t: -function(t), units, least))

    def exp(self, x: Float, base: Function = torch.exp) -> Float:
        """e^x, or 2^x: the approximate one takes a rounded exponent."""
        large = x.magnitude.clamp(max=200.0)
        return self._not_below(self.rising(x, base, 8.0 + 2.0 * large if self.fast else 8.0), 0.0)

    def expm1(self, x: Float) -> Float:
        """e^x - 1: the approximate one takes a rounded exponent."""
        large = x.magnitude.clamp(max=200.0)
        return self.rising(x, torch.expm1, self._cancelling(10.0 + 2.0 * large if self.fast else 10.0))

    def _cancelling(self, units: Tensor | float) -> Tensor | float:
        """The error of a function whose approximate form would cancel, and so is another one for small arguments: 2^-18."""
        return units + 64.0 if self.fast else units

    def _not_below(self, x: Float, least: float) -> Float:
        return Float.of(x.lo.clamp(min=least), x.hi.clamp(min=least), x.nan, x.num)

    def sqrt(self, x: Float) -> Float:
        return self._not_below(self.rising(x, torch.sqrt, 4.0, 0.0), 0.0)

    def rsqrt(self, x: Float) -> Float:
        """1 / sqrt(x); of a zero of either sign an infinity."""
        positive = self.falling(x, torch.rsqrt, 8.0, 0.0)
        infinite = torch.full_like(positive.lo, INF)
        return where(x.contains(0.0), hull(positive, Float.of(-infinite, infinite, x.nan, x.num)), positive)

    def log(self, x: Float) -> Float:
        return self.rising(x, torch.log, 8.0, 0.0)

    def log1p(self, x: Float) -> Float:
        return self.rising(x, torch.log1p, self._cancelling(8.0), -1.0)

    def bounded(self, x: Float, function: Function) -> Float:
        """Sine or cosine: no steeper than 1, between -1 and 1."""
        infinite = x.may_be_infinite
        certain = x.num & ((x.lo == INF) | (x.hi == -INF))
        lo, hi = torch.where(infinite, 0.0, x.lo), torch.where(infinite, 0.0, x.hi)
        middle, radius = (lo + hi) / 2, (hi - lo) / 2
        radius = torch.where(infinite, 2.0, radius + middle.abs() * 2.0**-53)
        value = function(middle)
        around = Float.of(value - radius, value + radius, x.nan | infinite, x.num & ~certain)
        kept = rounded(around, self.p, 8.0)
        most = 1.0 + 8 * self.p.unit
        return Float.of(kept.lo.clamp(-most, most), kept.hi.clamp(-most, most), kept.nan, kept.num)

    def sigmoid(self, x: Float) -> Float:
        """1 / (1 + exp(-x)), which is zero where the exponential overflows."""
        found = self.div(self.number(1.0), self.add(self.number(1.0), self.exp(self.neg(x))))
        lo = torch.where(x.lo < -80.0, 0.0, found.lo.clamp(min=0.0))
        return Float.of(lo, found.hi.clamp(0.0, 1.0 + 9 * self.p.unit), x.nan, x.num)

    def tanh(self, x: Float) -> Float:
        return self.rising(x, torch.tanh, self._cancelling(10.0))

    def erf(self, x: Float) -> Float:
        return self.rising(x, torch.erf, 10.0)

    def where(self, condition: Exact, a: Float, b: Float) -> Float:
        """One of two; both where the condition is not certain."""
        shape = torch.broadcast_shapes(condition.value.shape, a.lo.shape, b.lo.shape)
        a, b = (x.apply(lambda t: t.expand(shape)) for x in (a, b))
        return where(condition.sure, where(condition.value, a, b), hull(a, b))

    def less(self, a: Float, b: Float, *, equal: bool = False) -> Exact:
        both = a.num & b.num
        can = both & ((a.lo <= b.hi) if equal else (a.lo < b.hi))
        cannot = a.nan | b.nan | (both & ((a.hi > b.lo) if equal else (a.hi >= b.lo)))
        return Exact(can, can ^ cannot)

    def equal(self, a: Float, b: Float) -> Exact:
        both = a.num & b.num
        can = both & (a.lo <= b.hi) & (b.lo <= a.hi)
        cannot = a.nan | b.nan | (both & ~((a.lo == a.hi) & (b.lo == b.hi) & (a.lo == b.lo)))
        return Exact(can, can ^ cannot)

    # Over dims, which are kept.

    def sum(self, x: Float, dims: tuple[int, ...]) -> Float:
        """A sum in any order: errors grow with the root of the number of terms, small numbers of terms aside."""
        if not dims:
            return x
        count = torch.Size([x.lo.shape[d] for d in dims]).numel()
        finite = torch.where(x.magnitude.isinf(), 0.0, x.magnitude).sum(dims, keepdim=True)
        error = finite * self.p.unit * 2 * min(float(count), 4.0 * count**0.5) + self.p.tiny * count
        overflows = finite * 1.001 > self.p.largest
        lo, hi = self._border(x.lo, dims) - error, self._border(x.hi, dims) + error
        (up, down), (surely_up, surely_down) = _infinities(x.hi, x.lo, dims), _infinities(x.lo, x.hi, dims)
        lo, hi = torch.where(overflows | down, -INF, lo), torch.where(overflows | up, INF, hi)
        nan, num = x.nan.sum(dims, keepdim=True) > 0, (~x.num).sum(dims, keepdim=True) == 0
        return rounded(Float.of(lo, hi, nan | (up & down) | overflows, num & ~(surely_up & surely_down)), self.p, 2.0)

    def _border(self, border: Tensor, dims: tuple[int, ...]) -> Tensor:
        """The sum of one side's borders, where it is not infinite on the other side's account."""
        up, down = _infinities(border, border, dims)
        finite = torch.where(border.isinf(), 0.0, border).sum(dims, keepdim=True)
        return torch.where(up, INF, torch.where(down, -INF, finite))

    def amax(self, x: Float, dims: tuple[int, ...]) -> Float:
        """The greatest; NaN if there is one. Of nothing, no claim: torch refuses it but inside of a softmax."""
        if not dims:
            return x
        if any(x.lo.shape[d] == 0 for d in dims):
            return anything(x.lo.sum(dims, keepdim=True))
        nan, num = x.nan.sum(dims, keepdim=True) > 0, (~x.num).sum(dims, keepdim=True) == 0
        return Float.of(x.lo.amax(dims, keepdim=True), x.hi.amax(dims, keepdim=True), nan, num)

    def mean(self, x: Float, dims: tuple[int, ...], correction: float = 0.0) -> Float:
        """sum / (count - correction)."""
        count = torch.Size([x.lo.shape[d] for d in dims]).numel() - correction
        scale = self.number(1.0 / count) if count > 0 else constant(INF if count == 0 else float("nan"))
        return self.mul(self.sum(x, dims), scale)

    def matmul(self, a: Float, b: Float) -> Float:
        """A product of matrices: centres and radii; no claim where something is not finite, but that NaN gives NaN."""
        inner = a.lo.shape[-1]
        usable = [x.num & ~x.nan & ~x.may_be_infinite for x in (a, b)]
        centres = [torch.where(u, (x.lo + x.hi) / 2, 0.0) for u, x in zip(usable, (a, b), strict=True)]
        radii = [torch.where(u, (x.hi - x.lo) / 2, 0.0) for u, x in zip(usable, (a, b), strict=True)]
        middle, size = centres[0] @ centres[1], centres[0].abs() @ centres[1].abs()
        radius = centres[0].abs() @ radii[1] + radii[0] @ (centres[1].abs() + radii[1])
        error = (size + radius) * self.p.unit * self.factor * 2 * min(float(inner + 1), 4.0 * max(inner, 1) ** 0.5)
        radius = radius + error + self.p.tiny * (inner + 1)
        bad = (~usable[0]).any(-1, keepdim=True) | (~usable[1]).any(-2, keepdim=True) | (size > self.p.largest)
        yes = torch.ones_like(bad)
        none = (~a.num).any(-1, keepdim=True) | (~b.num).any(-2, keepdim=True)
        found = where(bad, anything(middle), rounded(Float.of(middle - radius, middle + radius, ~yes, yes), self.p, 2.0))
        return where(none, Float.of(middle, middle, yes, ~yes), found)


def _infinities(up: Tensor, down: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Returns where some of `up` are plus infinity, and where some of `down` are minus infinity."""
    return (up == INF).sum(dims, keepdim=True) > 0, (down == -INF).sum(dims, keepdim=True) > 0
