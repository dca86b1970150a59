"""Index maps of pointwise broadcasting and of views: the operand elements that each element of a node reads.

All of the compiler's knowledge of slices, reshapes, permutations, broadcasts, concatenations, gathers and strides is in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias, cast

import sympy

from fusegen.dtypes import DType
from fusegen.ir.graph import Graph, InputSpec, Node
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import (
    Axes,
    Dim,
    Index,
    IndexValue,
    Shape,
    axis_symbol,
    delinearize,
    exact_quotient,
    linearize,
    literal,
    product,
    recombined,
    same,
    simplify_dim,
)

Position: TypeAlias = tuple[Index, ...]

Passed: TypeAlias = tuple[tuple[int, int], ...]
"""Pointwise nodes that are passed as if they were views of one operand, each with that operand's number."""


@dataclass(frozen=True)
class Bounds:
    """The condition lower <= index < upper. A bound of None is open."""

    index: Index
    lower: Dim | None
    upper: Dim | None


def holds(bounds: Bounds, axes: Axes) -> bool | None:
    """Returns True if a condition holds on the whole iteration space, False if nowhere, None if it depends on the index."""
    index = sympy.sympify(bounds.index)
    lower, upper = bounds.lower, bounds.upper
    is_above = lower is None or same(lower, 0) or axes.is_nonnegative(sympy.expand(index - lower))
    is_below = upper is None or axes.is_below(index, upper)
    if is_above and is_below:
        return True
    is_left = lower is not None and axes.is_below(index, lower)
    is_right = upper is not None and axes.is_nonnegative(sympy.expand(index - upper))
    return False if is_left or is_right else None


@dataclass(frozen=True)
class ElementSource:
    """One element of an operand, and the condition under which it is read."""

    arg: int
    index: Position
    bounds: Bounds | None = None


def sources(graph: Graph, position: int, index: Position, axes: Axes) -> tuple[ElementSource, ...]:
    """Returns the operand elements that the element ``index`` of a pointwise, view or indexing node reads.

    Index expressions are over the iteration space `axes`.
    """
    node = graph.nodes[position]
    if node.family is Family.POINTWISE:
        return tuple(ElementSource(a, broadcast_index(graph.nodes[a].shape, index)) for a in node.args)
    if node.family is Family.INDEXING:
        return _gather(graph, position, index)
    return _VIEWS[node.op](graph, node, index, axes)


def broadcast_index(shape: Shape, index: Position) -> Position:
    """Returns the index of a broadcast operand: the trailing dims, 0 for an extent of 1."""
    trailing = index[len(index) - len(shape) :]
    return tuple(0 if same(extent, 1) else i for extent, i in zip(shape, trailing, strict=True))


def _expand(graph: Graph, node: Node, index: Position, axes: Axes) -> tuple[ElementSource, ...]:
    (a,) = node.args
    return (ElementSource(a, broadcast_index(graph.nodes[a].shape, index)),)


def _permute(graph: Graph, node: Node, index: Position, axes: Axes) -> tuple[ElementSource, ...]:
    dims = cast(tuple[int, ...], node.attr("dims"))
    (a,) = node.args
    inverse: list[Index] = [0] * len(dims)
    for i, d in zip(index, dims, strict=True):
        inverse[d] = i
    return (ElementSource(a, tuple(inverse)),)


def _slice(graph: Graph, node: Node, index: Position, axes: Axes) -> tuple[ElementSource, ...]:
    dim, start, step = (cast(int, node.attr(key)) for key in ("dim", "start", "step"))
    (a,) = node.args
    source = simplify_dim(index[dim] * step + start)
    return (ElementSource(a, (*index[:dim], source, *index[dim + 1 :])),)


def _concat(graph: Graph, node: Node, index: Position, axes: Axes) -> tuple[ElementSource, ...]:
    dim = cast(int, node.attr("dim"))
    operands: list[ElementSource] = []
    start: Dim = 0
    for a in node.args:
        end = simplify_dim(start + graph.nodes[a].shape[dim])
        shifted = (*index[:dim], simplify_dim(index[dim] - start), *index[dim + 1 :])
        operands.append(ElementSource(a, shifted, Bounds(index[dim], start, end)))
        start = end
    return tuple(operands)


def _gather(graph: Graph, position: int, index: Position) -> tuple[ElementSource, ...]:
    """The element of the operand at a run-time index, and the element of the index tensor."""
    node = graph.nodes[position]
    dim = cast(int, node.attr("dim"))
    x, index_node = node.args
    value = IndexValue(position, graph.nodes[x].shape[dim], *index)
    return ElementSource(x, (*index[:dim], value, *index[dim + 1 :])), ElementSource(index_node, index)


