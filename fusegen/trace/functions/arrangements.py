"""Repeats, rolls, padding, diagonals, windows (pools) and interpolation, all expressed as views."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import sympy
import torch

from fusegen.dtypes import DType
from fusegen.errors import ShapeError, TraceError, UnsupportedError
from fusegen.ir.infer import shape_text
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim, literal, same, simplify_dim
from fusegen.trace.functions import pointwise, reductions
from fusegen.trace.functions.common import (
    binary,
    cast,
    dtype_of,
    each_dim,
    normalize_dim,
    require_float,
    require_number,
    sequence,
    unsupported_argument,
)
from fusegen.trace.functions.creation import iota, scalar_tensor
from fusegen.trace.functions.pointwise import sub
from fusegen.trace.functions.views import (
    as_copy,
    as_view,
    cat,
    holds,
    movedim,
    narrow,
    permuted,
    reshape,
    reshaped,
    sliced,
    stack,
    transpose,
    unsqueeze,
)
from fusegen.trace.modes import autocasted
from fusegen.trace.registry import implements
from fusegen.trace.scalars import dim_of
from fusegen.trace.values import TracedTensor

_Border: TypeAlias = Callable[[TracedTensor, TracedTensor, int, Dim, int], TracedTensor]


@implements("repeat", "tile")
def repeat(input: TracedTensor, *repeats: Any, **named: Any) -> TracedTensor:
    """Repeats the whole tensor along each dim; extra counts add leading dims."""
    counts = [dim_of(c) for c in sequence(repeats, named)]
    if any((literal(c) or 0) < 0 for c in counts):
        raise ShapeError(f"repeat: a count of {shape_text(counts)} is negative", hint="give counts of 0 or more")
    counts = [1] * (input.ndim - len(counts)) + counts  # for tile; repeat requires a count for each dim
    sizes: list[Dim] = [1] * (len(counts) - input.ndim) + list(input._node.shape)
    split = reshaped(input, [extent for size in sizes for extent in (1, size)])
    expanded = input._tracer.add(Op.EXPAND, split, shape=tuple(p for c, s in zip(counts, sizes, strict=True) for p in (c, s)))
    return reshaped(expanded, [simplify_dim(c * s) for c, s in zip(counts, sizes, strict=True)])


@implements("repeat_interleave")
def repeat_interleave(input: TracedTensor, repeats: Any, dim: int | None = None, *, output_size: Any = None) -> TracedTensor:
    """Repeats each element by a scalar count."""
    if isinstance(repeats, TracedTensor) and repeats.ndim:
        raise TraceError("repeat_interleave by a tensor cannot be traced", hint="give the number of repetitions as an int")
    count = dim_of(repeats)
    x = reshaped(input, (simplify_dim(dim_of(input.numel())),)) if dim is None else input
    axis = normalize_dim(0 if dim is None else dim, x.ndim)
    shape = x._node.shape
    split = reshaped(x, (*shape[: axis + 1], 1, *shape[axis + 1 :]))
    expanded = x._tracer.add(Op.EXPAND, split, shape=(*shape[: axis + 1], count, *shape[axis + 1 :]))
    return reshaped(expanded, (*shape[:axis], simplify_dim(shape[axis] * count), *shape[axis + 1 :]))


@implements("roll")
def roll(input: TracedTensor, shifts: Any, dims: Any = None) -> TracedTensor:
    """Rolls elements along dims, wrapping around."""
    if dims is None or dims == ():
        flat = reshaped(input, (simplify_dim(dim_of(input.numel())),))
        return reshaped(roll(flat, shifts, 0), input._node.shape)
    offsets = shifts if isinstance(shifts, (tuple, list)) else (shifts,)
    axes = dims if isinstance(dims, (tuple, list)) else (dims,)
    if len(offsets) != len(axes):
        raise ShapeError(f"roll: {len(offsets)} shifts for {len(axes)} dims", hint="give one shift per dim")
    x = input
    for offset, axis in zip(offsets, axes, strict=True):
        dim = normalize_dim(axis, input.ndim)
        size = x.shape[dim]
        first = -offset % size if not isinstance(size, int) or size else 0  # index of the element that becomes the first
        if not isinstance(first, int) or first:
            x = cat([narrow(x, dim, first, size - first), narrow(x, dim, 0, first)], dim)
    return x


@implements("flip")
def flip(input: TracedTensor, *dims: Any, **named: Any) -> TracedTensor:
    result = input
    for axis in each_dim(sequence(dims, named), input.ndim):
        result = _flipped(result, axis) if input.ndim else result
    return as_copy(result)


def _flipped(x: TracedTensor, dim: int) -> TracedTensor:
    size = x._node.shape[dim]
    return x if same(size, 0) else sliced(x, dim, simplify_dim(size - 1), size, -1)


@implements("fliplr")
def fliplr(input: TracedTensor) -> TracedTensor:
    return flip(input, 1)


@implements("flipud")
def flipud(input: TracedTensor) -> TracedTensor:
    return flip(input, 0)


@implements("rot90")
def rot90(input: TracedTensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> TracedTensor:
    """Rotates a plane by k right angles, from the first dim towards the second."""
    first, second = each_dim(tuple(dims), input.ndim)
    turns = k % 4
    if turns == 2:
        return flip(input, first, second)
    flipped = _flipped(input, second) if turns == 1 else input
    transposed = transpose(flipped, first, second) if turns else flipped
    return as_copy(_flipped(transposed, second) if turns == 3 else transposed)


@implements("pixel_shuffle")
def pixel_shuffle(input: TracedTensor, upscale_factor: int) -> TracedTensor:
    """Rearranges groups of r^2 channels into r x r tiles (Shi et al., arXiv 1609.05158)."""
    *outer, _, height, width = input.shape
    r = int(upscale_factor)
    split = reshape(input, (*outer, -1, r, r, height, width))
    n = len(outer)
    tiles = permuted(split, (*range(n), n, n + 3, n + 1, n + 4, n + 2))
    return as_copy(reshape(tiles, (*outer, -1, height * r, width * r)))


@implements("pixel_unshuffle")
def pixel_unshuffle(input: TracedTensor, downscale_factor: int) -> TracedTensor:
    """Rearranges r x r tiles into channels: the inverse of pixel_shuffle."""
    *outer, channels, height, width = input.shape
    r = int(downscale_factor)
    split = reshape(input, (*outer, channels, height // r, r, width // r, r))
    n = len(outer)
    channel_tiles = permuted(split, (*range(n), n, n + 2, n + 4, n + 1, n + 3))
    return as_copy(reshape(channel_tiles, (*outer, channels * r * r, height // r, width // r)))


@implements("channel_shuffle")
def channel_shuffle(input: TracedTensor, groups: int) -> TracedTensor:
    """Interleaves the channels (dim 1) of the groups (Zhang et al., arXiv 1707.01083)."""
    split = reshape(input, (input.shape[0], groups, -1, *input.shape[2:]))
    return as_copy(reshape(transpose(split, 1, 2), input.shape))


@implements("diff")
def diff(input: TracedTensor, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> TracedTensor:
    """Differences of neighbours along a dim, n times; for bools, `!=`."""
    if n < 0:
        raise ShapeError(f"diff: n={n} is negative", hint="give 0 or more")
    if not n:
        return input
    tensors = [p for p in (prepend, input, append) if p is not None]
    x = cat(tensors, dim) if len(tensors) > 1 else input
    axis = normalize_dim(dim, x.ndim)
    for _ in range(n):
        count = simplify_dim(x._node.shape[axis] - 1)
        if not holds(x._tracer, sympy.sympify(count) > 0):
            return sliced(x, axis, 0, 0)
        left, right = sliced(x, axis, 0, count), sliced(x, axis, 1, count)
        x = x._tracer.add(Op.NE, right, left) if dtype_of(x) is DType.BOOL else sub(right, left)
    return x


@implements("pad")
def pad(input: TracedTensor, pad: Sequence[Any], mode: str = "constant", value: float | None = None) -> TracedTensor:
    """Pads or crops dims, the last dim first. Negative widths crop. Modes: constant, reflect, replicate, circular."""
    if mode not in ("constant", *_BORDERS):
        raise TraceError(f"pad: mode={mode!r} is not supported", hint=f"use constant, {', '.join(_BORDERS)}")
    if mode != "constant" and value is not None:
        raise TraceError(f"pad: mode={mode!r} takes no value", hint="leave value out, or use mode='constant'")
    if len(pad) % 2 or len(pad) > 2 * input.ndim:
        text = f"pad: {len(pad)} numbers for a tensor of {input.ndim} dims"
        raise ShapeError(text, hint="give two numbers per dim, the last dim first")
    border = partial(_constant, value=value or 0) if mode == "constant" else _BORDERS[mode]
    kernel = getattr(torch._C._nn, f"{_KERNELS.get(mode)}_pad{len(pad) // 2}d", None)
    (result,) = (input,) if kernel is None else autocasted(kernel, input)
    for number, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        result = _padded(result, input.ndim - 1 - number, (dim_of(before), dim_of(after)), border)
    return as_copy(result)


def _padded(x: TracedTensor, dim: int, widths: tuple[Dim, Dim], border: _Border) -> TracedTensor:
    """Pads or crops both ends of a dim."""
    grows = [holds(x._tracer, sympy.sympify(width) > 0) for width in widths]
    middle = _cut(x, dim, *(0 if is_padded else simplify_dim(-width) for is_padded, width in zip(grows, widths, strict=True)))
    before, after = ([border(x, middle, dim, widths[side], side)] if grows[side] else [] for side in (0, 1))
    return cat([*before, middle, *after], dim) if any(grows) else middle


def _cut(x: TracedTensor, dim: int, before: Dim, after: Dim) -> TracedTensor:
    """Removes elements at both ends of a dim."""
    size = x._node.shape[dim]
    remaining = simplify_dim(size - before - after)
    if not holds(x._tracer, remaining >= 0):
        raise ShapeError("pad: negative padding removes more elements than the dim has", hint="remove fewer elements")
    return x if same(remaining, size) else sliced(x, dim, before, remaining)


# Padding before (side 0) or after (side 1) a dim. If the other side is cropped, torch's reflect and replicate read the uncropped
# dim, and circular reads the cropped one.


def _constant(x: TracedTensor, _middle: TracedTensor, dim: int, width: Dim, _side: int, *, value: float) -> TracedTensor:
    shape = (*x._node.shape[:dim], width, *x._node.shape[dim + 1 :])
    return x._tracer.add(Op.EXPAND, scalar_tensor(x._tracer, value, x.dtype), shape=shape)


def _reflected(x: TracedTensor, _middle: TracedTensor, dim: int, width: Dim, side: int) -> TracedTensor:
    size = x._node.shape[dim]
    _require_room(x, width, simplify_dim(size - 1))
    return sliced(x, dim, simplify_dim(size - 2) if side else width, width, -1)


def _replicated(x: TracedTensor, _middle: TracedTensor, dim: int, width: Dim, side: int) -> TracedTensor:
    edge = sliced(x, dim, simplify_dim(x._node.shape[dim] - 1) if side else 0, 1)
    return x._tracer.add(Op.EXPAND, edge, shape=(*x._node.shape[:dim], width, *x._node.shape[dim + 1 :]))


def _wrapped(_x: TracedTensor, middle: TracedTensor, dim: int, width: Dim, side: int) -> TracedTensor:
    size = middle._node.shape[dim]
    _require_room(middle, width, size)
    return sliced(middle, dim, 0 if side else simplify_dim(size - width), width)


def _require_room(x: TracedTensor, width: Dim, available: Dim) -> None:
    if not holds(x._tracer, sympy.sympify(width) <= available):
        text = f"pad: {width} padding elements, but the dim provides only {available}"
        raise ShapeError(text, hint="pad by at most the size of the dim, or by one less with mode='reflect'")


_BORDERS: dict[str, _Border] = {"reflect": _reflected, "replicate": _replicated, "circular": _wrapped}
_KERNELS = {"reflect": "reflection", "replicate": "replication"}
"""Prefixes of torch's padding functions for these modes."""


