"""The sources of a node's elements: index maps of pointwise broadcasting and of views.

`sources` answers, for an element of a node, which elements of its operands it reads. Everything that the compiler
knows of slices, reshapes, permutations, broadcasts, concatenations and gathers is in this file, and so are strides.
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


@dataclass(frozen=True)
class Bounds:
    """A condition lower <= index < upper; None is no bound."""

    index: Index
    lower: Dim | None
    upper: Dim | None


def holds(bounds: Bounds, axes: Axes) -> bool | None:
    """True if a condition holds for every point of an iteration space, False if for none; None if it depends on the point."""
    index = sympy.sympify(bounds.index)
    lower, upper = bounds.lower, bounds.upper
    is_above = lower is None or same(lower, 0) or axes.is_nonnegative(sympy.expand(index - lower))
    is_below = upper is None or axes.below(index, upper)
    if is_above and is_below:
        return True
    is_left = lower is not None and axes.below(index, lower)
    is_right = upper is not None and axes.is_nonnegative(sympy.expand(index - upper))
    return False if is_left or is_right else None


@dataclass(frozen=True)
class ElementSource:
    """One operand's element: the operand, its index, and under which condition it is the one."""

    arg: int
    index: Position
    bounds: Bounds | None = None


def sources(graph: Graph, position: int, index: Position, axes: Axes) -> tuple[ElementSource, ...]:
    """The operands' elements that the element ``index`` of a pointwise, view or indexing node reads.

    Args:
        graph: the graph.
        position: the node.
        index: an expression a dim.
        axes: the iteration space that the expressions are over.
    """
    node = graph.nodes[position]
    if node.family is Family.POINTWISE:
        return tuple(ElementSource(a, broadcast_index(graph.nodes[a].shape, index)) for a in node.args)
    if node.family is Family.INDEXING:
        return _gather(graph, position, index)
    return _VIEWS[node.op](graph, node, index, axes)


def broadcast_index(shape: Shape, index: Position) -> Position:
    """The element of a broadcast operand: trailing dims, 0 where the extent is 1."""
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
    moved = simplify_dim(index[dim] * step + start)
    return (ElementSource(a, (*index[:dim], moved, *index[dim + 1 :])),)


def _concat(graph: Graph, node: Node, index: Position, axes: Axes) -> tuple[ElementSource, ...]:
    dim = cast(int, node.attr("dim"))
    found: list[ElementSource] = []
    start: Dim = 0
    for a in node.args:
        end = simplify_dim(start + graph.nodes[a].shape[dim])
        shifted = (*index[:dim], simplify_dim(index[dim] - start), *index[dim + 1 :])
        found.append(ElementSource(a, shifted, Bounds(index[dim], start, end)))
        start = end
    return tuple(found)


def _gather(graph: Graph, position: int, index: Position) -> tuple[ElementSource, ...]:
    """The places that a gather reads: in its operand at a value that is found when the kernel runs, and that value."""
    node = graph.nodes[position]
    dim = cast(int, node.attr("dim"))
    x, chosen = node.args
    value = IndexValue(position, graph.nodes[x].shape[dim], *index)
    return ElementSource(x, (*index[:dim], value, *index[dim + 1 :])), ElementSource(chosen, index)


def index_values(indices: Iterable[Index]) -> tuple[IndexValue, ...]:
    """The values that some indices are made of, in an order of their own."""
    found = set().union(*(i.atoms(IndexValue) for i in indices if not isinstance(i, int)))
    return tuple(sorted(found, key=str))


def _reshape(graph: Graph, node: Node, index: Position, axes: Axes) -> tuple[ElementSource, ...]:
    (a,) = node.args
    return (ElementSource(a, reshaped(index, node.shape, graph.nodes[a].shape, axes)),)


def reshaped(index: Position, shape: Shape, other: Shape, axes: Axes) -> Position:
    """The index in another shape of as many elements in the same order."""
    moved: list[Index] = []
    for other_dims, own_dims in reshape_blocks(other, shape):
        block = tuple(other[d] for d in other_dims)
        moved += delinearize(linearize([index[d] for d in own_dims], [shape[d] for d in own_dims]), block, axes)
    return tuple(moved)


@lru_cache(maxsize=1 << 12)
def reshape_blocks(source: Shape, result: Shape) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Splits a reshape into the smallest runs of dims with equal products, so that untouched dims stay apart."""
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
    """Tells if the result's side should grow next: it is the smaller, or the source's is ahead by a factor."""
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
    """One axis a dim, named by the prefix and the dim's number."""
    return Axes(tuple(axis_symbol(f"{prefix}{d}") for d in range(len(shape))), tuple(shape))


# Versions of inputs that are written to: which memory a `PUT` lies in, and where in it an element of its place is.


def chain(graph: Graph, place: int) -> tuple[int, ...]:
    """The views and gathers that a place is made of, the last first, and, at the end, the version that it is a place in."""
    found = [place]
    while graph.nodes[found[-1]].family in (Family.VIEW, Family.INDEXING):
        found.append(graph.nodes[found[-1]].args[0])
    return tuple(found)


def base(graph: Graph, put: int) -> int:
    """The version of which a `PUT` is the next one."""
    return chain(graph, graph.nodes[put].args[0])[-1]


def owner(graph: Graph, version: int) -> int:
    """The input in whose memory a version lies."""
    while graph.nodes[version].op is Op.PUT:
        version = base(graph, version)
    return version


def gathers(graph: Graph, put: int) -> tuple[int, ...]:
    """The gathers in the place that is written to: their indices say where, in part."""
    return tuple(p for p in chain(graph, graph.nodes[put].args[0]) if graph.nodes[p].family is Family.INDEXING)


def chosen(graph: Graph, put: int, index: Position, axes: Axes) -> tuple[tuple[int, int, Position], ...]:
    """The gathers in the place that is written to, each with the value that is its index, and where an element's is."""
    found: list[tuple[int, int, Position]] = []
    for position in chain(graph, graph.nodes[put].args[0])[:-1]:
        operand, *indices = sources(graph, position, index, axes)
        found += [(position, value.arg, value.index) for value in indices]
        index = operand.index
    return tuple(found)


def are_apart(graph: Graph, put: int, other: int) -> bool:
    """Tells if two places in one memory have certainly no element in common: the same views lead to slices that do not meet."""
    chains = [reversed(chain(graph, graph.nodes[p].args[0])[:-1]) for p in (put, other)]
    for one, two in zip(*chains, strict=False):
        a, b = graph.nodes[one], graph.nodes[two]
        if (a.op, a.attrs, a.args[1:]) != (b.op, b.attrs, b.args[1:]):
            return a.op is b.op is Op.SLICE and a.attr("dim") == b.attr("dim") and _do_not_meet(a, b)
    return False


def _do_not_meet(one: Node, other: Node) -> bool:
    """Tells if two slices of a dim have no element in common, by where they begin and end."""
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
    """The place, in the version's shape, of an element of the place; an `IndexValue` where only a gather's index says it."""
    for position in chain(graph, graph.nodes[put].args[0])[:-1]:
        index = sources(graph, position, index, axes)[0].index
    return index


# Views of buffers that strides alone can describe, as tensor cores and libraries need them.


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
