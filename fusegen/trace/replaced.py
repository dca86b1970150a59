"""A tensor with other elements at a place: what a write gives where nothing lies in memory yet.

A place is made of views and gathers of the tensor. From its last step to the first one, each says what the tensor of that step is
once its elements at the place are the new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from fusegen.dtypes import DType
from fusegen.errors import UnsupportedError
from fusegen.ir.graph import GraphBuilder, Location, Node
from fusegen.ir.index_map import contiguous_strides
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim, Shape, literal, product, same, simplify_dim


def replaced(builder: GraphBuilder, steps: Iterable[int], value: int, where: Location | None) -> int:
    """The tensor with a value at a place. If several elements of the value have one place, the last one is there.

    Args:
        steps: the views and gathers that lead from the tensor to the place, the last first.
        value: of the place's shape and dtype.
        where: the user's line.

    Raises:
        UnsupportedError: a step cannot be followed back.
    """
    made = _Made(builder, where)
    for step in steps:
        node = builder.nodes[step]
        if node.op not in _BACK:
            raise UnsupportedError(
                f"writing to {node.op.row.name} of a tensor that the kernel computes cannot be traced",
                mend="compute a new value with torch.where or torch.cat",
            )
        value = _BACK[node.op](made, node, node.args[0], value)
    return value


@dataclass(frozen=True)
class _Made:
    """Makes nodes at a line of the user's."""

    builder: GraphBuilder
    where: Location | None

    def add(self, op: Op, *args: int, **attrs: object) -> int:
        return self.builder.add(op, args, location=self.where, **attrs)

    def shape(self, position: int) -> Shape:
        return self.builder.nodes[position].shape

    def reshaped(self, position: int, shape: Sequence[Dim]) -> int:
        own = self.shape(position)
        if len(own) == len(shape) and all(map(same, own, shape)):
            return position
        return self.add(Op.RESHAPE, position, shape=tuple(shape))

    def part(self, position: int, dim: int, start: Dim, length: Dim) -> list[int]:
        """A run of a dim; nothing where it has no element."""
        if same(length, 0):
            return []
        is_all = same(length, self.shape(position)[dim])
        return [position if is_all else self.add(Op.SLICE, position, dim=dim, start=start, length=length, step=1)]

    def joined(self, parts: Sequence[int], dim: int) -> int:
        return parts[0] if len(parts) == 1 else self.add(Op.CONCAT, *parts, dim=dim)

    def iota(self, size: Dim) -> int:
        return self.add(Op.IOTA, shape=(size,), dtype=DType.INT64)


def _slice(made: _Made, node: Node, before: int, value: int) -> int:
    dim, start, step = cast(int, node.attr("dim")), cast(Dim, node.attr("start")), cast(int, node.attr("step"))
    length, size = node.shape[dim], made.shape(before)[dim]
    if step != 1 and _is_of_blocks(size, start, length, step):
        return _one_of_blocks(made, before, dim, cast(int, start), step, value)
    if step != 1:
        value, length = _apart(made, before, dim, (start, length, step), value)
    end = simplify_dim(start + length)
    around = made.part(before, dim, 0, start), made.part(before, dim, end, simplify_dim(size - end))
    return made.joined([*around[0], value, *around[1]], dim)


def _is_of_blocks(size: Dim, start: Dim, length: Dim, step: int) -> bool:
    """Tells if a slice takes one element of each block of a dim."""
    known = literal(start)
    return step > 1 and known is not None and known < step and same(simplify_dim(length * step), size)


def _one_of_blocks(made: _Made, before: int, dim: int, start: int, step: int, value: int) -> int:
    """The blocks with another element at one place."""
    shape, length = made.shape(before), made.shape(value)[dim]
    blocks = made.reshaped(before, (*shape[:dim], length, step, *shape[dim + 1 :]))
    single = made.reshaped(value, (*shape[:dim], length, 1, *shape[dim + 1 :]))
    around = made.part(blocks, dim + 1, 0, start), made.part(blocks, dim + 1, start + 1, step - start - 1)
    return made.reshaped(made.joined([*around[0], single, *around[1]], dim + 1), shape)


def _apart(made: _Made, before: int, dim: int, steps: tuple[Dim, Dim, int], value: int) -> tuple[int, Dim]:
    """The value with those elements between its own that a slice passes over, from its first element to its last one.

    Raises:
        UnsupportedError: the slice runs backwards.
    """
    start, length, step = steps
    if step < 0:
        raise UnsupportedError("writing to a tensor that was reversed cannot be traced", mend="reverse the value")
    span = simplify_dim((length - 1) * step + 1)
    shape = made.shape(value)
    first = made.part(value, dim, 0, simplify_dim(length - 1))
    last = made.part(value, dim, simplify_dim(length - 1), 1)
    if not first:
        return value, span
    (run,) = made.part(before, dim, start, simplify_dim(span - 1))
    blocks = made.reshaped(run, (*shape[:dim], simplify_dim(length - 1), step, *shape[dim + 1 :]))
    single = made.reshaped(first[0], (*shape[:dim], simplify_dim(length - 1), 1, *shape[dim + 1 :]))
    mixed = made.joined([single, *made.part(blocks, dim + 1, 1, step - 1)], dim + 1)
    return made.joined([made.reshaped(mixed, (*shape[:dim], simplify_dim(span - 1), *shape[dim + 1 :])), *last], dim), span


