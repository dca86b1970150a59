"""First operands that a matmul of few rows computes on load, e.g. a norm: elementwise math on rows, on vectors along the depth, and
on reductions of the rows.

Each block reduces its rows before it multiplies. A thread then reads the stored elements of a unit of a row, and evaluates the
operand's math for pairs of these, as for second operands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import sympy

from fusegen.dtypes import DType
from fusegen.families.gemm.plan import ComputedOperand, ComputedRows, RowStatistic
from fusegen.families.gemm.weights import (
    COORDINATES,
    ROW,
    UNIT,
    Windows,
    computed_operand,
    is_aligned,
    of_unit,
    simplified,
)
from fusegen.families.rows.phases import statistic_name
from fusegen.fusion.accumulator import LANES, is_same_row
from fusegen.fusion.producers import Producers, walk
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Position, buffer_strides, flat_offset, identity_axes, reshaped
from fusegen.ir.ops import Family, Op
from fusegen.ir.reductions import REDUCTIONS
from fusegen.ir.symbolic import Axes, Index, literal, product, same
from fusegen.schedule.access import merge_axes
from fusegen.schedule.column_pairs import PAIR, LaneMath, lane_function, lane_position
from fusegen.schedule.context import Context
from fusegen.schedule.evaluate import Evaluator, substitute
from fusegen.schedule.math import Reduction
from fusegen.schedule.reductions import element_type, lifted, reduction_of
from fusegen.schedule.terms import Terms

ELEMENTS = 8
"""Elements of a unit: those of 16 bytes of the operand."""
ROW_COORDINATES = (ROW.name, *COORDINATES[1:])
"""Names of the row, the unit, and a pair's first element within the unit."""
_MOST_STATISTICS = 4
_RESERVED = (*ROW_COORDINATES, "pair", "stored", "statistics", "partial", "words", "step", "start", "octet", "depth", "b", "v")


@dataclass(frozen=True)
class RowMath:
    """The math of a first operand: the values in memory that it is computed from, and the reductions of rows that it computes."""

    leaves: tuple[int, ...]
    reductions: tuple[int, ...]


def row_math(graph: Graph, matmul: int) -> RowMath | None:
    """Returns the math of a first operand, down to values that others need as well; None if it reduces no rows."""
    operand = graph.nodes[matmul].args[0]
    inside, alone = {operand}, {operand}  # `alone`: nothing else needs them
    for position in sorted(graph.ancestors[operand], reverse=True):
        node, users = graph.nodes[position], graph.users[position]
        is_alone = position not in graph.outputs and alone.issuperset(users)
        is_computed = node.family is Family.POINTWISE or _reduces_rows(graph, position)
        if not inside.isdisjoint(users) and (node.family is Family.VIEW or (is_alone and is_computed)):
            inside.add(position)
            alone.update({position} if is_alone else ())
    read = {a for p in inside for a in graph.nodes[p].args} - inside
    leaves = tuple(sorted(p for p in read if graph.nodes[p].op not in (Op.CONSTANT, Op.SCALAR)))
    reductions = tuple(sorted(p for p in inside if graph.nodes[p].family is Family.REDUCTION))
    is_read = all(graph.nodes[p].family is not Family.LEAF or graph.nodes[p].op is Op.INPUT for p in leaves)
    is_written = any(graph.nodes[p].family is Family.WRITE for p in leaves)
    return RowMath(leaves, reductions) if is_read and not is_written and 0 < len(reductions) <= _MOST_STATISTICS else None


def can_compute_rows(graph: Graph, matmuls: Sequence[int]) -> bool:
    """True if a kernel for few rows can compute the first operand that some matmuls share, and nothing else needs it."""
    operand = graph.nodes[matmuls[0]].args[0]
    depth = literal(graph.nodes[operand].shape[-1])
    if depth is None or depth % ELEMENTS or not _is_read_by(graph, operand, matmuls):
        return False
    math = row_math(graph, matmuls[0])
    return math is not None and _row_windows(graph, _Rows(graph, operand), math) is not None


