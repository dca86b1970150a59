"""Math functions of kernels: pure functions over registers, and the arguments of their calls."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

from fusegen.dtypes import DType
from fusegen.ir.graph import Location
from fusegen.ir.index_map import Bounds
from fusegen.ir.ops import Op
from fusegen.ir.reductions import REDUCTIONS, PivotSums
from fusegen.ir.symbolic import Axes, Index
from fusegen.schedule.indices import IndexCheck
from fusegen.schedule.terms import ByteBits, Term


class Approximations(IntEnum):
    """The approximate functions that math may use."""

    NONE = 0
    ROUNDED = 1  # those whose error vanishes when the result is rounded to 16 bits
    FAST_MATH = 2  # all that the hardware has, on request of the user


@dataclass(frozen=True)
class MathParameter:
    """A parameter of a math function: its name and its computing type."""

    name: str
    dtype: DType
    vec: int = 1


@dataclass(frozen=True)
class MathResult:
    name: str
    term: int
    dtype: DType


@dataclass(frozen=True)
class MathFunction:
    """A pure function of values in registers, extracted from the user's math.

    Attributes:
        terms: a DAG; leaves are constants or parameters.
        leaves: for each leaf that is a parameter, its position in ``terms`` and its expression.
        locations: for each term, the user's source line.
        doc: a comment of one line in the emitted text.
        variables: terms that a variable of the user holds, with its name.
    """

    name: str
    parameters: tuple[MathParameter, ...]
    terms: tuple[Term, ...]
    leaves: tuple[tuple[int, str], ...]
    results: tuple[MathResult, ...]
    locations: tuple[Location | None, ...]
    fast: Approximations
    doc: str = ""
    variables: tuple[tuple[int, str], ...] = ()


class Origin(Enum):
    LANES = "lanes"  # an array of neighbours: read from memory, from an accumulator, or computed by an earlier function
    VALUE = "value"  # a variable that all lanes share
    SCALAR = "scalar"  # a run-time scalar
    COORDINATE = "coordinate"  # computed from coordinates


@dataclass(frozen=True)
class CallArgument:
    """An argument of a call. Coordinates are indices or conditions: that of the first lane, or one per lane."""

    origin: Origin
    name: str
    coordinates: tuple[Index | Bounds, ...] = ()


@dataclass(frozen=True)
class MathCall:
    function: MathFunction
    arguments: tuple[CallArgument, ...]


@dataclass(frozen=True)
class Copy:
    """A result that is one of the call's inputs, so that nothing is computed."""

    name: str
    dtype: DType
    value: CallArgument


@dataclass(frozen=True)
class Reduction:
    """A reduction in a pipeline, with the variables of its state.

    Attributes:
        dtype: the type in which elements are combined.
        pivot_sums: the rule that accumulates elements as sums about a pivot; None to combine each element with the state directly.
    """

    op: Op
    dtype: DType
    components: tuple[MathParameter, ...]
    fast: Approximations = Approximations.NONE
    pivot_sums: PivotSums | None = None

    def of(self, component: str) -> MathParameter:
        return self.components[REDUCTIONS[self.op].component_index(component)]

    @property
    def lifted(self) -> tuple[MathParameter, ...]:
        """The components from which an element's state is built."""
        return self.components if self.pivot_sums is None else (self.of(self.pivot_sums.pivot),)


@dataclass(frozen=True)
class LaneRead:
    """A read of a buffer by two neighbouring lanes.

    Attributes:
        name: the variable: one value if both lanes read the same element, else an array of two.
        offsets: one for both lanes, or one per lane.
        conditions: for each offset, the bounds under which it is read; the value is 0 outside of them.
        vector: True if the lanes' elements are contiguous and aligned to the size of both.
        bits: the bits that are read as a float; None for whole elements.
        is_one_call: True for random bits if one call of the generator gives those of the eight columns of an n8 fragment.
    """

    name: str
    buffer: int
    offsets: tuple[Index, ...]
    conditions: tuple[tuple[Bounds, ...], ...]
    vector: bool
    bits: ByteBits | None = None
    is_one_call: bool = False

    @property
    def accesses(self) -> tuple[tuple[Index, tuple[Bounds, ...]], ...]:
        return tuple(zip(self.offsets, self.conditions, strict=True))


@dataclass(frozen=True)
class LaneFunction:
    """Math on two neighbouring lanes of an accumulator, with the reads of its call.

    Attributes:
        function: the math on one lane if the lanes do not mix (`lanewise`), else on both; results are those of the first lane, or
            of both in turn.
        checks: indices that must be in range and that no read contains.
        axes: the iteration space; the last axis numbers pairs of lanes.
    """

    function: MathFunction
    lanewise: bool
    arguments: tuple[CallArgument, ...]
    reads: tuple[LaneRead, ...]
    checks: tuple[IndexCheck, ...]
    axes: Axes
