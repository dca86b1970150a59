"""Tensors put together of parts of themselves: repeated, rolled, padded. Each is made of views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusegen.errors import ShapeError, TraceError
from fusegen.ir.infer import shape_text
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim, literal, same, simplify_dim
from fusegen.lang.functions.common import normalize_dim, sequence
from fusegen.lang.functions.creation import scalar_tensor
from fusegen.lang.functions.views import cat, holds, narrow, reshaped, sliced
from fusegen.lang.registry import implements
from fusegen.lang.values import TracedTensor, dim_of


@implements("repeat", "tile")
def repeat(input: TracedTensor, *repeats: Any, **named: Any) -> TracedTensor:
    """The whole tensor so many times along each dim; new dims stand in front."""
    counts = [dim_of(c) for c in sequence(repeats, named)]
    if any((literal(c) or 0) < 0 for c in counts):
        raise ShapeError(f"repeat {shape_text(counts)} times", mend="give numbers of 0 and more")
    counts = [1] * (input.ndim - len(counts)) + counts  # as tile has it; repeat names at least as many as there are dims
    sizes: list[Dim] = [1] * (len(counts) - input.ndim) + list(input._node.shape)
    apart = reshaped(input, [part for size in sizes for part in (1, size)])
    wide = input._tracer.add(Op.EXPAND, apart, shape=tuple(p for c, s in zip(counts, sizes, strict=True) for p in (c, s)))
    return reshaped(wide, [simplify_dim(c * s) for c, s in zip(counts, sizes, strict=True)])


@implements("repeat_interleave")
def repeat_interleave(input: TracedTensor, repeats: Any, dim: int | None = None, *, output_size: Any = None) -> TracedTensor:
    """Each element so many times; how many times must be a number."""
    if isinstance(repeats, TracedTensor) and repeats.ndim:
        raise TraceError("repeat_interleave by a tensor cannot be traced", mend="give the number of repetitions as an int")
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
        raise ShapeError(f"roll: {len(moves)} shifts for {len(places)} dims", mend="give one shift a dim")
    result = input
    for move, place in zip(moves, places, strict=True):
        result = _rolled(result, move, normalize_dim(place, input.ndim))
    return result


def _rolled(x: TracedTensor, shift: Any, dim: int) -> TracedTensor:
    size = x.shape[dim]
    if isinstance(size, int) and size == 0:
        return x
    first = -shift % size  # of the part that comes to the front
    if isinstance(first, int) and first == 0:
        return x
    return cat([narrow(x, dim, first, size - first), narrow(x, dim, 0, first)], dim)


@implements("pad")
def pad(input: TracedTensor, pad: Sequence[Any], mode: str = "constant", value: float | None = None) -> TracedTensor:
    """Constants put before and behind the last dims, the last dim first; a negative number takes elements away."""
    if mode != "constant":
        raise TraceError(f"pad: mode={mode!r} is not supported", mend="use mode='constant', or torch.cat")
    if len(pad) % 2 or len(pad) > 2 * input.ndim:
        text = f"pad: {len(pad)} numbers for a tensor of {input.ndim} dims"
        raise ShapeError(text, mend="give two a dim, the last dim first")
    result = input
    for number, (before, behind) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        result = _padded(result, input.ndim - 1 - number, (before, behind), value or 0)
    return result


def _padded(x: TracedTensor, dim: int, widths: tuple[Any, Any], value: float) -> TracedTensor:
    before, behind = (dim_of(width) for width in widths)
    more = [holds(x._tracer, width > 0) for width in (before, behind)]
    size = x._node.shape[dim]
    first = 0 if more[0] else simplify_dim(-before)
    kept = simplify_dim(size - first + (0 if more[1] else behind))
    if not holds(x._tracer, kept >= 0):
        raise ShapeError("pad: more is taken away than there is", mend="take away less")
    middle = x if same(kept, size) else sliced(x, dim, first, kept)
    parts = [_constant(x, dim, before, value)] * more[0] + [middle] + [_constant(x, dim, behind, value)] * more[1]
    return cat(parts, dim) if len(parts) > 1 else middle


def _constant(x: TracedTensor, dim: int, width: Dim, value: float) -> TracedTensor:
    shape = (*x._node.shape[:dim], width, *x._node.shape[dim + 1 :])
    return x._tracer.add(Op.EXPAND, scalar_tensor(x._tracer, value, x.dtype), shape=shape)
