"""Tensors put together of parts of themselves: repeated, rolled, padded; diagonals, and windows (pools). Each is made of views."""

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
    floats,
    normalize_dim,
    numbers,
    sequence,
    unsupported_argument,
)
from fusegen.trace.functions.creation import iota, scalar_tensor
from fusegen.trace.functions.pointwise import sub
from fusegen.trace.functions.views import (
    cat,
    holds,
    movedim,
    narrow,
    own,
    permuted,
    reshape,
    reshaped,
    sliced,
    stack,
    transpose,
    unsqueeze,
    within,
)
from fusegen.trace.modes import autocasted
from fusegen.trace.registry import implements
from fusegen.trace.scalars import dim_of
from fusegen.trace.values import TracedTensor

_Border: TypeAlias = Callable[[TracedTensor, TracedTensor, int, Dim, int], TracedTensor]


@implements("repeat", "tile")
def repeat(input: TracedTensor, *repeats: Any, **named: Any) -> TracedTensor:
    """The whole tensor so many times along each dim; new dims stand in front."""
    counts = [dim_of(c) for c in sequence(repeats, named)]
    if any((literal(c) or 0) < 0 for c in counts):
        raise ShapeError(f"repeat {shape_text(counts)} times", hint="give numbers of 0 and more")
    counts = [1] * (input.ndim - len(counts)) + counts  # as tile has it; repeat names at least as many as there are dims
    sizes: list[Dim] = [1] * (len(counts) - input.ndim) + list(input._node.shape)
    apart = reshaped(input, [part for size in sizes for part in (1, size)])
    wide = input._tracer.add(Op.EXPAND, apart, shape=tuple(p for c, s in zip(counts, sizes, strict=True) for p in (c, s)))
    return reshaped(wide, [simplify_dim(c * s) for c, s in zip(counts, sizes, strict=True)])


@implements("repeat_interleave")
def repeat_interleave(input: TracedTensor, repeats: Any, dim: int | None = None, *, output_size: Any = None) -> TracedTensor:
    """Each element so many times; how many times must be a number."""
    if isinstance(repeats, TracedTensor) and repeats.ndim:
        raise TraceError("repeat_interleave by a tensor cannot be traced", hint="give the number of repetitions as an int")
    count = dim_of(repeats)
    x = reshaped(input, (simplify_dim(dim_of(input.numel())),)) if dim is None else input
    place = normalize_dim(0 if dim is None else dim, x.ndim)
    shape = x._node.shape
    apart = reshaped(x, (*shape[: place + 1], 1, *shape[place + 1 :]))
    wide = x._tracer.add(Op.EXPAND, apart, shape=(*shape[: place + 1], count, *shape[place + 1 :]))
    return reshaped(wide, (*shape[:place], simplify_dim(shape[place] * count), *shape[place + 1 :]))


@implements("roll")
def roll(input: TracedTensor, shifts: Any, dims: Any = None) -> TracedTensor:
    """Elements moved along dims; what leaves at an end comes in at the other."""
    if dims is None or dims == ():
        flat = reshaped(input, (simplify_dim(dim_of(input.numel())),))
        return reshaped(roll(flat, shifts, 0), input._node.shape)
    moves = shifts if isinstance(shifts, (tuple, list)) else (shifts,)
    places = dims if isinstance(dims, (tuple, list)) else (dims,)
    if len(moves) != len(places):
        raise ShapeError(f"roll: {len(moves)} shifts for {len(places)} dims", hint="give one shift a dim")
    x = input
    for move, place in zip(moves, places, strict=True):
        dim = normalize_dim(place, input.ndim)
        size = x.shape[dim]
        first = -move % size if not isinstance(size, int) or size else 0  # of the part that comes to the front
        if not isinstance(first, int) or first:
            x = cat([narrow(x, dim, first, size - first), narrow(x, dim, 0, first)], dim)
    return x


@implements("flip")
def flip(input: TracedTensor, *dims: Any, **named: Any) -> TracedTensor:
    """The order of some dims turned round."""
    result = input
    for place in each_dim(sequence(dims, named), input.ndim):
        result = _turned(result, place) if input.ndim else result
    return own(result)


def _turned(x: TracedTensor, dim: int) -> TracedTensor:
    size = x._node.shape[dim]
    return x if same(size, 0) else sliced(x, dim, simplify_dim(size - 1), size, -1)


@implements("fliplr")
def fliplr(input: TracedTensor) -> TracedTensor:
    """The order of columns turned round."""
    return flip(input, 1)


