"""8-bit floats are stored, moved, compared for equality and converted, as in torch; nothing is computed in them."""

from __future__ import annotations

from collections.abc import Sequence

from fusegen.dtypes import DType
from fusegen.errors import TraceError
from fusegen.ir.ops import Family, Op

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
