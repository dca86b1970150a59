"""What templates see of accesses, calls and functions: ready pieces of text, no decisions left."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy

from fusegen.dtypes import DType
from fusegen.emit.offsets import Offsets
from fusegen.emit.text import c_text, condition_text
from fusegen.ir.index_map import Bounds
from fusegen.ir.symbolic import Axes, Index
from fusegen.schedule.access import Access, Pattern
from fusegen.schedule.indices import Check, has_checks
from fusegen.schedule.kernel import Kernel, Pointer
from fusegen.schedule.math import Argument, Call, Origin
from fusegen.schedule.names import identifier

LANE = sympy.Symbol("v", integer=True, nonnegative=True)
"""The lane within a thread's group of neighbours, as templates name it."""


@dataclass(frozen=True)
class FragmentView:
    """A read or write as a template sees it.

    Attributes:
        name: of the variable in the computing type.
        type, wide: element type in memory and in computing.
        pointer: what is indexed.
        pattern: ``vector``, ``window``, ``uniform``, ``interleaved`` or ``gather``.
        width: elements of one memory access.
        offset, lane_offset: of the first lane, and of lane ``v``.
        condition, lane_condition: when the address is valid; empty for always.
        checked: whether an index was checked on which depends whether something may be written.
        drawn: whether it is computed of a key, wherever that is asked for.
        parts: the variables of an interleaved one.
        part_width: elements of one memory access where there is one lane.
    """

    name: str
    type: str
    wide: str
    pointer: str
    pattern: str
    width: int
    offset: str
    lane_offset: str
    condition: str
    lane_condition: str
    checked: bool
    drawn: bool
    parts: tuple[str, ...]
    part_width: int

    @property
    def per_lane(self) -> int:
        """Elements of a lane."""
        return max(1, len(self.parts))

    @property
    def uniform(self) -> bool:
        """Whether all lanes see one element."""
        return self.pattern == Pattern.UNIFORM.value

    @property
    def same_in_row(self) -> bool:
        """Whether lanes of one row see one element."""
        return (self.offset, self.condition) == (self.lane_offset, self.lane_condition)


def fragment(access: Access, offsets: Offsets, lane_axis: sympy.Symbol | None) -> FragmentView:
    """The view of an access whose lanes run along an axis."""
    pointer = offsets.pointers[access.buffer]
    shifted = {} if lane_axis is None else {lane_axis: lane_axis + LANE}
    return FragmentView(
        name=access.name,
        type=pointer.dtype.spelling,
        wide=pointer.dtype.compute.spelling,
        pointer=elements(pointer),
        pattern=access.pattern.value,
        width=access.width,
        offset=offsets.text(access.offset),
        lane_offset=offsets.text(sympy.sympify(access.offset).subs(shifted)),
        condition=offsets.condition(access.conditions),
        lane_condition=offsets.condition(shift(b, shifted) for b in access.conditions),
        checked=has_checks([access.offset]),
        drawn=pointer.stream is not None,
        parts=access.parts,
        part_width=math.gcd(access.width, max(1, len(access.parts))),
    )


def shift(bounds: Bounds, replaced: Mapping[sympy.Symbol, Index]) -> Bounds:
    """Bounds with axes replaced."""
    return Bounds(sympy.sympify(bounds.index).subs(replaced), bounds.lower, bounds.upper)


@dataclass(frozen=True)
class ChecksView:
    """Statements that check indices: those that are the same for all lanes, and those of lane ``v``."""

    once: tuple[str, ...]
    lanes: tuple[str, ...]


def checks_view(checks: Sequence[Check], offsets: Offsets, axes: Axes) -> ChecksView:
    """The view of some checks.

    Args:
        axes: those along which lanes run, one after the other; the last one is the lanes'.
    """
    shifted = {axes.symbols[-1]: axes.symbols[-1] + LANE}
    along = set(axes.symbols)
    varying = [c for c in checks if any(sympy.sympify(e).free_symbols & along for e in c.expressions())]
    moved = (c.moved(lambda index: sympy.sympify(index).subs(shifted)) for c in varying)
    return ChecksView(tuple(offsets.check(c) for c in checks if c not in varying), tuple(map(offsets.check, moved)))


