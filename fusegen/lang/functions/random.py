"""Dropout. Random bits are leaves of the graph, of which comparisons and products make masks (`ir.random`)."""

from __future__ import annotations

from typing import Any
from typing import cast as cast_to

import torch
import torch.nn.functional as F

from fusegen.dtypes import DType
from fusegen.errors import ArgumentError, TraceError
from fusegen.ir.graph import Node, Shape
from fusegen.ir.ops import Op
from fusegen.ir.random import BITS, random_bits
from fusegen.lang.functions import pointwise
from fusegen.lang.functions.common import dtype_of, floats, written
from fusegen.lang.functions.creation import full_like
from fusegen.lang.places import location
from fusegen.lang.registry import implements, located
from fusegen.lang.scalars import TracedScalar
from fusegen.lang.values import TracedTensor

_STEPS = 1 << BITS
_SEEDS = range(-(1 << 63), 1 << 63)


def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, *, seed: int | None = None) -> torch.Tensor:
    """Dropout, the same for one seed wherever it runs; `torch.nn.functional.dropout` where there is none.

    Element i (in row-major order) stays where the 16 bits that Philox-4x32-10 gives for the seed and i are not below ``p * 2**16``,
    rounded; what stays is divided by the share that stays. Two calls with one seed and one shape drop the same elements.

    Args:
        input: a float tensor of any shape.
        p: the share that becomes 0, from 0 to 1; a multiple of 2^-16 but for 0 and 1.
        training: whether anything is dropped.
        seed: of 64 bits, of either sign; also a run-time parameter of a kernel. Without one, each call draws from torch's generator
            of the device.

    Returns:
        A tensor of the input's shape and dtype.

    Raises:
        ValueError: p is no probability, or the seed has more bits. In a kernel, a `TraceError`, as where torch raises others.
        TypeError: the seed is no int, or the input no tensor of floats.
    """
    if isinstance(input, TracedTensor):
        return cast_to(torch.Tensor, located("dropout", dropped, (input, p, training, input._node.shape, seed), {}))
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if training and not (input.is_floating_point() or input.is_complex()):
        raise ArgumentError(f"dropout of {input.dtype}", mend="convert it to floats, as input.float() does")
    if seed is None or not training or p in (0, 1):
        return F.dropout(input, p, training)
    if type(seed) is not int:
        raise TypeError(f"dropout with a seed of {type(seed).__name__}: give an int")
    if seed not in _SEEDS:
        raise ValueError(f"the seed {seed} has more than 64 bits")
    steps = _steps(p)
    keep = random_bits(seed, 0, input.shape, input.device) >= steps - _STEPS // 2
    wide = input.float() if input.dtype.itemsize == 2 else input
    return torch.where(keep, wide * _scale(steps), wide * 0.0).to(input.dtype)


