"""Helpers of all chapters: finding the tracer, normalising dims, casting, operations of two operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from typing import cast as cast_to

import torch

from fusegen.dtypes import DType, from_torch
from fusegen.errors import DimError, ShapeError, TraceError
from fusegen.ir.ops import Op
from fusegen.trace.memory import overwrite
from fusegen.trace.modes import no_arithmetic, tracer_among
from fusegen.trace.scalars import TracedScalar, computed
from fusegen.trace.tracer import Tracer
from fusegen.trace.values import TracedTensor


def tracer_of(*values: object) -> Tracer:
    """The tracer of the first traced value among some, and in lists and tuples among them."""
    tracer = tracer_among(values)
    if tracer is None:
        raise TraceError("no traced operand")
    return tracer


def dtype_of(value: TracedTensor) -> DType:
    """The dtype of a traced value."""
    return value._node.dtype


def normalize_dim(dim: int, rank: int) -> int:
    """A dim counted from the front."""
    if isinstance(dim, bool) or not hasattr(dim, "__index__"):
        raise TraceError(f"{dim!r} is no dim", hint="give an int")
    if not -max(rank, 1) <= dim < max(rank, 1):
        raise DimError(f"dim {dim} of a tensor of {rank} dims", hint="count dims from 0, or from -1 at the end")
    return dim % rank if rank else 0


def normalize_dims(dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Dims counted from the front, sorted; all of them for None or an empty list, as torch's reductions do."""
    if dims is None or (isinstance(dims, (tuple, list)) and not dims):
        return tuple(range(rank))
    found = each_dim(dims, rank)
    return tuple(sorted(found)) if rank else ()  # torch lets 0 and -1 name a dim of a scalar


def each_dim(dims: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """Dims counted from the front, in their order."""
    listed = tuple(dims) if isinstance(dims, (tuple, list)) else (dims,)
    found = tuple(normalize_dim(d, rank) for d in listed)
    if len(set(found)) != len(found):
        raise ShapeError(f"dims {listed} name a dim twice", hint="name each dim once")
    return found


def cast(value: TracedTensor, dtype: torch.dtype | None) -> TracedTensor:
    """The value in another dtype; itself when it has that already or none is asked for."""
    if dtype is None or (from_torch(dtype) is dtype_of(value) and not value._node.weak):
        return value
    return value._tracer.add(Op.CAST, value, dtype=from_torch(dtype))


def binary(op: Op, a: Any, b: Any) -> TracedTensor:
    """An operation of two operands, numbers perhaps, but not both."""
    tracer = tracer_of(a, b)
    return tracer.add(op, tracer.lift(a), tracer.lift(b))


def floats(name: str, x: TracedTensor) -> TracedTensor:
    """The value, if it is of a float dtype of 16 bits or more: torch does not have the function of others."""
    if not dtype_of(x).is_float:
        raise TraceError(f"{name} of {dtype_of(x)}", hint="convert to a float dtype first")
    if dtype_of(x).is_float8:
        raise no_arithmetic(name, dtype_of(x))
    return x


def numbers(name: str, x: TracedTensor) -> TracedTensor:
    """The value, unless it is of bools."""
    if dtype_of(x) is DType.BOOL:
        raise TraceError(f"{name} of bool", hint="convert to a number dtype first")
    return x


def setting(name: str, value: object) -> float:
    """A number that is no tensor: a float, or one of run time, which behaves as a float does."""
    if type(value) is TracedScalar:
        number: Any = value if value._node.dtype.is_float else computed(Op.MUL, value, value._tracer.scalar(1.0))
        return cast_to(float, number)
    if isinstance(value, TracedTensor):
        value.require_static()
    if isinstance(value, (int, float)):
        return float(value)
    raise TraceError(f"{name} is a {type(value).__name__}", hint="pass a number")


def sequence(given: Sequence[Any], named: Mapping[str, Any] | None = None) -> tuple[Any, ...]:
    """Sizes or dims given one by one, as one sequence, or as one sequence by its name."""
    if named:
        unknown = sorted(set(named) - {"size", "sizes", "shape", "dims", "repeats"})
        if unknown or len(named) > 1 or given:
            raise TraceError(f"unexpected argument {(unknown or sorted(named))[0]}", hint="give the numbers one by one")
        given = tuple(named.values())
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else tuple(given)


def written(input: TracedTensor, result: TracedTensor, inplace: Any) -> TracedTensor:
    """A function's result; in place also what its input means from then on. The caller's tensor stays as it is."""
    if inplace and result is not input:
        if result._node.dtype is not input._node.dtype or any(value is input for _, value in input._tracer.hidden.values()):
            raise TraceError("a function in place that cannot write to its input", hint="leave inplace out")
        overwrite(input, result)
        return input
    return result


def check_device(tracer: Tracer, device: Any) -> None:
    """Refuses a device that is not the kernel's."""
    if device is None:
        return
    wanted = torch.device(device)
    if wanted.type != tracer.device.type or (wanted.index or 0) != (tracer.device.index or 0):
        raise TraceError(
            f"a tensor on {wanted} in a kernel on {tracer.device}", hint="leave device out, or use that of an input: x.device"
        )


def unsupported_argument(function: str, **arguments: Any) -> None:
    """Refuses arguments that are given (not None, not False) but not supported."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise TraceError(f"{function}: the argument {name}={value!r} is not supported", hint=f"leave {name} out")
