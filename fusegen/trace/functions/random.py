"""Dropout and random tensors, composed of words of 16 random bits.

Each word is a leaf of the graph with its own stream (`ir.random`). An element's bits depend only on the call's key and the
element's index.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from typing import cast as cast_to

import torch
import torch.nn.functional as F

from fusegen.dtypes import DType
from fusegen.errors import ArgumentError, TraceError
from fusegen.ir.graph import Node
from fusegen.ir.ops import Op
from fusegen.ir.random import BITS, random_bits
from fusegen.ir.symbolic import Shape
from fusegen.trace.functions import pointwise
from fusegen.trace.functions.common import (
    binary,
    cast,
    dtype_of,
    float_setting,
    in_place,
    normalize_dim,
    require_float,
    unsupported_argument,
)
from fusegen.trace.functions.creation import check_settings, full_like, iota, size_arguments
from fusegen.trace.functions.normalization import softmax
from fusegen.trace.functions.pointwise import add, mul, where
from fusegen.trace.functions.reductions import argmax
from fusegen.trace.functions.views import movedim
from fusegen.trace.registry import creates, implements, located
from fusegen.trace.scalars import TracedScalar, dim_of
from fusegen.trace.tracer import Tracer
from fusegen.trace.user import location
from fusegen.trace.values import TracedTensor, assigned

_WORD_VALUES = 1 << BITS
_SEEDS = range(-(1 << 63), 1 << 63)


def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, *, seed: int | None = None) -> torch.Tensor:
    """Dropout with a mask that depends only on the seed; without a seed, `torch.nn.functional.dropout`.

    Element i, in row-major order, is kept if the 16 bits of Philox-4x32-10 of the seed and i are at least `p * 2**16`, rounded.
    Kept elements are divided by the probability to be kept. Calls with the same seed and shape drop the same elements.

    Args:
        input: a float tensor of any shape.
        p: probability of an element to become 0, from 0 to 1; between them, rounded to a multiple of 2^-16.
        seed: a signed 64-bit int; may be a run-time parameter of a kernel. By default each call draws from torch's generator.

    Returns:
        A tensor of the input's shape and dtype.

    Raises:
        ValueError: p is not in [0, 1], or the seed exceeds 64 bits. In a kernel, `TraceError`.
        TypeError: the seed is not an int, or the input is not a float tensor.
    """
    if isinstance(input, TracedTensor):
        return cast_to(torch.Tensor, located("dropout", apply_dropout, (input, p, training, input._node.shape, seed), {}))
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if training and not (input.is_floating_point() or input.is_complex()):
        raise ArgumentError(f"dropout of {input.dtype} is not supported", hint="convert it to a float dtype: input.float()")
    if seed is None or not training or p in (0, 1):
        return F.dropout(input, p, training)
    if type(seed) is not int:
        raise TypeError(f"dropout: the seed is a {type(seed).__name__}, not an int")
    if seed not in _SEEDS:
        raise ValueError(f"the seed {seed} has more than 64 bits")
    if input.is_meta:  # a mask without values: its cost counts as that of torch's mask
        return F.dropout(input, p)
    steps = _dropping_values(p)
    keep = random_bits(seed, 0, input.shape, input.device) >= steps - _WORD_VALUES // 2
    wide = input.float() if input.dtype.itemsize == 2 else input
    return torch.where(keep, wide * _scale(steps), wide * 0.0).to(input.dtype)


@implements("dropout")
def torch_dropout(input: TracedTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> TracedTensor:
    """torch's dropout, with fusegen's generator, seeded by torch's."""
    return in_place(input, apply_dropout(input, p, training, input._node.shape), inplace)


@implements("native_dropout")
def native_dropout(input: TracedTensor, p: float, train: bool | None) -> tuple[TracedTensor, TracedTensor]:
    """Returns the dropout's result and the mask of the kept elements."""
    all_or_none = apply_dropout(input, p, train, input._node.shape) if not train or p in (0, 1) else None
    if all_or_none is not None:
        return all_or_none, full_like(input, not train or p == 0, dtype=torch.bool)
    steps = _dropping_values(p)
    mask = _keep_mask(require_float("native_dropout", input), input._node.shape, None, steps)
    return pointwise.mul(input, _dropout_factor(input, mask, steps)), mask


