"""Dropout and random tensors, made of words of 16 random bits.

Each word is a leaf of the graph with a stream of its own (`ir.random`). An element's number depends on the call's key and on the
element's place alone.
"""

from __future__ import annotations

import math
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
from fusegen.trace.functions.common import binary, cast, dtype_of, floats, normalize_dim, setting, unsupported_argument, written
from fusegen.trace.functions.creation import check_settings, full_like, given_sizes, iota
from fusegen.trace.functions.normalization import softmax
from fusegen.trace.functions.pointwise import add, mul, where
from fusegen.trace.functions.reductions import argmax
from fusegen.trace.functions.views import movedim
from fusegen.trace.registry import creates, implements, located
from fusegen.trace.scalars import TracedScalar, dim_of
from fusegen.trace.tracer import Tracer
from fusegen.trace.user import location
from fusegen.trace.values import TracedTensor, assigned

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
        raise ArgumentError(f"dropout of {input.dtype}", hint="convert it to floats, as input.float() does")
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
        raise TraceError(f"{name} of a tensor of {input.ndim} dims", hint=f"give it {' or '.join(map(str, ranks))}")
    shape = input._node.shape
    return dropped(input, p, training, (*shape[:leading], *(1,) * (len(shape) - leading)))


def dropped(input: TracedTensor, p: Any, training: Any, shape: Shape, seed: Any = None) -> TracedTensor:
    """Dropout with a mask of a shape that broadcasts to the input's."""
    if not 0 <= p <= 1:
        raise TraceError("a dropout probability that is not between 0 and 1", hint="give p between 0 and 1")
    if not training or p == 0:
        return input
    dtype = dtype_of(input)
    if p == 1:
        return pointwise.mul(input, 0.0 if dtype.is_float else False if dtype is DType.BOOL else 0)
    if not dtype.is_float:
        raise TraceError(f"dropout of {dtype}", hint="convert to a float dtype first")
    steps = _steps(p)
    return pointwise.mul(input, _noise(input, _mask(input, shape, seed, steps), steps))


def _mask(input: TracedTensor, shape: Shape, seed: Any, steps: Any) -> TracedTensor:
    """True where an element stays."""
    return input._tracer.add(Op.GE, _bits(input, shape, seed), _threshold(input, steps))


def _noise(input: TracedTensor, mask: TracedTensor, steps: Any) -> TracedTensor:
    """The factor of the input, as if in its dtype, and unrounded: one by the share that stays, or 0."""
    tracer = input._tracer
    choices = (mask._position, tracer.lift(_scale(steps))._position, tracer.lift(0.0)._position)
    return tracer.value(tracer.builder.put(Node(Op.WHERE, choices, (), mask._node.shape, dtype_of(input)), location()))


def _steps(p: Any) -> Any:
    """The number of values of an element's bits that drop it: at least one, and not all."""
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
        raise TraceError(f"dropout with a seed of {kind}", hint="give an int")
    if type(seed) is int and seed not in _SEEDS:  # of any other kind of int, a range would look at each element
        raise TraceError("dropout with a seed of more than 64 bits", hint="give one from -2**63 to 2**63 - 1")
    return tracer.add(Op.RANDOM, tracer.lift(seed), shape=shape, dtype=DType.INT16, stream=0)


# Uniform, normal and exponential numbers.

