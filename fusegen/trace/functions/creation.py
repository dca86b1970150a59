"""New tensors: ranges, constants, `torch.tensor`, triangles, one-hot, and complex numbers from real parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fusegen.dtypes import DType, from_torch
from fusegen.errors import TraceError
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim, same
from fusegen.trace.complex import ComplexTensor
from fusegen.trace.functions import pointwise
from fusegen.trace.functions.common import cast, check_device, unsupported_argument
from fusegen.trace.functions.views import as_copy, cat, reshaped, unsqueeze
from fusegen.trace.modes import flat
from fusegen.trace.registry import creates, implements
from fusegen.trace.scalars import SymbolicSize, TracedScalar, dim_of
from fusegen.trace.tracer import Tracer
from fusegen.trace.values import TracedTensor

_MOST_NUMBERS = 64  # of a list: each becomes a constant


def iota(tracer: Tracer, size: Dim) -> TracedTensor:
    """Adds int64 numbers 0, 1, ..., size - 1."""
    return tracer.add(Op.IOTA, shape=(size,), dtype=DType.INT64)


@creates("arange")
def torch_arange(tracer: Tracer, *bounds: Any, dtype: torch.dtype | None = None, **settings: Any) -> TracedTensor:
    """torch.arange; int bounds may be run-time sizes."""
    bounds += tuple(settings.pop(name) for name in ("start", "end", "step") if name in settings)
    check_settings(tracer, settings)
    if not 1 <= len(bounds) <= 3:
        raise TraceError(f"arange takes 1 to 3 numbers, not {len(bounds)}", hint="write arange(start, end, step)")
    start, end, step = {1: (0, *bounds, 1), 2: (*bounds, 1), 3: bounds}[len(bounds)]
    if all(isinstance(b, (int, np.integer)) for b in (start, end, step)):
        return _integers(tracer, start, end, step, dtype)
    if not all(isinstance(b, (int, float, np.number)) for b in (start, end, step)):
        raise TraceError(
            "arange with a run-time float bound or step is not supported", hint="compute start + step * torch.arange(n)"
        )
    if dtype is not None and not dtype.is_floating_point:
        raise TraceError(f"arange of floats in {dtype} is not supported", hint="give ints, or convert: torch.arange(...).to(dtype)")
    _require_step(start, end, step)
    indices = cast(iota(tracer, math.ceil((end - start) / step)), torch.float64)  # torch computes in float64 too
    return cast(pointwise.add(pointwise.mul(indices, float(step)), float(start)), dtype or torch.get_default_dtype())


def _integers(tracer: Tracer, start: Any, end: Any, step: Any, dtype: torch.dtype | None) -> TracedTensor:
    _require_step(start, end, step)
    count = max(0, -(-(end - start) // step)) if step > 0 else max(0, -(-(start - end) // -step))
    numbers = iota(tracer, dim_of(count))
    numbers = numbers if step == 1 else tracer.add(Op.MUL, numbers, tracer.lift(step))
    return cast(numbers if start == 0 else pointwise.add(numbers, start), dtype)


def _require_step(start: Any, end: Any, step: Any) -> None:
    if step == 0 or (end < start if step > 0 else start < end):
        raise TraceError(
            f"arange from {start} never reaches {end} with the step {step}", hint="give a step that leads from start to end"
        )


def scalar_tensor(tracer: Tracer, value: Any, dtype: torch.dtype) -> TracedTensor:
    """Converts a number or run-time scalar to a zero-dimensional tensor."""
    if isinstance(value, (TracedTensor, TracedScalar, SymbolicSize)):
        return cast(tracer.lift(value), dtype)
    kind = from_torch(dtype)
    return tracer.constant(bool(value) if kind is DType.BOOL else float(value) if kind.is_float else int(value), kind)


def _filled(tracer: Tracer, shape: Sequence[Any], value: Any, dtype: torch.dtype) -> TracedTensor:
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else tuple(shape)
    return tracer.add(Op.EXPAND, scalar_tensor(tracer, value, dtype), shape=tuple(dim_of(s) for s in sizes))


@creates("zeros")
def zeros(tracer: Tracer, *sizes: Any, dtype: torch.dtype | None = None, **settings: Any) -> TracedTensor:
    return _filled(tracer, size_arguments(tracer, sizes, settings), 0.0, dtype or torch.get_default_dtype())


@creates("ones")
def ones(tracer: Tracer, *sizes: Any, dtype: torch.dtype | None = None, **settings: Any) -> TracedTensor:
    return _filled(tracer, size_arguments(tracer, sizes, settings), 1.0, dtype or torch.get_default_dtype())


def size_arguments(tracer: Tracer, sizes: Sequence[Any], settings: dict[str, Any]) -> Sequence[Any]:
    """Returns the sizes, which torch also accepts as `size=`, and checks the other settings."""
    result: Sequence[Any] = settings.pop("size", sizes)
    check_settings(tracer, settings)
    return result


def check_settings(tracer: Tracer, settings: dict[str, Any]) -> None:
    """Requires the kernel's device and a strided layout. The memory format is ignored."""
    check_device(tracer, settings.pop("device", None))
    settings.pop("memory_format", None)
    if settings.get("layout") is torch.strided:
        del settings["layout"]
    unsupported_argument("a new tensor", **settings)