def index_values(indices: Iterable[Index]) -> tuple[IndexValue, ...]:
    """Returns the run-time index values that some indices contain, in a stable order."""
    values = set().union(*(i.atoms(IndexValue) for i in indices if not isinstance(i, int)))
    return tuple(sorted(values, key=str))


def _reshape(graph: Graph, node: Node, index: Position, axes: Axes) -> tuple[ElementSource, ...]:
    (a,) = node.args
    return (ElementSource(a, reshaped(index, node.shape, graph.nodes[a].shape, axes)),)


def reshaped(index: Position, shape: Shape, target: Shape, axes: Axes) -> Position:
    """Maps an index to another shape with the same row-major order."""
    position: list[Index] = []
    for target_dims, own_dims in reshape_blocks(target, shape):
        block = tuple(target[d] for d in target_dims)
        position += delinearize(linearize([index[d] for d in own_dims], [shape[d] for d in own_dims]), block, axes)
    return tuple(position)


@lru_cache(maxsize=1 << 12)
def reshape_blocks(source: Shape, result: Shape) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Splits a reshape into the smallest runs of dims with equal size, so that untouched dims stay separate."""
    blocks: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    left: list[int] = []
    right: list[int] = []
    i = j = 0
    while i < len(source) or j < len(result):
        lefts, rights = product(source[d] for d in left), product(result[d] for d in right)
        if left and right and same(lefts, rights):
            blocks.append((tuple(left), tuple(right)))
            left, right = [], []
        elif j < len(result) and (i == len(source) or _shorter(rights, lefts, bool(right), bool(left))):
            right.append(j)
            j += 1
        else:
            left.append(i)
            i += 1
    if left or right:
        blocks.append((tuple(left), tuple(right)))
    return tuple(blocks)


def _shorter(rights: Dim, lefts: Dim, has_right: bool, has_left: bool) -> bool:
    """True if the result's side should grow next: it is the smaller, or the source's size is a multiple of it."""
    if has_left and not has_right:
        return True
    a, b = literal(rights), literal(lefts)
    if a is not None and b is not None:
        return a < b
    return exact_quotient(lefts, rights) is not None


_VIEWS: dict[Op, Callable[[Graph, Node, Position, Axes], tuple[ElementSource, ...]]] = {
    Op.EXPAND: _expand,
    Op.PERMUTE: _permute,
    Op.RESHAPE: _reshape,
    Op.SLICE: _slice,
    Op.CONCAT: _concat,
    Op.DETACH: lambda graph, node, index, axes: (ElementSource(node.args[0], index),),
}


def identity_axes(shape: Sequence[Dim], prefix: str = "i") -> Axes:
    """Returns one axis per dim, named by the prefix and the dim's number."""
    return Axes(tuple(axis_symbol(f"{prefix}{d}") for d in range(len(shape))), tuple(shape))


# Functionalized writes: the input whose memory a `PUT` writes to, and the elements that it writes.


def view_chain(graph: Graph, target: int) -> tuple[int, ...]:
    """Returns the chain from a write target through its views and gathers down to the version of the tensor that they index."""
    nodes = [target]
    while graph.nodes[nodes[-1]].family in (Family.VIEW, Family.INDEXING):
        nodes.append(graph.nodes[nodes[-1]].args[0])
    return tuple(nodes)


def previous_version(graph: Graph, put: int) -> int:
    """Returns the previous version of the tensor that a `PUT` writes to."""
    return view_chain(graph, graph.nodes[put].args[0])[-1]


def first_version(graph: Graph, version: int) -> int:
    """Returns the input of which a version is a later state; both share memory."""
    while graph.nodes[version].op is Op.PUT:
        version = previous_version(graph, version)
    return version


def target_gathers(graph: Graph, put: int) -> tuple[int, ...]:
    """Returns the gathers in the target of a write."""
    return tuple(p for p in view_chain(graph, graph.nodes[put].args[0]) if graph.nodes[p].family is Family.INDEXING)


def gather_indices(graph: Graph, put: int, index: Position, axes: Axes) -> tuple[tuple[int, int, Position], ...]:
    """Returns the gathers in the target of a write, each with its index tensor and the index into that tensor."""
    result: list[tuple[int, int, Position]] = []
    for position in view_chain(graph, graph.nodes[put].args[0])[:-1]:
        operand, *indices = sources(graph, position, index, axes)
        result += [(position, value.arg, value.index) for value in indices]
        index = operand.index
    return tuple(result)


