"""Matrix products that go to the library, and what else torch computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import mul
from typing import cast

from fusegen.ir.blocks import Blocks
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph, InputSpec, Node
from fusegen.ir.index_map import (
    ROW_MULTIPLE,
    StridedView,
    flat_offset,
    identity_axes,
    may_pad,
    memory_shape,
    memory_strides,
    strided_view,
)
from fusegen.ir.symbolic import Dim, linearize, literal, same
from fusegen.passes.fuse.cone import domain_axes
from fusegen.passes.fuse.contraction import is_left_to_library, operand_base
from fusegen.passes.fuse.skeletons import refusals, serving, skeletons_of
from fusegen.program.call import LibraryResult, Role, StridedOperand
from fusegen.program.formula import Formula, formula_of
from fusegen.schedule.lower.context import Context
from fusegen.schedule.lower.memory import formulas
from fusegen.schedule.lower.placement import Placement, place
from fusegen.schedule.program import LibraryProduct, LibraryStep, LoopStep, Step, Traffic

_SETTINGS = ("scale", "causal", "dropout", "descending")
"""Attributes of nodes that are numbers which torch's functions take, in this order."""


def lower_library(context: Context) -> Sequence[Step]:
    """The library's product, and a copy where its result is wanted as another view."""
    (product,) = context.group.anchors
    if context.group.outputs != (product,):
        return _in_parts(context, product, _accumulating(context, product))
    shape = context.graph.nodes[product].shape
    axes, strides = domain_axes(context.group.domain), memory_strides(context.graph, product)
    row_major = flat_offset(axes.symbols, strides)
    placement = place(context, product, axes.symbols, axes, lambda offset: same(offset, row_major))
    a, b = _factors(context, product)
    out = _operand(placement.buffer, StridedView(product, shape, strides, 0))
    padded = _padded(context.graph, product)
    step = LibraryProduct(a, b, out, context.group, context.traffic(), _reason(context, product), padded=padded)
    return [*_in_parts(context, product, step), *placement.copies]


def _in_parts(context: Context, product: int, step: LibraryProduct) -> list[LibraryProduct]:
    """A product by the library, whose padded rows are as many times 8 elements in one call as there are, and the rest in another.

    cuBLAS asks that of rows of the result, and of those of an operand that go along the result's rows.
    """
    graph, shape = context.graph, context.graph.nodes[product].shape
    a, columns, rows = strided_view(graph, graph.nodes[product].args[0]), literal(shape[-1]), literal(shape[-2])
    if product in graph.padded and columns is not None:
        parts = [replace(step, b=_part(step.b, -1, *part), out=_part(step.out, -1, *part)) for part in _even_and_rest(columns)]
    elif a.base in graph.padded and len(a.shape) == 2 and same(a.strides[0], 1) and rows is not None and may_pad(rows):
        parts = [replace(step, a=_part(step.a, -2, *part), out=_part(step.out, -2, *part)) for part in _even_and_rest(rows)]
    else:
        return [step]
    return [replace(part, traffic=_traffic(context, part)) for part in parts]


def _even_and_rest(extent: int) -> tuple[tuple[int, int], ...]:
    """The first element and the number of elements of both parts of a row."""
    even = extent // ROW_MULTIPLE * ROW_MULTIPLE
    return (0, even), (even, extent - even)


def _part(operand: StridedOperand, dim: int, start: int, length: int) -> StridedOperand:
    """Some elements of a dim."""
    shape = list(operand.shape)
    shape[dim] = formula_of(length)
    return replace(operand, shape=tuple(shape), offset=operand.offset + operand.strides[dim] * start)


def _traffic(context: Context, step: LibraryProduct) -> Traffic:
    """Each operand once."""
    a, b, out = (_bytes(context, operand) for operand in (step.a, step.b, step.out))
    return Traffic(a + b + out if step.adds else a + b, out)


def _bytes(context: Context, operand: StridedOperand) -> Formula:
    return reduce(mul, operand.shape, formula_of(context.memory.spec(operand.buffer).dtype.itemsize))


