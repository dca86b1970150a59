"""The table of reductions: the state that each one carries from element to element, and the rule that combines two states.

A state has one or more components. `lift` makes the state of one element, `combine` merges the states of two parts, and the
identity is the state of no elements; the order of parts only affects rounding. Each component is a separate result: a node names
its component in the attribute ``part``, and nodes that differ in it alone share one state in a kernel. Further math on components
is in `passes.expand`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from fusegen.dtypes import DType
from fusegen.ir.ops import Op


@dataclass(frozen=True)
class RuleValue:
    """A value in a rule of the table: an operand (`op` is None), a number, or a pointwise operation; `text` names or spells
    leaves, and is the variable of an operation's value, if any."""

    op: Op | None
    args: tuple[RuleValue, ...] = ()
    text: str = ""

    def apply(self, op: Op, *others: RuleValue | float) -> RuleValue:
        return RuleValue(op, (self, *map(_lifted, others)))

    def __add__(self, other: RuleValue | float) -> RuleValue:
        return self.apply(Op.ADD, other)

    def __sub__(self, other: RuleValue | float) -> RuleValue:
        return self.apply(Op.SUB, other)

    def __mul__(self, other: RuleValue | float) -> RuleValue:
        return self.apply(Op.MUL, other)

    def __truediv__(self, other: RuleValue | float) -> RuleValue:
        return self.apply(Op.DIV, other)

    def __neg__(self) -> RuleValue:
        return self.apply(Op.NEG)

    def where(self, chosen: RuleValue | float, other: RuleValue | float) -> RuleValue:
        """``chosen`` if this condition holds, else ``other``; at least one is a `RuleValue`."""
        return self.apply(Op.WHERE, chosen, other)

    @property
    def is_number(self) -> bool:
        """True for a number, which takes the type of the other operands."""
        return self.op is Op.CONSTANT


def _lifted(value: RuleValue | float) -> RuleValue:
    return value if isinstance(value, RuleValue) else RuleValue(Op.CONSTANT, (), repr(value))


StateValues: TypeAlias = tuple[RuleValue, ...]


@dataclass(frozen=True)
class Component:
    """One value of a state; `identity` is the value for no elements, as text: for floats, and for integers."""

    name: str
    identity: tuple[str, str]
    is_index: bool = False

    def dtype(self, element: DType) -> DType:
        return DType.INT64 if self.is_index else element


def _itself(element: RuleValue, _index: RuleValue) -> StateValues:
    return (element,)


@dataclass(frozen=True)
class PivotSums:
    """Combines any number of states by additions alone: sums about a pivot, which is one of the elements.

    Attributes:
        pivot: the component that the sums are centred on.
        sums: names of the sums, besides the count.
        lift: computes the sums about a pivot from an element.
        sums_of_state: computes the sums about a pivot from a state.
        state_of_sums: computes the components (besides the count) from a pivot, a count and sums about the pivot.
    """

    pivot: str
    count: str
    sums: tuple[str, ...]
    lift: Callable[[RuleValue, RuleValue], StateValues]
    sums_of_state: Callable[[StateValues, RuleValue], StateValues]
    state_of_sums: Callable[[RuleValue, RuleValue, StateValues], StateValues]


@dataclass(frozen=True)
class Monoid:
    """A reduction.

    Attributes:
        combine: merges the states of two parts.
        lift: the state of an element and its index along the reduced dims.
        operation: the pointwise operation that combines one-component states; None if it takes more.
        approximable: True if kernels with 16-bit results may combine with approximate functions.
        pivot_sums: combines many states at less cost than repeated `combine`.
        symmetric: False if `combine` rounds differently for swapped states.
        source: the publication of `combine`.
    """

    components: tuple[Component, ...]
    combine: Callable[[StateValues, StateValues], StateValues]
    lift: Callable[[RuleValue, RuleValue], StateValues] = _itself
    operation: Op | None = None
    approximable: bool = False
    pivot_sums: PivotSums | None = None
    symmetric: bool = True
    source: str = ""

    def component_index(self, part: object) -> int:
        """Returns the index of a component; 0 if `part` is None."""
        names = [c.name for c in self.components]
        return 0 if part is None else names.index(str(part))