def are_disjoint(graph: Graph, put: int, other_put: int) -> bool:
    """True if two writes to the same memory provably share no element: they write disjoint slices below equal views."""
    chains = [reversed(view_chain(graph, graph.nodes[p].args[0])[:-1]) for p in (put, other_put)]
    for position, other_position in zip(*chains, strict=False):
        a, b = graph.nodes[position], graph.nodes[other_position]
        if (a.op, a.attrs, a.args[1:]) != (b.op, b.attrs, b.args[1:]):
            return a.op is b.op is Op.SLICE and a.attr("dim") == b.attr("dim") and _are_disjoint_slices(a, b)
    return False


def _are_disjoint_slices(one: Node, other: Node) -> bool:
    starts, ends = [], []
    for node in (one, other):
        numbers = [literal(cast(Dim, node.attr(name))) for name in ("start", "length", "step")]
        if None in numbers:
            return False
        start, length, step = (n or 0 for n in numbers)
        starts.append(start)
        ends.append(start + (length - 1) * step)
    return ends[0] < starts[1] or ends[1] < starts[0]


def address(graph: Graph, put: int, index: Position, axes: Axes) -> Position:
    """Maps an element of a write's target to an index of the updated version; gathered dims become `IndexValue`."""
    for position in view_chain(graph, graph.nodes[put].args[0])[:-1]:
        index = sources(graph, position, index, axes)[0].index
    return index


# Strided views of buffers, for tensor cores and libraries.


@dataclass(frozen=True)
class StridedView:
    """A view of the buffer of node ``base``; strides and offset in elements."""

    base: int
    shape: Shape
    strides: tuple[Dim, ...]
    offset: Dim


ROW_MULTIPLE = 8
"""Elements: 16 bytes of 16-bit floats. cuBLAS has fast kernels for rows whose length and start are multiples of it."""
_PADDED_FROM = 64  # elements per row: padding is small for longer rows
_NOT_IN_MEMORY = (Op.CONSTANT, Op.SCALAR, Op.IOTA, Op.SIZE)


