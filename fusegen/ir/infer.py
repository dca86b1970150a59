"""Shapes and dtypes of results, one rule per family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import sympy

from fusegen.dtypes import DType, promote
from fusegen.errors import ShapeError, TraceError
from fusegen.ir.ops import DtypeRule, Family, Op
from fusegen.ir.reductions import REDUCTIONS
from fusegen.ir.symbolic import Dim, Shape, product, same, simplify_dim

_Pairs: TypeAlias = Sequence[tuple[Dim, Dim]]


class MismatchError(ShapeError):
    """Sizes that are not provably equal, though they may be for some values of their symbols."""

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None, sizes: _Pairs = ()) -> None:
        self.sizes = sizes
        super().__init__(what, where=where, hint=hint)


Attrs: TypeAlias = Mapping[str, object]


@dataclass(frozen=True)
class Operand:
    shape: Shape
    dtype: DType
    weak: bool = False


def result(op: Op, operands: Sequence[Operand], attrs: Attrs) -> Operand:
    """Infers a result; raises `ShapeError` for operands that do not fit, `TraceError` for a float operation on integers."""
    weak = op.family is Family.POINTWISE and op is not Op.CAST and all(o.weak for o in operands)
    weak = weak or (op is Op.CONSTANT and bool(attrs.get("weak", True)))
    dtype = result_dtype(op, operands, attrs)
    if weak and dtype.is_float:
        dtype = DType.FLOAT64  # arithmetic on Python floats has 64 bits
    return Operand(_SHAPES[op.family](op, operands, attrs), dtype, weak)


def result_dtype(op: Op, operands: Sequence[Operand], attrs: Attrs) -> DType:
    rule = op.row.result
    if rule is DtypeRule.EXPLICIT:
        return cast(DType, attrs["dtype"])
    if rule is DtypeRule.BOOL:
        return DType.BOOL
    if rule is DtypeRule.PART:
        monoid = REDUCTIONS[op]
        return monoid.components[monoid.component_index(attrs["part"])].dtype(operands[0].dtype)
    if op is Op.MATMUL and operands[0].dtype is not operands[1].dtype:
        raise ShapeError(f"matmul of {operands[0].dtype} and {operands[1].dtype}: the dtypes differ", hint="cast one of them")
    if rule is DtypeRule.SAME or rule is DtypeRule.SUM:
        dtype = operands[0].dtype
        return DType.INT64 if rule is DtypeRule.SUM and not dtype.is_float else dtype
    common = operand_dtype(op, operands)
    if rule is DtypeRule.FLOATING and not common.is_float:
        raise TraceError(f"{op.row.name} of {common} is not supported", hint="convert to a float dtype first")
    return DType.FLOAT32 if rule is DtypeRule.FLOAT and not common.is_float else common


def operand_dtype(op: Op, operands: Sequence[Operand]) -> DType:
    """Returns the common type of the operands, ignoring the condition of `where`."""
    values = operands[1:] if op is Op.WHERE else operands
    if op is Op.WHERE and not operands[0].weak and all(v.weak for v in values):  # two numbers make a tensor
        return DType.FLOAT32 if any(v.dtype.is_float for v in values) else promote([v.dtype for v in values], [True, True])
    return promote([v.dtype for v in values], [v.weak for v in values], [not v.shape for v in values])


def operand_types(op: Op, operands: Sequence[Operand], dtype: DType) -> list[DType]:
    """Returns the computing type of each operand of a pointwise operation with a result of this dtype."""
    if op is Op.WHERE:
        return [DType.BOOL, dtype.compute, dtype.compute]
    if op in (Op.LOGICAL_AND, Op.LOGICAL_OR, Op.LOGICAL_XOR, Op.LOGICAL_NOT):
        return [DType.BOOL] * len(operands)
    if op.row.result is DtypeRule.BOOL:
        return [operand_dtype(op, operands).compute] * len(operands)
    if op in (Op.SORT_KEY, Op.DESCENDING_KEY, Op.SORTED_VALUE, Op.DESCENDING_VALUE, Op.KEY_INDEX):
        return [o.dtype.compute for o in operands]
    return [dtype.compute] * len(operands)


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """Returns the broadcast shape by torch's rule, or raises `ShapeError`."""
    rank = max((len(s) for s in shapes), default=0)
    padded = [(1,) * (rank - len(s)) + tuple(s) for s in shapes]
    return tuple(_common(sizes, shapes) for sizes in zip(*padded, strict=True))


