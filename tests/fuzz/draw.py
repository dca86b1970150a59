"""Draws programs: inputs, then steps that fit what is there. Each step runs eagerly, which says what it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.fuzz.choices import (
    Draw,
    State,
    between,
    broadcast,
    is_float,
    is_integer,
    is_stored_only,
    number,
    partner,
    permutations,
    pick,
)
from tests.fuzz.draw_twice import alike, equal_results, numbers, twice
from tests.fuzz.program import Input, Program, Storage

EXTENTS = (4, 1, 2, 3, 5, 7, 8, 16, 17, 31, 32, 33, 64, 65, 128, 6, 24)
LONG = (257, 1000, 1024, 4097, 20000)
FLOATS = ("float32", "bfloat16", "float16", "float64")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
DTYPES = (*FLOATS, *INTEGERS, "bool")
EIGHTS = ("float8_e4m3fn", "float8_e5m2")
"""Types in which nothing is computed: what is of one is moved, converted or returned."""
_CHANNELS = 64  # that kernels of products and attention take
KEYS = (64, 63, 65, 127, 128, 129, 1)
"""Around multiples of what a step of attention takes."""
SCALARS = ((), (), (), (0.37,), (3,), (-1.5, 2), (0.999,), (0.1, 3), (1e-8, 0.9))
LAYOUTS = ("contiguous", "contiguous", "permuted", "stepped", "gapped", "offset", "repeated")

UNARY = (
    "-{0}", "{0}.abs()", "torch.sign({0})", "torch.floor({0})", "torch.ceil({0})", "torch.trunc({0})", "torch.round({0})",
    "torch.exp({0})", "torch.exp2({0})", "torch.expm1({0})", "torch.log({0})", "torch.log1p({0})", "torch.log2({0})", "{0} << 2",
    "{0} >> 1", "torch.sqrt({0})",
    "torch.rsqrt({0})", "torch.sin({0})", "torch.cos({0})", "torch.tanh({0})", "torch.erf({0})", "torch.sigmoid({0})",
    "torch.reciprocal({0})", "torch.square({0})", "torch.relu({0})", "F.silu({0})", "F.gelu({0})",
    "F.gelu({0}, approximate='tanh')", "F.softplus({0})", "F.softplus({0}, 2.0, 3.0)", "F.leaky_relu({0})",
    "F.leaky_relu({0}, 0.25)", "F.elu({0})", "F.elu({0}, 0.5)", "F.mish({0})", "F.hardsigmoid({0})", "F.hardswish({0})",
    "F.logsigmoid({0})", "F.relu6({0})", "{0}.clamp(-1, 2)", "{0}.clamp(min=0.5)", "{0}.clamp(max=1)", "0.5 * {0}", "{0} * 3",
    "{0} + 1", "2 - {0}", "{0} - 0.1", "1 / {0}", "{0} / 4", "{0} // 2", "{0} // 0.7", "{0} % 3", "{0} % -1.5", "{0} ** 2",
    "{0} ** 3", "{0} ** -0.5", "{0}.abs() ** 1.7", "1.5 ** {0}", "torch.div({0}, 3, rounding_mode='floor')",
    "torch.div({0}, 1.25, rounding_mode='trunc')", "torch.full_like({0}, 3)", "torch.zeros_like({0})", "{0}.contiguous().detach()",
    "fg.dropout({0}, 0.3, seed=5) if {0}.is_floating_point() else {0}",
    "F.celu({0})", "F.celu({0}, 0.5)", "torch.sinh({0}.clamp(-4, 4))", "torch.cosh({0}.clamp(-4, 4))", "F.hardtanh({0}, -2, 0.5)",
    "torch.asin({0}.clamp(-0.75, 0.75))", "torch.acos({0}.clamp(-0.75, 0.75))", "torch.asinh({0})", "torch.acosh({0}.abs() + 1.5)",
    "torch.erfc({0})", "torch.lgamma({0})", "torch.digamma({0}.abs() + 0.5)",
    "torch.erfinv({0}.sigmoid())",
    "torch.sinc({0})", "torch.logit({0}.clamp(0.125, 0.875))", "torch.special.entr({0}.abs())",
    "torch.rsub({0}, 1.5)", "{0} * {0}.shape[0]", "{0} * {0}", "({0} + 1).log1p() if {0}.is_floating_point() else {0}",
)  # fmt: skip
PREDICATES = (
    "{0} > 0", "{0} >= 1", "{0} < 0.25", "{0} <= -1", "{0} == 1", "{0} != 0", "torch.isnan({0})", "torch.isinf({0})",
    "torch.isfinite({0})", "torch.logical_not({0})", "0.1 == {0}",
)  # fmt: skip
BINARY = (
    "{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / {1}", "torch.maximum({0}, {1})", "torch.minimum({0}, {1})",
    "torch.add({0}, {1}, alpha=2)", "torch.sub({0}, {1}, alpha=0.5)", "{0} // {1}", "{0} % {1}", "{0}.abs() ** {1}", "{0} ** {1}",
    "torch.addcmul({0}, {1}, {0}, value=0.5)", "torch.lerp({0}, {1}, 0.25)", "torch.where({0} > {1}, {0}, {1})",
    "{0}.masked_fill({1} > 0, 0.5)", "torch.where({1} < 0.5, {0}, -1)", "{0}.type_as({1})", "torch.floor_divide({0}, {1})",
    "torch.fmod({0}, {1})", "torch.xlogy({0}, {1})", "torch.special.xlog1py({0}, {1}.abs())",
    "torch.hypot({0}, {1})", "F.huber_loss({0}, {1}, 'none')", "F.prelu({0}, {1}.reshape(-1)[:1])",
    "F.smooth_l1_loss({0}, {1}, reduction='none', beta=0.3)", "torch.atan2({0}, {1})",
    "F.binary_cross_entropy({0}.sigmoid(), {1}.sigmoid() + 0 * {0}, reduction='none')",
)  # fmt: skip
COMPARISONS = (
    "{0} == {1}", "{0} != {1}", "{0} < {1}", "{0} <= {1}", "{0} > {1}", "{0} >= {1}", "torch.logical_and({0}, {1})",
    "torch.logical_or({0}, {1})", "torch.logical_xor({0}, {1})", "{0} & {1}", "{0} | {1}", "{0} ^ {1}",
)  # fmt: skip
OF_BOOLS = (
    "{0} & {1}", "{0} | {1}", "{0} ^ {1}", "~{0}", "torch.where({0}, {1}, {2})", "{2}.masked_fill({0}, 2)", "{0} * {1}",
    "{0} + {1}", "{1}.where({0}, {2})", "{0}.where({1} > 0, {2} > 0)", "{2}.where(~{0}, -1)",
)  # fmt: skip


@st.composite
def programs(draw: Draw, most_steps: int = 12, tiny: bool = False) -> Program:
    """Programs of all kinds.

    Args:
        most_steps: their length.
        tiny: only some hundred elements, as the emulator takes them.
    """
    shape = _shape(draw, tiny)
    storages, inputs = _inputs(draw, shape)
    scalars = pick(draw, SCALARS)
    program = Program(storages, inputs, scalars, (), ())
    space: dict[str, Any] = {"torch": torch}
    exec(program.tensors_text(), space)
    first = [space[program.name_of(k)] for k in range(len(inputs) + len(scalars))]
    state = State(first, max(4 * torch.Size(shape).numel(), 64 if tiny else 512))
    for k, value in enumerate(first):
        if is_stored_only(value):
            state.add("{0}.float()", k)
    if _has_channels(shape):
        (_attention if len(shape) == 4 else _product)(draw, state)
    for each in (*([numbers] if scalars else []), *pick(draw, ((), (), (twice,), (alike,)))):
        each(draw, state)
    for _ in range(between(draw, 1, most_steps)):
        KINDS[pick(draw, WEIGHTED)](draw, state)
    return _finished(draw, program, state)


def _finished(draw: Draw, program: Program, state: State) -> Program:
    """The program of what was drawn, without what no result needs."""
    first = len(program.inputs) + len(program.scalars)
    if not state.steps:
        state.add("torch.zeros_like({0})", 0)
    last = len(state.values) - 1
    others = [between(draw, first, last) for _ in range(pick(draw, (0, 0, 1, 2)))]
    wanted = equal_results(draw, state, list(dict.fromkeys([*others, last])))
    return Program(program.storages, program.inputs, program.scalars, tuple(state.steps), tuple(wanted)).without_idle()


# Inputs.


def _shape(draw: Draw, tiny: bool) -> tuple[int, ...]:
    """A shape that most inputs are a part of."""
    extents = EXTENTS[:7] if tiny else EXTENTS
    rank = pick(draw, [2, 1, 3, 2, 4, 3])
    shape = [pick(draw, extents) for _ in range(rank)]
    special = between(draw, 0, 24)
    if special == 24:
        shape[between(draw, 0, rank - 1)] = 0
    elif special >= 22 and not tiny:
        shape = [*(min(s, 3) for s in shape[-2:-1]), pick(draw, LONG)]
    elif special >= 20 and not tiny:
        heads = (pick(draw, (1, 2)), pick(draw, (1, 2))) if special == 20 else ()
        return (*heads, pick(draw, (64, 16, 17)), _CHANNELS)
    for dim in range(len(shape) if torch.Size(shape).numel() > (160 if tiny else 20000) else 0):
        shape[dim] = min(shape[dim], 2 if dim < len(shape) - 1 else 4000)
    return tuple(shape)


def _has_channels(shape: Sequence[int]) -> bool:
    """True if it starts with a matmul or with attention."""
    return len(shape) in (2, 4) and shape[-1] == _CHANNELS and shape[-2] in (64, 16, 17)


def _inputs(draw: Draw, shape: tuple[int, ...]) -> tuple[tuple[Storage, ...], tuple[Input, ...]]:
    main = pick(draw, FLOATS[1:3] if _has_channels(shape) else [*FLOATS[:3], *DTYPES])
    storages: list[Storage] = []
    inputs: list[Input] = []
    keys = pick(draw, KEYS)
    for count in range(pick(draw, [2, 1, 3, 2, 4]) if len(shape) < 4 or not _has_channels(shape) else 3):
        again = between(draw, 0, 9) if count else 0
        if again >= 8:
            equal = again == 8 and not _has_channels(shape)
            inputs.append(_equal(inputs[-1], storages) if equal else _aliased(draw, inputs[-1]))
            continue
        part = shape if not count else _part(draw, shape)
        if _has_channels(shape) and count < len(shape) - 1:  # of a product or of attention, which lie as kernels want them
            part = (*shape[:-2], keys if len(shape) == 4 else 64, _CHANNELS) if count else shape
            dtype, (strides, offset, size) = main, _layout(draw, part, LAYOUTS[:3])
        else:
            dtype = main if between(draw, 0, 3) < 3 else pick(draw, (*DTYPES, *EIGHTS))
            strides, offset, size = _layout(draw, part)
        storages.append(Storage(size, dtype, _filling(draw, dtype), seed=count))
        hidden = count > 0 and 0 not in part and between(draw, 0, 9) == 9
        inputs.append(Input(len(storages) - 1, part, strides, offset, hidden))
    return tuple(storages), tuple(inputs)


def _equal(other: Input, storages: list[Storage]) -> Input:
    """A tensor of the same elements in other memory."""
    storages.append(storages[other.storage])
    return replace(other, storage=len(storages) - 1, hidden=False)


def _aliased(draw: Draw, other: Input) -> Input:
    """The same tensor again, its transpose, or a part that overlaps it."""
    kind = pick(draw, ["same", "transposed", "part"])
    shape, strides, offset = other.shape, other.strides, other.offset
    if kind == "transposed":
        shape, strides = shape[::-1], strides[::-1]
    elif kind == "part" and shape and shape[0] > 1:
        shape, offset = (shape[0] - 1, *shape[1:]), offset + strides[0]
    return Input(other.storage, shape, strides, offset)


def _part(draw: Draw, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to another one, mostly the same; or, as a weight, a square of its last extent."""
    kind = pick(draw, ["same", "same", "last", "ones", "leading one", "weight", "scalar"])
    if kind == "same":
        return shape
    if kind == "last":
        return shape[-1:]
    if kind == "ones":
        return tuple(1 if pick(draw, (False, True)) else s for s in shape)
    if kind == "weight" and shape[-1] <= 65:
        return (pick(draw, [4, 8, 3, 16]), shape[-1])
    return (1, *shape[1:]) if kind == "leading one" else ()


