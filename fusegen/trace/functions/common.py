"""Shared helpers of the handlers: tracer look-up, dim normalization, casts, binary operations, argument checks."""

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
    """Returns the tracer of the first traced value, searching lists and tuples too."""
    tracer = tracer_among(values)
    if tracer is None:
        raise TraceError("no argument is a traced tensor", hint="pass a parameter of the kernel, or a tensor computed from one")
    return tracer


def dtype_of(value: TracedTensor) -> DType:
    return value._node.dtype


def normalize_dim(dim: int, rank: int) -> int:
    if isinstance(dim, bool) or not hasattr(dim, "__index__"):
        raise TraceError(f"dim {dim!r} is not an int", hint="give an int")
    if not -max(rank, 1) <= dim < max(rank, 1):
        raise DimError(f"dim {dim} does not exist in a tensor of {rank} dims", hint="count dims from 0, or from -1 at the end")
    return dim % rank if rank else 0


def normalize_dims(dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Returns non-negative dims, sorted; all dims for None or an empty list, as torch's reductions do."""
    if dims is None or (isinstance(dims, (tuple, list)) and not dims):
        return tuple(range(rank))
    normalized = each_dim(dims, rank)
    return tuple(sorted(normalized)) if rank else ()  # torch accepts dims 0 and -1 of a scalar


def each_dim(dims: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """Returns non-negative dims in the given order."""
    listed = tuple(dims) if isinstance(dims, (tuple, list)) else (dims,)
    normalized = tuple(normalize_dim(d, rank) for d in listed)
    if len(set(normalized)) != len(normalized):
        raise ShapeError(f"dims {listed} name a dim twice", hint="name each dim once")
    return normalized


def cast(value: TracedTensor, dtype: torch.dtype | None) -> TracedTensor:
    """Casts a value; returns it unchanged if it has that dtype or dtype is None."""
    if dtype is None or (from_torch(dtype) is dtype_of(value) and not value._node.weak):
        return value
    return value._tracer.add(Op.CAST, value, dtype=from_torch(dtype))


def binary(op: Op, a: Any, b: Any) -> TracedTensor:
    """Adds a binary operation. One of the operands may be a Python number."""
    tracer = tracer_of(a, b)
    return tracer.add(op, tracer.lift(a), tracer.lift(b))


def require_float(name: str, x: TracedTensor) -> TracedTensor:
    """Requires a float dtype of 16 bits or more."""
    if not dtype_of(x).is_float:
        raise TraceError(f"{name} of {dtype_of(x)} is not supported", hint="convert to a float dtype first")
    if dtype_of(x).is_float8:
        raise no_arithmetic(name, dtype_of(x))
    return x


def require_number(name: str, x: TracedTensor) -> TracedTensor:
    """Requires a dtype other than bool."""
    if dtype_of(x) is DType.BOOL:
        raise TraceError(f"{name} of bool is not supported", hint="convert to a numeric dtype first")
    return x


def float_setting(name: str, value: object) -> float:
    """Returns a float argument of an operation: a constant, or a run-time scalar converted to float."""
    if type(value) is TracedScalar:
        number: Any = value if value._node.dtype.is_float else computed(Op.MUL, value, value._tracer.scalar(1.0))
        return cast_to(float, number)
    if isinstance(value, TracedTensor):
        value.require_static()
    if isinstance(value, (int, float)):
        return float(value)
    raise TraceError(f"{name} is a {type(value).__name__}, not a number", hint="pass a number")


def sequence(args: Sequence[Any], named: Mapping[str, Any] | None = None) -> tuple[Any, ...]:
    """Returns sizes or dims as a tuple, whether passed one by one, as one sequence, or by keyword."""
    if named:
        unknown = sorted(set(named) - {"size", "sizes", "shape", "dims", "repeats"})
        if unknown or len(named) > 1 or args:
            raise TraceError(f"unexpected argument {(unknown or sorted(named))[0]}", hint="give the numbers one by one")
        args = tuple(named.values())
    return tuple(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else tuple(args)


def in_place(input: TracedTensor, result: TracedTensor, inplace: Any) -> TracedTensor:
    """Returns a function's result. With inplace, the traced input is replaced by it; the caller's tensor is not written."""
    if inplace and result is not input:
        if result._node.dtype is not input._node.dtype or any(value is input for _, value in input._tracer.captured.values()):
            raise TraceError(
                "inplace=True cannot write to this input: it is captured, or the result has another dtype", hint="leave inplace out"
            )
        overwrite(input, result)
        return input
    return result


def check_device(tracer: Tracer, device: Any) -> None:
    """Rejects a device other than the kernel's."""
    if device is None:
        return
    requested = torch.device(device)
    if requested.type != tracer.device.type or (requested.index or 0) != (tracer.device.index or 0):
        raise TraceError(
            f"a kernel on {tracer.device} cannot create a tensor on {requested}",
            hint="leave device out, or use that of an input: x.device",
        )


def unsupported_argument(function: str, **arguments: Any) -> None:
    """Rejects unsupported arguments that are neither None nor False."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise TraceError(f"{function}: the argument {name}={value!r} is not supported", hint=f"leave {name} out")
