"""Functions of torch that are steps of calls: matrix products, into memory that is there, and those that allocate their results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from fusegen.errors import UnsupportedError
from fusegen.program.call import MatrixProduct, StridedOperand

ResultTypes: TypeAlias = Sequence[tuple[int, torch.dtype]]
"""Results by number, each with the dtype in which it will lie."""

_ATEN: Any = torch.ops.aten
_ALIGNMENT = 16
FAR = 1 << 31
"""Elements between the first and the last of a matrix from where on cuBLAS reads at wrong addresses."""


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b, which is not rounded on the way when the result is of float32 and the operands of 16 bits.

    Args:
        a, b: (…, m, k) and (…, k, n), of one dtype; their leading dims broadcast.
        out: (…, m, n), contiguous, of their dtype or of float32.
    """
    a, b = _near(a), _near(b)
    if out.dtype is a.dtype:
        torch.matmul(a, b, out=out)
    elif not out.is_cuda:
        torch.matmul(a.to(out.dtype), b.to(out.dtype), out=out)
    elif b.dim() == 2:
        torch.mm(a.reshape(-1, a.shape[-1]), b, out_dtype=out.dtype, out=out.view(-1, out.shape[-1]))
    else:
        torch.bmm(_batched(a, out), _batched(b, out), out_dtype=out.dtype, out=out.view(-1, *out.shape[-2:]))


