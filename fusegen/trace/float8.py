"""8-bit floats are stored, moved, compared for equality and converted, as in torch; nothing is computed in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fusegen.dtypes import DType
from fusegen.errors import TraceError
from fusegen.ir.ops import Family, Op

if TYPE_CHECKING:
    from fusegen.trace.values import TracedTensor

_LAST_ROUNDED_DOWN = 464.0
"""The largest number that rounds to 448, the largest one of float8_e4m3fn."""

_CLAMPS = {Op.CLAMP_MIN, Op.CLAMP_MAX}

_MOVED = frozenset({Op.CAST, Op.WHERE, Op.ABS, Op.EQ, Op.NE, Op.COPY})
"""Pointwise operations that torch has of 8-bit floats as well."""

_MOVING = frozenset({Family.LEAF, Family.VIEW, Family.INDEXING, Family.WRITE})


def require_wide(op: Op, dtypes: Sequence[DType]) -> None:
    """Refuses arithmetic on 8-bit floats.

    Raises:
        TraceError: an operand is one, and the operation computes.
    """
    narrow = next((dtype for dtype in dtypes if dtype.is_float8), None)
    if narrow is None or op in _MOVED or op.family in _MOVING:
        return
    if op is Op.MATMUL:
        raise TraceError(f"a product of {narrow}", mend="convert both first, or call torch._scaled_mm outside")
    raise no_arithmetic(op.row.name, narrow)


def no_arithmetic(name: str, dtype: DType) -> TraceError:
    """The error of a function that computes, given 8-bit floats."""
    return TraceError(f"{name} of {dtype}, which is only stored, moved and converted", mend="convert first: x.float()")


def without_overflow(value: TracedTensor) -> TracedTensor:
    """A value with NaN in place of what rounds to more than float8_e4m3fn holds; the value itself where it is clamped."""
    if _is_clamped(value):
        return value
    tracer = value._tracer
    if value._node.dtype in (DType.FLOAT64, DType.FLOAT8_E5M2) or not value._node.dtype.is_float:
        value = tracer.add(Op.CAST, value, dtype=DType.FLOAT32)  # in which torch rounds first
    is_above = tracer.add(Op.GT, tracer.add(Op.ABS, value), tracer.lift(_LAST_ROUNDED_DOWN))
    return tracer.add(Op.WHERE, is_above, tracer.lift(float("nan")), value)


def _is_clamped(value: TracedTensor) -> bool:
    """True if numbers bound a value from both sides, so that float8_e4m3fn holds it."""
    outer, nodes = value._node, value._tracer.builder.nodes
    inner = nodes[outer.args[0]] if outer.op in _CLAMPS else outer
    bounds = [nodes[node.args[1]] for node in (outer, inner) if node.op in _CLAMPS]
    is_known = all(b.op is Op.CONSTANT and abs(b.number) <= _LAST_ROUNDED_DOWN for b in bounds)
    return {outer.op, inner.op} == _CLAMPS and is_known
