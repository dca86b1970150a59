"""Scans: one pass along each row, with a state carried from one block of columns to the next."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import ClassVar, cast

from fusegen.dtypes import DType
from fusegen.emit import cpu
from fusegen.emit.cuda import assemble, math_text
from fusegen.emit.environment import c_text, render
from fusegen.emit.views import (
    call_view,
    checks_view,
    cpu_offsets,
    cuda_offsets,
    decode,
    entry,
    fragment,
    kernel_parameters,
    kinds,
    reduction_functions,
    view,
)
from fusegen.families.base import Emitters, KernelFamily
from fusegen.families.pointwise.cpu import CHUNK
from fusegen.families.rows.lower import rows_and_columns
from fusegen.fusion.groups import Domain, Group, GroupKind
from fusegen.fusion.matcher import Decision
from fusegen.fusion.producers import Producers, domain_axes, walk
from fusegen.ir.formula import ceil_div
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Bounds, Position
from fusegen.ir.ops import Family
from fusegen.ir.reductions import REDUCTIONS, SCANS
from fusegen.ir.symbolic import Axes, Dim, Index, literal, product, same
from fusegen.schedule.access import Access, AccessPattern, Multiples, divisor
from fusegen.schedule.column_pairs import Fragments
from fusegen.schedule.context import Context, Leaves, leaves_of
from fusegen.schedule.evaluate import Evaluator, substitute
from fusegen.schedule.indices import IndexCheck
from fusegen.schedule.kernel import Body, LoweredKernel, Plan, SharedArrays, arrange_shared_arrays
from fusegen.schedule.math import CallArgument, MathCall, MathParameter, Origin, Reduction
from fusegen.schedule.memory import Store
from fusegen.schedule.program import Launch, Step
from fusegen.schedule.reductions import element_type, lifted
from fusegen.schedule.terms import Leaf, Term, Terms
from fusegen.source import Source
from fusegen.target import Target

SCAN = GroupKind("scan")


@dataclass(frozen=True)
class ScanPlan(Plan):
    """The plan of a scan kernel.

    Attributes:
        threads: threads that share a row.
        rows: rows per block at a time; above 1 only if a row takes a warp.
        vec: vector width: neighbouring elements that a thread handles together.
    """

    threads: int
    rows: int
    vec: int

    @property
    def block(self) -> int:
        return self.threads * self.rows

    @property
    def warps(self) -> int:
        return max(1, self.threads // 32)


@dataclass(frozen=True)
class ScanBody(Body):
    """A kernel that scans rows along its one column axis.

    Attributes:
        reads, writes: accesses along the column axis; a write is named after the result of ``finish``.
        checks: indices to check against their range that no access mentions.
        scans: the carried states; their components' variables are results of ``lift`` and arguments of ``finish``.
        lift: math on each element before the scan.
        finish: math on each element and the scans up to it.
    """

    row_axes: Axes
    column_axes: Axes
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    checks: tuple[IndexCheck, ...]
    scans: tuple[Reduction, ...]
    lift: MathCall
    finish: MathCall
    shared: SharedArrays
    plan: ScanPlan

    @property
    def counts(self) -> tuple[Dim, ...]:
        return product(self.row_axes.extents), product(self.column_axes.extents)

    def describe(self, kind: str) -> str:
        return f"{kind} along rows, {self.plan.threads * self.plan.vec} elements of a row per step"


# Groups around scans: the pointwise math before and after a scan is computed in the same kernel.


def scan_group(graph: Graph, root: int, materialized: Collection[int]) -> Group | None:
    """Returns the group of a value with the last scans that it is computed from elementwise, or None.

    Scans of scans, scans of other shapes, and scans read at another element are materialized.
    """
    shape = graph.nodes[root].shape
    if not shape:
        return None
    domain = Domain(shape, (len(shape) - 1,))
    axes = domain_axes(domain)
    last = _last_scans(graph, root, materialized)

    def accepts(position: int, at: Position, bounds: tuple[Bounds, ...]) -> bool:
        return position in last and not bounds and _is_aligned(graph, position, at, axes)

    producers = Producers()
    walk(graph, root, axes.symbols, axes, accepts, producers, materialized)
    if not producers.core_nodes or not producers.core_nodes.keys().isdisjoint(
        producers.inputs
    ):  # a scan that is also read elsewhere is materialized
        return None
    return Group(SCAN, (root,), tuple(sorted(producers.inputs)), domain, tuple(sorted(producers.core_nodes)))


def _last_scans(graph: Graph, root: int, materialized: Collection[int]) -> frozenset[int]:
    scans: set[int] = set()
    stack, seen = [root], set[int]()
    while stack:
        position = stack.pop()
        family = graph.nodes[position].family
        if position in seen or (position in materialized and position != root):
            continue
        seen.add(position)
        if family is Family.SCAN:
            scans.add(position)
        elif family in (Family.POINTWISE, Family.VIEW):
            stack += graph.nodes[position].args
    return frozenset(p for p in scans if not any(p in graph.ancestors[later] for later in scans))


def _is_aligned(graph: Graph, scan: int, at: Position, axes: Axes) -> bool:
    """True if a scan over the whole iteration space is read at the element that is being computed."""
    shape = graph.nodes[scan].shape
    if len(shape) != len(axes.extents) or not all(map(same, shape, axes.extents)):
        return False
    return all(
        i == symbol or (i == 0 and same(extent, 1)) for i, symbol, extent in zip(at, axes.symbols, axes.extents, strict=True)
    )


# Lowering.


@dataclass(frozen=True)
class _Math:
    """The terms of a scan kernel, with leaves and stores over merged axes.

    Attributes:
        scanned: maps each scan's node to the state of an element, one term per component.
        result: the term of a result's element.
    """

    terms: Terms
    scanned: Mapping[int, tuple[int, ...]]
    result: int
    leaves: Leaves
    stores: tuple[Store, ...]
    row_axes: Axes
    column_axes: Axes


def _evaluate(context: Context) -> _Math:
    graph, domain = context.graph, context.group.domain
    axes = domain_axes(domain)
    evaluator = Evaluator(
        graph,
        axes,
        context.stored,
        lambda p, _at: _scan(graph, p),
        context.rounded,
        context.contracted,
        context.reciprocal_divisions,
    )
    scanned = {}
    for node in context.group.core_nodes:
        scanned[node] = _element(evaluator, graph, node, axes)
    (output,) = context.group.outputs
    result = evaluator.value(output, axes.symbols)
    stores = context.stores(output, axes.symbols, axes)
    leaves = leaves_of(evaluator.terms, [*chain(*scanned.values()), result], evaluator.checks())
    row_axes, column_axes, moves = rows_and_columns(domain, axes, [*leaves.expressions(), *(s.offset for s in stores)])
    substituted = tuple(Store(s.buffer, substitute(s.offset, moves)) for s in stores)
    return _Math(evaluator.terms, scanned, result, leaves.substituted(moves), substituted, row_axes, column_axes)


def _element(evaluator: Evaluator, graph: Graph, node: int, axes: Axes) -> tuple[int, ...]:
    scan = graph.nodes[node]
    element = evaluator.terms.convert(evaluator.value(scan.args[0], axes.symbols), element_type(graph, scan))
    index = evaluator.terms.add(Term(Leaf.COORDINATE, (), DType.INT64, axes.symbols[-1]))
    return lifted(evaluator.terms, SCANS[scan.op], element, index)


def _scan(graph: Graph, position: int) -> int | None:
    return position if graph.nodes[position].family is Family.SCAN else None


class _ScanBuilder:
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
        self.fragments.values |= {t: CallArgument(Origin.LANES, self._scanned(t)) for t in states}
        self.writes = tuple(self._access(context.names.take("result"), s.buffer, s.offset) for s in math.stores)

    def launch(self) -> Launch:
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
            arrange_shared_arrays(
                scratch=[2 * self.plan.warps * c.dtype.itemsize for r in scans for c in r.components if self.plan.warps > 1]
            ),
            self.plan,
        )
        kernel = self.fragments.kernel(body, self.writes, [math.row_axes, math.column_axes])
        grid = ceil_div(product(math.row_axes.extents), self.plan.rows)
        return Launch(kernel, context.group, (), grid, self.plan.block, body.shared.bytes, context.traffic())

    def _reduction(self, node: int) -> Reduction:
        scan = self.context.graph.nodes[node]
        op, element, stem = SCANS[scan.op], element_type(self.context.graph, scan), f"{scan.op.row.name}_{node}"
        specs = REDUCTIONS[op].components
        names = [stem] if len(specs) == 1 else [f"{stem}_{spec.name}" for spec in specs]
        components = (MathParameter(self.context.names.take(n), p.dtype(element)) for n, p in zip(names, specs, strict=True))
        return Reduction(op, element, tuple(components))

    def _lifted(self) -> list[tuple[str, int]]:
        return [(c.name, t) for n, terms in self.math.scanned.items() for c, t in zip(self.scans[n].components, terms, strict=True)]

    def _scanned(self, term: int) -> str:
        node = cast(int, self.math.terms.items[term].payload)
        number = REDUCTIONS[self.scans[node].op].component_index(dict(self.context.graph.nodes[node].attrs).get("part"))
        return self.scans[node].components[number].name

    def _access(self, name: str, buffer: int, offset: Index, conditions: Sequence[Bounds] = ()) -> Access:
        """Returns an access along the row. An element that lanes share, but that differs from vector to vector, is a fragment
        too."""
        access = self.context.access(name, buffer, offset, self.lane_axis, self.plan.vec, conditions)
        indices = [offset, *(b.index for b in conditions)]
        along = any(not isinstance(i, int) and i.has(self.lane_axis) for i in indices)
        return replace(access, pattern=AccessPattern.GATHER) if along and access.pattern is AccessPattern.UNIFORM else access


_VECTOR_BYTES = 16
_MOST_LANES = 8
_WARP = 32
_MOST_THREADS = 512  # threads per row: two blocks share an SM, so that one loads while the other waits at its barrier
_BLOCK = 256  # threads of a block with several short rows


def scan_plan(columns: Dim, itemsizes: Sequence[int], target: Target, multiples: Multiples) -> ScanPlan:
    """Returns the plan for rows of ``columns`` elements; ``itemsizes`` are those of fragments read or written along the row."""
    if not target.warp:
        return ScanPlan(threads=1, rows=1, vec=CHUNK)
    vec = max(1, min(_MOST_LANES, _VECTOR_BYTES // min(itemsizes, default=4)))
    while divisor(columns, multiples) % vec:
        vec //= 2
    length, threads = literal(columns), _WARP
    while threads < _MOST_THREADS and (length is None or threads * vec < length):
        threads *= 2
    return ScanPlan(threads, _BLOCK // threads if threads == _WARP else 1, vec)


# Text.


def emit_cuda(kernel: LoweredKernel, launch: Launch, target: Target) -> Source:
    body = kernel.body
    assert isinstance(body, ScanBody)
    offsets = cuda_offsets(kernel).with_hoisted(body.reads, body.column_axes.symbols)
    checks = checks_view(body.checks, offsets, body.column_axes)
    lane_axis = body.column_axes.symbols[-1]
    reads = [fragment(a, offsets, lane_axis) for a in body.reads]
    pipeline = render(
        "cuda/scan.cu.jinja",
        entry=entry(kernel),
        overlaps=launch.overlaps,
        parameters=kernel_parameters(kernel),
        index_type="i64" if kernel.index64 else "i32",
        rows=c_text(product(body.row_axes.extents)),
        columns=c_text(product(body.column_axes.extents)),
        row_decode=decode(body.row_axes, "row", "Index"),
        indices=[*offsets.lines.values(), *checks.once],
        checks=checks.vec,
        reads=reads,
        writes=[fragment(a, offsets, lane_axis) for a in body.writes],
        scans=[view(r) for r in body.scans],
        kinds=kinds(body.scans),
        lift=call_view(body.lift, offsets, lane_axis),
        finish=call_view(body.finish, offsets, lane_axis),
        arrays=dict(zip((c.name for r in body.scans for c in r.components), body.shared.scratch, strict=False)),  # none in a warp
        plan=body.plan,
    )
    math = math_text([*reduction_functions(body.scans), body.lift.function, body.finish.function])
    return assemble(launch, target, math, pipeline)


def emit_cpp(kernel: LoweredKernel, launch: Launch, target: Target) -> Source:
    body = kernel.body
    assert isinstance(body, ScanBody)
    offsets = cpu_offsets(kernel).with_hoisted(body.reads, body.column_axes.symbols)
    checks = checks_view(body.checks, offsets, body.column_axes)
    lane_axis = body.column_axes.symbols[-1]
    reads = [fragment(a, offsets, lane_axis) for a in body.reads]
    pipeline = render(
        "cpu/scan.cpp.jinja",
        names=cpu.names_of(kernel),
        rows=c_text(product(body.row_axes.extents)),
        columns=c_text(product(body.column_axes.extents)),
        row_decode=[*decode(body.row_axes, "row", "Index"), *offsets.lines.values(), *checks.once],
        checks=checks.vec,
        reads=reads,
        writes=[fragment(a, offsets, lane_axis) for a in body.writes],
        scans=[view(r) for r in body.scans],
        lift=call_view(body.lift, offsets, lane_axis),
        finish=call_view(body.finish, offsets, lane_axis),
        plan=body.plan,
    )
    math = cpu.math_text([*reduction_functions(body.scans), body.lift.function, body.finish.function])
    return cpu.assemble(launch, target, math, pipeline)


class ScanFamily(KernelFamily):
    """Scans along rows, with the pointwise math around them."""

    kinds = (SCAN,)
    needs = (Family.SCAN,)
    cuda: ClassVar[Emitters] = {ScanBody: emit_cuda}
    cpu: ClassVar[Emitters] = {ScanBody: emit_cpp}

    def group(self, graph: Graph, root: int, target: Target, decision: Decision) -> Group | None:
        return scan_group(graph, root, decision.materialized)

    def lower(self, context: Context) -> Sequence[Step]:
        return [_ScanBuilder(context, _evaluate(context)).launch()]
