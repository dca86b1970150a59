"""Operations on bits: logic of bools, and integers bit by bit."""

from __future__ import annotations

from typing import Any

from fusegen.dtypes import DType
from fusegen.errors import TraceError
from fusegen.ir.ops import Op
from fusegen.lang.functions.common import dtype_of, tracer_of
from fusegen.lang.registry import implements
from fusegen.lang.values import TracedTensor


@implements("__and__", "bitwise_and")
def bitwise_and(input: Any, other: Any) -> TracedTensor:
    """Conjunction of bools, or of the bits of integers."""
    return _of_bits(Op.LOGICAL_AND, Op.BITWISE_AND, input, other)


@implements("__or__", "bitwise_or")
def bitwise_or(input: Any, other: Any) -> TracedTensor:
    """Disjunction of bools, or of the bits of integers."""
    return _of_bits(Op.LOGICAL_OR, Op.BITWISE_OR, input, other)


@implements("__xor__", "bitwise_xor")
def bitwise_xor(input: Any, other: Any) -> TracedTensor:
    """Exclusive disjunction of bools, or of the bits of integers."""
    return _of_bits(Op.LOGICAL_XOR, Op.BITWISE_XOR, input, other)


@implements("__invert__", "bitwise_not")
def bitwise_not(input: TracedTensor) -> TracedTensor:
    """Negation of bools, or of every bit of integers."""
    if dtype_of(input) is DType.BOOL:
        return input._tracer.add(Op.LOGICAL_NOT, input)
    return _of_bits(Op.LOGICAL_XOR, Op.BITWISE_XOR, input, -1)


@implements("__lshift__", "bitwise_left_shift")
def bitwise_left_shift(input: Any, other: Any) -> TracedTensor:
    """The bits of integers moved up; zeros follow."""
    return _of_integers(Op.LEFT_SHIFT, input, other)


@implements("__rshift__", "bitwise_right_shift")
def bitwise_right_shift(input: Any, other: Any) -> TracedTensor:
    """The bits of integers moved down; the sign follows."""
    return _of_integers(Op.RIGHT_SHIFT, input, other)


def _of_bits(logical: Op, integral: Op, input: Any, other: Any) -> TracedTensor:
    tracer = tracer_of(input, other)
    operands = [tracer.lift(input), tracer.lift(other)]
    if all(dtype_of(x) is DType.BOOL for x in operands):
        return tracer.add(logical, *operands)
    return _of_integers(integral, *operands)


def _of_integers(op: Op, input: Any, other: Any) -> TracedTensor:
    tracer = tracer_of(input, other)
    operands = [tracer.lift(input), tracer.lift(other)]
    dtypes = [dtype_of(x) for x in operands]
    if any(dtype.is_float for dtype in dtypes) or all(dtype is DType.BOOL for dtype in dtypes):
        kinds = " and ".join(map(repr, dtypes))
        raise TraceError(f"{op.row.name} of {kinds}: bits are those of integers", mend="convert to an integer dtype first")
    return tracer.add(op, *operands)