def _permute(made: _Made, node: Node, _: int, value: int) -> int:
    dims = cast(tuple[int, ...], node.attr("dims"))
    return made.add(Op.PERMUTE, value, dims=tuple(dims.index(d) for d in range(len(dims))))


def _reshape(made: _Made, _: Node, before: int, value: int) -> int:
    return made.reshaped(value, made.shape(before))


_FEW = 8  # indices that are compared with each place, which costs no more than reading and writing it


def _gather(made: _Made, node: Node, before: int, value: int) -> int:
    """For each place along the dim the last of the elements that the index puts there."""
    dim, wraps = cast(int, node.attr("dim")), bool(node.attr("wraps"))
    shape, size = made.shape(before), made.shape(before)[dim]
    rows = _of_rows(made.builder, node, shape, dim)
    if rows is None:
        return _elements(made, node, before, value)
    number = _checked(made, made.reshaped(rows, (node.shape[dim],)), size, wraps=wraps)
    count = literal(node.shape[dim])
    if count is not None and count <= _FEW:
        return _compared(made, before, dim, number, value, count)
    last = made.add(Op.LAST, number, length=size)
    along = made.reshaped(last, [size if d == dim else 1 for d in range(len(shape))])
    return _chosen(made, before, dim, along, value)


def _of_rows(builder: GraphBuilder, node: Node, shape: Shape, dim: int) -> int | None:
    """The index of a gather that takes all that there is at a place along the dim, without further dims; None of others."""
    index = builder.nodes[node.args[1]]
    if len(shape) == 1:
        return node.args[1]
    if index.op is not Op.EXPAND or not all(
        same(a, b) for d, (a, b) in enumerate(zip(index.shape, shape, strict=True)) if d != dim
    ):
        return None
    below = builder.nodes[index.args[0]].shape
    is_vector = len(below) == len(shape) and all(same(size, 1) for d, size in enumerate(below) if d != dim)
    return index.args[0] if is_vector else None


def _checked(made: _Made, index: int, size: Dim, *, wraps: bool) -> int:
    """The index, counted from the front, as numbers that are gathered: that says which of them names no element."""
    return made.add(Op.GATHER, made.iota(size), index, dim=0, wraps=wraps)


def _compared(made: _Made, before: int, dim: int, number: int, value: int, count: int) -> int:
    shape = made.shape(before)
    places = made.reshaped(made.iota(shape[dim]), [shape[dim] if d == dim else 1 for d in range(len(shape))])
    for n in range(count):
        (at,), (one,) = made.part(number, 0, n, 1), made.part(value, dim, n, 1)
        is_here = made.add(Op.EQ, places, made.reshaped(at, [1] * len(shape)))
        before = made.add(Op.WHERE, is_here, one, before)
    return before


def _chosen(made: _Made, before: int, dim: int, last: int, value: int) -> int:
    """The value's elements by their numbers along the dim, and what was there before where there is none."""
    none = made.add(Op.LT, last, made.builder.constant(0))
    wide = made.add(Op.EXPAND, last, shape=made.shape(before))
    found = made.add(Op.GATHER, value, wide, dim=dim, wraps=True)  # of -1 the last element, which nobody takes
    return made.add(Op.WHERE, none, before, found)


def _elements(made: _Made, node: Node, before: int, value: int) -> int:
    """The same of single elements, by their numbers in row-major order."""
    dim, shape = cast(int, node.attr("dim")), made.shape(before)
    index = made.reshaped(node.args[1], (simplify_dim(product(node.shape)),))
    number = made.reshaped(_checked(made, index, shape[dim], wraps=bool(node.attr("wraps"))), node.shape)
    strides, total = contiguous_strides(shape), simplify_dim(product(shape))
    flat = made.add(Op.MUL, number, made.builder.size(strides[dim]))
    for d in (d for d in range(len(shape)) if d != dim):
        along = made.reshaped(made.iota(node.shape[d]), (node.shape[d], *(1,) * (len(shape) - 1 - d)))
        flat = made.add(Op.ADD, flat, made.add(Op.MUL, along, made.builder.size(strides[d])))
    count = (simplify_dim(product(node.shape)),)
    last = made.add(Op.LAST, made.reshaped(flat, count), length=total)
    found = _chosen(made, made.reshaped(before, (total,)), 0, last, made.reshaped(value, count))
    return made.reshaped(found, shape)


_BACK: dict[Op, Callable[[_Made, Node, int, int], int]] = {
    Op.SLICE: _slice,
    Op.PERMUTE: _permute,
    Op.RESHAPE: _reshape,
    Op.GATHER: _gather,
}
