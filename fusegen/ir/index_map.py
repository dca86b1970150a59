"""Where a node's element comes from: index maps of pointwise broadcasting and of views.

`sources` answers, for an element of a node, which elements of its operands it reads. Everything that the compiler
knows of slices, reshapes, permutations, broadcasts, concatenations and gathers is in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias, cast

import sympy

from fusegen.ir.graph import Graph, Node, Shape
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import (
    Axes,
    Dim,
    Index,
    IndexValue,
    axis_symbol,
    delinearize,
    exact_quotient,
    linearize,
    literal,
    product,
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
    """Where a gather reads: in its operand at a value that is found when the kernel runs, and that value."""
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
    """Whether the result's side should grow next: it is the smaller, or the source's is ahead by a factor."""
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