def _common(sizes: Sequence[Dim], shapes: Sequence[Shape]) -> Dim:
    common: Dim = 1
    for size in sizes:
        if same(common, 1):
            common = size
        elif not (same(size, 1) or same(size, common)):
            raise MismatchError(
                f"shapes {', '.join(map(shape_text, shapes))} do not broadcast: {size} against {common}",
                hint="make the sizes equal, or one of them 1",
                sizes=((common, size),),
            )
    return common


def shape_text(shape: Sequence[Dim]) -> str:
    return "(" + ", ".join(str(d) for d in shape) + ("," if len(shape) == 1 else "") + ")"


def _leaf(op: Op, operands: Sequence[Operand], attrs: Attrs) -> Shape:
    return cast(Shape, attrs.get("shape", ()))


def _pointwise(op: Op, operands: Sequence[Operand], attrs: Attrs) -> Shape:
    return broadcast([o.shape for o in operands])


def _reduction(op: Op, operands: Sequence[Operand], attrs: Attrs) -> Shape:
    dims = cast(tuple[int, ...], attrs["dims"])
    return tuple(1 if d in dims else size for d, size in enumerate(operands[0].shape))


def _normalization(op: Op, operands: Sequence[Operand], attrs: Attrs) -> Shape:
    shape = operands[0].shape
    count = cast(int, attrs["count"]) if "count" in attrs else 0
    for extra in operands[1:]:
        if not (len(extra.shape) == count and all(map(same, extra.shape, shape[len(shape) - count :]))):
            fits = len(extra.shape) == count
            raise MismatchError(
                f"{op.row.name}: weight or bias of shape {shape_text(extra.shape)} does not fit an input of {shape_text(shape)}",
                hint="give weight and bias the shape of the normalized dims",
                sizes=tuple(zip(extra.shape, shape[len(shape) - count :], strict=True)) if fits else (),
            )
    return shape


def _matmul(op: Op, operands: Sequence[Operand], attrs: Attrs) -> Shape:
    a, b = (o.shape for o in operands)
    if len(a) < 2 or len(b) < 2 or not same(a[-1], b[-2]):
        inner = ((a[-1], b[-2]),) if len(a) > 1 and len(b) > 1 else ()
        raise MismatchError(
            f"matmul of {shape_text(a)} and {shape_text(b)}: the inner sizes differ", hint="make the inner sizes equal", sizes=inner
        )
    return (*broadcast([a[:-2], b[:-2]]), a[-2], b[-1])


def _view(op: Op, operands: Sequence[Operand], attrs: Attrs) -> Shape:
    return _VIEWS[op](operands, attrs)


def _expand(operands: Sequence[Operand], attrs: Attrs) -> Shape:
    shape = cast(Shape, attrs["shape"])
    if not all(map(same, broadcast([operands[0].shape, shape]), shape)):
        text = f"cannot expand {shape_text(operands[0].shape)} to {shape_text(shape)}"
        raise ShapeError(text, hint="expand only dims of size 1")
    return shape


def _permute(operands: Sequence[Operand], attrs: Attrs) -> Shape:
    return tuple(operands[0].shape[d] for d in cast(tuple[int, ...], attrs["dims"]))


def _reshape(operands: Sequence[Operand], attrs: Attrs) -> Shape:
    shape = cast(Shape, attrs["shape"])
    if not same(product(shape), product(operands[0].shape)):
        raise MismatchError(
            f"cannot view {shape_text(operands[0].shape)} as {shape_text(shape)}",
            hint="the number of elements must stay the same",
            sizes=((product(operands[0].shape), product(shape)),),
        )
    return shape


def _slice(operands: Sequence[Operand], attrs: Attrs) -> Shape:
    shape = list(operands[0].shape)
    shape[cast(int, attrs["dim"])] = cast(Dim, attrs["length"])
    return tuple(shape)


