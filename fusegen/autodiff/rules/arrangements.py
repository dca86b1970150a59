"""Derivatives of views, indexing and matmuls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from fusegen.autodiff.rules.primitives import GradientRule, Gradients, no_gradient, positions_along
from fusegen.dtypes import DType
from fusegen.ir.index_map import contiguous_strides
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim, Shape, exact_quotient, literal, product, same, simplify_dim
from fusegen.passes.algebra import Value

_MATRIX = 2  # dims of a matrix
_MOST_INDICES = 8
"""Maximum comparisons per element of the gathered tensor that cost no more than reading and writing the element."""


def _permute(y: Value, dy: Value) -> Gradients:
    dims = cast(tuple[int, ...], y.node.attr("dims"))
    return (_permuted(dy, [dims.index(d) for d in range(len(dims))]),)


def _permuted(x: Value, dims: Sequence[int]) -> Value:
    """Permutes a value; merges the permutation with those below it."""
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
    spaced = dy if step == 1 else _with_gaps(dy, dim, step)
    after = simplify_dim(y.arg(0).node.shape[dim] - start - spaced.node.shape[dim])
    return (_padded(spaced, dim, start, after),)


def _with_gaps(x: Value, dim: int, step: int) -> Value:
    """Inserts zeros between the elements of a dim."""
    shape = x.node.shape
    single = x.apply(Op.RESHAPE, shape=(*shape[: dim + 1], 1, *shape[dim + 1 :]))
    padded = _padded(single, dim + 1, 0, step - 1)
    flat = padded.apply(Op.RESHAPE, shape=(*shape[:dim], simplify_dim(shape[dim] * step), *shape[dim + 1 :]))
    return flat.apply(Op.SLICE, dim=dim, start=0, length=simplify_dim((shape[dim] - 1) * step + 1), step=1)


def _padded(x: Value, dim: int, before: Dim, after: Dim) -> Value:
    """Pads a dim with zeros on both sides."""
    shape = x.node.shape
    zeros = [None if same(n, 0) else _zeros(x, (*shape[:dim], n, *shape[dim + 1 :])) for n in (before, after)]
    segments = [segment for segment in (zeros[0], x, zeros[1]) if segment is not None]
    return x if len(segments) == 1 else segments[0].apply(Op.CONCAT, *segments[1:], dim=dim)


def _zeros(like: Value, shape: Shape) -> Value:
    zero = Value(like.builder, like.builder.constant(0.0, dtype=like.dtype), like.location)
    return zero.apply(Op.EXPAND, shape=shape)


def _concat(y: Value, dy: Value) -> Gradients:
    dim, start, gradients = cast(int, y.node.attr("dim")), cast(Dim, 0), []
    for index in range(len(y.node.args)):
        length = y.arg(index).node.shape[dim]
        gradients.append(dy.apply(Op.SLICE, dim=dim, start=start, length=length, step=1))
        start = simplify_dim(start + length)
    return tuple(gradients)


def _gather(y: Value, dy: Value) -> Gradients:
    """Sums the gradient's elements by index, in a fixed order, so that results are bitwise reproducible.

    With few indices along the dim, each element of the gathered tensor is compared with them, fused with subsequent operations.
    Otherwise torch sums: rows if whole rows are selected (embeddings), else single elements.
    """
    x, index, dim = y.arg(0), y.arg(1), cast(int, y.node.attr("dim"))
    wraps, count = bool(y.node.attr("wraps")), literal(index.node.shape[dim])
    if dim == 0 and _selects_rows(x, index, dim) and (sparse := _Sparse.of(dy)) is not None:
        return sparse.summed(_vector(_from_front(index.arg(0), x, dim, wraps=wraps)), x.node.shape), None
    if _is_one_per_slice(x, index, dim):
        return _one_per_slice(x, _from_front(index.arg(0), x, dim, wraps=wraps), dy), None
    if count is not None and count <= _MOST_INDICES:
        return _by_comparison(x, _from_front(index, x, dim, wraps=wraps), dy, dim, count), None
    if _selects_rows(x, index, dim):
        return _by_rows(x, _from_front(index.arg(0), x, dim, wraps=wraps), dy, dim), None
    return _by_elements(x, _from_front(index, x, dim, wraps=wraps), dy, dim), None


def _is_one_per_slice(x: Value, index: Value, dim: int) -> bool:
    """True if each index selects along the second dim of a slice that was itself gathered by an index, e.g. `x[i, j]`."""
    while x.node.op is Op.RESHAPE:
        x = x.arg(0)
    if dim != 1 or x.node.op is not Op.GATHER or index.node.op is not Op.EXPAND:
        return False
    count, *trailing = index.arg(0).node.shape
    return same(count, index.node.shape[0]) and same(index.node.shape[1], 1) and all(same(size, 1) for size in trailing)


@dataclass(frozen=True)
class _Sparse:
    """The gradient of a stack of slices, with one nonzero row per slice.

    Attributes:
        rows: the nonzero rows.
        positions: the position of each row in its slice.
        slice_rows: rows per slice.
    """

    rows: Value
    positions: Value
    slice_rows: Dim

    @classmethod
    def of(cls, dy: Value) -> _Sparse | None:
        """Matches a gradient that `dense` built; None for others."""
        count = dy.node.shape[0]
        while dy.node.op is Op.RESHAPE:
            dy = dy.arg(0)
        if dy.node.op is not Op.SCATTER_ADD or not same(dy.arg(0).node.shape[0], count):
            return None
        slice_rows = exact_quotient(cast(Dim, dy.node.attr("length")), count)
        index = dy.arg(1)
        positions = index.arg(1) if slice_rows is not None and index.node.op is Op.ADD else None
        if positions is None or slice_rows is None or index.position != _in_slices(positions, slice_rows).position:
            return None
        return cls(dy.arg(0), positions, slice_rows)

    def below(self, index: Value, size: Dim) -> _Sparse:
        """Returns the gradient of larger slices, given the index of each slice in its larger slice."""
        return _Sparse(self.rows, index * _size(index, self.slice_rows) + self.positions, simplify_dim(size * self.slice_rows))

    def dense(self, shape: Shape) -> Value:
        """Returns the gradient with all zeros."""
        count = self.rows.node.shape[0]
        sums = self.rows.apply(
            Op.SCATTER_ADD, _in_slices(self.positions, self.slice_rows), length=simplify_dim(count * self.slice_rows)
        )
        return sums.apply(Op.RESHAPE, shape=shape)

    def summed(self, index: Value, shape: Shape) -> Value:
        """Returns the gradient of the tensor from which an index gathered the slices."""
        row = index * _size(index, self.slice_rows) + self.positions
        sums = self.rows.apply(Op.SCATTER_ADD, row, length=simplify_dim(shape[0] * self.slice_rows))
        return sums.apply(Op.RESHAPE, shape=shape)


def _in_slices(positions: Value, slice_rows: Dim) -> Value:
    """Returns the positions of rows in all slices together."""
    return positions_along(positions, 0) * _size(positions, slice_rows) + positions


def _one_per_slice(x: Value, index: Value, dy: Value) -> Value:
    """Returns the gradient of slices if an index selects one part of each."""
    count, size, *trailing = x.node.shape
    sparse = _Sparse.of(dy)
    if sparse is None:
        rows = dy.apply(Op.RESHAPE, shape=(count, simplify_dim(product(trailing))))
        return _Sparse(rows, _vector(index), size).dense(x.node.shape)
    return sparse.below(_vector(index), size).dense(x.node.shape)


def _vector(index: Value) -> Value:
    """Returns the indices as a vector of int64."""
    flat = index.apply(Op.RESHAPE, shape=(index.node.shape[0],))
    return flat if flat.dtype is DType.INT64 else flat.apply(Op.CAST, dtype=DType.INT64)


def _from_front(index: Value, x: Value, dim: int, *, wraps: bool) -> Value:
    """Maps negative indices along a dim to nonnegative ones."""
    if not wraps:
        return index
    return index.apply(Op.LT, 0).where(index + _size(x, x.node.shape[dim]), index)


def _size(like: Value, size: Dim) -> Value:
    return Value(like.builder, like.builder.size(size), like.location)


def _selects_rows(x: Value, index: Value, dim: int) -> bool:
    """True if each index along a dim selects the whole slice of x."""
    other_dims = [d for d in range(len(x.node.shape)) if d != dim]
    if index.node.op is not Op.EXPAND or len(index.arg(0).node.shape) != len(x.node.shape):
        return False
    is_vector = all(same(index.arg(0).node.shape[d], 1) for d in other_dims)
    return is_vector and all(same(index.node.shape[d], x.node.shape[d]) for d in other_dims)


def _by_comparison(x: Value, index: Value, dy: Value, dim: int, count: int) -> Value:
    positions, total = positions_along(x, dim), None
    for number in range(count):
        chosen, gradient = (v.apply(Op.SLICE, dim=dim, start=number, length=1, step=1) if count > 1 else v for v in (index, dy))
        term = positions.apply(Op.EQ, chosen).where(gradient, 0)
        total = term if total is None else total + term
    return _padded_at_end(cast(Value, total), x.node.shape)


def _by_rows(x: Value, index: Value, dy: Value, dim: int) -> Value:
    """Sums whole slices along the dim."""
    size = x.node.shape
    order = (dim, *(d for d in range(len(size)) if d != dim))
    count, width = index.node.shape[dim], simplify_dim(product(size[d] for d in order[1:]))
    rows = _permuted(dy, order).apply(Op.RESHAPE, shape=(count, width))
    sums = rows.apply(Op.SCATTER_ADD, index.apply(Op.RESHAPE, shape=(count,)), length=size[dim])
    unflattened = sums.apply(Op.RESHAPE, shape=tuple(size[d] for d in order))
    return _permuted(unflattened, [order.index(d) for d in range(len(size))])


def _by_elements(x: Value, index: Value, dy: Value, dim: int) -> Value:
    """Sums elements by their row-major index."""
    size = x.node.shape
    strides = contiguous_strides(size)
    element_index = index.apply(Op.CAST, dtype=DType.INT64) * _size(x, strides[dim])
    for d in (d for d in range(len(size)) if d != dim):
        element_index = element_index + positions_along(dy, d) * _size(x, strides[d])
    count = simplify_dim(product(dy.node.shape))
    elements = dy.apply(Op.RESHAPE, shape=(count, 1))
    sums = elements.apply(Op.SCATTER_ADD, element_index.apply(Op.RESHAPE, shape=(count,)), length=simplify_dim(product(size)))
    return sums.apply(Op.RESHAPE, shape=size)


def _running_extremum(last: Op) -> GradientRule:
    """Adds dy to the elements that are the running extrema, as for a gather."""

    def rule(y: Value, dy: Value) -> Gradients:
        x = y.arg(0)
        gathered = x.apply(Op.GATHER, x.apply(last, part="indices"), dim=len(x.node.shape) - 1, wraps=False)
        return _gather(gathered, dy)[:1]

    return rule


def _topk(y: Value, dy: Value) -> Gradients:
    """dy for the selected elements, which are distinct within a row; 0 for the others."""
    if y.node.attr("result"):
        return (None,)
    x = y.arg(0)
    attrs = {**dict(y.node.attrs), "result": 1, "dtype": DType.INT64}
    gathered = x.apply(Op.GATHER, x.apply(Op.TOPK, **attrs), dim=len(x.node.shape) - 1, wraps=False)
    return _gather(gathered, dy)[:1]


def _scatter_add(y: Value, dy: Value) -> Gradients:
    """Gathers the gradient of the sum that each row was added to."""
    rows, index = y.arg(0), y.arg(1)
    shape = rows.node.shape
    expanded = index.apply(Op.RESHAPE, shape=(shape[0], 1)).apply(Op.EXPAND, shape=shape)
    return dy.apply(Op.GATHER, expanded, dim=0, wraps=False), None


def _padded_at_end(x: Value, shape: Shape) -> Value:
    """Pads all dims with zeros at the end, up to a shape."""
    for dim, size in enumerate(shape):
        x = _padded(x, dim, 0, simplify_dim(size - x.node.shape[dim]))
    return x


def _matmul(y: Value, dy: Value) -> Gradients:
    """dY·Bᵀ and Aᵀ·dY, computed as (dYᵀ·A)ᵀ if B is transposed, e.g. a weight, so that the gradient has the weight's layout.

    If B is a single matrix, the second gradient is one matmul over all rows.
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
    Op.DETACH: no_gradient,
    Op.LAST: no_gradient,
    Op.GATHER: _gather,
    Op.CUMMAX: _running_extremum(Op.LAST_MAX),
    Op.CUMMIN: _running_extremum(Op.LAST_MIN),
    Op.TOPK: _topk,
    Op.MATMUL: _matmul,
    Op.SCATTER_ADD: _scatter_add,
}


def fitted(gradient: Value, shape: Shape, dtype: DType) -> Value:
    """Returns a gradient in its operand's shape and dtype: summed over broadcast dims, expanded over reduced dims."""
    current = gradient.node.shape
    extra = len(current) - len(shape)
    broadcast = (d for d in range(extra, len(current)) if same(shape[d - extra], 1) and not same(current[d], 1))
    dims = (*range(extra), *broadcast)
    if dims:
        gradient = gradient.reduce(Op.SUM, dims)
    if extra:
        gradient = gradient.apply(Op.RESHAPE, shape=gradient.node.shape[extra:])
    if not all(map(same, gradient.node.shape, shape)):
        gradient = gradient.apply(Op.EXPAND, shape=shape)
    return gradient if gradient.dtype is dtype else gradient.apply(Op.CAST, dtype=dtype)