@creates("full")
def full(
    tracer: Tracer, size: Sequence[Any], fill_value: Any, *, dtype: torch.dtype | None = None, **settings: Any
) -> TracedTensor:
    check_settings(tracer, settings)
    default: torch.dtype | None = _default_dtype(fill_value)
    if isinstance(fill_value, TracedTensor):
        default = None if fill_value._node.dtype.is_float else fill_value.dtype
    return _filled(tracer, (size,), fill_value, dtype or default or torch.get_default_dtype())


def _new(input: TracedTensor, size: Sequence[Any], value: Any, dtype: torch.dtype | None, settings: dict[str, Any]) -> TracedTensor:
    size = size_arguments(input._tracer, size, settings)
    return _filled(input._tracer, size, value, dtype or input.dtype)


@implements("new_zeros")
def new_zeros(input: TracedTensor, *size: Any, dtype: torch.dtype | None = None, **settings: Any) -> TracedTensor:
    return _new(input, size, 0, dtype, settings)


@implements("new_ones")
def new_ones(input: TracedTensor, *size: Any, dtype: torch.dtype | None = None, **settings: Any) -> TracedTensor:
    return _new(input, size, 1, dtype, settings)


@implements("new_full")
def new_full(
    input: TracedTensor, size: Sequence[Any], fill_value: Any, *, dtype: torch.dtype | None = None, **settings: Any
) -> TracedTensor:
    return _new(input, (size,), fill_value, dtype, settings)


@implements("full_like")
def full_like(
    input: TracedTensor,
    fill_value: float,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool = False,
    requires_grad: bool = False,
    memory_format: Any = None,
) -> TracedTensor:
    check_device(input._tracer, device)
    unsupported_layout = None if layout is torch.strided else layout
    unsupported_argument("full_like", requires_grad=requires_grad, pin_memory=pin_memory, layout=unsupported_layout)
    filled = scalar_tensor(input._tracer, fill_value, dtype or input.dtype)
    return input._tracer.add(Op.EXPAND, filled, shape=input._node.shape)


@implements("zeros_like")
def zeros_like(input: TracedTensor, **settings: Any) -> TracedTensor:
    return full_like(input, 0, **settings)


@implements("ones_like")
def ones_like(input: TracedTensor, **settings: Any) -> TracedTensor:
    return full_like(input, 1, **settings)


# Uninitialized tensors, which must be written before they are read.


def _unfilled(value: TracedTensor) -> TracedTensor:
    result = as_copy(value)
    result._memory.unfilled = True
    return result