def _concat(operands: Sequence[Operand], attrs: Attrs) -> Shape:
    dim = cast(int, attrs["dim"])
    first = list(operands[0].shape)
    for operand in operands[1:]:
        fits = len(operand.shape) == len(first) and all(
            same(a, b) for d, (a, b) in enumerate(zip(first, operand.shape, strict=True)) if d != dim
        )
        if not fits:
            pairs = zip(first, operand.shape, strict=False)
            raise MismatchError(
                f"cat of {', '.join(shape_text(o.shape) for o in operands)} along dim {dim}: the shapes do not fit",
                hint="make all sizes equal except along the concatenated dim",
                sizes=tuple((a, b) for d, (a, b) in enumerate(pairs) if d != dim) if len(operand.shape) == len(first) else (),
            )
    total: sympy.Expr = sum((sympy.sympify(o.shape[dim]) for o in operands), sympy.Integer(0))
    first[dim] = simplify_dim(total)
    return tuple(first)


def _gather(op: Op, operands: Sequence[Operand], attrs: Attrs) -> Shape:
    x, index = operands
    if len(x.shape) != len(index.shape):
        text = f"gather from {shape_text(x.shape)} by indices of shape {shape_text(index.shape)}: the numbers of dims differ"
        raise ShapeError(text, hint="give the index as many dims as the tensor has")
    if index.dtype not in (DType.INT32, DType.INT64):
        raise TraceError(f"gather: the index tensor is {index.dtype}", hint="convert it to torch.int64")
    return index.shape


def _library(op: Op, operands: Sequence[Operand], attrs: Attrs) -> Shape:
    if op in (Op.SCATTER_ADD, Op.RUN_SUM):
        return _scatter_add(operands[:2], attrs)
    if op is Op.LAST:
        return (cast(Dim, attrs["length"]),)
    if op is Op.BLOCKS:
        return cast(Shape, attrs["shape"])
    if op is Op.TOPK:
        return (*operands[0].shape[:-1], cast(Dim, attrs["length"]))
    number = cast(int, attrs["result"])
    if op is Op.ATTENTION:
        q, values = operands[0].shape, operands[2].shape
        shape = ((*q[:3], values[3]), q[:3], (2,))[number]
    else:
        shape = operands[3 + number].shape
    return tuple(shape[d] for d in cast(tuple[int, ...], attrs["order"]))


def _scatter_add(operands: Sequence[Operand], attrs: Attrs) -> Shape:
    rows, index = operands
    if len(rows.shape) != 2 or len(index.shape) != 1 or not same(rows.shape[0], index.shape[0]):
        text = f"index_add: rows of shape {shape_text(rows.shape)} do not fit indices of shape {shape_text(index.shape)}"
        sizes = ((rows.shape[0], index.shape[0]),) if rows.shape and index.shape else ()
        raise MismatchError(text, hint="pass a matrix, and one index per row", sizes=sizes)
    return cast(Dim, attrs["length"]), rows.shape[1]


def _put(op: Op, operands: Sequence[Operand], attrs: Attrs) -> Shape:
    target, value = operands
    if len(target.shape) != len(value.shape) or not all(map(same, target.shape, value.shape)) or target.dtype is not value.dtype:
        texts = (f"{o.dtype} of shape {shape_text(o.shape)}" for o in (value, target))
        raise ShapeError(" cannot be written to ".join(texts), hint="write a value of the target's shape and dtype")
    return cast(Shape, attrs["shape"])


_VIEWS: dict[Op, Callable[[Sequence[Operand], Attrs], Shape]] = {
    Op.EXPAND: _expand,
    Op.PERMUTE: _permute,
    Op.RESHAPE: _reshape,
    Op.SLICE: _slice,
    Op.CONCAT: _concat,
    Op.DETACH: lambda operands, attrs: operands[0].shape,
}

_SHAPES: dict[Family, Callable[[Op, Sequence[Operand], Attrs], Shape]] = {
    Family.LEAF: _leaf,
    Family.POINTWISE: _pointwise,
    Family.VIEW: _view,
    Family.INDEXING: _gather,
    Family.REDUCTION: _reduction,
    Family.SCAN: _pointwise,
    Family.ORDER: _pointwise,
    Family.NORMALIZATION: _normalization,
    Family.CONTRACTION: _matmul,
    Family.LIBRARY: _library,
    Family.WRITE: _put,
}
