"""Scans: one pass along each row, which carries a state from group to group of columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import cast

from fusegen.dtypes import DType
from fusegen.ir.formula import ceil_div
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Bounds
from fusegen.ir.ops import Family
from fusegen.ir.reductions import REDUCTIONS, SCANS
from fusegen.ir.symbolic import Axes, Index, product
from fusegen.passes.fuse.cone import domain_axes
from fusegen.schedule.access import Access, Pattern
from fusegen.schedule.bodies import SCRATCH_BYTES, ScanBody, arranged
from fusegen.schedule.evaluate import Evaluator, substitute
from fusegen.schedule.heuristics.scan import scan_plan
from fusegen.schedule.lower.context import Context, Leaves, leaves_of
from fusegen.schedule.lower.lanes import Fragments
from fusegen.schedule.lower.memory import Store
from fusegen.schedule.lower.rows import rows_and_columns
from fusegen.schedule.math import Argument, Origin, Parameter, Reduction
from fusegen.schedule.program import Launch
from fusegen.schedule.reductions import element_type, lifted
from fusegen.schedule.terms import Leaf, Term, Terms


@dataclass(frozen=True)
class _Math:
    """The terms of a scan's kernel, its leaves and stores over merged axes.

    Attributes:
        scanned: for each scan's node, the state of an element: a term a component.
        result: the term of a result's element.
    """

    terms: Terms
    scanned: Mapping[int, tuple[int, ...]]
    result: int
    leaves: Leaves
    stores: tuple[Store, ...]
    row_axes: Axes
    column_axes: Axes


def lower_scans(context: Context) -> list[Launch]:
    """The launch of a group around scans."""
    return [_ScanBuilder(context, _evaluate(context)).launch()]


def _evaluate(context: Context) -> _Math:
    graph, domain = context.graph, context.group.domain
    axes = domain_axes(domain)
    evaluator = Evaluator(
        graph, axes, context.stored, lambda p, _at: _scan(graph, p), context.rounded, context.contracted, context.inverted
    )
    scanned = {}
    for node in context.group.anchors:
        scanned[node] = _element(evaluator, graph, node, axes)
    (output,) = context.group.outputs
    result = evaluator.value(output, axes.symbols)
    stores = context.stores(output, axes.symbols, axes)
    leaves = leaves_of(evaluator.terms, [*chain(*scanned.values()), result], evaluator.checks())
    row_axes, column_axes, moves = rows_and_columns(domain, axes, [*leaves.expressions(), *(s.offset for s in stores)])
    moved = tuple(Store(s.buffer, substitute(s.offset, moves)) for s in stores)
    return _Math(evaluator.terms, scanned, result, leaves.moved(moves), moved, row_axes, column_axes)


def _element(evaluator: Evaluator, graph: Graph, node: int, axes: Axes) -> tuple[int, ...]:
    """The state of one element of a scan."""
    found = graph.nodes[node]
    element = evaluator.terms.convert(evaluator.value(found.args[0], axes.symbols), element_type(graph, found))
    index = evaluator.terms.put(Term(Leaf.COORDINATE, (), DType.INT64, axes.symbols[-1]))
    return lifted(evaluator.terms, SCANS[found.op], element, index)


def _scan(graph: Graph, position: int) -> int | None:
    """What a scan is known by in the kernel that computes it."""
    return position if graph.nodes[position].family is Family.SCAN else None


class _ScanBuilder:
    """Builds the kernel of a group around scans."""

    def __init__(self, context: Context, math: _Math) -> None:
        self.context, self.math = context, math
        self.lane_axis = math.column_axes.symbols[-1]
        buffers = [*(r.buffer for r in math.leaves.reads.values()), *(s.buffer for s in math.stores)]
        itemsizes = [context.dtype(b).itemsize for b in buffers]
        self.plan = scan_plan(math.column_axes.extents[-1], itemsizes, context.target, context.multiples)
        self.fragments = Fragments(
            context, math.terms, math.leaves, lambda name, read: self._access(name, read.buffer, read.offset, read.conditions)
        )
        self.scans = {node: self._reduction(node) for node in math.scanned}
        states = [t for t, term in enumerate(math.terms.items) if term.op is Leaf.STATISTIC]
        self.fragments.values |= {t: Argument(Origin.LANES, self._scanned(t)) for t in states}
        self.writes = tuple(self._access(context.names.take("result"), s.buffer, s.offset) for s in math.stores)

    def launch(self) -> Launch:
        """The launch of the kernel."""
        math, context = self.math, self.context
        call = self.fragments.call
        scans = tuple(self.scans.values())
        body = ScanBody(
            math.row_axes,
            math.column_axes,
            tuple(self.fragments.reads.values()),
            self.writes,
            self.fragments.checks,
            scans,
            call(f"{context.name}_0", self._lifted()),
            call(context.name, [(w.name, math.result) for w in self.writes]),
            arranged(scratch=[2 * self.plan.warps * SCRATCH_BYTES for r in scans for _ in r.components if self.plan.warps > 1]),
            self.plan,
        )
        kernel = self.fragments.kernel(body, self.writes, [math.row_axes, math.column_axes])
        grid = ceil_div(product(math.row_axes.extents), self.plan.rows)
        return Launch(kernel, context.group, (), grid, self.plan.block, body.shared.bytes, context.traffic())

    def _reduction(self, node: int) -> Reduction:
        found = self.context.graph.nodes[node]
        op, element, stem = SCANS[found.op], element_type(self.context.graph, found), f"{found.op.row.name}_{node}"
        parts = REDUCTIONS[op].components
        names = [stem] if len(parts) == 1 else [f"{stem}_{part.name}" for part in parts]
        components = (Parameter(self.context.names.take(n), p.dtype(element)) for n, p in zip(names, parts, strict=True))
        return Reduction(op, element, tuple(components))

    def _lifted(self) -> list[tuple[str, int]]:
        """The variables of elements' states, with their terms."""
        return [(c.name, t) for n, terms in self.math.scanned.items() for c, t in zip(self.scans[n].components, terms, strict=True)]

    def _scanned(self, term: int) -> str:
        """The variable of what was scanned up to an element."""
        node = cast(int, self.math.terms.items[term].payload)
        number = REDUCTIONS[self.scans[node].op].number(dict(self.context.graph.nodes[node].attrs).get("part"))
        return self.scans[node].components[number].name

    def _access(self, name: str, buffer: int, offset: Index, conditions: Sequence[Bounds] = ()) -> Access:
        """An access along the row; lanes that share an element which differs from group to group are a fragment all the same."""
        access = self.context.access(name, buffer, offset, self.lane_axis, self.plan.lanes, conditions)
        indices = [offset, *(b.index for b in conditions)]
        along = any(not isinstance(i, int) and i.has(self.lane_axis) for i in indices)
        return replace(access, pattern=Pattern.GATHER) if along and access.pattern is Pattern.UNIFORM else access
