"""The accuracy rule: bounds a result's distance from float64 relative to torch eager's on the same inputs.

NaN and infinities must occur where the exact result, rounded to the dtype, has them. The root mean square error is at most 1.1
times eager's for results of 16 bits or fewer and 1.25 times for float32; it is checked only if there are enough elements and it
exceeds 1/64 of a unit in the last place. The greatest error is at most twice eager's plus two units in the last place.

An 8-bit result is the rounded exact result, except for 0.1% of its elements, or 1.25 times as many as eager has wrong. Those
elements differ by at most one step, or by at most eager's greatest error. If eager overflows, the result either satisfies the rule
against torch in float32, rounded once, or has no error where eager is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ENOUGH = 1 << 16
"""The fewest elements for which the root mean square is significant."""

_GREATEST, _UNITS = 2.0, 2.0  # times eager's error, plus units in the last place
_INVISIBLE = 1 / 64  # units in the last place: both results round alike, except for one element in 4000
_MEANINGLESS = 0.125  # fraction of the result's root mean square: with a larger error, the result is meaningless
_MISROUNDED_RATIO = 1.25  # times eager's count: one scale of a tensor moves many numbers across a rounding boundary
_MISROUNDED = 1e-3  # fraction of 8-bit elements that may be one step off, across a rounding boundary

_ZERO = 1e-12  # fraction of the largest result below which one is only float64's rounding, such as a gradient that is zero


@dataclass(frozen=True)
class Errors:
    """Distances from the exact result, over elements where all are finite.

    Attributes:
        worst, eager_worst: the greatest error.
        rms, eager_rms: root mean square.
        compared: number of elements.
    """

    worst: float = 0.0
    eager_worst: float = 0.0
    rms: float = 0.0
    eager_rms: float = 0.0
    compared: int = 0


@dataclass(frozen=True)
class Verdict:
    """The rule's verdict on one result; `overflows` excuses deviations because eager overflows or is meaningless there."""

    errors: Errors
    failure: str = ""
    overflows: bool = False


def rms_bound(dtype: torch.dtype) -> float:
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
    """Judges one result.

    Args:
        got, eager, exact: the result, torch's on the same inputs, and the float64 result on the same device.
        wider: computes torch's result in float32, cast to the same dtype; replaces an eager result that overflows.
        may_overflow: True if eager may be meaningless for these inputs.
        through: a narrower dtype of intermediates, to which kernels may or may not round.
        approximate: True to check only NaN and infinities.
    """
    if got.shape != eager.shape or got.dtype is not eager.dtype:
        return Verdict(Errors(), f"{got.dtype} {tuple(got.shape)} instead of {eager.dtype} {tuple(eager.shape)}")
    if got.shape != exact.shape:
        return Verdict(Errors(), f"shape {tuple(got.shape)} instead of {tuple(exact.shape)}")
    dtype, rounded = got.dtype, exact.to(got.dtype)
    got, eager, rounded = _comparable(got), _comparable(eager), _comparable(rounded)
    eager_overflows, overflows = (bool(_differs_in_kind(result, rounded).any()) for result in (eager, got))
    if eager_overflows and wider is not None:
        comparison = _Comparison(dtype, got, _comparable(wider()), exact, rounded, through)
        if not comparison.failure():
            return Verdict(comparison.errors, overflows=overflows)
    comparison = _Comparison(dtype, got, eager, exact, rounded, through)
    failure = comparison.nonfinite_mismatch() if approximate else comparison.failure()
    if failure and may_overflow and (eager_overflows or comparison.eager_is_meaningless()):
        return Verdict(comparison.errors, overflows=True)
    return Verdict(comparison.errors, failure, overflows and not failure)


def _comparable(result: Tensor) -> Tensor:
    """Widens 8-bit floats, which torch can neither compare nor subtract."""
    return result.float() if result.is_floating_point() and result.itemsize == 1 else result


def _repetitions(exact: Tensor) -> int:
    """Counts how often expanded dims repeat a result: repeated rounding errors are not independent."""
    return math.prod(extent for dim, extent in enumerate(exact.shape) if extent and bool((exact == exact.narrow(dim, 0, 1)).all()))


def _differs_in_kind(left: Tensor, right: Tensor) -> Tensor:
    """True at elements that differ in being NaN, infinite (with sign) or finite."""
    return ~((left == right) | (left.isfinite() & right.isfinite()) | (left.isnan() & right.isnan()))


def relative_errors(results: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float | None]:
    """The greatest error of each result over elements where both are finite, relative to the root mean square of the exact result;
    None for integers. The error of a result that is zero but for rounding is relative to the largest one."""
    scales = [_rms(e.double()[e.isfinite()]) for e in exact]
    largest = max(scales, default=0.0)
    scales = [scale if scale > _ZERO * largest else largest for scale in scales]
    pairs = zip(results, exact, scales, strict=True)
    return [_relative_error(r, e.double(), scale) if r.is_floating_point() else None for r, e, scale in pairs]


