"""Functions of windows of a tensor: unfolding, pooling, enlarging. A window is as many slices as it has elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from fusegen.errors import ShapeError, TraceError, UnsupportedError
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import literal
from fusegen.trace.functions import pointwise
from fusegen.trace.functions.arrangements import pad, repeat_interleave
from fusegen.trace.functions.common import binary, floats, normalize_dim, unsupported_argument
from fusegen.trace.functions.views import own, reshaped, sliced, stack, within
from fusegen.trace.registry import implements
from fusegen.trace.values import TracedTensor

_MOST_SLICES = 64


@implements("Tensor.unfold")
def unfold(input: TracedTensor, dimension: int, size: int, step: int) -> TracedTensor:
    """The windows along a dim, whose elements are a new last dim."""
    if input._memory.declared:
        what = "unfold of a parameter that the kernel writes to, of whose elements it shows some several times, cannot be traced"
        raise UnsupportedError(what, mend="unfold a copy: x.clone().unfold(...)")
    if not input.ndim:
        windows: TracedTensor = unfold(reshaped(input, (1,)), 0, size, step)[0]
        return windows
    place = normalize_dim(dimension, input.ndim)
    return within(stack(_slices(input, (place,), (int(size),), (int(step),), (1,)), -1), input)


@implements("unfold_copy")
def unfold_copy(input: TracedTensor, dimension: int, size: int, step: int) -> TracedTensor:
    """The windows along a dim in memory of their own."""
    return unfold(own(input), dimension, size, step)


def _slices(
    x: TracedTensor, dims: Sequence[int], sizes: Sequence[int], steps: Sequence[int], apart: Sequence[int]
) -> list[TracedTensor]:
    """For each element of a window, that of all windows.

    Args:
        dims: along which windows move.
        sizes: their elements, a dim each.
        steps: from one window to the next.
        apart: from an element to the next one.
    """
    if math.prod(sizes) > _MOST_SLICES or min(*sizes, *steps, *apart) < 1:
        text = f"windows of {' x '.join(map(str, sizes))} elements, {' x '.join(map(str, steps))} apart"
        raise TraceError(text, mend=f"give positive numbers, and windows of up to {_MOST_SLICES} elements")
    counts = []
    for d, size, step, gap in zip(dims, sizes, steps, apart, strict=True):
        extent = literal(x._node.shape[d])
        if extent is None:
            x._tracer.require_literal(x._node.shape[d])
            raise UnsupportedError(f"windows along a dim of the run-time size {x.shape[d]}", mend="lower with example tensors")
        reach = (size - 1) * gap + 1
        if reach > extent:
            raise ShapeError(f"windows of {reach} elements along a dim of {extent}", mend="make them smaller, or pad")
        counts.append((extent - reach) // step + 1)
    found = []
    for corner in itertools.product(*(range(0, size * gap, gap) for size, gap in zip(sizes, apart, strict=True))):
        part = x
        for d, first, count, step in zip(dims, corner, counts, steps, strict=True):
            part = sliced(part, d, first, count, step)
        found.append(part)
    return found


def _each(name: str, value: Any, rank: int) -> tuple[int, ...]:
    """A number for each dim, of one number or of several.

    Raises:
        ShapeError: there are as many as neither.
    """
    given = tuple(map(int, value)) if isinstance(value, (tuple, list)) else (int(value),)
    if len(given) not in (1, rank):
        raise ShapeError(f"{name}: {len(given)} numbers for {rank} dims", mend="give one number, or one for each dim")
    return given if len(given) == rank else given * rank


def _steps(name: str, stride: Any, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """From one window to the next: where nothing is said, a window's size."""
    return sizes if stride is None or (isinstance(stride, (tuple, list)) and not stride) else _each(name, stride, len(sizes))