def multiply_into(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out += a @ b, which is not rounded on the way.

    Args:
        a, b: (m, k) and (k, n), of one dtype.
        out: (m, n), of their dtype or of float32.
    """
    a, b = _near(a), _near(b)
    if out.dtype is a.dtype:
        torch.addmm(out, a, b, out=out)
    elif out.is_cuda:
        _ATEN.addmm.dtype_out(out, a, b, out.dtype, out=out)
    else:
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), out=out)


def _batched(operand: Tensor, out: Tensor) -> Tensor:
    """An operand with one leading dim, as many as the result has."""
    return operand.expand(*out.shape[:-2], *operand.shape[-2:]).reshape(-1, *operand.shape[-2:])


def _near(operand: Tensor) -> Tensor:
    """An operand whose elements do not lie too far from each other: a copy of one whose strides leave holes of gigabytes."""
    reach = sum((extent - 1) * stride for extent, stride in zip(operand.shape, operand.stride(), strict=True))
    return operand if reach < FAR or operand.is_contiguous() else operand.contiguous()


def scatter_add(wanted: ResultTypes, length: int, rows: Tensor, index: Tensor) -> list[Tensor]:
    """Sums of those rows of which the index names the sum, in float32 at least, in the same order at each call: (length, width).

    Args:
        wanted: the dtype of the only result.
        rows: (n, width).
        index: (n,), int32 or int64, from 0 to below the length.
    """
    ((_, dtype),), shape = wanted, (length, rows.shape[1])
    total = torch.float32 if rows.is_floating_point() and rows.itemsize < 4 else rows.dtype
    rows, placed = (rows.to(total), total) if rows.itemsize == 1 else (rows, dtype)  # torch cannot place 8-bit floats
    if rows.is_cuda and rows.is_floating_point() and len(rows):
        return [_sums_of_runs(shape, placed, rows, index, total).to(dtype)]
    return [rows.new_zeros(shape, dtype=total).index_add_(0, index, rows.to(total)).to(dtype)]


def last(_: ResultTypes, length: int, index: Tensor) -> list[Tensor]:
    """The last place of each number below the length in the index; -1 for a number that is not there: (length,).

    Args:
        index: (n,), int64, from 0 to below the length.
    """
    places = torch.arange(len(index), device=index.device)
    return [index.new_full((length,), -1).scatter_reduce_(0, index, places, "amax")]


def topk(wanted: ResultTypes, descending: float, length: int, rows: Tensor) -> list[Tensor]:
    """The first of each row, in order, and where they stand: (…, length). Equal values of whole rows keep their order; torch says
    nothing of that of others.

    Args:
        wanted: the results: 0 for the values, 1 for the indices.
        descending: whether the greatest come first; NaN is above all numbers.
        rows: (…, n).
    """
    found: Sequence[Tensor]
    if length == rows.shape[-1]:
        found = torch.sort(rows, stable=True, dim=-1, descending=bool(descending))
    else:
        found = torch.topk(rows, length, -1, bool(descending), sorted=True)
    return [found[number].to(dtype) for number, dtype in wanted]


_FEW = 2  # sums for each row up to which all are computed, rather than those of the runs, each of which is then copied to its place
_PIECE = 64  # rows that one thread adds


def _sums_of_runs(shape: Sequence[int], dtype: torch.dtype, rows: Tensor, index: Tensor, total: torch.dtype) -> Tensor:
    """The sums by sorting: equal indices are a run. torch's own index_add and gradient of embeddings add in any order on a GPU."""
    count, (length, width) = len(index), shape
    ordered, order = index.sort(stable=True)
    given = rows.index_select(0, order).to(total)
    if length <= _FEW * count:
        starts = torch.searchsorted(ordered, torch.arange(length + 1, device=index.device, dtype=index.dtype))
        return _added(given, starts).to(dtype)
    is_last = torch.cat([ordered[1:] != ordered[:-1], ordered.new_ones(1, dtype=torch.bool)])
    run = is_last.cumsum(0) - is_last.long()
    starts = torch.searchsorted(run, torch.arange(count + 1, device=run.device))  # the count for runs that there are not
    place = ordered.new_full((count + 1,), length)  # and a row behind the last for these
    place[:count] = ordered
    found = rows.new_zeros(length + 1, width, dtype=dtype)
    return found.index_copy_(0, place[starts[:count]].long(), _added(given, starts).to(dtype))[:length]


def _added(rows: Tensor, starts: Tensor) -> Tensor:
    """The sum of each run of rows. torch has a thread add all of a run, so a long one, as of padding, is added in pieces.

    Args:
        rows: (n, width).
        starts: of each run, and behind the last one n: (runs + 1,).
    """
    count, runs = len(rows), len(starts) - 1
    if count <= _PIECE:
        return torch.segment_reduce(rows, "sum", offsets=starts, unsafe=True, initial=0)
    pieces = (starts.diff() + (_PIECE - 1)).div(_PIECE, rounding_mode="floor")
    before = torch.cat([pieces.new_zeros(1), pieces.cumsum(0)])  # each run, and behind the last one all
    number = torch.arange(count // _PIECE + runs + 1, device=rows.device)  # as many as there may be
    run = torch.searchsorted(before[1:], number, right=True)
    first = (starts[run] + (number - before[run]) * _PIECE).clamp_(max=count)
    sums = torch.segment_reduce(rows, "sum", offsets=first, unsafe=True, initial=0)
    return torch.segment_reduce(sums, "sum", offsets=before, unsafe=True, initial=0)


# Attention.

_FLASH, _EFFICIENT, _CUDNN = 1, 2, 3  # numbers of `torch.nn.attention.SDPBackend`
_ROWS = 32  # the efficient kernel's logsumexp has a multiple of so many


def attention(
    wanted: ResultTypes, scale: float, causal: float, dropout: float, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None
) -> list[Tensor]:
    """softmax(scale q kᵀ + bias) v and the logsumexp of the scores, in float32 at least: by the kernel that torch would take.

    Args:
        wanted: the results: 0 for the values (batch, head, query, channel), 1 for the logsumexp (batch, head, query), 2 for the
            state of torch's generator.
        causal: whether a query meets the keys up to its own position alone.
        dropout: the share of the weights that are dropped, by the flash kernel alone.
        q: (batch, head, query, channel).
        k, v: the same of keys, with as many heads, or with fewer that the others share.
        bias: broadcasts to (batch, head, query, key).
    """
    is_causal, needs_sums = bool(causal), any(number == 1 for number, _ in wanted)
    if not q.numel() or not k.numel():
        shapes = q.shape, q.shape[:3], (2,)
        return [q.new_zeros(shapes[number], dtype=dtype) for number, dtype in wanted]
    if dropout and not q.is_cuda:
        if any(number for number, _ in wanted):
            what = "attention with dropout and gradients in the emulator"
            raise UnsupportedError(what, hint="try it on a GPU, or without dropout")
        k, v = _of_each_head(k, q), _of_each_head(v, q)
        return [_ATEN._scaled_dot_product_attention_math(q, k, v, None, dropout, is_causal, scale=scale)[0]]
    q, k, v, bias = _regular(q), _regular(k), _regular(v), _of_each_key(bias, k)
    if not q.is_cuda:
        found = _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale)
        if not found[1].all() and not math.isfinite(q.sum(dtype=torch.float64) + k.sum(dtype=torch.float64)):
            # That kernel gives 0 for a query whose scores are all NaN, and 0 for the logarithm of their sum.
            k, v = _of_each_head(k, q), _of_each_head(v, q)
            exact = _ATEN._scaled_dot_product_attention_math(q, k, v, bias, 0.0, is_causal, scale=scale)[0]
            found = exact, found[1]
        return [found[number] for number, _ in wanted]
    kernel, state = _FLASH if dropout else _kernel_for(q, k, v, bias, is_causal, scale), q
    if kernel == _CUDNN:
        values, sums, *_ = _ATEN._scaled_dot_product_cudnn_attention(q, k, v, bias, needs_sums, 0.0, is_causal, False, scale=scale)
    elif kernel == _FLASH:
        found = _ATEN._scaled_dot_product_flash_attention(q, k, v, dropout, is_causal, False, scale=scale)
        values, sums, state = found[0], found[1], found[6].view(torch.int64)
    else:
        k, v, whole = _of_each_head(k, q), _of_each_head(v, q), _aligned(bias, q, k)
        values, sums, *_ = _ATEN._scaled_dot_product_efficient_attention(q, k, v, whole, needs_sums, 0.0, is_causal, scale=scale)
    if needs_sums and sums.shape != q.shape[:3]:
        sums = sums.reshape(*q.shape[:2], -1)[:, :, : q.shape[2]]
    return [(values, sums, state)[number] for number, _ in wanted]


def attention_backward(
    wanted: ResultTypes,
    scale: float,
    causal: float,
    dropout: float,
    gradient: Tensor,
    values: Tensor,
    sums: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    last: Tensor | None = None,
) -> list[Tensor]:
    """The gradients by q, k, v and bias (0 to 3), as far as they are wanted.

    Args:
        scale, causal, dropout, q, k, v: as of the forward pass.
        gradient: by its values.
        values, sums: its results.
        last: the bias; where weights are dropped, the state of torch's generator.
    """
    bias, state = (None, last) if dropout else (last, None)
    is_causal, known = bool(causal), {"scale": scale}
    if not q.numel() or not k.numel():
        given = [q, k, v, *([] if bias is None else [bias])]
        return [torch.zeros_like(given[number]) for number, _ in wanted]
    gradient, values, q, k, v = (_regular(x) for x in (gradient, values, q, k, v))
    bias = _of_each_key(bias, k)
    if not q.is_cuda and any(number == 3 for number, _ in wanted):  # which the emulator alone asks of CPUs
        return _by_autograd(wanted, scale, is_causal, gradient, [q, k, v, *([] if bias is None else [bias])])
    if not q.is_cuda:
        function = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
        k, v, few = _of_each_head(k, q), _of_each_head(v, q), k.shape[1]
        by_q, by_k, by_v = function(gradient, q, k, v, values, sums, 0.0, is_causal, attn_mask=bias, **known)
        found = [by_q, _of_few(by_k, few), _of_few(by_v, few)]
        return [found[number] for number, _ in wanted]
    needs_bias = any(number == 3 for number, _ in wanted)  # which the efficient kernel alone gives
    kernel = _EFFICIENT if needs_bias else _FLASH if dropout else _kernel_for(q, k, v, bias, is_causal, scale)
    lengths, none = (q.shape[2], k.shape[2]), sums.new_empty((), dtype=torch.int64)  # which is read with dropout alone
    if kernel == _CUDNN:
        function, empty = _ATEN._scaled_dot_product_cudnn_attention_backward, (none, none, bias, None, None)
        found = list(function(gradient, q, k, v, values, sums[..., None], *empty, *lengths, 0.0, is_causal, **known))
    elif kernel == _FLASH:
        function, drawn = _ATEN._scaled_dot_product_flash_attention_backward, none if state is None else state.view(torch.uint64)
        found = list(function(gradient, q, k, v, values, sums, None, None, *lengths, dropout, is_causal, drawn, none, **known))
    else:
        few, whole = k.shape[1], _aligned(bias, q, k)
        k, v = _of_each_head(k, q), _of_each_head(v, q)
        sums = F.pad(sums, (0, -sums.shape[2] % _ROWS), value=torch.inf)
        function, masks = _ATEN._scaled_dot_product_efficient_attention_backward, (True, True, True, needs_bias)
        found = list(function(gradient, q, k, v, whole, values, sums, none, none, 0.0, masks, is_causal, **known))
        found[1:3] = (_of_few(x, few) for x in found[1:3])
        found[3] = found[3][..., : k.shape[2]] if needs_bias else None
    return [found[number] for number, _ in wanted]


def _by_autograd(wanted: ResultTypes, scale: float, is_causal: bool, gradient: Tensor, operands: list[Tensor]) -> list[Tensor]:
    with torch.enable_grad():
        q, k, v, bias = given = [x.detach().requires_grad_() for x in operands]
        values, _ = _ATEN._scaled_dot_product_attention_math(
            q, _of_each_head(k, q), _of_each_head(v, q), bias, 0.0, is_causal, scale=scale
        )
    return list(torch.autograd.grad(values, [given[number] for number, _ in wanted], gradient))


def _kernel_for(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> int:
    """The number of the kernel that torch takes; where it would keep all scores, that of the one that takes everything."""
    shared = q.shape[1] != k.shape[1]
    chosen: int = torch._fused_sdp_choice(q, k, v, bias, 0.0, is_causal, scale=scale, enable_gqa=shared)
    return chosen if chosen in (_FLASH, _CUDNN) else _EFFICIENT


def _regular(x: Tensor) -> Tensor:
    """An operand as all kernels read it: contiguous channels, and rows that begin at multiples of 16 bytes."""
    if not x.data_ptr() % _ALIGNMENT and _are_regular(x.stride(), x.itemsize):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=1024)
def _are_regular(strides: tuple[int, ...], itemsize: int) -> bool:
    """True if channels are contiguous, and all other strides multiples of 16 bytes."""
    return strides[-1] == 1 and not any(stride * itemsize % _ALIGNMENT for stride in strides[:-1])


def _of_each_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values once for each head of queries."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _of_few(gradient: Tensor, heads: int) -> Tensor:
    """The gradient by heads of which each was repeated."""
    return gradient if gradient.shape[1] == heads else gradient.view(len(gradient), heads, -1, *gradient.shape[2:]).sum(2)


def _of_each_key(bias: Tensor | None, k: Tensor) -> Tensor | None:
    """A bias with an element for each key, as kernels read it along a row."""
    if bias is None or bias.shape[-1] == k.shape[2]:
        return bias
    return bias.expand(*bias.shape[:-1], k.shape[2]).contiguous()


def _aligned(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """A bias as the efficient kernel reads it: of all scores, with rows that begin at multiples of 16 elements."""
    if bias is None:
        return None
    keys = k.shape[2]
    if bias.stride(-1) != 1 or any(stride % _ALIGNMENT for stride in bias.stride()[:-1]) or bias.data_ptr() % _ALIGNMENT:
        bias = F.pad(bias, (0, -keys % _ALIGNMENT))[..., :keys]
    return bias.expand(*q.shape[:3], keys)


@dataclass(frozen=True)
class LibraryFunction:
    """A function of the results that are wanted, with their dtypes, of numbers, of sizes and of tensors.

    Attributes:
        settings, sizes: how many numbers and sizes it takes.
        operands: how many tensors.
        results: dims of each of its results; None of any number.
    """

    run: Callable[..., list[Tensor]]
    settings: int
    sizes: int
    operands: range
    results: tuple[int | None, ...]


FUNCTIONS = {
    "scatter_add": LibraryFunction(scatter_add, 0, 1, range(2, 3), (2,)),
    "last": LibraryFunction(last, 0, 1, range(1, 2), (1,)),
    "topk": LibraryFunction(topk, 1, 1, range(1, 2), (None, None)),
    "attention": LibraryFunction(attention, 3, 0, range(3, 5), (4, 3, 1)),
    "attention_backward": LibraryFunction(attention_backward, 3, 0, range(6, 8), (4, 4, 4, 4)),
}
"""Functions by name."""


# Matrix products of a call: one function of torch on views that are known when it is bound.
#
# What torch, or `multiply`, looks at before it comes to cuBLAS takes as long as some kernels.


@dataclass(frozen=True)
class BufferView:
    """A view of a buffer, in elements."""

    buffer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def is_near(self) -> bool:
        """True if cuBLAS reads it rightly."""
        return sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True)) < FAR