def _relative_error(got: Tensor, exact: Tensor, scale: float) -> float:
    got = got.double()
    finite = got.isfinite() & exact.isfinite()
    error = _greatest((got[finite] - exact[finite]).abs())
    return error / scale if scale else error


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
        nonfinite = self.nonfinite_mismatch()
        if self.is_narrow:
            return nonfinite or self._misrounding()
        return nonfinite or self._check_worst(self.ours, self.expected) or self._rms() or self._check_unmeasured()

    def eager_is_meaningless(self) -> bool:
        finite = self.eager.isfinite()
        exact = self.exact[finite]
        return _rms(self.eager[finite].double() - exact) > _MEANINGLESS * _rms(exact)

    def nonfinite_mismatch(self) -> str:
        """Checks NaN and infinities. Results near the greatest finite number may overflow; the error bound judges these."""
        mismatched = _differs_in_kind(self.got, self.rounded) & ~_differs_in_kind(self.eager, self.rounded)
        limit = self.info.max
        allowed = _GREATEST * self.errors.eager_worst + _UNITS * self.info.eps * limit
        is_near_limit = ((self.exact.abs() - limit).abs() <= allowed) & (self.got.sign() == self.exact.sign())
        mismatched &= ~(is_near_limit & (self.got.abs().double() >= limit - 2 * allowed))
        count = int(mismatched.sum())
        if not count:
            return ""
        first = tuple(mismatched.nonzero()[0].tolist())
        return f"{count} elements differ from the exact result in being NaN, infinite or finite: {self._describe_element(first)}"

    def _misrounding(self) -> str:
        got, eager, rounded = self.got[self.finite], self.eager[self.finite], self.rounded[self.finite]
        steps = self.info.eps * rounded.abs().clamp(min=self.info.tiny)
        return misrounding(got, eager, rounded, steps)

    def _rms(self) -> str:
        bound = self.rms_bound
        invisible = _INVISIBLE * torch.finfo(self.got.dtype).eps * _rms(self.expected)
        if self.different < ENOUGH or self.errors.rms <= max(bound * self.errors.eager_rms, invisible) + 1e-300:
            return ""
        return f"root mean square error {self.errors.rms:.3e} is more than {bound} × eager's {self.errors.eager_rms:.3e}"

    def _check_worst(self, ours: Tensor, expected: Tensor) -> str:
        bound = _GREATEST * self.errors.eager_worst
        over = ours - _UNITS * self._unit(expected) - self.on_the_way * expected.abs() - bound
        if not over.numel() or not bool((over > 0).any()):
            return ""
        index = int(over.argmax())
        message = f"an error of {ours[index].item():.3e} at {expected[index].item():.6g}"
        return f"{message} is more than twice eager's greatest, {self.errors.eager_worst:.3e}, plus 2 units in the last place"

    def _check_unmeasured(self) -> str:
        """Checks elements where only eager is not finite: their errors are compared with eager's errors elsewhere."""
        alone = self.rounded.isfinite() & self.got.isfinite() & ~self.eager.isfinite()
        if not bool(alone.any()):
            return ""
        if not self.errors.compared:
            return "eager has no finite element to compare with"
        expected = self.exact[alone]
        return self._check_worst((self.got[alone].double() - expected).abs(), expected)

    def _unit(self, expected: Tensor) -> Tensor:
        return self.info.eps * expected.abs().clamp(min=self.info.tiny)

    def _describe_element(self, index: tuple[int, ...]) -> str:
        ours, theirs, exact = (t[index].item() for t in (self.got, self.eager, self.exact))
        return f"at {index} it is {ours:.6g}, eager {theirs:.6g}, exact {exact:.6g}"


def misrounding(got: Tensor, eager: Tensor, rounded: Tensor, steps: Tensor) -> str:
    """Describes 8-bit results (finite elements only) that are rounded wrongly too often, or by more than one of the `steps`."""
    ours, theirs = (got - rounded).abs(), (eager - rounded).abs()
    misrounded, eager_misrounded = int((ours > 0).sum()), int((theirs > 0).sum())
    chance = 1 + 3 * math.sqrt(eager_misrounded)  # random variation of the counts
    if misrounded > max(_MISROUNDED * ours.numel(), _MISROUNDED_RATIO * eager_misrounded) + chance:
        return f"{misrounded} of {ours.numel()} elements are not the rounded exact result, and {eager_misrounded} of eager's"
    far = int((ours > steps.clamp(min=_greatest(theirs))).sum())
    return f"{far} elements are more than a step, and further than eager's, from the exact result" if far else ""


def _greatest(errors: Tensor) -> float:
    return float(errors.max()) if errors.numel() else 0.0


def _rms(values: Tensor) -> float:
    """Computes the root mean square of scaled values, so that squares of large values do not overflow."""
    scale = _greatest(values.abs())
    if not 0 < scale < math.inf:
        return scale
    return scale * math.sqrt(float((values / scale).square().mean()))


def judge_any(got: Tensor, eager: Tensor, exact: Tensor, *, is_quantized: bool = False, **settings: Any) -> Verdict:
    """Judges a result of any dtype: integers and booleans must equal those of float64 or of eager.

    Args:
        is_quantized: True if 8-bit integers are rounded floats, judged like 8-bit floats.
        settings: further arguments of `judge`, for floats.
    """
    if is_quantized and got.dtype is torch.int8 is eager.dtype and got.shape == eager.shape == exact.shape:
        ours, theirs, rounded = (t.double() for t in (got, eager, exact))
        worst, eager_worst = _greatest((ours - rounded).abs()), _greatest((theirs - rounded).abs())
        errors = Errors(worst, eager_worst, _rms(ours - rounded), _rms(theirs - rounded), got.numel())
        return Verdict(errors, misrounding(ours, theirs, rounded, torch.ones_like(rounded)))
    if got.is_floating_point() or got.dtype is not eager.dtype or got.shape != eager.shape:
        return judge(got, eager, exact, **settings)
    wrong = int(((got != exact) & (got != eager)).sum())
    errors = Errors(float(wrong > 0), 0.0, 0.0, 0.0, got.numel())
    return Verdict(errors, f"{wrong} of {got.numel()} elements are neither eager's nor those of float64" if wrong else "")
