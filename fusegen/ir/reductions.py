"""The table of reductions: what is carried from element to element, and how two such states become one.

A state has one or more components. `lift` makes the state of one element, `combine` the state of two parts, and the identity is
that of no elements; the order of parts must not matter but for rounding. Each component is a result by itself: a node of a
reduction with several names its own in the attribute ``part``, and nodes that agree in all else share one state in a kernel. What
else a result takes is ordinary math on components, in `passes.expand`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from fusegen.dtypes import DType
from fusegen.ir.ops import Op


@dataclass(frozen=True)
class RuleValue:
    """A value in a rule of the table: an operand, a number, or a pointwise operation on others.

    Attributes:
        op: the operation; None for an operand or a number.
        args: what it is applied to.
        text: the operand's name, or the number.
    """

    op: Op | None
    args: tuple[RuleValue, ...] = ()
    text: str = ""

    def apply(self, op: Op, *others: RuleValue | float) -> RuleValue:
        """An operation on this value and others."""
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
        """``chosen`` where this holds, ``other`` elsewhere; one of them is no number."""
        return self.apply(Op.WHERE, chosen, other)

    @property
    def is_number(self) -> bool:
        """Tells if this is a number, which takes the type of what it meets."""
        return self.op is Op.CONSTANT


def _lifted(value: RuleValue | float) -> RuleValue:
    return value if isinstance(value, RuleValue) else RuleValue(Op.CONSTANT, (), repr(value))


StateValues: TypeAlias = tuple[RuleValue, ...]


@dataclass(frozen=True)
class Component:
    """One value of a state.

    Attributes:
        name: what its result is called.
        identity: the value of no elements, as text: of floats, and of integers.
        is_index: whether it numbers elements, in int64; else it has the elements' type.
    """

    name: str
    identity: tuple[str, str]
    is_index: bool = False

    def dtype(self, element: DType) -> DType:
        """The type of a state's component."""
        return DType.INT64 if self.is_index else element


def _itself(element: RuleValue, _index: RuleValue) -> StateValues:
    return (element,)


@dataclass(frozen=True)
class Gathering:
    """The combination of states by additions alone, however many they are: as sums about a pivot, which is one of them.

    Attributes:
        pivot: the component of a state, and of an element's, that others are measured from.
        count: the component that counts elements.
        sums: names of what is added up, beside the count.
        lift: the sums of an element about a pivot.
        spread: the sums of a state about a pivot.
        settle: the state that a pivot, a count and sums about the pivot are: its components beside the count.
    """

    pivot: str
    count: str
    sums: tuple[str, ...]
    lift: Callable[[RuleValue, RuleValue], StateValues]
    spread: Callable[[StateValues, RuleValue], StateValues]
    settle: Callable[[RuleValue, RuleValue, StateValues], StateValues]


@dataclass(frozen=True)
class Monoid:
    """A reduction.

    Attributes:
        components: of the state, in order.
        combine: the state of two parts.
        lift: the state of an element and its index along the reduced dims.
        operation: the pointwise operation that combines states of one component by itself; None where it takes more.
        approximable: whether kernels whose results end in 16 bits may combine by approximate functions.
        gathering: how many states are combined with less than `combine` for each.
    """

    components: tuple[Component, ...]
    combine: Callable[[StateValues, StateValues], StateValues]
    lift: Callable[[RuleValue, RuleValue], StateValues] = _itself
    operation: Op | None = None
    approximable: bool = False
    gathering: Gathering | None = None

    def number(self, part: object) -> int:
        """The place of a component; of the only one where none is named."""
        names = [c.name for c in self.components]
        return 0 if part is None else names.index(str(part))


SHORT_ROW = 4096
"""Elements of a row up to which a kernel finds the first few of it, by as many reductions."""

_ZERO, _ONE = ("0.0", "0"), ("1.0", "1")
_LEAST, _GREATEST = ("-inf", str(-(2**63))), ("inf", str(2**63 - 1))


def _single(name: str, identity: tuple[str, str], op: Op) -> Monoid:
    return Monoid((Component(name, identity),), lambda a, b: (a[0].apply(op, b[0]),), operation=op)