def place_of(operand: StridedOperand, sizes: Mapping[str, int]) -> BufferView:
    """An operand at the sizes of a call."""
    shape, strides = (tuple(formula(sizes) for formula in formulas) for formulas in (operand.shape, operand.strides))
    return BufferView(operand.buffer, shape, strides, operand.offset(sizes))


def product_of(
    product: MatrixProduct, sizes: Mapping[str, int], *, is_rounded_once: bool
) -> tuple[Any, BufferView, BufferView, BufferView]:
    """The function that computes a product, and its views of both operands and of the result.

    Args:
        product: what is computed.
        sizes: values of all sizes and strides, by name.
        is_rounded_once: whether torch's own function rounds the result once, to its dtype.
    """
    a, b, out = (place_of(operand, sizes) for operand in (product.a, product.b, product.out))
    if product.adds(sizes):
        return multiply_into, a, b, out
    return _function_of(a, b, out) if is_rounded_once and a.is_near and b.is_near else (multiply, a, b, out)


def _function_of(a: BufferView, b: BufferView, out: BufferView) -> tuple[Any, BufferView, BufferView, BufferView]:
    """torch's own function, where one takes such views."""
    rows, results = _as_matrix(a), _as_matrix(out)
    if math.prod(b.shape[:-2]) == 1 and rows is not None and results is not None:
        return torch.mm, rows, replace(b, shape=b.shape[-2:], strides=b.strides[-2:]), results
    first, second, third = (_as_planes(place, out.shape[:-2]) for place in (a, b, out))
    if first is not None and second is not None and third is not None:
        return torch.bmm, first, second, third
    return multiply, a, b, out


