"""Matmuls by cuBLAS, and other functions that torch computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import mul
from typing import cast

from fusegen.dtypes import DType
from fusegen.families.base import KernelFamily
from fusegen.families.gemm.pipelines import is_left_to_library, pipelines_of, rejection_reasons, supporting_pipeline
from fusegen.families.gemm.placement import Placement, place_output
from fusegen.fusion.groups import Domain, Group, GroupKind, operand_base
from fusegen.fusion.matcher import Claims, Decision
from fusegen.fusion.producers import domain_axes
from fusegen.ir.blocks import Blocks
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph, InputSpec, Node
from fusegen.ir.index_map import (
    ROW_MULTIPLE,
    StridedView,
    first_version,
    flat_offset,
    identity_axes,
    may_pad,
    memory_shape,
    memory_strides,
    strided_view,
)
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Dim, linearize, literal, same
from fusegen.program.call import LibraryResult, Role, StridedOperand
from fusegen.program.formula import Formula, formula_of
from fusegen.schedule.context import Context
from fusegen.schedule.memory import formulas
from fusegen.schedule.program import LibraryMatmul, LibraryStep, LoopStep, Step, Traffic
from fusegen.target import Target

_SETTINGS = ("scale", "causal", "dropout", "descending")
"""Node attributes that are passed to torch's functions as numbers, in this order."""
_RESULT_ATTRIBUTES = ("result", "order", "dtype", "shape")
"""Attributes that distinguish the results of one call."""

LIBRARY_MATMUL = GroupKind("library matmul", is_strided=True, reads_logical_dtype=True, is_library=True)
LIBRARY_CALL = GroupKind("library call", reads_logical_dtype=True, is_library=True)
LOOP = GroupKind("loop over blocks of rows", reads_logical_dtype=True)


class AccumulationFamily(KernelFamily):
    """Matmuls that the library accumulates into a tensor; their groups have the kind of library matmuls."""

    needs = (Family.CONTRACTION,)

    def claim(self, graph: Graph, target: Target, claims: Claims) -> None:
        for put in graph.puts:
            if (added := accumulation(graph, put)) is not None:
                claims.ends.add(graph.nodes[put].args[1])
                claims.fused_matmuls.add(added)

    def group(self, graph: Graph, root: int, target: Target, decision: Decision) -> Group | None:
        return accumulation_group(graph, root) if root in decision.ends else None


class LibraryFamily(KernelFamily):
    """Matmuls and functions that torch computes, and loops over blocks of rows."""

    kinds = (LIBRARY_MATMUL, LIBRARY_CALL, LOOP)
    needs = (Family.CONTRACTION, Family.LIBRARY)

    def group(self, graph: Graph, root: int, target: Target, decision: Decision) -> Group | None:
        if graph.nodes[root].family is Family.CONTRACTION:
            return library_group(graph, root, decision.refusals.get(root, ""))
        return call_group(graph, root) if graph.nodes[root].family is Family.LIBRARY else None

    def lower(self, context: Context) -> Sequence[Step]:
        lowered = {LIBRARY_MATMUL: lower_library, LIBRARY_CALL: lower_call, LOOP: lower_blocks}
        return lowered[context.group.kind](context)


def library_group(graph: Graph, matmul: int, reason: str = "") -> Group:
    inputs = tuple(sorted({operand_base(graph, a) for a in graph.nodes[matmul].args}))
    return Group(LIBRARY_MATMUL, (matmul,), inputs, Domain(graph.nodes[matmul].shape), (matmul,), reason)


def accumulation(graph: Graph, put: int) -> int | None:
    """Returns the 2-d matmul that a write adds to a whole tensor of float32 or float64; None for another write."""
    target, value = graph.nodes[put].args
    chain = [value]  # from the written copy to the matmul; nothing else reads these values
    while (node := graph.nodes[chain[-1]]).op in (Op.COPY, Op.CAST, Op.ADD):
        operands = [a for a in node.args if a != target]
        if len(operands) != 1 or (node.op is Op.ADD) is (len(node.args) == len(operands)):
            return None
        chain.append(operands[0])
    added = sum(graph.nodes[p].op is Op.ADD for p in chain)
    is_own = graph.nodes[target].op is Op.INPUT and all(len(graph.users[p]) == 1 for p in chain)
    is_float32_or_64 = graph.nodes[target].dtype in (DType.FLOAT32, DType.FLOAT64)
    are_matrices = node.op is Op.MATMUL and all(len(operand.shape) == 2 for operand in graph.operands(chain[-1]))
    if not (added == 1 and is_own and is_float32_or_64 and are_matrices):
        return None
    written = first_version(graph, target)  # the library must not read the memory that it writes
    is_read = any(first_version(graph, operand_base(graph, operand)) == written for operand in node.args)
    return None if is_read else chain[-1]


