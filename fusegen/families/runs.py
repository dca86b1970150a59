"""Sums of runs: rows whose sorted keys are equal, e.g. the gradient of an embedding table.

The first kernel finds the run of each row of the result. It also sums the runs that cross chunks of sorted positions, chunk by
chunk, so that many warps share a long run. The second kernel computes each row of the result from its run, or from the partial
sums of the run's chunks. All sums are float32 and have a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from fusegen.dtypes import DType
from fusegen.emit.cuda import assemble as assemble_text
from fusegen.emit.environment import c_text, render
from fusegen.emit.views import cuda_offsets, entry, fragment, kernel_parameters
from fusegen.families.base import Emitters, KernelFamily
from fusegen.families.library import placed
from fusegen.fusion.groups import Domain, Group, GroupKind, operand_base
from fusegen.fusion.matcher import Decision
from fusegen.ir.formula import ceil_div, formula
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import strided_view
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Dim, Index, axis_symbol, literal
from fusegen.passes.algebra import Value
from fusegen.program.formula import Formula, formula_of
from fusegen.schedule.access import Access
from fusegen.schedule.context import Context, assemble, uses_of
from fusegen.schedule.kernel import Body, LoweredKernel, Plan
from fusegen.schedule.program import Launch, Step, Traffic
from fusegen.source import Source
from fusegen.target import Target

RUNS = GroupKind("sums of rows with equal keys", reads_logical_dtype=True)

CHUNK = 64
"""Sorted positions per chunk. A warp sums a chunk; a block joins the partial sums of a run, twice as many with half the chunk."""

_LANES = 32
_WARPS = 8  # of a block
_MOST_VECTORS = 4
_VECTOR_BYTES = 16
_BLOCK = _LANES * _WARPS
_NARROWEST = 64
"""Fewest columns. Lanes idle in narrower rows; with this many, 32-bit keys number all rows that fit the memory of a GPU."""


# The pass that sorts.


def sorted_sums(x: Value) -> Value:
    """Sums of rows at indices as sums of runs: torch sorts the indices, and kernels sum the rows of equal ones."""
    if x.node.op is not Op.SCATTER_ADD or x.dtype not in (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16):
        return x
    rows, index = x.args
    count, width = rows.node.shape[0], literal(rows.node.shape[1])
    if width is None or width < _NARROWEST:
        return x
    keys = index if index.dtype is DType.INT32 else index.apply(Op.CAST, dtype=DType.INT32)
    ordered, order = (
        keys.apply(Op.TOPK, length=count, descending=False, result=number, dtype=dtype)
        for number, dtype in enumerate((DType.INT32, DType.INT64))
    )
    return rows.apply(Op.RUN_SUM, ordered, order, length=x.node.attr("length"))


# Lowering.


@dataclass(frozen=True)
class RunPlan(Plan):
    """The plan of a kernel that sums runs.

    Attributes:
        vec: vector width.
        vectors: vectors per lane.
        unroll: rows that a warp loads at once.
    """

    vec: int
    vectors: int
    unroll: int

    @property
    def tile(self) -> int:
        """The columns of a warp."""
        return _LANES * self.vec * self.vectors


@dataclass(frozen=True)
class RunBody(Body):
    """A kernel that sums runs.

    Attributes:
        count, length, width: rows that are summed, rows of the result, columns.
        rows: element (`row`, `column`) of the rows.
        keys, order: the buffers of the sorted keys, and of the rows that they belong to.
        starts: the buffer of the first sorted position of each row of the result.
        partials: the buffer with two sums for each chunk: of a run from an earlier chunk, and of a run that goes on in the next.
        sums: the buffer of the result; None for the first kernel.
    """

    count: Dim
    length: Dim
    width: int
    rows: Access
    keys: int
    order: int
    starts: int
    partials: int
    sums: int | None
    plan: RunPlan

    @property
    def tiles(self) -> int:
        return -(-self.width // self.plan.tile)

    @property
    def grid(self) -> Formula:
        if self.sums is not None:
            return ceil_div(self.length, _WARPS) * self.tiles
        return self.search_blocks + (ceil_div(self.count, CHUNK) * self.tiles + (_WARPS - 1)) // _WARPS

    @property
    def search_blocks(self) -> Formula:
        """The blocks of the first kernel that find runs."""
        return ceil_div(self.length + 1, _BLOCK)

    @property
    def shared_bytes(self) -> int:
        """The sums of half of a block's warps."""
        return 0 if self.sums is None else _WARPS // 2 * self.plan.tile * DType.FLOAT32.itemsize

    def describe(self, kind: str) -> str:
        return f"{kind}: finds them, and adds parts of those that cross chunks of {CHUNK} rows" if self.sums is None else kind