_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Bits of a uniform number: as many as torch draws for the dtype on a CPU."""

_LONGEST_RANGE = 1 << 31
"""The longest range of random integers: their product with a word of 32 bits fits 63."""


def _word(tracer: Tracer, shape: Shape, bits: int, dtype: torch.dtype) -> TracedTensor:
    """Up to 16 random bits as a whole number that is not negative."""
    word = tracer.add(Op.RANDOM, shape=shape, dtype=DType.INT16, stream=tracer.new_stream())
    if bits == BITS:
        return add(cast(word, dtype), 1 << (BITS - 1))
    return cast(binary(Op.BITWISE_AND, word, (1 << bits) - 1), dtype)


def _fraction(tracer: Tracer, shape: Shape, digits: int, dtype: torch.dtype, *, offset: float = 0.0) -> TracedTensor:
    """A uniform number from 0 to 1, with an offset that counts in units of the last digit."""
    last = digits % BITS or BITS
    found = mul(add(_word(tracer, shape, last, dtype), offset) if offset else _word(tracer, shape, last, dtype), 2.0**-digits)
    for end in range(digits - last, 0, -BITS):
        found = add(mul(_word(tracer, shape, BITS, dtype), 2.0**-end), found)
    return found


def uniform(tracer: Tracer, shape: Shape, dtype: torch.dtype) -> TracedTensor:
    """Numbers from 0 up to, not including, 1."""
    return _fraction(tracer, shape, _DIGITS[dtype], dtype)


def exponential(tracer: Tracer, shape: Shape, dtype: torch.dtype) -> TracedTensor:
    """-log(u) of a uniform u, of which neither end is coarse: the lesser of u and 1 - u is drawn, and a coin says which it is."""
    lesser = mul(_fraction(tracer, shape, 64 if dtype is torch.float64 else 32, dtype, offset=0.5), 0.5)
    is_u = binary(Op.LT, _word(tracer, shape, 1, dtype), 1)
    beside = tracer.add(Op.LOG1P, tracer.add(Op.NEG, lesser))
    return tracer.add(Op.NEG, where(is_u, tracer.add(Op.LOG, lesser), beside))


def normal(tracer: Tracer, shape: Shape, dtype: torch.dtype) -> TracedTensor:
    """Box and Muller, A Note on the Generation of Random Normal Deviates (1958): one of the two of each pair of uniform numbers."""
    radius = tracer.add(Op.SQRT, mul(exponential(tracer, shape, dtype), 2.0))
    angle = mul(uniform(tracer, shape, dtype), 2.0 * math.pi)
    return mul(radius, tracer.add(Op.COS, angle))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers are drawn that become ones of a dtype."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _float_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    if dtype not in _DIGITS:
        raise TraceError(f"{name} of {dtype}", hint="give a float dtype")
    return dtype


def _shape(tracer: Tracer, sizes: tuple[Any, ...], settings: dict[str, Any]) -> Shape:
    """The shape of a new tensor, once its other settings are checked."""
    given = given_sizes(tracer, sizes, settings)
    listed = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    return tuple(dim_of(size) for size in listed)


# Tensors of a shape, and of another tensor's.


@creates("rand")
def rand(tracer: Tracer, *sizes: Any, dtype: torch.dtype | None = None, **settings: Any) -> TracedTensor:
    """Uniform numbers of a shape."""
    shape = _shape(tracer, sizes, settings)
    return uniform(tracer, shape, _float_dtype("rand", dtype or torch.get_default_dtype()))


@implements("rand_like")
def rand_like(input: TracedTensor, *, dtype: torch.dtype | None = None, **settings: Any) -> TracedTensor:
    """Uniform numbers of the input's shape."""
    check_settings(input._tracer, settings)
    return uniform(input._tracer, input._node.shape, _float_dtype("rand_like", dtype or input.dtype))


@creates("randn")
def randn(tracer: Tracer, *sizes: Any, dtype: torch.dtype | None = None, **settings: Any) -> TracedTensor:
    """Normal numbers of a shape."""
    shape = _shape(tracer, sizes, settings)
    kind = _float_dtype("randn", dtype or torch.get_default_dtype())
    return cast(normal(tracer, shape, _wide(kind)), kind)


@implements("randn_like")
def randn_like(input: TracedTensor, *, dtype: torch.dtype | None = None, **settings: Any) -> TracedTensor:
    """Normal numbers of the input's shape."""
    check_settings(input._tracer, settings)
    kind = _float_dtype("randn_like", dtype or input.dtype)
    return cast(normal(input._tracer, input._node.shape, _wide(kind)), kind)


@creates("randint")
def randint(tracer: Tracer, *given: Any, dtype: torch.dtype | None = None, **settings: Any) -> TracedTensor:
    """Whole numbers from low (0) up to, not including, high."""
    names = ("high", "size") if len(given) + len(settings.keys() & {"low", "high", "size"}) == 2 else ("low", "high", "size")
    settings = dict(zip(names, given, strict=False)) | settings
    low, high, size = settings.pop("low", 0), settings.pop("high"), settings.pop("size")
    check_settings(tracer, settings)
    return _integers("randint", tracer, tuple(dim_of(s) for s in size), low, high, dtype or torch.int64)


@implements("randint_like")
def randint_like(input: TracedTensor, *bounds: Any, dtype: torch.dtype | None = None, **settings: Any) -> TracedTensor:
    """Whole numbers of the input's shape and dtype; one bound alone is the upper one."""
    named = {"low": 0} | dict(zip(("low", "high") if len(bounds) > 1 else ("high",), bounds, strict=False))
    low, high = (settings.pop(name, named.get(name)) for name in ("low", "high"))
    check_settings(input._tracer, settings)
    return _integers("randint_like", input._tracer, input._node.shape, low, high, dtype or input.dtype)


def _integers(name: str, tracer: Tracer, shape: Shape, low: Any, high: Any, dtype: torch.dtype) -> TracedTensor:
    """The high half of a product of 32 random bits and the number of integers: Lemire, Fast Random Integer Generation in an
    Interval (2019), without the rejection: an integer's share is wrong by 2^-32 at most."""
    if type(low) is not int or type(high) is not int:
        raise TraceError(f"{name} between bounds that are no ints known while tracing", hint="give constant ints")
    if not 0 < high - low <= _LONGEST_RANGE:
        raise TraceError(f"{name} from {low} to {high}", hint="give bounds from 1 to 2^31 apart")
    words = [_word(tracer, shape, BITS, torch.int64) for _ in range(2)]
    bits = binary(Op.BITWISE_OR, binary(Op.LEFT_SHIFT, words[0], BITS), words[1])
    return cast(add(binary(Op.RIGHT_SHIFT, mul(bits, high - low), 2 * BITS), low), dtype)


