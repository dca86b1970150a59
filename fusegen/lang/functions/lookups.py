"""Places in short tables: of numbers among sorted ones, and whether they are among some; elements by their flat numbers."""

from __future__ import annotations

from typing import Any

import torch

from fusegen.dtypes import DType
from fusegen.errors import ShapeError, TraceError, UnsupportedError
from fusegen.ir.infer import shape_text
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import literal, product, simplify_dim
from fusegen.lang.functions import reductions
from fusegen.lang.functions.common import binary, cast, dtype_of, numbers, tracer_of
from fusegen.lang.functions.indexing import gather, taken
from fusegen.lang.functions.views import require_shape, reshaped, unsqueeze
from fusegen.lang.registry import implements
from fusegen.lang.values import TracedTensor

_MOST = 1024  # entries of a table: each is compared with each number


@implements("searchsorted")
def searchsorted(
    sorted_sequence: Any,
    input: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> TracedTensor:
    """Counts the entries of a sorted table before each number: those below it, or, from the right, those not above it.

    Args:
        sorted_sequence: a vector, or a table for each row of `input`.
        input: numbers to look up, or one Python number.
        out_int32: counts are int32, and not int64.
        right, side: from the right: `right=True` or `side="right"`.
        sorter: int64 of the table's shape: the order in which the table's last dim is sorted.
    """
    if side not in (None, "left", "right") or (side == "left" and right):
        raise TraceError(f"searchsorted with side={side!r} and right={right}", mend="give one of them")
    tracer = tracer_of(sorted_sequence, input)
    table = numbers("searchsorted", tracer.lift(sorted_sequence))
    if sorter is not None:
        table = _in_order(table, tracer.lift(sorter))
    x = numbers("searchsorted", tracer.lift(input) if isinstance(input, torch.Tensor) else cast(tracer.lift(input), table.dtype))
    if dtype_of(table) is not dtype_of(x):
        raise TraceError(f"searchsorted of {dtype_of(x)} among {dtype_of(table)}", mend="convert one of them")
    if not table.ndim or (table.ndim > 1 and table.ndim != x.ndim):
        shapes = " and ".join(shape_text(t._node.shape) for t in (table, x))
        raise ShapeError(f"searchsorted of shapes {shapes}", mend="give a vector, or a table for each row")
    if table.ndim > 1:
        require_shape("searchsorted: the table", table, (*x._node.shape[:-1], table._node.shape[-1]))
        table = unsqueeze(table, -2)
    _require_short("searchsorted", table)
    is_behind = binary(Op.GT if right or side == "right" else Op.GE, table, unsqueeze(x, -1))
    count = reductions.sum(_negated(is_behind), -1)
    return cast(count, torch.int32) if out_int32 else count


def _in_order(table: TracedTensor, sorter: TracedTensor) -> TracedTensor:
    """A table along its last dim in the order that a sorter gives."""
    if dtype_of(sorter) is not DType.INT64:
        raise TraceError(f"searchsorted with a sorter of {dtype_of(sorter)}", mend="convert it to torch.int64")
    require_shape("searchsorted: the sorter", sorter, table._node.shape)
    return gather(table, -1, sorter)


@implements("bucketize")
def bucketize(input: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> TracedTensor:
    """The number of the bucket that each number falls into: how many boundaries come before it."""
    if tracer_of(input, boundaries).lift(boundaries).ndim != 1:
        raise ShapeError("bucketize by boundaries that are no vector", mend="give a vector")
    return searchsorted(boundaries, input, out_int32=out_int32, right=right)


@implements("isin")
def isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> TracedTensor:
    """True for each number that is among some others."""
    tracer = tracer_of(elements, test_elements)
    x, others = (numbers("isin", tracer.lift(t)) for t in (elements, test_elements))
    table = reshaped(others, (simplify_dim(product(others._node.shape)),))
    _require_short("isin", table)
    found = reductions.any_(binary(Op.EQ, unsqueeze(x, -1), table), -1)
    return _negated(found) if invert else found


def _negated(x: TracedTensor) -> TracedTensor:
    return x._tracer.add(Op.LOGICAL_NOT, x)


def _require_short(name: str, table: TracedTensor) -> None:
    size = table._node.shape[-1]
    table._tracer.require_literal(size)
    if (literal(size) or 0) > _MOST:
        what = f"{name} of a table of {size} entries, each of which would be compared with each number"
        raise UnsupportedError(what, mend=f"give {_MOST} entries at most, or call it outside of the kernel")


@implements("take")
def take(input: Any, index: Any) -> TracedTensor:
    """Elements by their numbers in row-major order; negative ones count from the end."""
    tracer = tracer_of(input, index)
    x, chosen = tracer.lift(input), tracer.lift(index)
    if dtype_of(chosen) is not DType.INT64:
        raise TraceError(f"take by indices of {dtype_of(chosen)}", mend="convert them to torch.int64")
    return taken(reshaped(x, (simplify_dim(product(x._node.shape)),)), 0, chosen, wraps=True)
