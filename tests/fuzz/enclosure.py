"""Intervals that hold what a kernel may compute: float64 borders around every element, and whether it may be NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fusegen.dtypes import DType

INF = float("inf")


@dataclass(frozen=True)
class Precision:
    """A computing type: half a unit in the last place of 1, what rounding may lose near zero, the greatest number."""

    unit: float
    tiny: float
    largest: float


SINGLE = Precision(2.0**-24, 2.0**-149, 3.4028234663852886e38)
FLUSHED = Precision(2.0**-24, 2.0**-126, 3.4028234663852886e38)  # approximate functions take subnormals for zero
DOUBLE = Precision(2.0**-52, 2.0**-1073, 1.7976931348623157e308)  # twice, since the borders are doubles themselves
HALVES = {
    DType.BFLOAT16: Precision(2.0**-9, 2.0**-134, 3.3895313892515355e38),
    DType.FLOAT16: Precision(2.0**-12, 2.0**-25, 65504.0),
}


@dataclass(frozen=True)
class Exact:
    """Integers or bools: int64 or bool values, and where they are certain. Elsewhere anything may stand."""

    value: Tensor
    sure: Tensor


@dataclass(frozen=True)
class Float:
    """Floats: numbers from ``lo`` to ``hi`` where ``num``, NaN where ``nan``; at least one of them holds."""

    lo: Tensor
    hi: Tensor
    nan: Tensor
    num: Tensor

    @classmethod
    def of(cls, lo: Tensor, hi: Tensor, nan: Tensor, num: Tensor) -> Float:
        """With borders in order, and zeros where there are no numbers."""
        lo, hi = torch.where(lo.isnan(), -INF, lo), torch.where(hi.isnan(), INF, hi)
        num = num.expand(lo.shape)
        return cls(torch.where(num, lo, 0.0), torch.where(num, hi, 0.0), nan.expand(lo.shape) | ~num, num)

    @classmethod
    def point(cls, value: Tensor) -> Float:
        """Certain values, in float64."""
        nan = value.isnan()
        return cls.of(value, value, nan, ~nan)

    @property
    def exact(self) -> Tensor:
        """Where there is one possible value."""
        return (self.num & ~self.nan & (self.lo == self.hi)) | ~self.num

    @property
    def values(self) -> Tensor:
        """The values where they are exact."""
        return torch.where(self.num, self.lo, float("nan"))

    @property
    def magnitude(self) -> Tensor:
        """The greatest absolute value."""
        return torch.maximum(self.lo.abs(), self.hi.abs())

    def apply(self, view: Callable[[Tensor], Tensor]) -> Float:
        """A view of all parts."""
        return Float(view(self.lo), view(self.hi), view(self.nan), view(self.num))

    def contains(self, value: float) -> Tensor:
        """Where a number is possible."""
        return self.num & (self.lo <= value) & (value <= self.hi)

    @property
    def may_be_infinite(self) -> Tensor:
        """Where an infinity is possible."""
        return self.num & ((self.hi == INF) | (self.lo == -INF))


def where(condition: Tensor, a: Float, b: Float) -> Float:
    """One of two, element by element."""
    parts = zip((a.lo, a.hi, a.nan, a.num), (b.lo, b.hi, b.nan, b.num), strict=True)
    return Float(*(torch.where(condition, x, y) for x, y in parts))


def hull(a: Float, b: Float) -> Float:
    """Either of two."""
    lo = torch.minimum(torch.where(a.num, a.lo, INF), torch.where(b.num, b.lo, INF))
    hi = torch.maximum(torch.where(a.num, a.hi, -INF), torch.where(b.num, b.hi, -INF))
    return Float.of(lo, hi, a.nan | b.nan, a.num | b.num)


def anything(like: Tensor) -> Float:
    """No claim."""
    full = torch.full(like.shape, INF, dtype=torch.float64)
    yes = torch.ones(like.shape, dtype=torch.bool)
    return Float(-full, full, yes, yes)


def rounded(x: Float, p: Precision, units: Tensor | float) -> Float:
    """What computing with an error of some units of the precision may give; beyond its greatest number it may overflow."""
    lo = torch.where(x.lo.isinf(), x.lo, x.lo - (x.lo.abs() * p.unit + p.tiny) * units)
    hi = torch.where(x.hi.isinf(), x.hi, x.hi + (x.hi.abs() * p.unit + p.tiny) * units)
    lo, hi = torch.where(lo < -p.largest, -INF, lo), torch.where(hi > p.largest, INF, hi)
    return Float.of(lo, hi, x.nan, x.num)


def converted(x: Float, dtype: DType) -> Float:
    """Rounded to nearest in a type; narrow floats by way of float32, as torch does."""
    if dtype is DType.FLOAT64:
        return x
    to = dtype.torch

    def one(t: Tensor) -> Tensor:
        return t.float().to(to).double()

    return Float.of(one(x.lo), one(x.hi), x.nan, x.num)
