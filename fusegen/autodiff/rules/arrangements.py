"""Derivatives of views, indices and products: the gradient's elements in another order, repeated, or summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from fusegen.autodiff.rules.primitives import GradientRule, Gradients, nothing, places
from fusegen.dtypes import DType
from fusegen.ir.index_map import contiguous_strides
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim, Shape, exact_quotient, literal, product, same, simplify_dim
from fusegen.passes.algebra import Value

_MATRIX = 2  # dims of a matrix
_MOST_INDICES = 8
"""As many comparisons with each element of what is gathered from cost no more than reading and writing it."""


def _permute(y: Value, dy: Value) -> Gradients:
    dims = cast(tuple[int, ...], y.node.attr("dims"))
    return (_permuted(dy, [dims.index(d) for d in range(len(dims))]),)


def _permuted(x: Value, dims: Sequence[int]) -> Value:
    """The value with its dims in another order, as one permutation of what it is a permutation of."""
    while x.node.op is Op.PERMUTE:
        inner = cast(tuple[int, ...], x.node.attr("dims"))
        x, dims = x.arg(0), [inner[d] for d in dims]
    return x if list(dims) == sorted(dims) else x.apply(Op.PERMUTE, dims=tuple(dims))


def _reshape(y: Value, dy: Value) -> Gradients:
    return (dy.apply(Op.RESHAPE, shape=y.arg(0).node.shape),)


def _slice(y: Value, dy: Value) -> Gradients:
    """The gradient with zeros between its elements and around them."""
    dim, step = (cast(int, y.node.attr(name)) for name in ("dim", "step"))
    start = cast(Dim, y.node.attr("start"))
    if step < 0:
        length = dy.node.shape[dim]
        dy = dy.apply(Op.SLICE, dim=dim, start=simplify_dim(length - 1), length=length, step=-1)
        start, step = simplify_dim(start + (length - 1) * step), -step
    apart = dy if step == 1 else _apart(dy, dim, step)
    behind = simplify_dim(y.arg(0).node.shape[dim] - start - apart.node.shape[dim])
    return (_between(apart, dim, start, behind),)


def _apart(x: Value, dim: int, step: int) -> Value:
    """The elements of a dim with zeros between each two."""
    shape = x.node.shape
    single = x.apply(Op.RESHAPE, shape=(*shape[: dim + 1], 1, *shape[dim + 1 :]))
    padded = _between(single, dim + 1, 0, step - 1)
    flat = padded.apply(Op.RESHAPE, shape=(*shape[:dim], simplify_dim(shape[dim] * step), *shape[dim + 1 :]))
    return flat.apply(Op.SLICE, dim=dim, start=0, length=simplify_dim((shape[dim] - 1) * step + 1), step=1)


def _between(x: Value, dim: int, before: Dim, behind: Dim) -> Value:
    """The value with so many zeros on both sides of it."""
    shape = x.node.shape
    zeros = [None if same(n, 0) else _zeros(x, (*shape[:dim], n, *shape[dim + 1 :])) for n in (before, behind)]
    parts = [part for part in (zeros[0], x, zeros[1]) if part is not None]
    return x if len(parts) == 1 else parts[0].apply(Op.CONCAT, *parts[1:], dim=dim)


def _zeros(like: Value, shape: Shape) -> Value:
    zero = Value(like.builder, like.builder.constant(0.0, dtype=like.dtype), like.location)
    return zero.apply(Op.EXPAND, shape=shape)


def _concat(y: Value, dy: Value) -> Gradients:
    dim, start, parts = cast(int, y.node.attr("dim")), cast(Dim, 0), []
    for number in range(len(y.node.args)):
        length = y.arg(number).node.shape[dim]
        parts.append(dy.apply(Op.SLICE, dim=dim, start=start, length=length, step=1))
        start = simplify_dim(start + length)
    return tuple(parts)


def _gather(y: Value, dy: Value) -> Gradients:
    """Sums of the gradient's elements where one is chosen several times; they have one order, so that two calls give equal bits.

    Where few indices choose along the dim, each element of what they choose from is compared with them, in one pass with what
    follows. Otherwise torch sums, rows where whole rows are chosen (as embeddings are), else single elements.
    """
    x, index, dim = y.arg(0), y.arg(1), cast(int, y.node.attr("dim"))
    wraps, count = bool(y.node.attr("wraps")), literal(index.node.shape[dim])
    if dim == 0 and _is_of_rows(x, index, dim) and (sparse := _Sparse.of(dy)) is not None:
        return sparse.summed(_vector(_from_front(index.arg(0), x, dim, wraps=wraps)), x.node.shape), None
    if _is_one_a_slice(x, index, dim):
        return _one_a_slice(x, _from_front(index.arg(0), x, dim, wraps=wraps), dy), None
    if count is not None and count <= _MOST_INDICES:
        return _by_comparison(x, _from_front(index, x, dim, wraps=wraps), dy, dim, count), None
    if _is_of_rows(x, index, dim):
        return _by_rows(x, _from_front(index.arg(0), x, dim, wraps=wraps), dy, dim), None
    return _by_elements(x, _from_front(index, x, dim, wraps=wraps), dy, dim), None


def _is_one_a_slice(x: Value, index: Value, dim: int) -> bool:
    """Tells if each index chooses along the second dim, in a slice that an index has chosen, as several do of an element."""
    while x.node.op is Op.RESHAPE:
        x = x.arg(0)
    if dim != 1 or x.node.op is not Op.GATHER or index.node.op is not Op.EXPAND:
        return False
    count, *others = index.arg(0).node.shape
    return same(count, index.node.shape[0]) and same(index.node.shape[1], 1) and all(same(size, 1) for size in others)


@dataclass(frozen=True)
class _Sparse:
    """A gradient of slices, as many as rows, each with one row of what is not 0.

    Attributes:
        rows: what is not 0.
        place: where each row is in its slice.
        share: how many rows a slice has.
    """

    rows: Value
    place: Value
    share: Dim

    @classmethod
    def of(cls, dy: Value) -> _Sparse | None:
        """The gradient as `dense` made it; None of others."""
        count = dy.node.shape[0]
        while dy.node.op is Op.RESHAPE:
            dy = dy.arg(0)
        if dy.node.op is not Op.SCATTER_ADD or not same(dy.arg(0).node.shape[0], count):
            return None
        share = exact_quotient(cast(Dim, dy.node.attr("length")), count)
        found = dy.arg(1)
        place = found.arg(1) if share is not None and found.node.op is Op.ADD else None
        if place is None or share is None or found.position != _in_slices(place, share).position:
            return None
        return cls(dy.arg(0), place, share)

    def below(self, index: Value, size: Dim) -> _Sparse:
        """The gradient by larger slices, in each of which an index says where one of these is."""
        return _Sparse(self.rows, index * _size(index, self.share) + self.place, simplify_dim(size * self.share))

    def dense(self, shape: Shape) -> Value:
        """The gradient with all zeros."""
        count = self.rows.node.shape[0]
        sums = self.rows.apply(Op.SCATTER_ADD, _in_slices(self.place, self.share), length=simplify_dim(count * self.share))
        return sums.apply(Op.RESHAPE, shape=shape)

    def summed(self, index: Value, shape: Shape) -> Value:
        """The gradient by what an index chooses slices of."""
        place = index * _size(index, self.share) + self.place
        sums = self.rows.apply(Op.SCATTER_ADD, place, length=simplify_dim(shape[0] * self.share))
        return sums.apply(Op.RESHAPE, shape=shape)


def _in_slices(place: Value, share: Dim) -> Value:
    """The place of a row among those of all slices."""
    return places(place, 0) * _size(place, share) + place


def _one_a_slice(x: Value, index: Value, dy: Value) -> Value:
    """The gradient by slices, in each of which an index chooses a part."""
    count, size, *others = x.node.shape
    sparse = _Sparse.of(dy)
    if sparse is None:
        rows = dy.apply(Op.RESHAPE, shape=(count, simplify_dim(product(others))))
        return _Sparse(rows, _vector(index), size).dense(x.node.shape)
    return sparse.below(_vector(index), size).dense(x.node.shape)


def _vector(index: Value) -> Value:
    """The indices as int64, without further dims."""
    flat = index.apply(Op.RESHAPE, shape=(index.node.shape[0],))
    return flat if flat.dtype is DType.INT64 else flat.apply(Op.CAST, dtype=DType.INT64)


def _from_front(index: Value, x: Value, dim: int, *, wraps: bool) -> Value:
    """Indices along a dim, of which negative ones count from its end."""
    if not wraps:
        return index
    return index.apply(Op.LT, 0).where(index + _size(x, x.node.shape[dim]), index)


def _size(like: Value, size: Dim) -> Value:
    return Value(like.builder, like.builder.size(size), like.location)


def _is_of_rows(x: Value, index: Value, dim: int) -> bool:
    """Tells if each index along a dim chooses all that x has there."""
    others = [d for d in range(len(x.node.shape)) if d != dim]
    if index.node.op is not Op.EXPAND or len(index.arg(0).node.shape) != len(x.node.shape):
        return False
    one = all(same(index.arg(0).node.shape[d], 1) for d in others)
    return one and all(same(index.node.shape[d], x.node.shape[d]) for d in others)


def _by_comparison(x: Value, index: Value, dy: Value, dim: int, count: int) -> Value:
    found, total = places(x, dim), None
    for number in range(count):
        chosen, given = (v.apply(Op.SLICE, dim=dim, start=number, length=1, step=1) if count > 1 else v for v in (index, dy))
        part = found.apply(Op.EQ, chosen).where(given, 0)
        total = part if total is None else total + part
    return _surrounded(cast(Value, total), x.node.shape)


def _by_rows(x: Value, index: Value, dy: Value, dim: int) -> Value:
    """Sums of rows: of all that is beside the dim."""
    size = x.node.shape
    order = (dim, *(d for d in range(len(size)) if d != dim))
    count, width = index.node.shape[dim], simplify_dim(product(size[d] for d in order[1:]))
    rows = _permuted(dy, order).apply(Op.RESHAPE, shape=(count, width))
    sums = rows.apply(Op.SCATTER_ADD, index.apply(Op.RESHAPE, shape=(count,)), length=size[dim])
    apart = sums.apply(Op.RESHAPE, shape=tuple(size[d] for d in order))
    return _permuted(apart, [order.index(d) for d in range(len(size))])


def _by_elements(x: Value, index: Value, dy: Value, dim: int) -> Value:
    """Sums of elements, by their numbers in row-major order."""
    size = x.node.shape
    strides = contiguous_strides(size)
    number = index.apply(Op.CAST, dtype=DType.INT64) * _size(x, strides[dim])
    for d in (d for d in range(len(size)) if d != dim):
        number = number + places(dy, d) * _size(x, strides[d])
    count = simplify_dim(product(dy.node.shape))
    elements = dy.apply(Op.RESHAPE, shape=(count, 1))
    sums = elements.apply(Op.SCATTER_ADD, number.apply(Op.RESHAPE, shape=(count,)), length=simplify_dim(product(size)))
    return sums.apply(Op.RESHAPE, shape=size)


def _running_extremum(last: Op) -> GradientRule:
    """To the elements at which the extrema stand, as of a gather there."""

    def rule(y: Value, dy: Value) -> Gradients:
        x = y.arg(0)
        chosen = x.apply(Op.GATHER, x.apply(last, part="indices"), dim=len(x.node.shape) - 1, wraps=False)
        return _gather(chosen, dy)[:1]

    return rule


def _topk(y: Value, dy: Value) -> Gradients:
    """To the elements that were chosen, of which each is one of a row's."""
    if y.node.attr("result"):
        return (None,)
    x = y.arg(0)
    attrs = {**dict(y.node.attrs), "result": 1, "dtype": DType.INT64}
    chosen = x.apply(Op.GATHER, x.apply(Op.TOPK, **attrs), dim=len(x.node.shape) - 1, wraps=False)
    return _gather(chosen, dy)[:1]


