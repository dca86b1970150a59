"""The accuracy rule: how far a result may be from float64, measured by what torch eager does on the same inputs.

NaN and infinities stand where the exact result, rounded to the dtype, has them; the root mean square of the errors is within
1.1 times eager's for results of 16 bits or fewer and 1.25 times for float32 (where there are elements enough for it to say
something, and it is more than a sixtieth of a unit in the last place); the greatest error is within twice eager's plus two units
in the last place. A result of 8 bits is the exact one rounded, but for a thousandth of its elements, or 1.25 times as many as
eager has wrong, which are one step beside it, or as far as eager's. Where eager itself overflows, either the result is as good as
torch's in float32, rounded once, or it has nothing wrong where eager is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ENOUGH = 1 << 16
"""Elements from which on the root mean square says something."""

_GREATEST, _UNITS = 2.0, 2.0  # times eager's error, plus units in the last place
_INVISIBLE = 1 / 64  # units in the last place: where both results are rounded alike but for one element in 4000
_FARAWAY = 0.125  # of the result's root mean square: an error that says that nothing of the result is left
_MORE_BESIDE = 1.25  # times as many as eager's: one scale of a tensor moves many numbers across the middle
_BESIDE = 1e-3  # of the elements of 8 bits may be a step beside the exact result: the other side of the middle between two numbers


@dataclass(frozen=True)
class Errors:
    """Distances from the exact result, over elements that are finite in all of them.

    Attributes:
        worst, eager_worst: the greatest.
        rms, eager_rms: root mean square.
        compared: elements.
    """

    worst: float = 0.0
    eager_worst: float = 0.0
    rms: float = 0.0
    eager_rms: float = 0.0
    compared: int = 0


@dataclass(frozen=True)
class Verdict:
    """The verdict of the rule on one result.

    Attributes:
        errors: that it was judged by.
        failure: what is wrong; empty where nothing is.
        overflows: what is wrong is so because eager is as well: NaN or infinite at the same elements, or nowhere near at all.
    """

    errors: Errors
    failure: str = ""
    overflows: bool = False


def rms_bound(dtype: torch.dtype) -> float:
    """Times eager's root mean square error that a result's may be."""
    return 1.25 if dtype is torch.float32 else 1.1


def judge(
    got: Tensor,
    eager: Tensor,
    exact: Tensor,
    *,
    wider: Callable[[], Tensor] | None = None,
    may_overflow: bool = False,
    through: torch.dtype | None = None,
    approximate: bool = False,
) -> Verdict:
    """The verdict on one result.

    Args:
        got: what is judged.
        eager: torch's result on the same inputs.
        exact: in float64, on the same device.
        wider: gives torch's result in float32 as the same dtype, which takes eager's place where that overflows.
        may_overflow: whether the inputs are such that eager may be of no use at all.
        through: a narrower dtype that the program has values in on the way, to which kernels may round them, or may not.
        approximate: True if only NaN and infinities are judged, since the result is not meant to be as exact as eager's.
    """
    if got.shape != eager.shape or got.dtype is not eager.dtype:
        return Verdict(Errors(), f"{got.dtype} {tuple(got.shape)} instead of {eager.dtype} {tuple(eager.shape)}")
    if got.shape != exact.shape:
        return Verdict(Errors(), f"shape {tuple(got.shape)} instead of {tuple(exact.shape)}")
    dtype, rounded = got.dtype, exact.to(got.dtype)
    got, eager, rounded = _comparable(got), _comparable(eager), _comparable(rounded)
    eager_overflows, overflows = (bool(_is_elsewhere(one, rounded).any()) for one in (eager, got))
    if eager_overflows and wider is not None:
        found = _Comparison(dtype, got, _comparable(wider()), exact, rounded, through)
        if not found.failure():
            return Verdict(found.errors, overflows=overflows)
    found = _Comparison(dtype, got, eager, exact, rounded, through)
    failure = found.places() if approximate else found.failure()
    if failure and may_overflow and (eager_overflows or found.eager_is_far_away()):
        return Verdict(found.errors, overflows=True)
    return Verdict(found.errors, failure, overflows and not failure)


def _comparable(result: Tensor) -> Tensor:
    """A result as it is, or wider where torch cannot compare and subtract it: 8-bit floats."""
    return result.float() if result.is_floating_point() and result.itemsize == 1 else result


def _repetitions(exact: Tensor) -> int:
    """The number of times that a result repeats itself, as that of an expanded tensor does: one row's rounding stays one's."""
    return math.prod(extent for dim, extent in enumerate(exact.shape) if extent and bool((exact == exact.narrow(dim, 0, 1)).all()))


def _is_elsewhere(one: Tensor, other: Tensor) -> Tensor:
    """True at elements of which one is NaN, infinite or finite and the other is not, or infinite with another sign."""
    return ~((one == other) | (one.isfinite() & other.isfinite()) | (one.isnan() & other.isnan()))


class _Comparison:
    def __init__(
        self, dtype: torch.dtype, got: Tensor, eager: Tensor, exact: Tensor, rounded: Tensor, through: torch.dtype | None
    ) -> None:
        self.info, self.rms_bound = torch.finfo(dtype), rms_bound(dtype)
        self.is_narrow = dtype.itemsize == 1
        self.on_the_way = torch.finfo(through).eps / 2 if through is not None else 0.0
        self.got, self.eager, self.exact, self.rounded = got, eager, exact, rounded
        self.finite = rounded.isfinite() & got.isfinite() & eager.isfinite()
        expected = exact[self.finite]
        ours, theirs = ((t[self.finite].double() - expected).abs() for t in (got, eager))
        self.expected, self.ours = expected, ours
        self.errors = Errors(_greatest(ours), _greatest(theirs), _rms(ours), _rms(theirs), ours.numel())
        self.different = ours.numel() // _repetitions(exact)

    def failure(self) -> str:
        """The first fault; empty where there is none."""
        places = self.places()
        if self.is_narrow:
            return places or self._beside()
        return places or self._worst(self.ours, self.expected) or self._rms() or self._unmeasured()

    def eager_is_far_away(self) -> bool:
        """True if eager is of no use as a yardstick."""
        finite = self.eager.isfinite()
        exact = self.exact[finite]
        return _rms(self.eager[finite].double() - exact) > _FARAWAY * _rms(exact)

    def places(self) -> str:
        """NaN and infinities; which side of the greatest number something just there falls on is a matter of its error."""
        wrong = _is_elsewhere(self.got, self.rounded) & ~_is_elsewhere(self.eager, self.rounded)
        limit = self.info.max
        allowed = _GREATEST * self.errors.eager_worst + _UNITS * self.info.eps * limit
        is_there = ((self.exact.abs() - limit).abs() <= allowed) & (self.got.sign() == self.exact.sign())
        wrong &= ~(is_there & (self.got.abs().double() >= limit - 2 * allowed))
        count = int(wrong.sum())
        if not count:
            return ""
        first = tuple(wrong.nonzero()[0].tolist())
        return f"{count} elements are NaN or infinite where they should not be, or the reverse: {self._at(first)}"

    def _beside(self) -> str:
        """Elements of 8 bits that are not the exact result rounded: too many, or too far away."""
        got, eager, rounded = self.got[self.finite], self.eager[self.finite], self.rounded[self.finite]
        steps = self.info.eps * rounded.abs().clamp(min=self.info.tiny)
        return beside(got, eager, rounded, steps)

    def _rms(self) -> str:
        bound = self.rms_bound
        invisible = _INVISIBLE * torch.finfo(self.got.dtype).eps * _rms(self.expected)
        if self.different < ENOUGH or self.errors.rms <= max(bound * self.errors.eager_rms, invisible) + 1e-300:
            return ""
        return f"root mean square error {self.errors.rms:.3e} is more than {bound} × eager's {self.errors.eager_rms:.3e}"

    def _worst(self, ours: Tensor, expected: Tensor) -> str:
        bound = _GREATEST * self.errors.eager_worst
        over = ours - _UNITS * self._unit(expected) - self.on_the_way * expected.abs() - bound
        if not over.numel() or not bool((over > 0).any()):
            return ""
        place = int(over.argmax())
        what = f"an error of {ours[place].item():.3e} at {expected[place].item():.6g}"
        return f"{what} is more than twice eager's greatest, {self.errors.eager_worst:.3e}, plus 2 units in the last place"

    def _unmeasured(self) -> str:
        """Elements that eager alone has not finite: held to what it does elsewhere, if it does anything."""
        alone = self.rounded.isfinite() & self.got.isfinite() & ~self.eager.isfinite()
        if not bool(alone.any()):
            return ""
        if not self.errors.compared:
            return "eager has nothing finite to compare with"
        expected = self.exact[alone]
        return self._worst((self.got[alone].double() - expected).abs(), expected)

    def _unit(self, expected: Tensor) -> Tensor:
        return self.info.eps * expected.abs().clamp(min=self.info.tiny)

    def _at(self, place: tuple[int, ...]) -> str:
        ours, theirs, exact = (t[place].item() for t in (self.got, self.eager, self.exact))
        return f"at {place} it is {ours:.6g}, eager {theirs:.6g}, exact {exact:.6g}"


def beside(got: Tensor, eager: Tensor, rounded: Tensor, steps: Tensor) -> str:
    """Says if more than a few numbers of 8 bits, and more than eager's, are not the exact result rounded, or are more than a step
    away from it; empty if neither.

    Args:
        got, eager, rounded: ours, eager's, and the exact result rounded, which are finite.
        steps: the distance of each from its neighbours.
    """
    ours, theirs = (got - rounded).abs(), (eager - rounded).abs()
    wrong, of_eager = int((ours > 0).sum()), int((theirs > 0).sum())
    chance = 1 + 3 * math.sqrt(of_eager)  # so much such counts differ by
    if wrong > max(_BESIDE * ours.numel(), _MORE_BESIDE * of_eager) + chance:
        return f"{wrong} of {ours.numel()} elements are not the exact result rounded, and {of_eager} of eager's"
    far = int((ours > steps.clamp(min=_greatest(theirs))).sum())
    return f"{far} elements are more than a step, and further than eager's, from the exact result" if far else ""


def _greatest(errors: Tensor) -> float:
    return float(errors.max()) if errors.numel() else 0.0


def _rms(values: Tensor) -> float:
    """Scaled, so that squares of large values do not overflow."""
    scale = _greatest(values.abs())
    if not 0 < scale < math.inf:
        return scale
    return scale * math.sqrt(float((values / scale).square().mean()))


def judge_any(got: Tensor, eager: Tensor, exact: Tensor, *, is_quantized: bool = False, **settings: Any) -> Verdict:
    """The verdict on a result of any dtype: integers and booleans are those of float64 or of eager.

    Args:
        got, eager, exact: as of `judge`.
        is_quantized: True if integers of 8 bits were floats, which are judged as 8-bit floats are.
        settings: of `judge`, for floats.
    """
    if is_quantized and got.dtype is torch.int8 is eager.dtype and got.shape == eager.shape == exact.shape:
        ours, theirs, rounded = (t.double() for t in (got, eager, exact))
        worst, eager_worst = _greatest((ours - rounded).abs()), _greatest((theirs - rounded).abs())
        errors = Errors(worst, eager_worst, _rms(ours - rounded), _rms(theirs - rounded), got.numel())
        return Verdict(errors, beside(ours, theirs, rounded, torch.ones_like(rounded)))
    if got.is_floating_point() or got.dtype is not eager.dtype or got.shape != eager.shape:
        return judge(got, eager, exact, **settings)
    wrong = int(((got != exact) & (got != eager)).sum())
    errors = Errors(float(wrong > 0), 0.0, 0.0, 0.0, got.numel())
    return Verdict(errors, f"{wrong} of {got.numel()} elements are neither eager's nor those of float64" if wrong else "")