_ROW, _COLUMN = axis_symbol("row"), axis_symbol("column")


def lower_runs(context: Context) -> Sequence[Step]:
    """Returns the kernel of partial sums, the kernel of the result, and copies of a result that is needed as another view."""
    (output,) = context.group.outputs
    node, placement = context.graph.nodes[output], placed(context, output)
    rows, keys, order = (strided_view(context.graph, operand) for operand in node.args)
    count, width = rows.shape[0], literal(node.shape[1])
    assert width is not None
    offset = rows.offset + _ROW * rows.strides[0] + _COLUMN * rows.strides[1]
    access, vec = _access(context, context.reads[rows.base], offset, width)
    partials = context.memory.add("partial", DType.FLOAT32, (ceil_div(count, CHUNK) * 2, formula_of(width)))
    starts = context.memory.add("start", DType.INT32, (formula(node.shape[0] + 1),))
    buffers = context.reads[keys.base], context.reads[order.base], starts, partials
    body = RunBody(count, node.shape[0], width, access, *buffers, None, RunPlan(vec, vectors=1, unroll=8))
    plan = RunPlan(vec, min(_MOST_VECTORS, -(-width // (_LANES * vec))), unroll=2)
    last = replace(body, sums=placement.buffer, plan=plan)
    return [_launch(context, body, f"{context.name}_partials"), _launch(context, last, context.name), *placement.copies]


def _access(context: Context, buffer: int, offset: Index, width: int) -> tuple[Access, int]:
    """Returns the access to the rows, and the widest vector that divides them."""
    vec = math.gcd(width, _VECTOR_BYTES // context.dtype(buffer).itemsize)
    access = context.access("row", buffer, offset, _COLUMN, vec)
    return access, access.width


def _launch(context: Context, body: RunBody, name: str) -> Launch:
    found = [body.starts, body.partials]
    read, written = ([body.keys], found) if body.sums is None else (found, [body.sums])
    pointers = context.pointers([body.rows.buffer, body.order, *read], written)
    uses = uses_of([(body.rows.offset, ())], (), (), (body.length,) if body.sums is not None else (body.count, body.length))
    kernel = assemble(context, body, [uses], pointers, axes=(_ROW, _COLUMN))
    traffic = context.traffic() if body.sums is not None else Traffic(formula_of(0), formula_of(0))
    return Launch(replace(kernel, name=name), context.group, (), body.grid, _BLOCK, body.shared_bytes, traffic)


# Text.


def emit_cuda(kernel: LoweredKernel, launch: Launch, target: Target) -> Source:
    body = kernel.body
    assert isinstance(body, RunBody)
    offsets = cuda_offsets(kernel)
    pointers = {pointer.buffer: pointer for pointer in kernel.pointers}
    names = {buffer: pointer.name for buffer, pointer in pointers.items()}
    pipeline = render(
        "cuda/runs.cu.jinja",
        entry=entry(kernel),
        overlaps=launch.overlaps,
        parameters=kernel_parameters(kernel),
        count=c_text(body.count),
        length=c_text(body.length),
        row=fragment(body.rows, offsets, None),
        keys=names.get(body.keys),
        order=names[body.order],
        starts=names[body.starts],
        partials=names[body.partials],
        sums=None if body.sums is None else pointers[body.sums],
        body=body,
        warps=_WARPS,
        chunk=CHUNK,
    )
    return assemble_text(launch, target, "", pipeline)


class RunFamily(KernelFamily):
    """Sums of rows with equal keys."""

    kinds = (RUNS,)
    needs = (Family.LIBRARY,)
    cuda: ClassVar[Emitters] = {RunBody: emit_cuda}

    def group(self, graph: Graph, root: int, target: Target, decision: Decision) -> Group | None:
        node = graph.nodes[root]
        if node.op is not Op.RUN_SUM:
            return None
        return Group(RUNS, (root,), tuple(sorted({operand_base(graph, a) for a in node.args})), Domain(node.shape))

    def lower(self, context: Context) -> Sequence[Step]:
        return lower_runs(context)