@creates("empty")
def empty(tracer: Tracer, *sizes: Any, dtype: torch.dtype | None = None, **settings: Any) -> TracedTensor:
    return _unfilled(zeros(tracer, *sizes, dtype=dtype, **settings))


@implements("empty_like")
def empty_like(input: TracedTensor, **settings: Any) -> TracedTensor:
    return _unfilled(zeros_like(input, **settings))


@implements("new_empty")
def new_empty(input: TracedTensor, *size: Any, dtype: torch.dtype | None = None, **settings: Any) -> TracedTensor:
    return _unfilled(_new(input, size, 0, dtype, settings))


@creates("tensor", "scalar_tensor", "as_tensor")
def tensor(tracer: Tracer, data: Any, dtype: torch.dtype | None = None, device: Any = None, **settings: Any) -> TracedTensor:
    """Converts a number, a run-time scalar, a short nested list or a tensor."""
    check_settings(tracer, {"device": device} | settings)
    if isinstance(data, torch.Tensor):
        data = tracer.lift(data)
    if isinstance(data, TracedTensor):
        is_default = data._node.weak and data._node.dtype.is_float
        return cast(data, dtype or (torch.get_default_dtype() if is_default else data.dtype))
    if isinstance(data, (list, tuple)):
        return _listed(tracer, data, dtype)
    if not isinstance(data, (bool, int, float, np.generic)):
        message = f"torch.tensor of a {type(data).__name__} cannot be traced"
        raise TraceError(message, hint="make the tensor outside and pass it; use torch.stack for traced values")
    if isinstance(data, np.generic):  # keeps its dtype
        return _filled(tracer, ((),), data, dtype or torch.tensor(_specialized(data)).dtype)
    return _filled(tracer, ((),), data, dtype or _default_dtype(data))