@creates("normal")
def torch_normal(tracer: Tracer, mean: Any, std: Any = 1.0, size: Any = None, **settings: Any) -> TracedTensor:
    """Normal numbers around one mean, or around the elements of a tensor; deviations may be those of a tensor, too."""
    tensors = [tracer.lift(value) for value in (mean, std) if isinstance(value, torch.Tensor)]
    if size is not None and not tensors:
        return _moved(randn(tracer, tuple(size), **settings), mean, std)
    unsupported_argument("normal", size=size, **settings)
    if not tensors:
        raise TraceError("normal of two numbers without a size", hint="give size")
    like = tensors[0] if len(tensors) == 1 else add(*tensors)
    return _moved(randn_like(floats("normal", like)), mean, std)


def _moved(found: TracedTensor, mean: Any, std: Any) -> TracedTensor:
    return cast(add(mul(found, std), mean), found.dtype)


# In place.


@implements("Tensor.uniform_")
def uniform_(input: TracedTensor, *bounds: Any, generator: Any = None, **named: Any) -> TracedTensor:
    """Uniform numbers from one bound (0) to another (1)."""
    unsupported_argument("uniform_", generator=generator)
    low, high = ({"from": 0.0, "to": 1.0} | dict(zip(("from", "to"), bounds, strict=False)) | named).values()
    low, high = setting("from", low), setting("to", high)
    return assigned("uniform_", input, add(mul(rand_like(input), high - low), low))


@implements("Tensor.normal_")
def normal_(input: TracedTensor, mean: Any = 0.0, std: Any = 1.0, *, generator: Any = None) -> TracedTensor:
    """Normal numbers."""
    unsupported_argument("normal_", generator=generator)
    return assigned("normal_", input, _moved(randn_like(input), setting("mean", mean), setting("std", std)))


@implements("Tensor.exponential_")
def exponential_(input: TracedTensor, lambd: Any = 1.0, *, generator: Any = None) -> TracedTensor:
    """Exponential numbers of a rate."""
    unsupported_argument("exponential_", generator=generator)
    kind = _float_dtype("exponential_", input.dtype)
    found = exponential(input._tracer, input._node.shape, _wide(kind))
    return assigned("exponential_", input, cast(mul(found, 1.0 / setting("lambd", lambd)), kind))


@implements("Tensor.bernoulli_")
def bernoulli_(input: TracedTensor, p: Any = 0.5, *, generator: Any = None) -> TracedTensor:
    """1 with a probability, else 0."""
    unsupported_argument("bernoulli_", generator=generator)
    share = p if isinstance(p, torch.Tensor) else _probability(p)
    return assigned("bernoulli_", input, cast(_coins(input, share), input.dtype))


# Coins.


@implements("bernoulli")
def bernoulli(input: TracedTensor, p: Any = None, *, generator: Any = None) -> TracedTensor:
    """1 with the probability that an element is, or with one for all, else 0."""
    unsupported_argument("bernoulli", generator=generator)
    share = floats("bernoulli", input) if p is None else p if isinstance(p, torch.Tensor) else _probability(p)
    return cast(_coins(input, share), input.dtype)


def _probability(p: Any) -> Any:
    if not 0 <= p <= 1:
        raise TraceError("a probability that is not between 0 and 1", hint="give p between 0 and 1")
    return setting("p", p)


def _coins(input: TracedTensor, share: Any) -> TracedTensor:
    """True with a probability: where a uniform number is below it."""
    if isinstance(share, torch.Tensor):
        share = input._tracer.lift(share)
        share = cast(share, _wide(share.dtype))
        return binary(Op.LT, uniform(input._tracer, input._node.shape, share.dtype), share)
    return binary(Op.LT, uniform(input._tracer, input._node.shape, torch.float32), share)


@implements("gumbel_softmax")
def gumbel_softmax(logits: TracedTensor, tau: Any = 1, hard: bool = False, eps: Any = 1e-10, dim: int = -1) -> TracedTensor:
    """Jang, Gu and Poole, Categorical Reparameterization with Gumbel-Softmax (arXiv 1611.01144). A hard sample has the gradient of
    the soft one."""
    kind = dtype_of(floats("gumbel_softmax", logits)).torch
    tracer = logits._tracer
    waiting = exponential(tracer, logits._node.shape, _wide(kind))
    noise = cast(tracer.add(Op.NEG, tracer.add(Op.LOG, waiting)), kind)
    soft = softmax(binary(Op.DIV, add(logits, noise), tau), dim)
    if not hard:
        return soft
    place = normalize_dim(dim, soft.ndim)
    numbers = iota(tracer, soft._node.shape[place]) if soft.ndim else 0
    is_chosen = binary(Op.EQ, movedim(argmax(soft, place, True), place, -1), numbers)
    one = cast(movedim(is_chosen, -1, place), kind)
    return add(binary(Op.SUB, one, soft.detach()), soft)