def _as_matrix(place: BufferView) -> BufferView | None:
    """Leading dims as one, where their strides allow it."""
    shape, strides = place.shape, place.strides
    merged = _merged(shape[:-1], strides[:-1])
    return None if merged is None else replace(place, shape=(merged[0], shape[-1]), strides=(merged[1], strides[-1]))


def _as_planes(place: BufferView, batch: Sequence[int]) -> BufferView | None:
    """Leading dims as one, of as many as a result has, where their strides allow it; over dims that an operand lacks it repeats."""
    missing = len(batch) + 2 - len(place.shape)
    extents, steps = (1,) * missing + place.shape[:-2], (0,) * missing + place.strides[:-2]
    repeated = [0 if extent == 1 else step for extent, step in zip(extents, steps, strict=True)]
    merged = _merged(batch, repeated)
    if merged is None:
        return None
    return replace(place, shape=(merged[0], *place.shape[-2:]), strides=(merged[1], *place.strides[-2:]))


def _merged(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int] | None:
    """Some dims as one: how many elements it has, and the stride between them."""
    dims = [dim for dim in range(len(shape)) if shape[dim] != 1]
    if any(strides[outer] != shape[inner] * strides[inner] for outer, inner in pairwise(dims)):
        return None
    last = dims[-1] if dims else len(shape) - 1
    return math.prod(shape), strides[last] if shape else 0
