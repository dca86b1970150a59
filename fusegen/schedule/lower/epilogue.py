"""Epilogues: the math on two neighbouring columns, and on whole heads before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import sympy

from fusegen.ir.index_map import Position
from fusegen.ir.ops import Family
from fusegen.ir.symbolic import Axes, Dim, Index, axis_symbol, linearize, literal
from fusegen.passes.fuse.epilogue import position_of
from fusegen.passes.fuse.groups import Part
from fusegen.passes.fuse.pairs import LANES, OCTET, is_same_row
from fusegen.schedule.access import merge_axes
from fusegen.schedule.bodies import Accumulated, HeadStatistic
from fusegen.schedule.evaluate import Evaluator
from fusegen.schedule.indices import Check
from fusegen.schedule.lane_math import LaneFunction
from fusegen.schedule.lower.context import Context
from fusegen.schedule.lower.lanes import PAIR, LaneMath, lane_checks, lane_function, lane_position
from fusegen.schedule.lower.leaves import leaves_of
from fusegen.schedule.lower.row_names import statistic_name
from fusegen.schedule.math import Reduction
from fusegen.schedule.reductions import element_type, lifted, reduction_of

ROW, COLUMN, HEAD, CHANNEL = "row", "col", "head", "channel"
"""What an epilogue calls its place in the result: a column is a channel of a head, where it tells heads apart."""


@dataclass(frozen=True)
class Epilogue:
    """The math of a part.

    Attributes:
        function: on two neighbouring columns.
        accumulated: what it takes of products.
        statistics: what it takes of heads.
        rows: how many of its axes number rows.
        moves: what became of the part's axes when they were merged.
    """

    function: LaneFunction
    accumulated: tuple[Accumulated, ...]
    statistics: tuple[HeadStatistic, ...]
    rows: int
    moves: dict[object, Index]


@dataclass(frozen=True)
class _Head:
    """A reduction of a head, and the index at which it is read."""

    reduction: Reduction
    at: Position


@dataclass(frozen=True)
class _Lanes:
    """Math that was evaluated for both lanes.

    Attributes:
        roots: of each result, the terms of both.
        checks: indices that must be in range.
        accumulated: what it takes of products.
    """

    evaluator: Evaluator
    roots: tuple[int, ...]
    checks: tuple[Check, ...]
    accumulated: tuple[Accumulated, ...]


def lower_epilogue(context: Context, part: Part, axes: Axes, number: int, offsets: Sequence[Index]) -> Epilogue:
    """The math of a part of a launch.

    Args:
        axes: of the part's domain, the last one over pairs of columns.
        number: of the part.
        offsets: where results go that do not leave as whole tiles.
    """
    for taken in (*_taken(part), *(s.name for s in axes.symbols)):
        context.names.take(taken)
    heads: dict[int, _Head] = {}
    last = _evaluated(context, part, axes, heads, _results(context, part, axes))
    lifts = _lifts(context, part, axes, heads)
    every = [last, *lifts.values()]
    for name in dict.fromkeys(a.name for math in every for a in math.accumulated):
        context.names.take(name)
    expressions = [e for math in every for e in leaves_of(math.evaluator.terms, math.roots, math.checks).expressions()]
    rows, columns, moves = _merged(axes, len(part.domain.rows), [*expressions, *offsets])
    merged = Axes((*rows.symbols, *columns.symbols), (*rows.extents, *columns.extents))
    word = CHANNEL if len(columns.symbols) > 1 else COLUMN
    words: dict[Index, str] = {s: s.name for s in merged.symbols[:-1]} | {LANES * PAIR: word}
    ends = f"_{number}" if len(context.group.parts) > 1 else ""

    def function(math: _Lanes, word: str) -> LaneFunction:
        lanes = LaneMath(math.evaluator.terms, math.roots, merged, words, moves, _optional(part), math.checks)
        return lane_function(context, lanes, f"{context.name}_{word}", fast=context.fast)

    width = literal(part.domain.shape[-1]) or 1
    statistics = tuple(
        HeadStatistic(heads[position].reduction, width, math.accumulated, function(math, f"element{ends}_{number}"))
        for number, (position, math) in enumerate(sorted(lifts.items()))  # those that a statistic takes come before it
    )
    return Epilogue(function(last, f"epilogue{ends}"), last.accumulated, statistics, len(rows.symbols), dict(moves))


def _lifts(context: Context, part: Part, axes: Axes, heads: dict[int, _Head]) -> dict[int, _Lanes]:
    """What is combined of heads, by reductions.

    Args:
        heads: reductions that are needed; gets those that they need in turn.
    """
    found: dict[int, _Lanes] = {}
    while missing := heads.keys() - found.keys():
        position = max(missing)
        (operand,) = context.graph.nodes[position].args
        elements = [(operand, (*heads[position].at[:-1], lane_position(axes, lane)[-1])) for lane in range(LANES)]
        found[position] = _evaluated(context, part, axes, heads, elements, position)
    return found


def _results(context: Context, part: Part, axes: Axes) -> list[tuple[int, Position]]:
    """The elements of results that a thread computes, those of both lanes in turn."""
    return [
        (output, position_of(context.graph, output, order, part.domain, lane_position(axes, lane), axes))
        for output, order in zip(part.outputs, part.orders, strict=True)
        for lane in range(LANES)
    ]


def _evaluated(
    context: Context,
    part: Part,
    axes: Axes,
    heads: dict[int, _Head],
    elements: Sequence[tuple[int, Position]],
    reduction: int | None = None,
) -> _Lanes:
    """Elements as terms.

    Args:
        reduction: whose elements they are, if any: its state is what is wanted of each.
    """
    held = _Held(context, part, axes, heads)
    evaluator = Evaluator(context.graph, axes, context.stored, held, context.rounded, context.contracted, context.inverted)
    roots = [evaluator.value(*element) for element in elements]
    if reduction is None:
        dtypes = [context.memory.dtype(position) for position, _ in elements]
        roots = [evaluator.stored(root, dtype) for root, dtype in zip(roots, dtypes, strict=True)]
    else:
        roots = [_state(context, evaluator, reduction, root) for root in roots]
    checks = lane_checks(evaluator, elements[::LANES], _optional(part))
    return _Lanes(evaluator, tuple(roots), checks, tuple(held.found))


def _state(context: Context, evaluator: Evaluator, reduction: int, element: int) -> int:
    """The state of an element; of one component, which no index is part of."""
    node, terms = context.graph.nodes[reduction], evaluator.terms
    value = terms.convert(element, element_type(context.graph, node))
    (state,) = lifted(terms, node.op, value, value)
    return state


def _optional(part: Part) -> Dim | None:
    """The extent of the last dim, where the second lane may lie past its end."""
    last = part.domain.shape[-1]
    return last if (literal(last) or 0) % LANES else None


@dataclass
class _Held:
    """What math on a pair of columns takes that threads hold, for `Evaluator`: the lane that holds an element of a product; and the
    statistic of the pair's head.

    Attributes:
        heads: reductions that any math of the part takes, each with its name and where it is read; grows.
        found: what this math takes of products.
    """

    context: Context
    part: Part
    axes: Axes
    heads: dict[int, _Head]
    found: dict[Accumulated, None] = field(default_factory=dict)

    def __call__(self, position: int, at: Position) -> object | None:
        if self.context.graph.nodes[position].family is Family.REDUCTION:
            return self._statistic(position, at)
        domain, symbols, extents = self.part.domain, self.axes.symbols, self.part.domain.shape
        if position not in self.part.products:
            return None
        count = len(domain.rows)
        if not is_same_row(self.context.graph.nodes[position].shape[:-1], at[:-1], symbols[:count], extents[:count]):
            return None
        own = linearize(lane_position(self.axes, 0)[count:], extents[count:])
        offset = sympy.expand(at[-1] - own)
        if not offset.is_Integer or int(offset) % OCTET >= LANES:
            return None
        lane = int(offset) % OCTET
        return self._name(self.part.products.index(position), int(offset) - lane), lane

    def _statistic(self, position: int, at: Position) -> object:
        if position not in self.heads:
            graph, names = self.context.graph, self.context.names
            reduction = reduction_of(graph, position, names.take, fast=self.context.fast, name=statistic_name(graph, position))
            self.heads[position] = _Head(reduction, at)
        return self.heads[position].reduction.components[0].name

    def _name(self, product: int, shift: int) -> str:
        taken = Accumulated(_accumulated_name(product, shift), product, shift)
        self.found[taken] = None
        return taken.name


def _accumulated_name(product: int, shift: int) -> str:
    name = ("product", "second")[product]
    return name if shift == 0 else f"{name}_{'right' if shift > 0 else 'left'}_{abs(shift)}"


def _merged(axes: Axes, rows: int, expressions: Sequence[Index]) -> tuple[Axes, Axes, dict[sympy.Symbol, Index]]:
    """The axes that number rows, those that number heads, and what became of the others: an axis of heads disappears where nothing
    tells heads apart."""
    row_axes, moves = merge_axes(Axes(axes.symbols[:rows], axes.extents[:rows]), expressions, ROW)
    columns, moved = merge_axes(Axes(axes.symbols[rows:], axes.extents[rows:]), expressions, PAIR.name)
    heads = Axes(columns.symbols[:-1], columns.extents[:-1])
    if len(heads.symbols) == 1:
        moved[heads.symbols[0]] = axis_symbol(HEAD)
        heads = Axes((axis_symbol(HEAD),), heads.extents)
    return row_axes, Axes((*heads.symbols, PAIR), (*heads.extents, columns.extents[-1])), moves | moved


def _taken(part: Part) -> list[str]:
    """What the epilogue's call names by itself."""
    numbered = [f"{word}_{number}" for word in ("out", "result") for number in range(len(part.outputs))]
    return ["operands", "product", "out", "result", *numbered, ROW, COLUMN, HEAD, CHANNEL]