def decode(axes: Axes, linear: str, index_type: str, *, sized: bool = False) -> list[str]:
    """Statements that find the axes' values from a row-major position.

    Args:
        sized: whether sizes are of the index's type; else they have 64 bits, and a division by them would have.
    """
    symbols, extents = axes.symbols, axes.extents
    if len(symbols) == 1:
        return []  # its symbol is the position itself
    lines: list[str] = []
    rest = linear
    for d in range(len(symbols) - 1, 0, -1):
        outer = symbols[d - 1].name if d == 1 else f"{symbols[d].name}_outer"
        extent, is_symbol = c_text(extents[d]), sympy.sympify(extents[d]).is_Symbol
        cast = f"static_cast<{index_type}>" if not sized else ""
        divisor = extent if sympy.sympify(extents[d]).is_Integer or (sized and is_symbol) else f"{cast}({extent})"
        lines.append(f"const {index_type} {outer} = {rest} / {divisor};")
        lines.append(f"const {index_type} {symbols[d].name} = {rest} - {outer} * {divisor};")
        rest = outer
    return lines


@dataclass(frozen=True)
class CallView:
    """A call of a math function as a template sees it: the arguments for lane ``v``, and the results' types."""

    name: str
    arguments: str
    results: tuple[tuple[str, str], ...]

    @property
    def single(self) -> bool:
        """Whether the function returns its only result."""
        return len(self.results) == 1

    def type_of(self, result: str) -> str:
        """The type of a result."""
        return dict(self.results)[result]


def call_view(call: Call, offsets: Offsets, lane_axis: sympy.Symbol | None) -> CallView:
    """The view of a call.

    Args:
        offsets: how they are written.
        lane_axis: along which lanes run.
    """
    arguments = [argument_text(a, offsets, lane_axis) for a in call.arguments]
    results = tuple((r.name, r.dtype.spelling) for r in call.function.results)
    return CallView(call.function.name, ", ".join(arguments), results)


def argument_text(argument: Argument, offsets: Offsets, lane_axis: sympy.Symbol | None) -> str:
    """An argument's value for lane ``v``; what is passed is as in `call_view`."""
    if argument.origin is Origin.COORDINATE:
        (value,) = argument.coordinates
        return coordinate_text(value, offsets, {} if lane_axis is None else {lane_axis: lane_axis + LANE})
    return f"{argument.name}[v]" if argument.origin is Origin.LANES else argument.name


def coordinate_text(value: Index | Bounds, offsets: Offsets, replaced: Mapping[sympy.Symbol, Index]) -> str:
    """A coordinate as the math takes it."""
    if isinstance(value, Bounds):
        return condition_text(shift(value, replaced))
    return offsets.text(sympy.sympify(value).subs(replaced))


def declared(pointer: Pointer) -> str:
    """The declaration of a buffer: its address, or that of the key of random bits."""
    if pointer.stream is not None:
        return f"const i64* {pointer.name}"
    return f"{'' if pointer.writable else 'const '}{pointer.dtype.spelling}* {pointer.name}"


def elements(pointer: Pointer, prefix: str = "") -> str:
    """What is indexed, or loaded from.

    Args:
        prefix: of the pointer's name.
    """
    name = f"{prefix}{pointer.name}"
    return name if pointer.stream is None else f"random_bits({name}, {pointer.stream})"


def kernel_parameters(kernel: Kernel) -> list[str]:
    """Declarations of a kernel's parameters: buffers, sizes, scalars."""
    pointers = list(map(declared, kernel.pointers))
    sizes = [f"i64 {name}" for name in kernel.sizes]
    return [*pointers, *sizes, *(f"{_scalar_type(d)} {name}" for name, d in kernel.scalars)]


def _scalar_type(dtype: DType) -> str:
    return "double" if dtype.is_float else "i64"


def entry(kernel: Kernel) -> str:
    """The kernel's symbol."""
    return f"fg_{identifier(kernel.name)}"