def _placed(loses: Op, identity: tuple[str, str], prefers: Op, nowhere: tuple[str, str]) -> Monoid:
    """The best of all values, and an index at which it stands.

    Args:
        loses: a comparison with what is as good or better.
        prefers: how the index of one value compares with that of another, as good one, which it replaces.
        nowhere: the index of no element.
    """

    def beats(a: RuleValue, b: RuleValue) -> RuleValue:
        """Tells if a is better than b; NaN is better than every number."""
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
    return _placed(loses, identity, Op.LT, _GREATEST)


def _last(loses: Op, identity: tuple[str, str]) -> Monoid:
    return _placed(loses, identity, Op.GT, _LEAST)


def _combined_logarithms(a: StateValues, b: StateValues) -> StateValues:
    """log(e^a + e^b), by the greater one."""
    distance = (a[0] - b[0]).apply(Op.ABS)
    apart = a[0].apply(Op.EQ, b[0]).where(0.0, distance)  # two infinities have no difference
    return (a[0].apply(Op.MAXIMUM, b[0]) + (-apart).apply(Op.EXP).apply(Op.LOG1P),)


def _combined_moments(a: StateValues, b: StateValues) -> StateValues:
    """Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances (1979), equation 2.1.

    The mean is kept in two parts, the second of which is what rounding took from the first (Dekker 1971): where the mean is far
    from zero, its rounding would be as large as the differences whose squares are summed.
    """
    (count_a, mean_a, rest_a, m2_a), (count_b, mean_b, rest_b, m2_b) = a, b
    count, rest_apart = count_a + count_b, rest_b - rest_a
    share = count_b / count.apply(Op.MAXIMUM, 1.0)
    apart = mean_b - mean_a
    step = apart * share
    mean = mean_a + step
    rest = rest_a + rest_apart * share + (step - (mean - mean_a))
    difference = apart + rest_apart
    return count, mean, rest, m2_a + m2_b + difference * (difference * (count_a * share))


def _settled_moments(pivot: RuleValue, count: RuleValue, sums: StateValues) -> StateValues:
    """The moments from sums of differences from a pivot and of their squares. Since the pivot is one of the n values (or the
    mean of one of n parts), the sum of squares about it is at most n times that about the mean, so that no more is lost than n
    roundings: Chan, Golub and LeVeque, Algorithms for Computing the Sample Variance (1983), section 3."""
    apart, squares = sums
    step = apart / count.apply(Op.MAXIMUM, 1.0)
    mean = pivot + step
    return mean, step - (mean - pivot), (squares - apart * step).apply(Op.MAXIMUM, 0.0)


def _spread_moments(state: StateValues, pivot: RuleValue) -> StateValues:
    count, mean, rest, m2 = state
    apart = (mean - pivot) + rest
    return count * apart, m2 + count * apart * apart


_MOMENTS = Gathering(
    pivot="mean",
    count="count",
    sums=("apart", "squares"),
    lift=lambda element, pivot: (element - pivot, (element - pivot) * (element - pivot)),
    spread=_spread_moments,
    settle=_settled_moments,
)


def _combined_normalizers(a: StateValues, b: StateValues) -> StateValues:
    """Milakov and Gimelshein, Online normalizer calculation for softmax (arXiv 1805.02867): the lesser peak's mass is rescaled."""
    (peak_a, mass_a), (peak_b, mass_b) = a, b
    distance = (peak_a - peak_b).apply(Op.ABS)
    scale = peak_a.apply(Op.EQ, peak_b).where(1.0, (-distance).apply(Op.EXP))  # two infinities have no difference
    mass = peak_a.apply(Op.GE, peak_b).where(mass_a + mass_b * scale, mass_a * scale + mass_b)
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
        gathering=_MOMENTS,
    ),
    Op.NORMALIZER: Monoid(
        (Component("peak", _LEAST), Component("mass", _ZERO)),
        _combined_normalizers,
        lambda element, _index: (element, _NUMBER_ONE),
        approximable=True,
    ),
    Op.LAST_MAX: _last(Op.LE, _LEAST),
    Op.LAST_MIN: _last(Op.GE, _GREATEST),
    Op.LOGCUMSUMEXP: Monoid((Component("logarithm", _LEAST),), _combined_logarithms),
}
"""One row a primitive reduction, and one a scan of which nothing else is the reduction."""


def operation_of(op: Op) -> Op | None:
    """The pointwise operation that a reduction repeats; None for what is no reduction, or repeats more than one."""
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
"""For each scan, the reduction of each prefix."""
