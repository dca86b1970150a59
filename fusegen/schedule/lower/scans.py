"""Scans: one pass along each row, which carries a state from group to group of columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from fusegen.ir.formula import ceil_div
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Bounds
from fusegen.ir.ops import Family
from fusegen.ir.reductions import SCANS
from fusegen.ir.symbolic import Axes, Index, product
from fusegen.passes.fuse.cone import domain_axes
from fusegen.schedule.access import Access, Pattern
from fusegen.schedule.bodies import ScanBody
from fusegen.schedule.evaluate import Evaluator, substitute
from fusegen.schedule.heuristics.scan import scan_plan
from fusegen.schedule.lower.context import Context
from fusegen.schedule.lower.fragments import Fragments
from fusegen.schedule.lower.leaves import Leaves, leaves_of
from fusegen.schedule.lower.memory import Store
from fusegen.schedule.lower.rows import rows_and_columns
from fusegen.schedule.math import Argument, Origin, Parameter, Reduction
from fusegen.schedule.program import Launch
from fusegen.schedule.shared import SCRATCH_BYTES, arranged
from fusegen.schedule.terms import Leaf, Terms


@dataclass(frozen=True)
class _Math:
    """The terms of a scan's kernel, its leaves and stores over merged axes.

    Attributes:
        scanned: for each scan's node, the term of an element.
        result: the term of a result's element.
    """

    terms: Terms
    scanned: Mapping[int, int]
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
    evaluator = Evaluator(graph, axes, context.stored, lambda p, _at: _scan(graph, p), context.rounded)
    scanned = {}
    for node in context.group.anchors:
        element = evaluator.value(graph.nodes[node].args[0], axes.symbols)
        scanned[node] = evaluator.terms.convert(element, graph.nodes[node].dtype.compute)
    (output,) = context.group.outputs
    result = evaluator.value(output, axes.symbols)
    stores = context.stores(output, axes.symbols, axes)
    leaves = leaves_of(evaluator.terms, [*scanned.values(), result], evaluator.checks())
    row_axes, column_axes, moves = rows_and_columns(domain, axes, [*leaves.expressions(), *(s.offset for s in stores)])
    moved = tuple(Store(s.buffer, substitute(s.offset, moves)) for s in stores)
    return _Math(evaluator.terms, scanned, result, leaves.moved(moves), moved, row_axes, column_axes)


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
            call(f"{context.name}_0", [(self.scans[n].components[0].name, t) for n, t in math.scanned.items()]),
            call(context.name, [(w.name, math.result) for w in self.writes]),
            arranged(scratch=[2 * self.plan.warps * SCRATCH_BYTES for _ in scans if self.plan.warps > 1]),
            self.plan,
        )
        kernel = self.fragments.kernel(body, self.writes, [math.row_axes, math.column_axes])
        grid = ceil_div(product(math.row_axes.extents), self.plan.rows)
        return Launch(kernel, context.group, (), grid, self.plan.block, body.shared.bytes, context.traffic())

    def _reduction(self, node: int) -> Reduction:
        found = self.context.graph.nodes[node]
        name = self.context.names.take(f"{found.op.row.name}_{node}")
        return Reduction(SCANS[found.op], found.dtype.compute, (Parameter(name, found.dtype.compute),))

    def _scanned(self, term: int) -> str:
        """The variable of what was scanned up to an element."""
        return self.scans[cast(int, self.math.terms.items[term].payload)].components[0].name

    def _access(self, name: str, buffer: int, offset: Index, conditions: Sequence[Bounds] = ()) -> Access:
        """An access along the row; lanes that share an element which differs from group to group are a fragment all the same."""
        access = self.context.access(name, buffer, offset, self.lane_axis, self.plan.lanes, conditions)
        indices = [offset, *(b.index for b in conditions)]
        along = any(not isinstance(i, int) and i.has(self.lane_axis) for i in indices)
        return replace(access, pattern=Pattern.GATHER) if along and access.pattern is Pattern.UNIFORM else access
