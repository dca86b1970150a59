"""The math of kernels: functions over fragments, and what a pipeline calls them with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

from fusegen.dtypes import DType
from fusegen.ir.graph import Location
from fusegen.ir.index_map import Bounds
from fusegen.ir.ops import Op
from fusegen.ir.reductions import REDUCTIONS, Gathering
from fusegen.ir.symbolic import Axes, Index
from fusegen.schedule.indices import IndexCheck
from fusegen.schedule.terms import Term


class Fast(IntEnum):
    """Approximate functions that math may use.

    Attributes:
        NONE: none of them.
        ROUNDED: those whose error vanishes in 16 bits, in which every result ends.
        FAST_MATH: all that the hardware has, as the user asked for.
    """

    NONE = 0
    ROUNDED = 1
    FAST_MATH = 2


@dataclass(frozen=True)
class MathParameter:
    """An argument of a math function: a name and the type in which it is computed."""

    name: str
    dtype: DType
    lanes: int = 1


@dataclass(frozen=True)
class MathResult:
    """A result of a math function: a name and the term."""

    name: str
    term: int
    dtype: DType


@dataclass(frozen=True)
class MathFunction:
    """A piece of the user's math: a pure function of values in registers.

    Attributes:
        name: the function's name in the emitted text.
        parameters: what it takes.
        terms: a DAG; leaves are constants, or stand for a parameter.
        leaves: for each leaf that is no constant: its position in ``terms`` and the expression that stands for it.
        results: what it gives.
        locations: for each term, the user's line.
        fast: which approximate functions may be used.
        doc: one line that says what it is.
    """

    name: str
    parameters: tuple[MathParameter, ...]
    terms: tuple[Term, ...]
    leaves: tuple[tuple[int, str], ...]
    results: tuple[MathResult, ...]
    locations: tuple[Location | None, ...]
    fast: Fast
    doc: str = ""


class Origin(Enum):
    """The origin of an argument."""

    LANES = "lanes"  # an array of neighbours: of what was read, of an accumulator, of what an earlier function computed
    VALUE = "value"  # a variable that lanes share
    SCALAR = "scalar"  # a run-time scalar
    COORDINATE = "coordinate"  # computed of coordinates


@dataclass(frozen=True)
class CallArgument:
    """An argument of a call of a math function.

    Attributes:
        name: of the variable, or of the parameter that a coordinate is.
        coordinates: an index, or a condition on one: of the first lane, or one a lane where these are listed.
    """

    origin: Origin
    name: str
    coordinates: tuple[Index | Bounds, ...] = ()


@dataclass(frozen=True)
class MathCall:
    """A call of a math function in a pipeline."""

    function: MathFunction
    arguments: tuple[CallArgument, ...]


@dataclass(frozen=True)
class Copy:
    """A result for which nothing is computed.

    Attributes:
        name: of the result.
        value: what it is.
    """

    name: str
    dtype: DType
    value: CallArgument


@dataclass(frozen=True)
class Reduction:
    """A state that a pipeline combines over many elements.

    Attributes:
        op: the row of the table of reductions.
        dtype: in which elements are combined.
        components: of the state: a variable each.
        fast: which approximate functions may combine.
        gathering: the rule by which threads gather their elements, and combine their states, as sums about a pivot; None where each
            is combined with what came before.
    """

    op: Op
    dtype: DType
    components: tuple[MathParameter, ...]
    fast: Fast = Fast.NONE
    gathering: Gathering | None = None

    def of(self, component: str) -> MathParameter:
        """The variable of a component."""
        return self.components[REDUCTIONS[self.op].number(component)]

    @property
    def lifted(self) -> tuple[MathParameter, ...]:
        """The components that an element must be given as."""
        return self.components if self.gathering is None else (self.of(self.gathering.pivot),)


@dataclass(frozen=True)
class LaneRead:
    """A read of a buffer by two neighbouring lanes.

    Attributes:
        name: of the variable: one value when both lanes read the same element, else an array of two.
        buffer: the node whose buffer it is.
        offsets: one for both lanes, or one a lane.
        conditions: of each offset, the bounds under which it may be read; 0 is taken where they do not hold.
        vector: whether the lanes' elements lie side by side, aligned to the size of both.
    """

    name: str
    buffer: int
    offsets: tuple[Index, ...]
    conditions: tuple[tuple[Bounds, ...], ...]
    vector: bool

    @property
    def places(self) -> tuple[tuple[Index, tuple[Bounds, ...]], ...]:
        """Each offset with its conditions."""
        return tuple(zip(self.offsets, self.conditions, strict=True))


@dataclass(frozen=True)
class LaneFunction:
    """Math on two neighbouring lanes of an accumulator, and what its call reads by the lanes' coordinates.

    Attributes:
        function: the math: of one lane when the lanes do not mix, else of both; its results are those of the first lane, or of both
            lanes in turn.
        lanewise: whether it is of one lane.
        arguments: one a parameter.
        reads: what must be read for them.
        checks: indices that must be in range, and which no read mentions.
        axes: the iteration space; the last axis numbers pairs of lanes.
    """

    function: MathFunction
    lanewise: bool
    arguments: tuple[CallArgument, ...]
    reads: tuple[LaneRead, ...]
    checks: tuple[IndexCheck, ...]
    axes: Axes