def accumulation_group(graph: Graph, position: int) -> Group | None:
    """Returns the group of a write that adds a matmul to its target, or None."""
    for put in graph.puts:
        if graph.nodes[put].args[1] == position and (matmul := accumulation(graph, put)) is not None:
            group = library_group(graph, matmul, "accumulates into its target")
            inputs = tuple(sorted({*group.inputs, graph.nodes[put].args[0]}))
            return replace(group, outputs=(position,), inputs=inputs)
    return None


def call_group(graph: Graph, position: int) -> Group:
    """Returns the group of a value that torch or a loop computes, with all other results of the same step."""
    node = graph.nodes[position]
    inputs = tuple(sorted({operand_base(graph, a) for a in node.args}))
    outputs = tuple(p for p, other in graph if _call_key(other) == _call_key(node))
    kind = LOOP if node.op is Op.BLOCKS else LIBRARY_CALL
    return Group(kind, outputs, inputs, Domain(node.shape))


def _call_key(node: Node) -> tuple[object, ...]:
    """Returns the parts of a node that are equal for all results of one call."""
    return node.op, node.args, tuple((name, value) for name, value in node.attrs if name not in _RESULT_ATTRIBUTES)


def lower_library(context: Context) -> Sequence[Step]:
    """Returns a library matmul, and a copy if its result is needed as another view."""
    (product,) = context.group.core_nodes
    if context.group.outputs != (product,):
        return _in_parts(context, product, _accumulating(context, product))
    shape = context.graph.nodes[product].shape
    axes, strides = domain_axes(context.group.domain), memory_strides(context.graph, product)
    row_major = flat_offset(axes.symbols, strides)
    placement = place_output(context, product, axes.symbols, axes, lambda store: same(store.offset, row_major))
    a, b = _operands(context, product)
    out = _operand(placement.buffer, StridedView(product, shape, strides, 0))
    padded = _padded(context.graph, product)
    step = LibraryMatmul(a, b, out, context.group, context.traffic(), _reason(context, product), padded=padded)
    return [*_in_parts(context, product, step), *placement.copies]


def _in_parts(context: Context, product: int, step: LibraryMatmul) -> list[LibraryMatmul]:
    """Splits a library matmul with padded rows in two calls: a multiple of 8 elements, and the rest.

    cuBLAS requires this for rows of the result, and for operands that are contiguous along the result's rows.
    """
    graph, shape = context.graph, context.graph.nodes[product].shape
    a, columns, rows = strided_view(graph, graph.nodes[product].args[0]), literal(shape[-1]), literal(shape[-2])
    if product in graph.padded and columns is not None:
        parts = [replace(step, b=_part(step.b, -1, *part), out=_part(step.out, -1, *part)) for part in _aligned_and_rest(columns)]
    elif a.base in graph.padded and len(a.shape) == 2 and same(a.strides[0], 1) and rows is not None and may_pad(rows):
        parts = [replace(step, a=_part(step.a, -2, *part), out=_part(step.out, -2, *part)) for part in _aligned_and_rest(rows)]
    else:
        return [step]
    return [replace(part, traffic=_traffic(context, part)) for part in parts]


def _aligned_and_rest(extent: int) -> tuple[tuple[int, int], ...]:
    even = extent // ROW_MULTIPLE * ROW_MULTIPLE
    return (0, even), (even, extent - even)


def _part(operand: StridedOperand, dim: int, start: int, length: int) -> StridedOperand:
    shape = list(operand.shape)
    shape[dim] = formula_of(length)
    return replace(operand, shape=tuple(shape), offset=operand.offset + operand.strides[dim] * start)


def _traffic(context: Context, step: LibraryMatmul) -> Traffic:
    a, b, out = (_bytes(context, operand) for operand in (step.a, step.b, step.out))
    return Traffic(a + b + out if step.adds else a + b, out)


def _bytes(context: Context, operand: StridedOperand) -> Formula:
    return reduce(mul, operand.shape, formula_of(context.memory.spec(operand.buffer).dtype.itemsize))