def _listed(tracer: Tracer, data: Sequence[Any], dtype: torch.dtype | None) -> TracedTensor:
    """Concatenates the numbers of nested lists, which may be run-time scalars."""
    try:
        samples = torch.tensor(_samples(tracer, data), dtype=dtype, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        message = f"torch.tensor of this list cannot be traced: {error}"
        raise TraceError(message, hint="give numbers, or use torch.stack for traced tensors") from None
    if samples.numel() > _MOST_NUMBERS:
        message = f"torch.tensor of {samples.numel()} numbers cannot be traced: the limit is {_MOST_NUMBERS}"
        raise TraceError(message, hint="make the tensor outside and pass it")
    if not samples.numel():
        return _filled(tracer, tuple(samples.shape), 0, samples.dtype)
    elements = [tracer.add(Op.EXPAND, scalar_tensor(tracer, n, samples.dtype), shape=(1,)) for n in flat(data)]
    return reshaped(cat(elements, 0) if len(elements) > 1 else elements[0], tuple(samples.shape))


def _samples(tracer: Tracer, data: Any) -> Any:
    """Replaces run-time scalars by samples of their types, from which torch infers the shape and dtype."""
    if isinstance(data, (list, tuple)):
        return [_samples(tracer, part) for part in data]
    if isinstance(data, torch.Tensor):
        raise TraceError("torch.tensor of a list of tensors cannot be traced", hint="use torch.stack")
    if type(data) is TracedScalar:
        return 1.0 if tracer.lift(data)._node.dtype.is_float else 1
    return 1 if type(data) is SymbolicSize else data


def _specialized(number: Any) -> Any:
    """Returns a number; a run-time scalar is specialized to its value."""
    return number.number() if type(number) is TracedScalar else number


def _default_dtype(number: Any) -> torch.dtype:
    """Returns torch's dtype for a tensor of a number."""
    if isinstance(number, np.generic):
        return torch.full((), _specialized(number)).dtype
    if isinstance(number, bool):
        return torch.bool
    return torch.int64 if isinstance(number, int) else torch.get_default_dtype()


@creates("eye")
def eye(tracer: Tracer, n: Any, m: Any = None, *, dtype: torch.dtype | None = None, **settings: Any) -> TracedTensor:
    check_settings(tracer, settings)
    rows, columns = (iota(tracer, dim_of(size)) for size in (n, n if m is None else m))
    return cast(tracer.add(Op.EQ, unsqueeze(rows, 1), columns), dtype or torch.get_default_dtype())


@creates("linspace")
def linspace(
    tracer: Tracer, start: Any, end: Any, steps: Any, *, dtype: torch.dtype | None = None, **settings: Any
) -> TracedTensor:
    """torch.linspace. The second half counts back from the end, as in torch."""
    check_settings(tracer, settings)
    kind = dtype or torch.get_default_dtype()
    if not all(isinstance(x, (int, float)) for x in (start, end)) or not isinstance(steps, int) or not kind.is_floating_point:
        raise TraceError(
            "linspace needs numbers as bounds, an int as steps and a float dtype", hint="compute it from torch.arange(n)"
        )
    steps = int(steps)  # specializes a run-time size
    index = cast(iota(tracer, steps), torch.float64)
    step = (end - start) / max(steps - 1, 1)
    rising = pointwise.add(pointwise.mul(index, step), start)
    falling = pointwise.rsub(pointwise.mul(pointwise.rsub(index, steps - 1), step), end)
    return cast(pointwise.where(tracer.add(Op.LT, index, tracer.lift(max(steps / 2, 1))), rising, falling), kind)


@implements("one_hot")
def one_hot(tensor: TracedTensor, num_classes: int = -1) -> TracedTensor:
    """One-hot vectors in int64."""
    if num_classes == -1:
        raise TraceError("one_hot without num_classes depends on the values", hint="give num_classes")
    equal = tensor._tracer.add(Op.EQ, unsqueeze(tensor, -1), iota(tensor._tracer, dim_of(num_classes)))
    return cast(equal, torch.int64)


@implements("tril")
def tril(input: TracedTensor, diagonal: int = 0) -> TracedTensor:
    return cast(pointwise.where(_compared(Op.LE, input, diagonal), input, 0), input.dtype)


@implements("triu")
def triu(input: TracedTensor, diagonal: int = 0) -> TracedTensor:
    return cast(pointwise.where(_compared(Op.GE, input, diagonal), input, 0), input.dtype)


def _compared(op: Op, x: TracedTensor, diagonal: int) -> TracedTensor:
    """Compares column indices with row indices plus a diagonal."""
    rows, columns = (iota(x._tracer, size) for size in x._node.shape[-2:])
    return x._tracer.add(op, columns, pointwise.add(unsqueeze(rows, 1), diagonal))


# Complex tensors from real ones.


@implements("view_as_complex")
def view_as_complex(input: TracedTensor) -> ComplexTensor:
    if not input.ndim or not same(input._node.shape[-1], 2):
        raise TraceError("view_as_complex needs a last dim of size 2", hint="reshape it: x.reshape(..., -1, 2)")
    return ComplexTensor(input[..., 0], input[..., 1])


@implements("complex")
def torch_complex(real: Any, imag: Any) -> ComplexTensor:
    _require_floats("complex", real, imag)
    return ComplexTensor(*torch.broadcast_tensors(real, imag))  # type: ignore[no-untyped-call]


@implements("polar")
def polar(abs: Any, angle: Any) -> ComplexTensor:
    _require_floats("polar", abs, angle)
    return ComplexTensor(abs * torch.cos(angle), abs * torch.sin(angle))


def _require_floats(name: str, first: Any, second: Any) -> None:
    """Requires float32 or float64, as torch does."""
    if first.dtype is not second.dtype or first.dtype not in (torch.float32, torch.float64):
        raise TraceError(f"{name}: the parts are {first.dtype} and {second.dtype}", hint="make both float32, or both float64")


@implements("real")
def real(input: TracedTensor) -> TracedTensor:
    return input
