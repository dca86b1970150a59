"""Which nodes are views of a buffer that strides alone can describe, as tensor cores and libraries need them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import sympy

from fusegen.dtypes import DType
from fusegen.ir.graph import Graph, InputSpec, Shape
from fusegen.ir.index_map import Position, identity_axes, sources
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Axes, Dim, Index, exact_quotient, literal, product, recombined, simplify_dim
from fusegen.ir.versions import owner


@dataclass(frozen=True)
class StridedView:
    """A view of the buffer of node ``base``: sizes, strides and offset in elements."""

    base: int
    shape: Shape
    strides: tuple[Dim, ...]
    offset: Dim


ROW_MULTIPLE = 8
"""Elements: 16 bytes of 16-bit floats. cuBLAS has fast kernels for rows that are multiples of it, and start at such."""
_PADDED_FROM = 64  # elements of a row: padding is a small part of it then
_NOT_IN_MEMORY = (Op.CONSTANT, Op.SCALAR, Op.IOTA, Op.SIZE)


def contiguous_strides(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """Row-major strides."""
    return tuple(simplify_dim(product(shape[d + 1 :])) for d in range(len(shape)))


def row_major(name: str, shape: Shape, dtype: DType) -> InputSpec:
    """An input as torch lays out a fresh tensor."""
    return _in_row_major_order(InputSpec(name, dtype, shape, ()))


def in_row_major_order(graph: Graph) -> Graph:
    """The graph with inputs as torch lays out fresh tensors."""
    return replace(graph, inputs=tuple(map(_in_row_major_order, graph.inputs)))


def _in_row_major_order(spec: InputSpec) -> InputSpec:
    strides = zip(spec.shape, contiguous_strides(spec.shape), strict=True)
    return replace(spec, strides=tuple(0 if literal(dim) == 1 else stride for dim, stride in strides), alignment=16)


def padded_extent(extent: int) -> int:
    """The elements between rows of an extent where rows are padded: the next multiple of 8."""
    return -(-extent // ROW_MULTIPLE) * ROW_MULTIPLE


def may_pad(extent: int) -> bool:
    """True if rows of an extent are none of multiples of 8 elements, and long enough to be padded."""
    return extent >= _PADDED_FROM and extent != padded_extent(extent)


def memory_shape(graph: Graph, position: int) -> Shape:
    """The shape of the memory in which a node lies that a kernel makes: with longer rows where they are padded."""
    shape = graph.nodes[position].shape
    last = literal(shape[-1]) if position in graph.padded else None
    return shape if last is None else (*shape[:-1], padded_extent(last))


def memory_strides(graph: Graph, position: int) -> tuple[Dim, ...]:
    """The strides of a node that a kernel makes: row-major in its memory."""
    return contiguous_strides(memory_shape(graph, position))


def buffer_strides(graph: Graph, position: int) -> tuple[Dim, ...]:
    """The strides of a node's buffer: an input's own, also of its later versions; `memory_strides` for what a kernel makes."""
    made = owner(graph, position)
    node = graph.nodes[made]
    return graph.input_spec(str(node.attr("name"))).strides if node.op is Op.INPUT else memory_strides(graph, made)


def strided_view(graph: Graph, position: int) -> StridedView:
    """The node as a strided view of another one's buffer: of the furthest below it, through views, for which strides can say it; of
    its own at worst."""
    if position not in graph.known_views:
        shape = graph.nodes[position].shape
        axes = identity_axes(shape)
        graph.known_views[position] = next(view for view in _views(graph, position, axes.symbols, axes) if view is not None)
    return cast(StridedView, graph.known_views[position])


def repeated_view(graph: Graph, position: int, dim: int, count: int) -> StridedView | None:
    """The node, of which each index of a dim repeats the one before ``count - 1`` times, as a strided view without the repetitions;
    None where it does not."""
    known = position, dim, count
    if known not in graph.known_views:
        graph.known_views[known] = _without_repetitions(graph, position, dim, count)
    return cast("StridedView | None", graph.known_views[known])


def _without_repetitions(graph: Graph, position: int, dim: int, count: int) -> StridedView | None:
    shape = graph.nodes[position].shape
    kept = exact_quotient(shape[dim], count)
    if kept is None:
        return None
    axes = identity_axes((*shape[:dim], kept, count, *shape[dim + 1 :]))
    outer, inner = axes.symbols[dim : dim + 2]
    index = (*axes.symbols[:dim], outer * count + inner, *axes.symbols[dim + 2 :])
    for view in _views(graph, position, index, axes):
        if view is not None and view.strides[dim + 1] == 0:
            without = [(*dims[: dim + 1], *dims[dim + 2 :]) for dims in (view.shape, view.strides)]
            return StridedView(view.base, without[0], without[1], view.offset)
    return None


def _views(graph: Graph, position: int, index: Position, axes: Axes) -> Iterator[StridedView | None]:
    """The node at an index as a view of each buffer below it, the furthest first; None where strides cannot say it."""
    below: list[tuple[int, Position]] = [(position, index)]
    while graph.nodes[below[-1][0]].family is Family.VIEW:
        found = sources(graph, *below[-1], axes)
        if len(found) != 1 or graph.nodes[found[0].arg].op in _NOT_IN_MEMORY:
            break
        below.append((found[0].arg, found[0].index))
    for base, at in reversed(below):
        yield _affine(base, axes.extents, flat_offset(at, buffer_strides(graph, base)), axes.symbols)


def flat_offset(index: Sequence[Index], strides: Sequence[Dim]) -> Index:
    """The position in the buffer of an index."""
    total: Index = 0
    for i, stride in zip(index, strides, strict=True):
        total = total + i * stride
    return recombined(simplify_dim(total))


def _affine(base: int, shape: Shape, offset: Index, symbols: Sequence[sympy.Symbol]) -> StridedView | None:
    if not symbols:
        return StridedView(base, shape, (), simplify_dim(offset))
    rest, strides = sympy.Integer(0), dict.fromkeys(symbols, sympy.Integer(0))
    for term in sympy.Add.make_args(sympy.expand(offset)):
        along = [symbol for symbol in symbols if symbol in term.free_symbols]
        if not along:
            rest += term
            continue
        strides[along[0]] += term / along[0]
    if any(not s.free_symbols.isdisjoint(symbols) or (s.is_nonpositive and not s.is_zero) for s in strides.values()):
        return None
    return StridedView(base, shape, tuple(map(simplify_dim, strides.values())), simplify_dim(rest))