def _accumulating(context: Context, product: int) -> LibraryMatmul:
    (value,) = context.group.outputs
    (target,) = (context.graph.nodes[put].args[0] for put in context.graph.puts if context.graph.nodes[put].args[1] == value)
    out = _operand(context.reads[target], strided_view(context.graph, target))
    a, b = _operands(context, product)
    padded = _padded(context.graph, product)
    return LibraryMatmul(a, b, out, context.group, context.traffic(), context.group.reason, adds=True, padded=padded)


def _padded(graph: Graph, product: int) -> tuple[int, ...]:
    """Returns the row pitch, in elements, of each padded operand or result of a matmul."""
    touched = [*(operand_base(graph, a) for a in graph.nodes[product].args), product]
    rows = (literal(memory_shape(graph, position)[-1]) for position in touched if position in graph.padded)
    return tuple(dict.fromkeys(row for row in rows if row is not None))


def _operands(context: Context, product: int) -> tuple[StridedOperand, StridedOperand]:
    left, right = (strided_view(context.graph, p) for p in context.graph.nodes[product].args)
    return _operand(context.reads[left.base], left), _operand(context.reads[right.base], right)


def lower_call(context: Context) -> Sequence[Step]:
    """Returns a call of torch, and copies for results that are needed as other views."""
    nodes = [context.graph.nodes[output] for output in context.group.outputs]
    placements = [placed(context, output) for output in context.group.outputs]
    attrs, views = dict(nodes[0].attrs), (strided_view(context.graph, p) for p in nodes[0].args)
    step = LibraryStep(
        function=nodes[0].op.row.name,
        settings=tuple(float(cast(float, attrs[name])) for name in _SETTINGS if name in attrs),
        sizes=(formula(cast(Dim, attrs["length"])),) if "length" in attrs else (),
        operands=tuple(_operand(context.reads[view.base], view) for view in views),
        results=tuple(_result(node, placement.buffer) for node, placement in zip(nodes, placements, strict=True)),
        shapes=tuple(formulas(node.shape) for node in nodes),
        group=context.group,
        traffic=context.traffic(),
    )
    return [step, *(copy for placement in placements for copy in placement.copies)]


def lower_blocks(context: Context) -> Sequence[Step]:
    """Returns a loop, and copies for results that are needed as other views."""
    nodes = [context.graph.nodes[output] for output in context.group.outputs]
    by_number = {cast(int, node.attr("result")): output for node, output in zip(nodes, context.group.outputs, strict=True)}
    blocks = cast(Blocks, nodes[0].attr("blocks"))
    placements = {number: placed(context, output) for number, output in by_number.items()}
    arguments = tuple(context.reads[a] for a in nodes[0].args)
    results = tuple(_result_buffer(context, placements.get(number), spec) for number, spec in enumerate(blocks.results))
    step = LoopStep(blocks, *context.bodies[blocks], (*arguments, *results), context.group, context.traffic())
    return [step, *(copy for placement in placements.values() for copy in placement.copies)]


def _result_buffer(context: Context, placement: Placement | None, spec: InputSpec) -> int:
    return placement.buffer if placement is not None else context.memory.add(spec.name, spec.dtype, formulas(spec.shape))


def placed(context: Context, output: int) -> Placement:
    """Returns the storage of a result that a step can write in row-major order only, in memory of its own."""
    shape = context.graph.nodes[output].shape
    axes = identity_axes(shape)
    stores, row_major = context.stores(output, axes.symbols, axes), linearize(axes.symbols, shape)
    is_fresh = all(context.memory.spec(store.buffer).role is not Role.INPUT for store in stores)
    return place_output(context, output, axes.symbols, axes, lambda store: is_fresh and same(store.offset, row_major))


def _result(node: Node, buffer: int) -> LibraryResult:
    attrs = dict(node.attrs)
    order = cast(tuple[int, ...], attrs.get("order", tuple(range(len(node.shape)))))
    return LibraryResult(cast(int, attrs.get("result", 0)), buffer, order)


def _operand(buffer: int, view: StridedView) -> StridedOperand:
    return StridedOperand(buffer, tuple(map(formula, view.shape)), tuple(map(formula, view.strides)), formula(view.offset))


def _reason(context: Context, product: int) -> str:
    if context.group.reason:
        return context.group.reason
    if is_left_to_library(context.graph, product):
        return "expected to be faster than a generated kernel"
    if not pipelines_of(context.target):
        return "no tensor-core kernel for this target"
    graph = replace(context.graph, padded=frozenset())  # as fusion saw it
    if supporting_pipeline(graph, product, product, context.target) is None:
        return rejection_reasons(graph, product, product, context.target)
    return "no operation to fuse with it"