def _layout(draw: Draw, shape: tuple[int, ...], kinds: Sequence[str] = LAYOUTS) -> tuple[tuple[int, ...], int, int]:
    """Strides, an offset, and the elements of memory that they need."""
    kind = pick(draw, kinds)
    order = list(range(len(shape)))
    if kind == "permuted" and len(shape) > 1:
        order = draw(permutations(len(order)))
    strides = [0] * len(shape)
    step = 2 if kind == "stepped" else 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
        if kind == "gapped" and dim == order[-1]:
            step += 3
    if kind == "repeated" and shape:
        strides[between(draw, 0, len(shape) - 1)] = 0
    offset = pick(draw, [1, 2, 3, 8]) if kind == "offset" or between(draw, 0, 9) == 9 else 0
    span = 1 + sum((max(size, 1) - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return tuple(strides), offset, offset + span + max(strides, default=0)


def _filling(draw: Draw, dtype: str) -> str:
    if dtype == "bool":
        return "flags"
    if dtype in (*FLOATS, *EIGHTS):
        return pick(draw, ("normal",) * 6 + ("positive", "positive", "moved", "small", "hard"))
    return pick(draw, ("small", "small", "natural", "natural", "wide"))


# Steps.


def _unary(draw: Draw, state: State) -> None:
    x = number(draw, state, is_float) if pick(draw, (False, True)) else None
    x = number(draw, state) if x is None else x
    if x is not None:
        state.add(pick(draw, UNARY), x)


def _predicate(draw: Draw, state: State) -> None:
    x = number(draw, state)
    if x is not None:
        state.add(pick(draw, PREDICATES), x)


def _binary(draw: Draw, state: State) -> None:
    x = number(draw, state)
    if x is not None:
        pair = [x, partner(draw, state, x)]
        call = pick(draw, BINARY if between(draw, 0, 4) else COMPARISONS)
        state.add(call, *(pair if pick(draw, (False, True)) else pair[::-1]))


def _choice(draw: Draw, state: State) -> None:
    condition = number(draw, state, lambda x: x.dtype is torch.bool)
    if condition is None:
        return _predicate(draw, state)
    a = partner(draw, state, condition)
    b = partner(draw, state, condition)
    state.add(pick(draw, OF_BOOLS), condition, a, b)
    return None


BITS = ("{0} | {1}", "{0} & {1}", "{0} ^ {1}", "{0} & 3", "~{0}", "{0} << 1", "{0} >> 2")


def _bits(draw: Draw, state: State) -> None:
    x = number(draw, state, is_integer)
    if x is not None:
        state.add(pick(draw, BITS), x, partner(draw, state, x, is_integer))


def _cast(draw: Draw, state: State) -> None:
    x = number(draw, state)
    if x is None:
        return
    dtype = pick(draw, (*DTYPES, *EIGHTS))
    found = state.add(f"{{0}}.to(torch.{dtype})", x)
    if dtype in EIGHTS and found is not None:
        moved = state.add(pick(draw, MOVES), found)
        state.add("{0}.float()", found if moved is None else moved)


MOVES = ("{0}.contiguous()", "{0}.mT", "torch.stack([{0}, {0}])", "{0}[..., 1:]", "torch.where({0} == {0}, {0}, 1.0)", "{0}.abs()")
"""The 8-bit floats."""


def _dims(draw: Draw, rank: int) -> tuple[int, ...]:
    if pick(draw, (False, True)):
        return (rank - 1,)
    first, last = sorted((between(draw, 0, rank - 1), between(draw, 0, rank - 1)))
    return tuple(range(first, last + 1)) if pick(draw, (True, True, False)) else tuple(sorted({first, last}))


REDUCTIONS = (
    "{{0}}.sum({dims}, keepdim={keep})", "{{0}}.sum({dims}, keepdim={keep})", "{{0}}.mean({dims}, keepdim={keep})",
    "{{0}}.amax({dims}, keepdim={keep})", "{{0}}.amin({dims}, keepdim={keep})", "{{0}}.var({dims}, correction=0, keepdim={keep})",
    "{{0}}.std({dims}, correction=1, keepdim={keep})",
    "{{0}}.norm(2, {dims}, {keep})", "{{0}}.norm(3, {dims}, {keep})", "torch.logsumexp({{0}}, {dims}, {keep})",
    "{{0}}.sum({dims}, dtype=torch.float32)", "{{0}} - {{0}}.amax({dims}, keepdim=True)", "{{0}} / {{0}}.sum({dims}, keepdim=True)",
    "{{0}} - {{0}}.mean({dims}, keepdim=True)", "{{0}}.sum()", "{{0}}.max()", "{{0}}.min()", "{{0}}.prod({dims}[0], {keep})",
    "{{0}}.max({dims}[0], {keep}).values", "{{0}}.min({dims}[-1], {keep}).indices", "{{0}}.argmax({dims}[-1], {keep})",
    "{{0}}.cumsum({dims}[-1])", "{{0}}.cumprod({dims}[0])", "{{0}}.cummax({dims}[0]).values", "{{0}}.cummin({dims}[-1]).values",
    "{{0}}.cummax({dims}[-1]).indices", "{{0}}.cummin({dims}[0]).indices", "{{0}}.mul(1.0).logcumsumexp({dims}[-1])",
    "{{0}}.sort({dims}[-1]).values", "{{0}}.sort(dim={dims}[0], descending=True, stable=True).indices",
    "{{0}}.topk(1, {dims}[-1], {keep}).values",
    "{{0}}.topk(1, {dims}[-1], {keep}).indices", "{{0}}.sort(-1, {keep}).values[..., :3].softmax(-1)",
    "{{0}}.kthvalue(1, {dims}[0], {keep}).values", "{{0}}.median({dims}[-1], {keep}).values",
)  # fmt: skip


def _reduction(draw: Draw, state: State) -> None:
    x = number(draw, state, lambda t: t.dim() > 0)
    if x is not None:
        dims, keep = _dims(draw, state.values[x].dim()), pick(draw, (False, True))
        state.add(pick(draw, REDUCTIONS).format(dims=dims, keep=keep), x)


def _normalization(draw: Draw, state: State) -> None:
    x = number(draw, state, lambda t: t.dim() > 0 and t.is_floating_point())
    if x is None:
        return
    shape = tuple(state.values[x].shape)
    count = pick(draw, [1, 1, 2]) if len(shape) > 1 else 1
    weights = [k for k in state.tensors() if tuple(state.values[k].shape) == shape[-count:] and state.values[k].is_floating_point()]
    weight = pick(draw, weights) if weights and pick(draw, (False, True)) else None
    normalized = f"{{0}}.shape[{-count}:]"
    dim = between(draw, -1, len(shape) - 1)
    calls = [f"torch.softmax({{0}}, {dim})", f"torch.log_softmax({{0}}, {dim})"]
    calls += [f"F.layer_norm({{0}}, {normalized})", f"F.rms_norm({{0}}, {normalized}, eps=1e-5)"]
    if weight is not None:
        calls = [f"F.layer_norm({{0}}, {normalized}, {{1}}, {{1}})", f"F.layer_norm({{0}}, {normalized}, {{1}})"]
        calls += [f"F.rms_norm({{0}}, {normalized}, {{1}}, 1e-6)"]
    state.add(pick(draw, calls), *((x,) if weight is None else (x, weight)))


def _view(draw: Draw, state: State) -> None:
    x = number(draw, state, lambda t: t.dim() > 0)
    if x is not None:
        shape = tuple(state.values[x].shape)
        state.add(_view_call(draw, shape, between(draw, 0, len(shape) - 1)), x)


def _view_call(draw: Draw, shape: tuple[int, ...], dim: int) -> str:
    """A view of a tensor of a shape, of one dim or of all."""
    rank, size = len(shape), shape[dim]
    colons = ":, " * dim
    half = max(size // 2, 1)
    start = between(draw, 0, max(size - 1, 0))
    order = tuple(draw(permutations(rank)))
    choices = [
        f"{{0}}.permute({order})", f"{{0}}.transpose({dim}, -1)", f"{{0}}[{colons}{start}:]", f"{{0}}[{colons}::2]",
        f"{{0}}[{colons}{start}::3]",
        f"{{0}}[{colons}:{half}]", f"{{0}}[{colons}-{half}:]", f"{{0}}.select({dim}, {start})",
        f"{{0}}.narrow({dim}, {start}, {max(size - start, 0)})",
        "{0}.flatten()", "{0}.reshape(-1, {0}.shape[-1])", f"{{0}}.unsqueeze({dim})", "{0}.squeeze()", f"{{0}}.movedim({dim}, 0)",
        f"{{0}}.unsqueeze({dim}).expand({', '.join(['-1'] * dim + ['2'] + ['-1'] * (rank - dim))})",
        f"torch.cat([{{0}}[{colons}{half}:], -{{0}}[{colons}:{half}]], {dim})", f"torch.stack([{{0}}, {{0}}], {dim})",
        f"torch.cat([{{0}}, {{0}}], {dim})", f"{{0}}.chunk(2, {dim})[0]", f"{{0}}.chunk(2, {dim})[-1]",
        f"{{0}}.split({half}, {dim})[-1]",
        f"{{0}}.unbind({dim})[0]", "{0}.flatten(0, 1)", f"{{0}}.unflatten({dim}, (-1, {half}))", "{0}[..., None]", "{0}.mT",
        "torch.tril({0})",
        "torch.triu({0}, 1)", f"{{0}}[{colons}{start}]", f"{{0}}[{colons}:0]",
    ]  # fmt: skip
    return pick(draw, choices)


def _indexing(draw: Draw, state: State) -> None:
    """Elements that a value of integers names: an input as it is, where torch finds all of them, or anything within the dim."""
    x, i = number(draw, state, lambda t: t.dim() > 0), number(draw, state, is_integer)
    if x is None:
        return
    size, dim = state.values[x].shape, between(draw, 0, state.values[x].dim() - 1)
    colons = ":, " * dim
    if i is None or not pick(draw, (True, True, True, False)):
        first = between(draw, 0, 3)
        index = f"(torch.arange({max(size[dim] // 2, 1)}, device={{0}}.device) + {first})"
        calls = [f"{{0}}[{colons}{index}]", f"{{0}}[{colons}{index} - {size[dim]}]", f"{{0}}.index_select({dim}, {index} % 2)"]
        state.add(pick(draw, calls), x)
        return
    inside = f"({{1}} % {max(size[dim], 1)}).long()"
    is_input = i < len(state.values) - len(state.steps)
    index = pick(draw, (["{1}", "{1}.long()"] if is_input else []) + [inside])
    calls = [
        f"{{0}}[{colons}{index}]", f"{{0}}.index_select({dim}, {index}.flatten())", f"{{0}}.gather({dim}, {index})",
        f"torch.take_along_dim({{0}}, {inside}, {dim})", f"F.embedding({index}, {{0}})", f"{{0}}[..., None, {index}]",
        f"{{0}}.index_add({dim}, {inside}.flatten(), {{0}}.index_select({dim}, {inside}.flatten()))",
        f"{{0}}.scatter_add({dim}, {inside}, {{0}}.gather({dim}, {inside}))",
        f"{{0}}.index_put(({inside},), {{0}}[{inside}], accumulate=True)", f"{{0}}.index_put(({inside},), {{0}}[{inside}].neg())",
    ]  # fmt: skip
    if len(size) > 1:
        two = f"({{1}} % {max(size[0], 1)}).long(), ({{1}} % {max(size[1], 1)}).long() - {size[1]}"
        calls.append(f"{{0}}[{two}]")
    state.add(pick(draw, calls), x, i)


def _concatenation(draw: Draw, state: State) -> None:
    x = number(draw, state, lambda t: t.dim() > 0)
    if x is not None:
        shape = state.values[x].shape
        dim = between(draw, 0, len(shape) - 1)
        fitting = [k for k in state.tensors() if _joins(shape, state.values[k].shape, dim)]
        state.add(f"torch.cat([{{0}}, {{1}}], {dim})", x, pick(draw, fitting))


def _joins(a: Sequence[int], b: Sequence[int], dim: int) -> bool:
    return len(a) == len(b) and all(m == n or d == dim for d, (m, n) in enumerate(zip(a, b, strict=True)))


def _coordinate(draw: Draw, state: State) -> None:
    """Something with the numbers of the elements along a dim."""
    x = number(draw, state, lambda t: t.dim() > 0)
    if x is not None:
        calls = (
            "{0} * torch.arange({0}.shape[-1], device={0}.device)",
            "{0} + torch.arange({0}.shape[-1], dtype=torch.float32, device={0}.device)",
            "torch.where(torch.arange({0}.shape[-1], device={0}.device) % 2 == 0, {0}, {0} + {0})",
            "{0} * torch.arange({0}.shape[0], device={0}.device).reshape(-1, *[1] * ({0}.dim() - 1))",
            "{0} + torch.ones((), device={0}.device)",
            "{0} * torch.full((), 0.5, dtype=torch.float64, device={0}.device)",
        )  # fmt: skip
        state.add(pick(draw, calls), x)


def _product(draw: Draw, state: State) -> None:
    a = number(draw, state, lambda t: t.dim() > 0 and t.is_floating_point())
    if a is None:
        return
    first = state.values[a]
    fitting = [(k, t) for k, t in product(state.tensors(), ("", ".mT")) if _multiplies(first, state.values[k], t)]
    if not fitting:
        return
    b, transposed = pick(draw, fitting)
    ending = pick(draw, ["", "", ".relu()", " * 0.5", " + 1"])
    state.add(f"({{0}} @ {{1}}{transposed}){ending}", a, b)


def _multiplies(a: Tensor, b: Tensor, transposed: str) -> bool:
    if b.dim() < 2 or a.dtype is not b.dtype or not a.is_floating_point():
        return False
    shape = b.shape if not transposed else (*b.shape[:-2], b.shape[-1], b.shape[-2])
    return a.shape[-1] == shape[-2] and (b.dim() == 2 or broadcast(a.shape[:-2], b.shape[:-2]))


_ROWS = "torch.arange({0}.shape[-2], device={0}.device)[:, None] % 3 > 0"
_MASK = f"(({_ROWS}) & (torch.arange({{1}}.shape[-2], device={{0}}.device) % 5 != 1))"
"""Some rows are masked as a whole."""


def _attends(a: Tensor, b: Tensor, *, v: bool = False) -> bool:
    """True if b can be keys of the queries a, or values of the keys a."""
    same = a.dtype is b.dtype and a.dim() == b.dim() and (a.shape[:-2], a.shape[-1]) == (b.shape[:-2], b.shape[-1])
    return same and (not v or a.shape == b.shape)


def _attention(draw: Draw, state: State) -> None:
    q = number(draw, state, lambda t: t.dim() > 2 and t.is_floating_point())
    if q is None:
        return _product(draw, state)
    k = pick(draw, [k for k in state.tensors() if _attends(state.values[q], state.values[k])])
    v = pick(draw, [v for v in state.tensors() if _attends(state.values[k], state.values[v], v=True)])
    calls = (
        "F.scaled_dot_product_attention({0}, {1}, {2})", "F.scaled_dot_product_attention({0}, {1}, {2}, is_causal=True)",
        "torch.softmax({0} @ {1}.mT * 0.3, -1) @ {2}", "torch.softmax(({0} @ {1}.mT).tanh() * 2, -1) @ {2}",
        f"F.scaled_dot_product_attention({{0}}, {{1}}, {{2}}, attn_mask={_MASK})",
        f"F.scaled_dot_product_attention({{0}}, {{1}}, {{2}}, attn_mask=torch.where({_MASK}, 0.0, float('-inf')).to({{0}}.dtype))",
        f"torch.softmax(({{0}} @ {{1}}.mT + torch.where({_MASK}, 0.0, -1e30)) * 0.3, -1) @ {{2}}",
    )  # fmt: skip
    state.add(pick(draw, calls), q, k, v)
    return None


KINDS: dict[str, Callable[[Draw, State], None]] = {
    "unary": _unary, "binary": _binary, "view": _view, "reduction": _reduction, "cast": _cast, "choice": _choice,
    "predicate": _predicate,
    "normalization": _normalization, "concatenation": _concatenation, "coordinate": _coordinate, "product": _product,
    "attention": _attention,
    "bits": _bits, "indexing": _indexing, "twice": twice, "alike": alike, "numbers": numbers,
}  # fmt: skip
WEIGHTED = [
    *["unary"] * 7, *["binary"] * 6, *["view"] * 5, *["reduction"] * 4, *["cast"] * 2, *["choice"] * 2, "predicate",
    "normalization", "normalization", "concatenation", "coordinate", "product", "attention", "bits", "bits",
    *["indexing"] * 2, *["twice"] * 4, "alike", "alike", *["numbers"] * 3,
]  # fmt: skip