def _accumulating(context: Context, product: int) -> LibraryProduct:
    """The product that is added to an input."""
    (value,) = context.group.outputs
    (place,) = (context.graph.nodes[put].args[0] for put in context.graph.puts if context.graph.nodes[put].args[1] == value)
    out = _operand(context.reads[place], strided_view(context.graph, place))
    a, b = _factors(context, product)
    padded = _padded(context.graph, product)
    return LibraryProduct(a, b, out, context.group, context.traffic(), context.group.reason, adds=True, padded=padded)


def _padded(graph: Graph, product: int) -> tuple[int, ...]:
    """Elements between those rows of a product's operands and result that are padded."""
    touched = [*(operand_base(graph, a) for a in graph.nodes[product].args), product]
    rows = (literal(memory_shape(graph, position)[-1]) for position in touched if position in graph.padded)
    return tuple(dict.fromkeys(row for row in rows if row is not None))


def _factors(context: Context, product: int) -> tuple[StridedOperand, StridedOperand]:
    left, right = (strided_view(context.graph, p) for p in context.graph.nodes[product].args)
    return _operand(context.reads[left.base], left), _operand(context.reads[right.base], right)


def lower_call(context: Context) -> Sequence[Step]:
    """A call of torch, and copies where its results are wanted as other views."""
    nodes = [context.graph.nodes[output] for output in context.group.outputs]
    placements = [_placed(context, output) for output in context.group.outputs]
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
    """A loop, and copies where its results are wanted as other views."""
    nodes = [context.graph.nodes[output] for output in context.group.outputs]
    by_number = {cast(int, node.attr("result")): output for node, output in zip(nodes, context.group.outputs, strict=True)}
    blocks = cast(Blocks, nodes[0].attr("blocks"))
    placements = {number: _placed(context, output) for number, output in by_number.items()}
    given = tuple(context.reads[a] for a in nodes[0].args)
    made = tuple(_made(context, placements.get(number), spec) for number, spec in enumerate(blocks.results))
    step = LoopStep(blocks, *context.bodies[blocks], (*given, *made), context.group, context.traffic())
    return [step, *(copy for placement in placements.values() for copy in placement.copies)]


def _made(context: Context, placement: Placement | None, spec: InputSpec) -> int:
    """The buffer of a result; one of its own where nobody reads it."""
    return placement.buffer if placement is not None else context.memory.add(spec.name, spec.dtype, formulas(spec.shape))


def _placed(context: Context, output: int) -> Placement:
    """The place of a result, which is memory that the function makes."""
    shape = context.graph.nodes[output].shape
    axes = identity_axes(shape)
    stores, row_major = context.stores(output, axes.symbols, axes), linearize(axes.symbols, shape)
    is_fresh = all(context.memory.spec(store.buffer).role is not Role.INPUT for store in stores)
    return place(context, output, axes.symbols, axes, lambda offset: is_fresh and same(offset, row_major))


def _result(node: Node, buffer: int) -> LibraryResult:
    attrs = dict(node.attrs)
    order = cast(tuple[int, ...], attrs.get("order", tuple(range(len(node.shape)))))
    return LibraryResult(cast(int, attrs.get("result", 0)), buffer, order)


def _operand(buffer: int, view: StridedView) -> StridedOperand:
    return StridedOperand(buffer, tuple(map(formula, view.shape)), tuple(map(formula, view.strides)), formula(view.offset))


def _reason(context: Context, product: int) -> str:
    """Why the library computes it."""
    if context.group.reason:
        return context.group.reason
    if is_left_to_library(context.graph, product):
        return "expected to be faster than a kernel of ours"
    if not skeletons_of(context.target):
        return "no tensor-core skeleton serves this target"
    graph = replace(context.graph, padded=frozenset())  # as fusion saw it
    if serving(graph, product, product, context.target) is None:
        return refusals(graph, product, product, context.target)
    return "a plain product: nothing is fused with it"