SHORT_ROW = 4096
"""The row length up to which a kernel computes top-k for a small k by repeated reductions."""

ABOVE_ALL_KEYS = 0x7F800002 << 32
"""Greater than all values of `Op.SORT_KEY`, and exact in float64."""

_ZERO, _ONE = ("0.0", "0"), ("1.0", "1")
_LEAST, _GREATEST = ("-inf", str(-(2**63))), ("inf", str(2**63 - 1))


def _single(name: str, identity: tuple[str, str], op: Op) -> Monoid:
    return Monoid((Component(name, identity),), lambda a, b: (a[0].apply(op, b[0]),), operation=op)


def _with_index(loses: Op, identity: tuple[str, str], prefers: Op, nowhere: tuple[str, str]) -> Monoid:
    """The best value and an index of it; NaN beats every number.

    `loses` is True for a value and an equal or better one. For equal values, `prefers` is True for an index that replaces another.
    """

    def beats(a: RuleValue, b: RuleValue) -> RuleValue:
        is_number = b.apply(Op.EQ, b)
        return a.apply(loses, b).apply(Op.LOGICAL_NOT).apply(Op.LOGICAL_AND, is_number)

    def combine(a: StateValues, b: StateValues) -> StateValues:
        is_preferred = b[1].apply(prefers, a[1])
        is_as_good = beats(a[0], b[0]).apply(Op.LOGICAL_NOT)
        wins = beats(b[0], a[0]).apply(Op.LOGICAL_OR, is_as_good.apply(Op.LOGICAL_AND, is_preferred))
        return wins.where(b[0], a[0]), wins.where(b[1], a[1])

    components = (Component("values", identity), Component("indices", nowhere, is_index=True))
    return Monoid(components, combine, lambda element, index: (element, index))


def _first(loses: Op, identity: tuple[str, str]) -> Monoid:
    return _with_index(loses, identity, Op.LT, _GREATEST)


def _last(loses: Op, identity: tuple[str, str]) -> Monoid:
    return _with_index(loses, identity, Op.GT, _LEAST)


def _combined_logarithms(a: StateValues, b: StateValues) -> StateValues:
    """log(e^a + e^b), relative to the greater one."""
    distance = (a[0] - b[0]).apply(Op.ABS)
    gap = a[0].apply(Op.EQ, b[0]).where(0.0, distance)  # inf - inf is NaN
    return (a[0].apply(Op.MAXIMUM, b[0]) + (-gap).apply(Op.EXP).apply(Op.LOG1P),)


def _combined_moments(a: StateValues, b: StateValues) -> StateValues:
    """Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances (1979), equation 2.1.

    The mean has two parts; the second is the rounding error of the first (Dekker 1971). If the mean is far from zero, its rounding
    error would be as large as the summed differences.
    """
    (count_a, mean_a, rest_a, m2_a), (count_b, mean_b, rest_b, m2_b) = a, b
    count, rest_delta = count_a + count_b, rest_b - rest_a
    share = count_b / count.apply(Op.MAXIMUM, 1.0)
    delta = mean_b - mean_a
    step = delta * share
    mean = mean_a + step
    rest = rest_a + rest_delta * share + (step - (mean - mean_a))
    difference = delta + rest_delta
    return count, mean, rest, m2_a + m2_b + difference * (difference * (count_a * share))


def _moments_of_sums(pivot: RuleValue, count: RuleValue, sums: StateValues) -> StateValues:
    """The moments from sums of differences from a pivot and of their squares.

    The pivot is one of the n values (or the mean of one of n parts), so the squares about it sum to at most n times those about the
    mean, and at most n roundings are lost: Chan, Golub and LeVeque, Algorithms for Computing the Sample Variance (1983), section 3.
    """
    differences, squares = sums
    step = differences / count.apply(Op.MAXIMUM, 1.0)
    mean = pivot + step
    return mean, step - (mean - pivot), (squares - differences * step).apply(Op.MAXIMUM, 0.0)


