"""Scans: one pass along each row, which carries a state from group to group of columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
from fusegen.schedule.functions import cut
from fusegen.schedule.heuristics.scan import scan_plan
from fusegen.schedule.indices import has_checks
from fusegen.schedule.kernel import Kernel
from fusegen.schedule.lower.context import Context, scalar_parameter
from fusegen.schedule.lower.leaves import Leaves, bound_index, leaves_of
from fusegen.schedule.lower.memory import Store
from fusegen.schedule.lower.rows import rows_and_columns
from fusegen.schedule.math import Argument, Call, Coordinate, Parameter, Reduction
from fusegen.schedule.program import Launch
from fusegen.schedule.terms import Leaf, Terms

_SCRATCH_BYTES = 8  # of one warp's state; the widest type


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
        self.reads = {t: self._read(t) for t in math.leaves.reads}
        self.coordinates = {t: Coordinate(context.names.take("coordinate"), v) for t, v in math.leaves.coordinates.items()}
        self.checks = math.leaves.checks_apart()
        self.scans = {node: self._reduction(node) for node in math.scanned}
        self.writes = tuple(self._access(context.names.take("result"), s.buffer, s.offset) for s in math.stores)

    def launch(self) -> Launch:
        """The launch of the kernel."""
        math, context = self.math, self.context
        lift = self._call(f"{context.name}_0", [(self.scans[n].components[0].name, t) for n, t in math.scanned.items()])
        finish = self._call(context.name, [(w.name, math.result) for w in self.writes])
        scans = tuple(self.scans.values())
        body = ScanBody(
            math.row_axes,
            math.column_axes,
            tuple(self.reads.values()),
            self.writes,
            tuple(self.coordinates.values()),
            self.checks,
            scans,
            lift,
            finish,
            self.plan,
        )
        expressions = self._expressions()
        kernel = Kernel(
            name=context.name,
            pointers=context.pointers((a.buffer for a in self.reads.values()), (w.buffer for w in self.writes), expressions),
            sizes=context.sizes(expressions, (*math.row_axes.symbols, *math.column_axes.symbols)),
            scalars=context.scalars(math.terms, math.terms.below((*math.scanned.values(), math.result))),
            body=body,
            wide=context.wide,
            checks=has_checks(expressions),
        )
        grid = ceil_div(product(math.row_axes.extents), self.plan.rows)
        shared = len(scans) * 2 * self.plan.warps * _SCRATCH_BYTES if self.plan.warps > 1 else 0
        return Launch(kernel, context.group, (), grid, self.plan.block, shared, context.traffic())

    def _reduction(self, node: int) -> Reduction:
        found = self.context.graph.nodes[node]
        name = self.context.names.take(f"{found.op.row.name}_{node}")
        return Reduction(SCANS[found.op], found.dtype.compute, (Parameter(name, found.dtype.compute),))

    def _read(self, term: int) -> Access:
        read = self.math.leaves.reads[term]
        return self._access(self.context.read_name(read), read.buffer, read.offset, read.conditions)

    def _access(self, name: str, buffer: int, offset: Index, conditions: Sequence[Bounds] = ()) -> Access:
        """An access along the row; lanes that share an element which differs from group to group are a fragment all the same."""
        access = self.context.access(name, buffer, offset, self.lane_axis, self.plan.lanes, conditions)
        indices = [offset, *(b.index for b in conditions)]
        along = any(not isinstance(i, int) and i.has(self.lane_axis) for i in indices)
        return replace(access, pattern=Pattern.GATHER) if along and access.pattern is Pattern.UNIFORM else access

    def _call(self, name: str, roots: Sequence[tuple[str, int]]) -> Call:
        """A call of math on elements: of what was read, of coordinates, run-time scalars, and what was scanned."""
        terms = self.math.terms
        kinds = {t: ("read" if a.pattern is not Pattern.UNIFORM else "scalar", a.name) for t, a in self.reads.items()}
        kinds |= {t: ("coordinate", c.name) for t, c in self.coordinates.items()}
        scalars = {t: terms.items[t] for t in self.math.leaves.scalars}
        kinds |= {t: ("scalar", scalar_parameter(str(s.payload), s.dtype).name) for t, s in scalars.items()}
        for position, term in enumerate(terms.items):
            if term.op is Leaf.STATISTIC:
                kinds[position] = ("held", self.scans[term.payload].components[0].name)  # type: ignore[index]
        given = {t: Parameter(text, terms.items[t].dtype) for t, (_, text) in kinds.items()}
        function, used = cut(terms, name, roots, given, fast=self.context.fast)
        return Call(function, tuple(Argument(*kinds[t]) for t in used))

    def _expressions(self) -> list[Index]:
        found: list[Index] = [a.offset for a in (*self.reads.values(), *self.writes)]
        found += [e for a in self.reads.values() for b in a.conditions for e in (b.index, b.lower or 0, b.upper or 0)]
        found += [bound_index(c.value) for c in self.coordinates.values()]
        found += [e for check in self.checks for e in check.expressions()]
        return [*found, *self.math.row_axes.extents, *self.math.column_axes.extents]