@implements("flipud")
def flipud(input: TracedTensor) -> TracedTensor:
    """The order of rows turned round."""
    return flip(input, 0)


@implements("rot90")
def rot90(input: TracedTensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> TracedTensor:
    """A plane turned by so many right angles, from the first dim towards the second."""
    first, second = each_dim(tuple(dims), input.ndim)
    turns = k % 4
    if turns == 2:
        return flip(input, first, second)
    turned = _turned(input, second) if turns == 1 else input
    crossed = transpose(turned, first, second) if turns else turned
    return own(_turned(crossed, second) if turns == 3 else crossed)


@implements("pixel_shuffle")
def pixel_shuffle(input: TracedTensor, upscale_factor: int) -> TracedTensor:
    """Channels of r^2 parts each, laid out as tiles of r x r points (Shi et al., arXiv 1609.05158)."""
    *outer, _, height, width = input.shape
    r = int(upscale_factor)
    apart = reshape(input, (*outer, -1, r, r, height, width))
    n = len(outer)
    tiles = permuted(apart, (*range(n), n, n + 3, n + 1, n + 4, n + 2))
    return own(reshape(tiles, (*outer, -1, height * r, width * r)))


@implements("pixel_unshuffle")
def pixel_unshuffle(input: TracedTensor, downscale_factor: int) -> TracedTensor:
    """Tiles of r x r points as channels: what pixel_shuffle does, turned back."""
    *outer, channels, height, width = input.shape
    r = int(downscale_factor)
    apart = reshape(input, (*outer, channels, height // r, r, width // r, r))
    n = len(outer)
    parts = permuted(apart, (*range(n), n, n + 2, n + 4, n + 1, n + 3))
    return own(reshape(parts, (*outer, channels * r * r, height // r, width // r)))


@implements("channel_shuffle")
def channel_shuffle(input: TracedTensor, groups: int) -> TracedTensor:
    """Channels (dim 1) of several groups dealt out in turn (Zhang et al., arXiv 1707.01083)."""
    apart = reshape(input, (input.shape[0], groups, -1, *input.shape[2:]))
    return own(reshape(transpose(apart, 1, 2), input.shape))


@implements("diff")
def diff(input: TracedTensor, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> TracedTensor:
    """Differences of neighbours along a dim, n times; of bools, whether they differ."""
    if n < 0:
        raise ShapeError(f"diff: n={n}", hint="give a number of 0 or more")
    if not n:
        return input
    parts = [p for p in (prepend, input, append) if p is not None]
    x = cat(parts, dim) if len(parts) > 1 else input
    place = normalize_dim(dim, x.ndim)
    for _ in range(n):
        count = simplify_dim(x._node.shape[place] - 1)
        if not holds(x._tracer, sympy.sympify(count) > 0):
            return sliced(x, place, 0, 0)
        before, behind = sliced(x, place, 0, count), sliced(x, place, 1, count)
        x = x._tracer.add(Op.NE, behind, before) if dtype_of(x) is DType.BOOL else sub(behind, before)
    return x


@implements("pad")
def pad(input: TracedTensor, pad: Sequence[Any], mode: str = "constant", value: float | None = None) -> TracedTensor:
    """Put before and behind the last dims, the last dim first; a negative number takes elements away. What is put there is a
    constant, or elements of the dim's own: from the other end (``circular``), the nearest one (``replicate``),
    or mirrored (``reflect``)."""
    if mode not in ("constant", *_BORDERS):
        raise TraceError(f"pad: mode={mode!r} is not supported", hint=f"use constant, {', '.join(_BORDERS)}")
    if mode != "constant" and value is not None:
        raise TraceError(f"pad: a value for the mode {mode!r}", hint="leave value out, or use mode='constant'")
    if len(pad) % 2 or len(pad) > 2 * input.ndim:
        text = f"pad: {len(pad)} numbers for a tensor of {input.ndim} dims"
        raise ShapeError(text, hint="give two a dim, the last dim first")
    border = partial(_constant, value=value or 0) if mode == "constant" else _BORDERS[mode]
    kernel = getattr(torch._C._nn, f"{_KERNELS.get(mode)}_pad{len(pad) // 2}d", None)
    (result,) = (input,) if kernel is None else autocasted(kernel, input)
    for number, (before, behind) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        result = _padded(result, input.ndim - 1 - number, (dim_of(before), dim_of(behind)), border)
    return own(result)


def _padded(x: TracedTensor, dim: int, widths: tuple[Dim, Dim], border: _Border) -> TracedTensor:
    """A dim with something on both sides of it, or less than it is."""
    more = [holds(x._tracer, sympy.sympify(width) > 0) for width in widths]
    middle = _cut(x, dim, *(0 if is_more else simplify_dim(-width) for is_more, width in zip(more, widths, strict=True)))
    before, behind = ([border(x, middle, dim, widths[place], place)] if more[place] else [] for place in (0, 1))
    return cat([*before, middle, *behind], dim) if any(more) else middle


def _cut(x: TracedTensor, dim: int, before: Dim, behind: Dim) -> TracedTensor:
    """A dim without some of its elements on both sides."""
    size = x._node.shape[dim]
    kept = simplify_dim(size - before - behind)
    if not holds(x._tracer, kept >= 0):
        raise ShapeError("pad: more is taken away than there is", hint="take away less")
    return x if same(kept, size) else sliced(x, dim, before, kept)


# What is put before (place 0) or behind (1) a dim. Of one that loses elements at its other side, torch mirrors and repeats those of
# the whole, and takes those of what is left from the other end.


def _constant(x: TracedTensor, _middle: TracedTensor, dim: int, width: Dim, _place: int, *, value: float) -> TracedTensor:
    shape = (*x._node.shape[:dim], width, *x._node.shape[dim + 1 :])
    return x._tracer.add(Op.EXPAND, scalar_tensor(x._tracer, value, x.dtype), shape=shape)


def _mirrored(x: TracedTensor, _middle: TracedTensor, dim: int, width: Dim, place: int) -> TracedTensor:
    size = x._node.shape[dim]
    _require_room(x, width, simplify_dim(size - 1))
    return sliced(x, dim, simplify_dim(size - 2) if place else width, width, -1)


def _nearest(x: TracedTensor, _middle: TracedTensor, dim: int, width: Dim, place: int) -> TracedTensor:
    edge = sliced(x, dim, simplify_dim(x._node.shape[dim] - 1) if place else 0, 1)
    return x._tracer.add(Op.EXPAND, edge, shape=(*x._node.shape[:dim], width, *x._node.shape[dim + 1 :]))


def _opposite(_x: TracedTensor, middle: TracedTensor, dim: int, width: Dim, place: int) -> TracedTensor:
    size = middle._node.shape[dim]
    _require_room(middle, width, size)
    return sliced(middle, dim, 0 if place else simplify_dim(size - width), width)


def _require_room(x: TracedTensor, width: Dim, most: Dim) -> None:
    if not holds(x._tracer, sympy.sympify(width) <= most):
        text = f"pad: {width} elements more of a dim that can give {most}"
        raise ShapeError(text, hint="give a number up to what the dim holds, less one where it is mirrored")


_BORDERS: dict[str, _Border] = {"reflect": _mirrored, "replicate": _nearest, "circular": _opposite}
_KERNELS = {"reflect": "reflection", "replicate": "replication"}
"""Names of the functions by which torch pads in some of these modes."""


# Diagonals of matrices.


@implements("diagonal")
def diagonal_of(input: TracedTensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> TracedTensor:
    """The elements whose index in one dim is that in another less an offset, as the last dim."""
    if input.ndim < 2:
        raise ShapeError(f"diagonal of a tensor of {input.ndim} dims", hint="give it two dims or more")
    x = movedim(input, each_dim((dim1, dim2), input.ndim), (-2, -1))
    *outer, rows, columns = x._node.shape
    below, behind = max(0, -int(offset)), max(0, int(offset))
    length, other = simplify_dim(rows - below), simplify_dim(columns - behind)
    length = length if holds(x._tracer, sympy.sympify(length) <= other) else other
    if not holds(x._tracer, sympy.sympify(length) > 0):
        return sliced(reshaped(x, (*outer, simplify_dim(rows * columns))), len(outer), 0, 0)
    flat = reshaped(x, (*outer, simplify_dim(rows * columns)))
    return within(sliced(flat, len(outer), simplify_dim(below * columns + behind), length, columns + 1), x)


@implements("linalg.diagonal")
def linalg_diagonal(A: TracedTensor, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> TracedTensor:
    """The diagonals of matrices in the last two dims, unless others are named."""
    return diagonal_of(A, offset, dim1, dim2)


@implements("diag")
def diag(input: TracedTensor, diagonal: int = 0) -> TracedTensor:
    """The diagonal of a matrix, or the matrix with a vector as its diagonal."""
    if input.ndim == 1:
        return diag_embed(input, diagonal)
    if input.ndim != 2:
        raise ShapeError(f"diag of a tensor of {input.ndim} dims", hint="give it a vector or a matrix, or use torch.diagonal")
    return own(diagonal_of(input, diagonal))


@implements("trace")
def trace(input: TracedTensor) -> TracedTensor:
    """The sum of a matrix's diagonal."""
    if input.ndim != 2:
        raise ShapeError(f"trace of a tensor of {input.ndim} dims", hint="give it a matrix")
    return reductions.sum(diagonal_of(numbers("trace", input)))


@implements("diag_embed")
def diag_embed(input: TracedTensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> TracedTensor:
    """Matrices with vectors as their diagonals, and zeros elsewhere."""
    if not input.ndim:
        raise ShapeError("diag_embed of a tensor without dims", hint="give it one dim or more")
    tracer, shift = input._tracer, int(offset)
    wide = pad(input, (0, abs(shift)))
    number = iota(tracer, wide._node.shape[-1])
    is_on = tracer.add(Op.EQ, number, pointwise.add(unsqueeze(number, 1), shift))
    along = unsqueeze(wide, -1 if shift >= 0 else -2)
    rank = input.ndim + 1
    places = tuple(normalize_dim(d, rank) for d in (dim1, dim2))
    filled = cast(pointwise.where(is_on, along, 0), input.dtype)
    return movedim(filled, (-2, -1), places)


# Windows: each is as many slices as it has elements.

_MOST_SLICES = 64


@implements("Tensor.unfold")
def unfold(input: TracedTensor, dimension: int, size: int, step: int) -> TracedTensor:
    """The windows along a dim, whose elements are a new last dim."""
    if input._memory.declared:
        what = "unfold of a parameter that the kernel writes to, of whose elements it shows some several times, cannot be traced"
        raise UnsupportedError(what, hint="unfold a copy: x.clone().unfold(...)")
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
    """For each element of a window, that of all windows, whose elements are so far apart along each dim."""
    if math.prod(sizes) > _MOST_SLICES or min(*sizes, *steps, *apart) < 1:
        text = f"windows of {' x '.join(map(str, sizes))} elements, {' x '.join(map(str, steps))} apart"
        raise TraceError(text, hint=f"give positive numbers, and windows of up to {_MOST_SLICES} elements")
    counts = []
    for d, size, step, gap in zip(dims, sizes, steps, apart, strict=True):
        extent = literal(x._node.shape[d])
        if extent is None:
            x._tracer.require_literal(x._node.shape[d])
            raise UnsupportedError(f"windows along a dim of the run-time size {x.shape[d]}", hint="lower with example tensors")
        reach = (size - 1) * gap + 1
        if reach > extent:
            raise ShapeError(f"windows of {reach} elements along a dim of {extent}", hint="make them smaller, or pad")
        counts.append((extent - reach) // step + 1)
    found = []
    for corner in itertools.product(*(range(0, size * gap, gap) for size, gap in zip(sizes, apart, strict=True))):
        part = x
        for d, first, count, step in zip(dims, corner, counts, steps, strict=True):
            part = sliced(part, d, first, count, step)
        found.append(part)
    return found


def _each(name: str, value: Any, rank: int) -> tuple[int, ...]:
    """A number for each dim, of one number or of several."""
    given = tuple(map(int, value)) if isinstance(value, (tuple, list)) else (int(value),)
    if len(given) not in (1, rank):
        raise ShapeError(f"{name}: {len(given)} numbers for {rank} dims", hint="give one number, or one for each dim")
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
            raise TraceError(f"{name}: a divisor of 0", hint="leave divisor_override out, or give another")
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
        raise ShapeError(f"{name}: a border of {tuple(border)} for windows of {tuple(sizes)}", hint="give half a window at most")
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
        raise TraceError(f"interpolate: mode={mode!r} is not supported", hint="use mode='nearest'")
    rank = input.ndim - 2
    given = scale_factor if size is None else size
    numbers = list(given) if isinstance(given, (tuple, list)) else [given] * rank
    if len(numbers) != rank:
        raise ShapeError(f"interpolate: {len(numbers)} numbers for {rank} dims", hint="give one for each dim behind the channels")
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
        raise TraceError(f"interpolate from {size} to {extent} elements is not supported", hint="enlarge by a whole factor")
    return extent // size


def _whole(factor: Any) -> int:
    if not isinstance(factor, (int, float)) or factor < 1 or factor != int(factor):
        raise TraceError(f"interpolate: scale_factor={factor!r} is not supported", hint="enlarge by a whole factor")
    return int(factor)