def _scatter_add(y: Value, dy: Value) -> Gradients:
    """The gradient by the sum that each row is part of."""
    rows, index = y.arg(0), y.arg(1)
    shape = rows.node.shape
    wide = index.apply(Op.RESHAPE, shape=(shape[0], 1)).apply(Op.EXPAND, shape=shape)
    return dy.apply(Op.GATHER, wide, dim=0, wraps=False), None


def _surrounded(x: Value, shape: Shape) -> Value:
    """The value with zeros behind it along all dims, up to a shape."""
    for dim, size in enumerate(shape):
        x = _between(x, dim, 0, simplify_dim(size - x.node.shape[dim]))
    return x


def _matmul(y: Value, dy: Value) -> Gradients:
    """dY·Bᵀ and Aᵀ·dY, the latter as (dYᵀ·A)ᵀ where B is a transpose, as a weight is, so that the gradient lies as the weight does.

    Where all rows meet one matrix, the second is one product over all of them.
    """
    a, b = y.arg(0), y.arg(1)
    by_a = dy.apply(Op.MATMUL, _transposed(b))
    if len(b.node.shape) == _MATRIX:
        a, dy = _rows(a), _rows(dy)
    if b.node.op is Op.PERMUTE:
        return by_a, _transposed(_transposed(dy).apply(Op.MATMUL, a))
    return by_a, _transposed(a).apply(Op.MATMUL, dy)