@implements("dropout1d")
def dropout1d(input: TracedTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> TracedTensor:
    """Drops channels of (batch, channel, position) or (channel, position)."""
    return in_place(input, _drop_channels("dropout1d", input, p, training, 2 if input.ndim == 3 else 1, (2, 3)), inplace)


@implements("dropout2d")
def dropout2d(input: TracedTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> TracedTensor:
    """Drops channels of (batch, channel, height, width) or (batch, channel, position)."""
    return in_place(input, _drop_channels("dropout2d", input, p, training, 2, (3, 4)), inplace)


@implements("dropout3d")
def dropout3d(input: TracedTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> TracedTensor:
    """Drops channels of (batch, channel, depth, height, width) or (channel, depth, height, width)."""
    return in_place(input, _drop_channels("dropout3d", input, p, training, 2 if input.ndim == 5 else 1, (4, 5)), inplace)


def _drop_channels(name: str, input: TracedTensor, p: float, training: bool, leading: int, ranks: tuple[int, ...]) -> TracedTensor:
    """Drops either all or none of the elements that share their leading indices."""
    if input.ndim not in ranks:
        raise TraceError(f"{name}: the tensor has {input.ndim} dims", hint=f"give it {' or '.join(map(str, ranks))}")
    shape = input._node.shape
    return apply_dropout(input, p, training, (*shape[:leading], *(1,) * (len(shape) - leading)))


def apply_dropout(input: TracedTensor, p: Any, training: Any, shape: Shape, seed: Any = None) -> TracedTensor:
    """Dropout with a mask of a shape that broadcasts to the input's."""
    if not 0 <= p <= 1:
        raise TraceError("the dropout probability is not in [0, 1]", hint="give p between 0 and 1")
    if not training or p == 0:
        return input
    dtype = dtype_of(input)
    if p == 1:
        return pointwise.mul(input, 0.0 if dtype.is_float else False if dtype is DType.BOOL else 0)
    if not dtype.is_float:
        raise TraceError(f"dropout of {dtype} is not supported", hint="convert to a float dtype first")
    steps = _dropping_values(p)
    return pointwise.mul(input, _dropout_factor(input, _keep_mask(input, shape, seed, steps), steps))


def _keep_mask(input: TracedTensor, shape: Shape, seed: Any, steps: Any) -> TracedTensor:
    """True for kept elements."""
    return input._tracer.add(Op.GE, _bits(input, shape, seed), _threshold(input, steps))


def _dropout_factor(input: TracedTensor, mask: TracedTensor, steps: Any) -> TracedTensor:
    """Returns 1 / (1 - p) or 0, marked as the input's dtype but not rounded to it."""
    tracer = input._tracer
    scale = tracer.lift(_named(_scale(steps), "keep_scale"))
    choices = (mask._position, scale._position, tracer.lift(0.0)._position)
    note = "An element is kept, times 1 / (1 - p), if its 16 random bits are at least the threshold."
    place = (at := location()) and replace(at, note=note)
    return tracer.value(tracer.builder.add_node(Node(Op.WHERE, choices, (), mask._node.shape, dtype_of(input)), place))


def _dropping_values(p: Any) -> Any:
    """Returns the number of 16-bit values that drop an element, from 1 to 2^16 - 1."""
    steps = (p * _WORD_VALUES + 0.5) // 1
    if steps < 1:
        return 1
    if steps > _WORD_VALUES - 1:
        return _WORD_VALUES - 1
    return steps if isinstance(steps, TracedScalar) else int(steps)


def _threshold(input: TracedTensor, steps: Any) -> TracedTensor:
    """Returns the smallest signed word that keeps an element."""
    lowest = input._tracer.lift(_named(steps - _WORD_VALUES // 2, "threshold"))
    return input._tracer.add(Op.CAST, lowest, dtype=DType.INT64) if isinstance(steps, TracedScalar) else lowest


def _scale(steps: Any) -> Any:
    """Returns 1 / (1 - p)."""
    return _WORD_VALUES / (_WORD_VALUES - steps)


def _named(number: Any, name: str) -> Any:
    """Returns a run-time number that is called so in kernels; a constant has no name there."""
    if not isinstance(number, TracedScalar):
        return number
    tracer, node = number._tracer, number._node
    return TracedScalar(tracer, tracer.builder.add_node(replace(node, attrs=(*node.attrs, ("name", name))), location()))


def _bits(input: TracedTensor, shape: Shape, seed: Any) -> TracedTensor:
    """Returns random bits of a seed, or of the key that each call draws and a new stream."""
    tracer = input._tracer
    if seed is None:
        return tracer.add(Op.RANDOM, shape=shape, dtype=DType.INT16, stream=tracer.new_stream())
    if not isinstance(seed, int) or isinstance(seed, bool):  # run-time ints included
        kind = "Tensor" if isinstance(seed, TracedTensor) else type(seed).__name__
        raise TraceError(f"dropout: the seed is a {kind}, not an int", hint="give an int")
    if type(seed) is int and seed not in _SEEDS:  # `in range` iterates for int subclasses
        raise TraceError("dropout: the seed has more than 64 bits", hint="give one from -2**63 to 2**63 - 1")
    return tracer.add(Op.RANDOM, tracer.lift(seed), shape=shape, dtype=DType.INT16, stream=0)


# Uniform, normal and exponential numbers.

_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Random bits of a uniform number, as torch draws on a CPU."""

_LONGEST_RANGE = 1 << 31
"""The longest range of random integers, so that its product with 32 random bits fits 63 bits."""


def _word(tracer: Tracer, shape: Shape, bits: int, dtype: torch.dtype) -> TracedTensor:
    """Returns up to 16 random bits as a non-negative integer."""
    word = tracer.add(Op.RANDOM, shape=shape, dtype=DType.INT16, stream=tracer.new_stream())
    if bits == BITS:
        return add(cast(word, dtype), 1 << (BITS - 1))
    return cast(binary(Op.BITWISE_AND, word, (1 << bits) - 1), dtype)


def _fraction(tracer: Tracer, shape: Shape, digits: int, dtype: torch.dtype, *, offset: float = 0.0) -> TracedTensor:
    """Returns uniform numbers in [0, 1), plus an offset in units of the last bit."""
    last = digits % BITS or BITS
    total = mul(add(_word(tracer, shape, last, dtype), offset) if offset else _word(tracer, shape, last, dtype), 2.0**-digits)
    for end in range(digits - last, 0, -BITS):
        total = add(mul(_word(tracer, shape, BITS, dtype), 2.0**-end), total)
    return total


def uniform(tracer: Tracer, shape: Shape, dtype: torch.dtype) -> TracedTensor:
    """Uniform numbers in [0, 1)."""
    return _fraction(tracer, shape, _DIGITS[dtype], dtype)


def exponential(tracer: Tracer, shape: Shape, dtype: torch.dtype) -> TracedTensor:
    """-log(u) of uniform u, precise at both ends: draws min(u, 1 - u), and one bit that selects u or 1 - u."""
    lesser = mul(_fraction(tracer, shape, 64 if dtype is torch.float64 else 32, dtype, offset=0.5), 0.5)
    is_u = binary(Op.LT, _word(tracer, shape, 1, dtype), 1)
    log_of_complement = tracer.add(Op.LOG1P, tracer.add(Op.NEG, lesser))
    return tracer.add(Op.NEG, where(is_u, tracer.add(Op.LOG, lesser), log_of_complement))


def normal(tracer: Tracer, shape: Shape, dtype: torch.dtype) -> TracedTensor:
    """Normal numbers: one of each Box-Muller pair (A Note on the Generation of Random Normal Deviates, 1958)."""
    radius = tracer.add(Op.SQRT, mul(exponential(tracer, shape, dtype), 2.0))
    angle = mul(uniform(tracer, shape, dtype), 2.0 * math.pi)
    return mul(radius, tracer.add(Op.COS, angle))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which numbers are drawn."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _float_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    if dtype not in _DIGITS:
        raise TraceError(f"{name} of {dtype} is not supported", hint="give a float dtype")
    return dtype


def _shape(tracer: Tracer, sizes: tuple[Any, ...], settings: dict[str, Any]) -> Shape:
    """Returns the shape of a new tensor, and checks the other settings."""
    args = size_arguments(tracer, sizes, settings)
    extents = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    return tuple(dim_of(size) for size in extents)


# New tensors.


@creates("rand")
def rand(tracer: Tracer, *sizes: Any, dtype: torch.dtype | None = None, **settings: Any) -> TracedTensor:
    shape = _shape(tracer, sizes, settings)
    return uniform(tracer, shape, _float_dtype("rand", dtype or torch.get_default_dtype()))


@implements("rand_like")
def rand_like(input: TracedTensor, *, dtype: torch.dtype | None = None, **settings: Any) -> TracedTensor:
    check_settings(input._tracer, settings)
    return uniform(input._tracer, input._node.shape, _float_dtype("rand_like", dtype or input.dtype))


@creates("randn")
def randn(tracer: Tracer, *sizes: Any, dtype: torch.dtype | None = None, **settings: Any) -> TracedTensor:
    shape = _shape(tracer, sizes, settings)
    kind = _float_dtype("randn", dtype or torch.get_default_dtype())
    return cast(normal(tracer, shape, _wide(kind)), kind)


@implements("randn_like")
def randn_like(input: TracedTensor, *, dtype: torch.dtype | None = None, **settings: Any) -> TracedTensor:
    check_settings(input._tracer, settings)
    kind = _float_dtype("randn_like", dtype or input.dtype)
    return cast(normal(input._tracer, input._node.shape, _wide(kind)), kind)


@creates("randint")
def randint(tracer: Tracer, *args: Any, dtype: torch.dtype | None = None, **settings: Any) -> TracedTensor:
    """Integers in [low, high); low defaults to 0."""
    names = ("high", "size") if len(args) + len(settings.keys() & {"low", "high", "size"}) == 2 else ("low", "high", "size")
    settings = dict(zip(names, args, strict=False)) | settings
    low, high, size = settings.pop("low", 0), settings.pop("high"), settings.pop("size")
    check_settings(tracer, settings)
    return _integers("randint", tracer, tuple(dim_of(s) for s in size), low, high, dtype or torch.int64)


@implements("randint_like")
def randint_like(input: TracedTensor, *bounds: Any, dtype: torch.dtype | None = None, **settings: Any) -> TracedTensor:
    """Integers of the input's shape and dtype. A single bound is `high`."""
    named = {"low": 0} | dict(zip(("low", "high") if len(bounds) > 1 else ("high",), bounds, strict=False))
    low, high = (settings.pop(name, named.get(name)) for name in ("low", "high"))
    check_settings(input._tracer, settings)
    return _integers("randint_like", input._tracer, input._node.shape, low, high, dtype or input.dtype)


def _integers(name: str, tracer: Tracer, shape: Shape, low: Any, high: Any, dtype: torch.dtype) -> TracedTensor:
    """Returns the high half of 32 random bits times the range: Lemire, Fast Random Integer Generation in an Interval (2019),
    without rejection. The error of each probability is at most 2^-32."""
    if type(low) is not int or type(high) is not int:
        raise TraceError(f"{name}: bounds must be ints that are known while tracing", hint="give constant ints")
    if not 0 < high - low <= _LONGEST_RANGE:
        raise TraceError(f"{name}: the range from {low} to {high} is empty or too large", hint="give a range of 1 to 2^31 integers")
    words = [_word(tracer, shape, BITS, torch.int64) for _ in range(2)]
    bits = binary(Op.BITWISE_OR, binary(Op.LEFT_SHIFT, words[0], BITS), words[1])
    return cast(add(binary(Op.RIGHT_SHIFT, mul(bits, high - low), 2 * BITS), low), dtype)


@creates("normal")
def torch_normal(tracer: Tracer, mean: Any, std: Any = 1.0, size: Any = None, **settings: Any) -> TracedTensor:
    """Normal numbers; the mean and the standard deviation are numbers or tensors."""
    tensors = [tracer.lift(value) for value in (mean, std) if isinstance(value, torch.Tensor)]
    if size is not None and not tensors:
        return _rescaled(randn(tracer, tuple(size), **settings), mean, std)
    unsupported_argument("normal", size=size, **settings)
    if not tensors:
        raise TraceError("normal of two numbers needs a size", hint="give size")
    like = tensors[0] if len(tensors) == 1 else add(*tensors)
    return _rescaled(randn_like(require_float("normal", like)), mean, std)


def _rescaled(samples: TracedTensor, mean: Any, std: Any) -> TracedTensor:
    return cast(add(mul(samples, std), mean), samples.dtype)


# In place.


@implements("Tensor.uniform_")
def uniform_(input: TracedTensor, *bounds: Any, generator: Any = None, **named: Any) -> TracedTensor:
    """Fills with uniform numbers in [0, 1), or between two bounds."""
    unsupported_argument("uniform_", generator=generator)
    low, high = ({"from": 0.0, "to": 1.0} | dict(zip(("from", "to"), bounds, strict=False)) | named).values()
    low, high = float_setting("from", low), float_setting("to", high)
    return assigned("uniform_", input, add(mul(rand_like(input), high - low), low))


@implements("Tensor.normal_")
def normal_(input: TracedTensor, mean: Any = 0.0, std: Any = 1.0, *, generator: Any = None) -> TracedTensor:
    unsupported_argument("normal_", generator=generator)
    return assigned("normal_", input, _rescaled(randn_like(input), float_setting("mean", mean), float_setting("std", std)))


@implements("Tensor.exponential_")
def exponential_(input: TracedTensor, lambd: Any = 1.0, *, generator: Any = None) -> TracedTensor:
    unsupported_argument("exponential_", generator=generator)
    kind = _float_dtype("exponential_", input.dtype)
    samples = exponential(input._tracer, input._node.shape, _wide(kind))
    return assigned("exponential_", input, cast(mul(samples, 1.0 / float_setting("lambd", lambd)), kind))


@implements("Tensor.bernoulli_")
def bernoulli_(input: TracedTensor, p: Any = 0.5, *, generator: Any = None) -> TracedTensor:
    unsupported_argument("bernoulli_", generator=generator)
    probability = p if isinstance(p, torch.Tensor) else _probability(p)
    return assigned("bernoulli_", input, cast(_bernoulli_mask(input, probability), input.dtype))


# Bernoulli and Gumbel samples.


@implements("bernoulli")
def bernoulli(input: TracedTensor, p: Any = None, *, generator: Any = None) -> TracedTensor:
    """1 with the probability p, by default the input, else 0."""
    unsupported_argument("bernoulli", generator=generator)
    probability = require_float("bernoulli", input) if p is None else p if isinstance(p, torch.Tensor) else _probability(p)
    return cast(_bernoulli_mask(input, probability), input.dtype)


def _probability(p: Any) -> Any:
    if not 0 <= p <= 1:
        raise TraceError("the probability is not in [0, 1]", hint="give p between 0 and 1")
    return float_setting("p", p)


def _bernoulli_mask(input: TracedTensor, probability: Any) -> TracedTensor:
    if isinstance(probability, torch.Tensor):
        probability = input._tracer.lift(probability)
        probability = cast(probability, _wide(probability.dtype))
        return binary(Op.LT, uniform(input._tracer, input._node.shape, probability.dtype), probability)
    return binary(Op.LT, uniform(input._tracer, input._node.shape, torch.float32), probability)


@implements("gumbel_softmax")
def gumbel_softmax(logits: TracedTensor, tau: Any = 1, hard: bool = False, eps: Any = 1e-10, dim: int = -1) -> TracedTensor:
    """Jang, Gu and Poole, Categorical Reparameterization with Gumbel-Softmax (arXiv 1611.01144). A hard sample has the soft one's
    gradient."""
    kind = dtype_of(require_float("gumbel_softmax", logits)).torch
    tracer = logits._tracer
    exponentials = exponential(tracer, logits._node.shape, _wide(kind))
    noise = cast(tracer.add(Op.NEG, tracer.add(Op.LOG, exponentials)), kind)
    soft = softmax(binary(Op.DIV, add(logits, noise), tau), dim)
    if not hard:
        return soft
    axis = normalize_dim(dim, soft.ndim)
    classes = iota(tracer, soft._node.shape[axis]) if soft.ndim else 0
    is_chosen = binary(Op.EQ, movedim(argmax(soft, axis, True), axis, -1), classes)
    one_hot = cast(movedim(is_chosen, -1, axis), kind)
    return add(binary(Op.SUB, one_hot, soft.detach()), soft)