@implements("dropout")
def torch_dropout(input: TracedTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> TracedTensor:
    """torch's, with a mask of our own generator's, which torch's seeds."""
    return written(input, dropped(input, p, training, input._node.shape), inplace)


@implements("native_dropout")
def native_dropout(input: TracedTensor, p: float, train: bool | None) -> tuple[TracedTensor, TracedTensor]:
    """Dropout, and the mask of what stays."""
    all_or_none = dropped(input, p, train, input._node.shape) if not train or p in (0, 1) else None
    if all_or_none is not None:
        return all_or_none, full_like(input, not train or p == 0, dtype=torch.bool)
    steps = _steps(p)
    mask = _mask(floats("native_dropout", input), input._node.shape, None, steps)
    return pointwise.mul(input, _noise(input, mask, steps)), mask


@implements("dropout1d")
def dropout1d(input: TracedTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> TracedTensor:
    """Whole channels of (batch, channel, position) or (channel, position)."""
    return written(input, _channels("dropout1d", input, p, training, 2 if input.ndim == 3 else 1, (2, 3)), inplace)


@implements("dropout2d")
def dropout2d(input: TracedTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> TracedTensor:
    """Whole channels of (batch, channel, height, width) or (batch, channel, position)."""
    return written(input, _channels("dropout2d", input, p, training, 2, (3, 4)), inplace)


@implements("dropout3d")
def dropout3d(input: TracedTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> TracedTensor:
    """Whole channels of (batch, channel, depth, height, width) or (channel, depth, height, width)."""
    return written(input, _channels("dropout3d", input, p, training, 2 if input.ndim == 5 else 1, (4, 5)), inplace)


def _channels(name: str, input: TracedTensor, p: float, training: bool, leading: int, ranks: tuple[int, ...]) -> TracedTensor:
    """Dropout of all that has the first indices in common."""
    if input.ndim not in ranks:
        raise TraceError(f"{name} of a tensor of {input.ndim} dims", mend=f"give it {' or '.join(map(str, ranks))}")
    shape = input._node.shape
    return dropped(input, p, training, (*shape[:leading], *(1,) * (len(shape) - leading)))


def dropped(input: TracedTensor, p: Any, training: Any, shape: Shape, seed: Any = None) -> TracedTensor:
    """Dropout with a mask of a shape that broadcasts to the input's."""
    if not 0 <= p <= 1:
        raise TraceError("a dropout probability that is not between 0 and 1", mend="give p between 0 and 1")
    if not training or p == 0:
        return input
    dtype = dtype_of(input)
    if p == 1:
        return pointwise.mul(input, 0.0 if dtype.is_float else False if dtype is DType.BOOL else 0)
    if not dtype.is_float:
        raise TraceError(f"dropout of {dtype}", mend="convert to a float dtype first")
    steps = _steps(p)
    return pointwise.mul(input, _noise(input, _mask(input, shape, seed, steps), steps))


def _mask(input: TracedTensor, shape: Shape, seed: Any, steps: Any) -> TracedTensor:
    """True where an element stays."""
    return input._tracer.add(Op.GE, _bits(input, shape, seed), _threshold(input, steps))


def _noise(input: TracedTensor, mask: TracedTensor, steps: Any) -> TracedTensor:
    """What the input is multiplied by, as if in its dtype, and unrounded: one by the share that stays, or 0."""
    tracer = input._tracer
    choices = (mask._position, tracer.lift(_scale(steps))._position, tracer.lift(0.0)._position)
    return tracer.value(tracer.builder.put(Node(Op.WHERE, choices, (), mask._node.shape, dtype_of(input)), location()))


def _steps(p: Any) -> Any:
    """Of all values that an element's bits may have, how many drop it: at least one, and not all."""
    steps = (p * _STEPS + 0.5) // 1
    if steps < 1:
        return 1
    if steps > _STEPS - 1:
        return _STEPS - 1
    return steps if isinstance(steps, TracedScalar) else int(steps)


def _threshold(input: TracedTensor, steps: Any) -> TracedTensor:
    """The least bits, as a signed integer, of an element that stays."""
    least = input._tracer.lift(steps - _STEPS // 2)
    return input._tracer.add(Op.CAST, least, dtype=DType.INT64) if isinstance(steps, TracedScalar) else least


def _scale(steps: Any) -> Any:
    """One by the share that stays."""
    return _STEPS / (_STEPS - steps)


def _bits(input: TracedTensor, shape: Shape, seed: Any) -> TracedTensor:
    """Random bits: of a seed, or of a key that each call draws, with a stream of their own."""
    tracer = input._tracer
    if seed is None:
        return tracer.add(Op.RANDOM, shape=shape, dtype=DType.INT16, stream=tracer.new_stream())
    if not isinstance(seed, int) or isinstance(seed, bool):  # as a run-time int is
        kind = "Tensor" if isinstance(seed, TracedTensor) else type(seed).__name__
        raise TraceError(f"dropout with a seed of {kind}", mend="give an int")
    if type(seed) is int and seed not in _SEEDS:  # of any other kind of int, a range would look at each element
        raise TraceError("dropout with a seed of more than 64 bits", mend="give one from -2**63 to 2**63 - 1")
    return tracer.add(Op.RANDOM, tracer.lift(seed), shape=shape, dtype=DType.INT16, stream=0)