def _register_pools(rank: int) -> None:
    dims = tuple(range(-rank, 0))

    @implements(f"avg_pool{rank}d")
    def average(
        input: TracedTensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> TracedTensor:
        name = f"avg_pool{rank}d"
        unsupported_argument(name, ceil_mode=ceil_mode)
        sizes, border = _each(name, kernel_size, rank), _each(name, padding, rank)
        steps = _steps(name, stride, sizes)
        if divisor_override is not None and not divisor_override:
            raise TraceError(f"{name}: a divisor of 0", mend="leave divisor_override out, or give another")
        x = _with_border(name, floats(name, input), sizes, border, 0.0)
        total = _joined(pointwise.add, _slices(x, _places(x, dims), sizes, steps, (1,) * rank))
        if count_include_pad or not any(border) or divisor_override:
            return pointwise.mul(total, 1.0 / (divisor_override or math.prod(sizes)))
        ones = _with_border(name, input.new_ones(input.shape[-rank:]), sizes, border, 0.0)
        return pointwise.div(total, _joined(pointwise.add, _slices(ones, _places(ones, dims), sizes, steps, (1,) * rank)))

    @implements(f"max_pool{rank}d")
    def greatest(
        input: TracedTensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> TracedTensor:
        name = f"max_pool{rank}d"
        unsupported_argument(name, ceil_mode=ceil_mode, return_indices=return_indices)
        sizes = _each(name, kernel_size, rank)
        steps = _steps(name, stride, sizes)
        x = _with_border(name, floats(name, input), sizes, _each(name, padding, rank), float("-inf"))
        return _joined(_greater, _slices(x, _places(x, dims), sizes, steps, _each(name, dilation, rank)))

    average.__doc__ = f"""The mean of each window of {rank} dims; what is padded are zeros, which count unless told otherwise."""
    greatest.__doc__ = f"""The greatest value of each window of {rank} dims; NaN where there is one."""


for _rank in (1, 2, 3):
    _register_pools(_rank)


def _places(x: TracedTensor, dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(normalize_dim(d, x.ndim) for d in dims)


def _with_border(name: str, x: TracedTensor, sizes: Sequence[int], border: Sequence[int], value: float) -> TracedTensor:
    if any(2 * width > size for width, size in zip(border, sizes, strict=True)):
        raise ShapeError(f"{name}: a border of {tuple(border)} for windows of {tuple(sizes)}", mend="give half a window at most")
    widths = [width for each in reversed(border) for width in (each, each)]
    return pad(x, widths, "constant", value) if any(border) else x


def _greater(first: TracedTensor, then: TracedTensor) -> TracedTensor:
    """The first of equal ones, which alone has the gradient; NaN where there is one."""
    return pointwise.where(binary(Op.LOGICAL_OR, binary(Op.GT, then, first), pointwise.isnan(then)), then, first)


def _joined(join: Callable[[TracedTensor, TracedTensor], TracedTensor], parts: Sequence[TracedTensor]) -> TracedTensor:
    """The elements of windows, two by two."""
    values = list(parts)
    while len(values) > 1:
        pairs = [join(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(values) // 2 * 2 :]
    return values[0] if len(parts) > 1 else own(values[0])


@implements("interpolate")
def interpolate(
    input: TracedTensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> TracedTensor:
    """Each element as often as the whole factor of its dim says: mode ``nearest``, and no other."""
    unsupported_argument("interpolate", align_corners=align_corners, antialias=antialias)
    if mode not in ("nearest", "nearest-exact"):
        raise TraceError(f"interpolate: mode={mode!r} is not supported", mend="use mode='nearest'")
    rank = input.ndim - 2
    given = scale_factor if size is None else size
    numbers = list(given) if isinstance(given, (tuple, list)) else [given] * rank
    if len(numbers) != rank:
        raise ShapeError(f"interpolate: {len(numbers)} numbers for {rank} dims", mend="give one for each dim behind the channels")
    if size is None:
        factors = [_whole(factor) for factor in numbers]
    else:
        factors = [_quotient(int(extent), int(input.shape[2 + d])) for d, extent in enumerate(numbers)]
    result = input
    for d, factor in enumerate(factors):
        result = repeat_interleave(result, factor, 2 + d)
    return own(result)


def _quotient(extent: int, size: int) -> int:
    if size < 1 or extent % size:
        raise TraceError(f"interpolate from {size} to {extent} elements is not supported", mend="enlarge by a whole factor")
    return extent // size


def _whole(factor: Any) -> int:
    if not isinstance(factor, (int, float)) or factor < 1 or factor != int(factor):
        raise TraceError(f"interpolate: scale_factor={factor!r} is not supported", mend="enlarge by a whole factor")
    return int(factor)