def _rows(x: Value) -> Value:
    *rows, columns = x.node.shape
    return x if len(rows) == 1 else x.apply(Op.RESHAPE, shape=(simplify_dim(product(rows)), columns))


def _transposed(x: Value) -> Value:
    rank = len(x.node.shape)
    return _permuted(x, (*range(rank - 2), rank - 1, rank - 2))


ARRANGEMENTS: dict[Op, GradientRule] = {
    Op.EXPAND: lambda _y, dy: (dy,),  # summed where gradients take their operands' shapes
    Op.PERMUTE: _permute,
    Op.RESHAPE: _reshape,
    Op.SLICE: _slice,
    Op.CONCAT: _concat,
    Op.DETACH: nothing,
    Op.LAST: nothing,
    Op.GATHER: _gather,
    Op.CUMMAX: _running_extremum(Op.LAST_MAX),
    Op.CUMMIN: _running_extremum(Op.LAST_MIN),
    Op.TOPK: _topk,
    Op.MATMUL: _matmul,
    Op.SCATTER_ADD: _scatter_add,
}


def fitted(gradient: Value, shape: Shape, dtype: DType) -> Value:
    """A gradient in its operand's shape and dtype: summed over dims that broadcasting repeated, repeated over those that were
    reduced."""
    given = gradient.node.shape
    extra = len(given) - len(shape)
    ones = (d for d in range(extra, len(given)) if same(shape[d - extra], 1) and not same(given[d], 1))
    dims = (*range(extra), *ones)
    if dims:
        gradient = gradient.reduce(Op.SUM, dims)
    if extra:
        gradient = gradient.apply(Op.RESHAPE, shape=gradient.node.shape[extra:])
    if not all(map(same, gradient.node.shape, shape)):
        gradient = gradient.apply(Op.EXPAND, shape=shape)
    return gradient if gradient.dtype is dtype else gradient.apply(Op.CAST, dtype=dtype)