def _sums_of_moments(state: StateValues, pivot: RuleValue) -> StateValues:
    count, mean, rest, m2 = state
    difference = (mean - pivot) + rest
    return count * difference, m2 + count * difference * difference


_MOMENTS = PivotSums(
    pivot="mean",
    count="count",
    sums=("apart", "squares"),
    lift=lambda element, pivot: (element - pivot, (element - pivot) * (element - pivot)),
    sums_of_state=_sums_of_moments,
    state_of_sums=_moments_of_sums,
)


def _combined_normalizers(a: StateValues, b: StateValues) -> StateValues:
    """Rescales the sum of the smaller max."""
    (peak_a, mass_a), (peak_b, mass_b) = a, b
    distance = (peak_a - peak_b).apply(Op.ABS)
    scale = peak_a.apply(Op.EQ, peak_b).where(1.0, (-distance).apply(Op.EXP))  # inf - inf is NaN
    rescale = replace(scale, text="rescale")
    mass = peak_a.apply(Op.GE, peak_b).where(mass_a + mass_b * rescale, mass_a * rescale + mass_b)
    return peak_a.apply(Op.MAXIMUM, peak_b), mass


_NUMBER_ONE = RuleValue(Op.CONSTANT, (), "1.0")
_NUMBER_ZERO = RuleValue(Op.CONSTANT, (), "0.0")

REDUCTIONS: dict[Op, Monoid] = {
    Op.SUM: _single("sum", _ZERO, Op.ADD),
    Op.PROD: _single("prod", _ONE, Op.MUL),
    Op.AMAX: _single("amax", _LEAST, Op.MAXIMUM),
    Op.AMIN: _single("amin", _GREATEST, Op.MINIMUM),
    Op.MAX: _first(Op.LE, _LEAST),
    Op.MIN: _first(Op.GE, _GREATEST),
    Op.MOMENTS: Monoid(
        (Component("count", _ZERO), Component("mean", _ZERO), Component("rest", _ZERO), Component("m2", _ZERO)),
        _combined_moments,
        lambda element, _index: (_NUMBER_ONE, element, _NUMBER_ZERO, _NUMBER_ZERO),
        pivot_sums=_MOMENTS,
        symmetric=False,
    ),
    Op.NORMALIZER: Monoid(
        (Component("peak", _LEAST), Component("mass", _ZERO)),
        _combined_normalizers,
        lambda element, _index: (element, _NUMBER_ONE),
        approximable=True,
        source="Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867",
    ),
    Op.LAST_MAX: _last(Op.LE, _LEAST),
    Op.LAST_MIN: _last(Op.GE, _GREATEST),
    Op.LOGCUMSUMEXP: Monoid((Component("logarithm", _LEAST),), _combined_logarithms),
}
"""One row per primitive reduction, and per scan that is not the prefix of another reduction."""


TRUTH = {Op.AMAX: "any", Op.AMIN: "all"}
"""Names of reductions of truth values."""


def operation_of(op: Op) -> Op | None:
    """Returns the pointwise operation that combines two values in a reduction; None if one operation is not enough."""
    return REDUCTIONS[op].operation if op in REDUCTIONS else None


SCANS: dict[Op, Op] = {
    Op.CUMSUM: Op.SUM,
    Op.CUMPROD: Op.PROD,
    Op.CUMMAX: Op.AMAX,
    Op.CUMMIN: Op.AMIN,
    Op.LAST_MAX: Op.LAST_MAX,
    Op.LAST_MIN: Op.LAST_MIN,
    Op.LOGCUMSUMEXP: Op.LOGCUMSUMEXP,
}
"""The reduction that each scan applies to every prefix."""