def contiguous_strides(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    return tuple(simplify_dim(product(shape[d + 1 :])) for d in range(len(shape)))


def row_major(name: str, shape: Shape, dtype: DType) -> InputSpec:
    return _in_row_major_order(InputSpec(name, dtype, shape, ()))


def in_row_major_order(graph: Graph) -> Graph:
    return replace(graph, inputs=tuple(map(_in_row_major_order, graph.inputs)))


def _in_row_major_order(spec: InputSpec) -> InputSpec:
    strides = zip(spec.shape, contiguous_strides(spec.shape), strict=True)
    return replace(spec, strides=tuple(0 if literal(dim) == 1 else stride for dim, stride in strides), alignment=16)


def padded_extent(extent: int) -> int:
    """Returns the row stride of padded rows: the extent rounded up to a multiple of 8."""
    return -(-extent // ROW_MULTIPLE) * ROW_MULTIPLE


def may_pad(extent: int) -> bool:
    """True if rows of this extent are long enough to be padded and not a multiple of 8 elements."""
    return extent >= _PADDED_FROM and extent != padded_extent(extent)


def memory_shape(graph: Graph, position: int) -> Shape:
    """Returns the shape of a computed node's buffer, including row padding."""
    shape = graph.nodes[position].shape
    last = literal(shape[-1]) if position in graph.padded else None
    return shape if last is None else (*shape[:-1], padded_extent(last))


def memory_strides(graph: Graph, position: int) -> tuple[Dim, ...]:
    """Returns the strides of a computed node: row-major in its buffer."""
    return contiguous_strides(memory_shape(graph, position))


def buffer_strides(graph: Graph, position: int) -> tuple[Dim, ...]:
    """Returns the strides of a node's buffer: the input's own for an input and its versions, else `memory_strides`."""
    producer = first_version(graph, position)
    node = graph.nodes[producer]
    return graph.input_spec(str(node.attr("name"))).strides if node.op is Op.INPUT else memory_strides(graph, producer)


def strided_view(graph: Graph, position: int) -> StridedView:
    """Returns the node as a strided view of the furthest buffer that it is a view of; of its own buffer if no other works."""
    if position not in graph.view_cache:
        shape = graph.nodes[position].shape
        axes = identity_axes(shape)
        graph.view_cache[position] = next(view for view in _views(graph, position, axes.symbols, axes) if view is not None)
    return cast(StridedView, graph.view_cache[position])


def repeated_view(graph: Graph, position: int, dim: int, count: int, passed: Passed = ()) -> StridedView | None:
    """Returns a node that repeats each index of a dim ``count`` times as a strided view without the repetitions; else None."""
    key = position, dim, count, passed
    if key not in graph.view_cache:
        graph.view_cache[key] = _without_repetitions(graph, position, dim, count, passed)
    return cast("StridedView | None", graph.view_cache[key])


def _without_repetitions(graph: Graph, position: int, dim: int, count: int, passed: Passed) -> StridedView | None:
    shape = graph.nodes[position].shape
    extent = exact_quotient(shape[dim], count)
    if extent is None:
        return None
    axes = identity_axes((*shape[:dim], extent, count, *shape[dim + 1 :]))
    outer, inner = axes.symbols[dim : dim + 2]
    index = (*axes.symbols[:dim], outer * count + inner, *axes.symbols[dim + 2 :])
    for view in _views(graph, position, index, axes, passed):
        if view is not None and (count == 1 or view.strides[dim + 1] == 0):
            dims_without = [(*all_dims[: dim + 1], *all_dims[dim + 2 :]) for all_dims in (view.shape, view.strides)]
            return StridedView(view.base, dims_without[0], dims_without[1], view.offset)
    return None


@dataclass(frozen=True)
class GatheredView:
    """A node as a view of the buffer that it gathers from.

    Attributes:
        view: its first dim is the gathered one, and its others are those of the node.
        gather: the gather.
        index: the element of the index tensor that is read for an element of the node: the tensor and the index into it.
    """

    view: StridedView
    gather: int
    index: tuple[int, Position]


def gathered_view(graph: Graph, position: int, index: Position, axes: Axes, passed: Passed = ()) -> GatheredView | None:
    """Returns a node at an index as a view of the buffer that it gathers from; None if there is no gather, or no such view."""
    gather, at = _elements_below(graph, position, index, axes, passed)[-1]
    if graph.nodes[gather].family is not Family.INDEXING:
        return None
    operand, number = sources(graph, gather, at, axes)
    dim = cast(int, graph.nodes[gather].attr("dim"))
    gathered = Axes((axis_symbol("gathered"), *axes.symbols), (graph.nodes[operand.arg].shape[dim], *axes.extents))
    inside = (*operand.index[:dim], gathered.symbols[0], *operand.index[dim + 1 :])
    view = next((view for view in _views(graph, operand.arg, inside, gathered) if view is not None), None)
    return None if view is None else GatheredView(view, gather, (number.arg, number.index))


def _views(graph: Graph, position: int, index: Position, axes: Axes, passed: Passed = ()) -> Iterator[StridedView | None]:
    """The node at an index as a view of each buffer below it, the furthest first; None if it is not a strided view."""
    for base, offset_index in reversed(_elements_below(graph, position, index, axes, passed)):
        yield _affine(base, axes.extents, flat_offset(offset_index, buffer_strides(graph, base)), axes.symbols)


def _elements_below(graph: Graph, position: int, index: Position, axes: Axes, passed: Passed = ()) -> list[tuple[int, Position]]:
    """Returns the node and those that it is a view of, each with the index that is read."""
    below, operand_of = [(position, index)], dict(passed)
    while graph.nodes[below[-1][0]].family is Family.VIEW or below[-1][0] in operand_of:
        operands, number = sources(graph, *below[-1], axes), operand_of.get(below[-1][0])
        operands = operands if number is None else operands[number : number + 1]
        if len(operands) != 1 or graph.nodes[operands[0].arg].op in _NOT_IN_MEMORY:
            break
        below.append((operands[0].arg, operands[0].index))
    return below


def flat_offset(index: Sequence[Index], strides: Sequence[Dim]) -> Index:
    """Returns the offset of an index in the buffer."""
    total: Index = 0
    for i, stride in zip(index, strides, strict=True):
        total = total + i * stride
    return recombined(simplify_dim(total))


def _affine(base: int, shape: Shape, offset: Index, symbols: Sequence[sympy.Symbol]) -> StridedView | None:
    if not symbols:
        return StridedView(base, shape, (), simplify_dim(offset))
    constant, strides = sympy.Integer(0), dict.fromkeys(symbols, sympy.Integer(0))
    for term in sympy.Add.make_args(sympy.expand(offset)):
        axes = [symbol for symbol in symbols if symbol in term.free_symbols]
        if not axes:
            constant += term
            continue
        strides[axes[0]] += term / axes[0]
    if any(not s.free_symbols.isdisjoint(symbols) or (s.is_nonpositive and not s.is_zero) for s in strides.values()):
        return None
    return StridedView(base, shape, tuple(map(simplify_dim, strides.values())), simplify_dim(constant))