def _is_read_by(graph: Graph, operand: int, matmuls: Sequence[int]) -> bool:
    """True if these matmuls alone read a computed value, as their first operand."""
    users = graph.users[operand]
    is_computed = graph.nodes[operand].family in (Family.POINTWISE, Family.VIEW) and operand not in graph.outputs
    return is_computed and set(users) <= set(matmuls) and all(graph.nodes[m].args[0] == operand for m in matmuls)


def _reduces_rows(graph: Graph, position: int) -> bool:
    node = graph.nodes[position]
    if node.family is not Family.REDUCTION or len(REDUCTIONS[node.op].components) > 1:
        return False
    last = len(graph.nodes[node.args[0]].shape) - 1
    return node.attr("dims") == (last,) and node.dtype.compute is DType.FLOAT32


# The iteration space: rows, which may have several dims, units of the depth, and pairs of a unit.


@dataclass(frozen=True)
class _Rows:
    """The iteration space of a first operand; `at` is the element at a lane of a pair, in a value with the same rows."""

    graph: Graph
    operand: int
    axes: Axes = field(init=False)

    def __post_init__(self) -> None:
        *leading, depth = self.graph.nodes[self.operand].shape
        several = identity_axes(tuple(leading))
        kept = [(s, e) for s, e in zip(several.symbols, several.extents, strict=True) if not same(e, 1)]
        symbols, extents = (*(s for s, _ in kept), UNIT, PAIR), (*(e for _, e in kept), (literal(depth) or 0) // ELEMENTS)
        object.__setattr__(self, "axes", Axes(symbols, (*extents, ELEMENTS // LANES)))

    def at(self, value: int, lane: int) -> Position:
        shape, symbols = self.graph.nodes[self.operand].shape, iter(self.axes.symbols)
        rows = tuple(0 if same(extent, 1) else next(symbols) for extent in shape[:-1])
        at = (*rows, ELEMENTS * UNIT + lane_position(self.axes, lane)[-1])
        return reshaped(at, shape, self.graph.nodes[value].shape, self.axes)

    def is_row(self, position: int, at: Position) -> bool:
        """True if a value with one element per row is read at the current row."""
        shape = self.graph.nodes[position].shape[:-1]
        return same(at[-1], 0) and is_same_row(shape, at[:-1], self.axes.symbols[:-2], self.axes.extents[:-2])

    def elements(self, key: int) -> list[tuple[int, Position]]:
        """Returns the elements of a pair that the operand, or one of its reductions, is computed from."""
        value = key if key == self.operand else self.graph.nodes[key].args[0]
        return [(value, self.at(value, lane)) for lane in range(LANES)]

    def has_rows(self, value: int) -> bool:
        """True if a value has the rows of the operand."""
        shape, own = self.graph.nodes[value].shape, self.graph.nodes[self.operand].shape
        return same(shape[-1], own[-1]) and same(product(shape), product(own))


_Moves: TypeAlias = Mapping[sympy.Symbol, Index]
_Found: TypeAlias = dict[int, list[tuple[int, Index, int]]]


def _row_windows(graph: Graph, rows: _Rows, math: RowMath) -> tuple[_Found, dict[sympy.Symbol, Index]] | None:
    """Returns the windows of a unit, of the operand and of each reduction: the value, the first element's offset, and the number of
    elements; and the replacements that make one axis of those of the rows. None if the elements of a unit are not neighbours, or
    the rows have several strides."""
    reads: dict[int, list[tuple[int, Index]]] = {}
    for key in (rows.operand, *math.reductions):
        elements = rows.elements(key)
        producers = Producers()
        for value, at in elements:
            walk(graph, value, at, rows.axes, lambda *_: False, producers, frozenset(math.leaves))
        own = [(p, at) for p, at in producers.elements if p in math.reductions]
        others = [(p, at) for p, at in producers.elements if p not in math.reductions]
        is_of_rows = all(rows.has_rows(value) for value, _ in elements) and all(rows.is_row(*each) for each in own)
        if producers.conditions or not is_of_rows or not {p for p, _ in others} <= set(math.leaves):
            return None
        reads[key] = [(p, of_unit(flat_offset(at, buffer_strides(graph, p)), ELEMENTS)) for p, at in others]
    leading = Axes(rows.axes.symbols[:-2], rows.axes.extents[:-2])
    merged, moves = merge_axes(leading, [offset for each in reads.values() for _, offset in each], ROW.name)
    if len(merged.symbols) > 1:
        return None
    found: _Found = {}
    for key, each in reads.items():
        windows = Windows(ELEMENTS)
        places = [windows.place(p, substitute(offset, dict(moves))) for p, offset in each]
        if None in places or not all(is_aligned(graph, *window) for window in windows.found):
            return None
        found[key] = windows.found
    return found, moves


# Lowering.


@dataclass
class _Statistics:
    """Names the reductions that math on rows reads, for `Evaluator`."""

    context: Context
    rows: _Rows
    reductions: dict[int, Reduction] = field(default_factory=dict)

    def __call__(self, position: int, at: Position) -> object | None:
        graph, names = self.context.graph, self.context.names
        if graph.nodes[position].family is not Family.REDUCTION or not self.rows.is_row(position, at):
            return None
        if position not in self.reductions:
            name = statistic_name(graph, position)
            self.reductions[position] = reduction_of(graph, position, names.take, fast=self.context.fast, name=name)
        return self.reductions[position].components[0].name


def lower_rows(context: Context, matmul: int) -> ComputedRows:
    """Lowers the math of a first operand, and the reductions of rows that it reads, for two neighbouring elements of the depth."""
    for reserved in _RESERVED:
        context.names.take(reserved)
    graph, rows, math = context.graph, _Rows(context.graph, context.graph.nodes[matmul].args[0]), row_math(context.graph, matmul)
    windows = None if math is None else _row_windows(graph, rows, math)
    assert math is not None and windows is not None  # checked by fusion
    statistics, (found, moves) = _Statistics(context, rows), windows
    computed = {key: _computed(statistics, key, found[key], moves, number) for number, key in enumerate(found)}
    reduced = tuple(RowStatistic(statistics.reductions[p], computed[p]) for p in math.reductions)  # each reads earlier ones only
    return ComputedRows(computed[rows.operand], reduced)


def _computed(
    statistics: _Statistics, key: int, found: Sequence[tuple[int, Index, int]], moves: _Moves, number: int
) -> ComputedOperand:
    context, rows = statistics.context, statistics.rows
    node = context.graph.nodes[key]
    evaluator = Evaluator(
        context.graph, rows.axes, context.stored, statistics, context.rounded, context.contracted, context.reciprocal_divisions
    )
    roots = [evaluator.value(*element) for element in rows.elements(key)]
    if key == rows.operand:
        roots = [evaluator.without_final_cast(root, node.dtype) for root in roots]
    else:
        roots = [_state(context, evaluator.terms, key, root) for root in roots]
    roots = simplified(context, evaluator.terms, roots, ELEMENTS)
    axes = Axes((ROW, *rows.axes.symbols[-2:]), (product(rows.axes.extents[:-2]), *rows.axes.extents[-2:]))
    names: dict[Index, str] = {ROW: ROW.name, UNIT: UNIT.name, LANES * PAIR: ROW_COORDINATES[-1]}
    word = f"row_{number - 1}" if number else "row"
    math = LaneMath(evaluator.terms, tuple(roots), axes, names, moves)
    function = lane_function(context, math, f"{context.name}_{word}", fast=context.fast)
    windows = Windows(ELEMENTS)
    windows.found = [(context.reads[p], first, count) for p, first, count in found]
    return computed_operand(context, node.dtype, function, windows)


def _state(context: Context, terms: Terms, reduction: int, element: int) -> int:
    node = context.graph.nodes[reduction]
    value = terms.convert(element, element_type(context.graph, node))
    (state,) = lifted(terms, node.op, value, value)
    return state