# Diagonals of matrices.


@implements("diagonal")
def diagonal_of(input: TracedTensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> TracedTensor:
    """The diagonal of two dims, `index1 == index2 - offset`, as the last dim."""
    if input.ndim < 2:
        raise ShapeError(f"diagonal: the tensor has {input.ndim} dims", hint="give it two dims or more")
    x = movedim(input, each_dim((dim1, dim2), input.ndim), (-2, -1))
    *outer, rows, columns = x._node.shape
    below, right = max(0, -int(offset)), max(0, int(offset))
    length, column_length = simplify_dim(rows - below), simplify_dim(columns - right)
    length = length if holds(x._tracer, sympy.sympify(length) <= column_length) else column_length
    if not holds(x._tracer, sympy.sympify(length) > 0):
        return sliced(reshaped(x, (*outer, simplify_dim(rows * columns))), len(outer), 0, 0)
    flat = reshaped(x, (*outer, simplify_dim(rows * columns)))
    return as_view(sliced(flat, len(outer), simplify_dim(below * columns + right), length, columns + 1), x)


@implements("linalg.diagonal")
def linalg_diagonal(A: TracedTensor, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> TracedTensor:
    return diagonal_of(A, offset, dim1, dim2)


@implements("diag")
def diag(input: TracedTensor, diagonal: int = 0) -> TracedTensor:
    """The diagonal of a matrix, or a diagonal matrix from a vector."""
    if input.ndim == 1:
        return diag_embed(input, diagonal)
    if input.ndim != 2:
        raise ShapeError(f"diag: the tensor has {input.ndim} dims", hint="give it a vector or a matrix, or use torch.diagonal")
    return as_copy(diagonal_of(input, diagonal))


@implements("trace")
def trace(input: TracedTensor) -> TracedTensor:
    if input.ndim != 2:
        raise ShapeError(f"trace: the tensor has {input.ndim} dims", hint="give it a matrix")
    return reductions.sum(diagonal_of(require_number("trace", input)))


@implements("diag_embed")
def diag_embed(input: TracedTensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> TracedTensor:
    """Diagonal matrices from vectors."""
    if not input.ndim:
        raise ShapeError("diag_embed: the tensor has no dims", hint="give it one dim or more")
    tracer, shift = input._tracer, int(offset)
    padded = pad(input, (0, abs(shift)))
    column = iota(tracer, padded._node.shape[-1])
    is_on = tracer.add(Op.EQ, column, pointwise.add(unsqueeze(column, 1), shift))
    expanded = unsqueeze(padded, -1 if shift >= 0 else -2)
    rank = input.ndim + 1
    axes = tuple(normalize_dim(d, rank) for d in (dim1, dim2))
    filled = cast(pointwise.where(is_on, expanded, 0), input.dtype)
    return movedim(filled, (-2, -1), axes)


# Windows: one strided slice for each element of a window.

_MOST_SLICES = 64


@implements("Tensor.unfold")
def unfold(input: TracedTensor, dimension: int, size: int, step: int) -> TracedTensor:
    """Windows along a dim; their elements become a new last dim."""
    if input._memory.declared:
        message = "unfold of a parameter that the kernel writes to cannot be traced: windows may overlap"
        raise UnsupportedError(message, hint="unfold a copy: x.clone().unfold(...)")
    if not input.ndim:
        windows: TracedTensor = unfold(reshaped(input, (1,)), 0, size, step)[0]
        return windows
    axis = normalize_dim(dimension, input.ndim)
    return as_view(stack(_slices(input, (axis,), (int(size),), (int(step),), (1,)), -1), input)


@implements("unfold_copy")
def unfold_copy(input: TracedTensor, dimension: int, size: int, step: int) -> TracedTensor:
    """Copies the windows along a dim."""
    return unfold(as_copy(input), dimension, size, step)


def _slices(
    x: TracedTensor, dims: Sequence[int], sizes: Sequence[int], steps: Sequence[int], dilations: Sequence[int]
) -> list[TracedTensor]:
    """Returns one slice for each window element: that element in all windows."""
    if math.prod(sizes) > _MOST_SLICES or min(*sizes, *steps, *dilations) < 1:
        text = f"windows of {' x '.join(map(str, sizes))} elements with steps of {' x '.join(map(str, steps))} are not supported"
        raise TraceError(text, hint=f"give positive numbers, and windows of up to {_MOST_SLICES} elements")
    counts = []
    for d, size, step, dilation in zip(dims, sizes, steps, dilations, strict=True):
        extent = literal(x._node.shape[d])
        if extent is None:
            x._tracer.require_literal(x._node.shape[d])
            raise UnsupportedError(
                f"windows cannot slide along a dim of the run-time size {x.shape[d]}", hint="lower with example tensors"
            )
        span = (size - 1) * dilation + 1
        if span > extent:
            raise ShapeError(f"windows of {span} elements do not fit a dim of {extent}", hint="make them smaller, or pad")
        counts.append((extent - span) // step + 1)
    slices = []
    for corner in itertools.product(
        *(range(0, size * dilation, dilation) for size, dilation in zip(sizes, dilations, strict=True))
    ):
        window_slice = x
        for d, first, count, step in zip(dims, corner, counts, steps, strict=True):
            window_slice = sliced(window_slice, d, first, count, step)
        slices.append(window_slice)
    return slices


def _per_dim(name: str, value: Any, rank: int) -> tuple[int, ...]:
    """Expands one number to one for each dim."""
    listed = tuple(map(int, value)) if isinstance(value, (tuple, list)) else (int(value),)
    if len(listed) not in (1, rank):
        raise ShapeError(f"{name}: {len(listed)} numbers for {rank} dims", hint="give one number, or one for each dim")
    return listed if len(listed) == rank else listed * rank


def _steps(name: str, stride: Any, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides; by default the window sizes."""
    return sizes if stride is None or (isinstance(stride, (tuple, list)) and not stride) else _per_dim(name, stride, len(sizes))


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
        sizes, border = _per_dim(name, kernel_size, rank), _per_dim(name, padding, rank)
        steps = _steps(name, stride, sizes)
        if divisor_override is not None and not divisor_override:
            raise TraceError(f"{name}: divisor_override is 0", hint="leave divisor_override out, or give another")
        x = _with_border(name, require_float(name, input), sizes, border, 0.0)
        total = _combined(pointwise.add, _slices(x, _axes(x, dims), sizes, steps, (1,) * rank))
        if count_include_pad or not any(border) or divisor_override:
            return pointwise.mul(total, 1.0 / (divisor_override or math.prod(sizes)))
        ones = _with_border(name, input.new_ones(input.shape[-rank:]), sizes, border, 0.0)
        return pointwise.div(total, _combined(pointwise.add, _slices(ones, _axes(ones, dims), sizes, steps, (1,) * rank)))

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
        sizes = _per_dim(name, kernel_size, rank)
        steps = _steps(name, stride, sizes)
        x = _with_border(name, require_float(name, input), sizes, _per_dim(name, padding, rank), float("-inf"))
        return _combined(_greater, _slices(x, _axes(x, dims), sizes, steps, _per_dim(name, dilation, rank)))

    average.__doc__ = f"""The mean of each window of {rank} dims; zero padding counts by default."""
    greatest.__doc__ = f"""The maximum of each window of {rank} dims; NaN if the window has one."""


for _rank in (1, 2, 3):
    _register_pools(_rank)


def _axes(x: TracedTensor, dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(normalize_dim(d, x.ndim) for d in dims)


def _with_border(name: str, x: TracedTensor, sizes: Sequence[int], border: Sequence[int], value: float) -> TracedTensor:
    if any(2 * width > size for width, size in zip(border, sizes, strict=True)):
        raise ShapeError(
            f"{name}: padding of {tuple(border)} is more than half a window of {tuple(sizes)}",
            hint="reduce the padding, or enlarge the windows",
        )
    widths = [width for pad_width in reversed(border) for width in (pad_width, pad_width)]
    return pad(x, widths, "constant", value) if any(border) else x


def _greater(first: TracedTensor, second: TracedTensor) -> TracedTensor:
    """Returns the greater value, or NaN. The first of equal values is taken, and only it receives the gradient."""
    return pointwise.where(binary(Op.LOGICAL_OR, binary(Op.GT, second, first), pointwise.isnan(second)), second, first)


def _combined(combine: Callable[[TracedTensor, TracedTensor], TracedTensor], slices: Sequence[TracedTensor]) -> TracedTensor:
    """Combines the elements of windows pairwise, as a tree."""
    values = list(slices)
    while len(values) > 1:
        pairs = [combine(first, second) for first, second in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(values) // 2 * 2 :]
    return values[0] if len(slices) > 1 else as_copy(values[0])


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
    """Nearest-neighbour upsampling by whole factors."""
    unsupported_argument("interpolate", align_corners=align_corners, antialias=antialias)
    if mode not in ("nearest", "nearest-exact"):
        raise TraceError(f"interpolate: mode={mode!r} is not supported", hint="use mode='nearest'")
    rank = input.ndim - 2
    requested = scale_factor if size is None else size
    numbers = list(requested) if isinstance(requested, (tuple, list)) else [requested] * rank
    if len(numbers) != rank:
        raise ShapeError(f"interpolate: {len(numbers)} numbers for {rank} dims", hint="give one for each dim after the channels")
    if size is None:
        factors = [_integer_factor(factor) for factor in numbers]
    else:
        factors = [_size_factor(int(extent), int(input.shape[2 + d])) for d, extent in enumerate(numbers)]
    result = input
    for d, factor in enumerate(factors):
        result = repeat_interleave(result, factor, 2 + d)
    return as_copy(result)


def _size_factor(extent: int, size: int) -> int:
    if size < 1 or extent % size:
        raise TraceError(f"interpolate from {size} to {extent} elements is not supported", hint="enlarge by an integer factor")
    return extent // size


def _integer_factor(factor: Any) -> int:
    if not isinstance(factor, (int, float)) or factor < 1 or factor != int(factor):
        raise TraceError(f"interpolate: scale_factor={factor!r} is not supported", hint="enlarge by an integer factor")
    return int(factor)
