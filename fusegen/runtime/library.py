"""Library functions that are steps of calls: matmuls with preallocated results, and functions that allocate their results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from fusegen.errors import UnsupportedError
from fusegen.lazy import dataclass
from fusegen.program.call import MatmulCall, StridedOperand

ResultTypes: TypeAlias = Sequence[tuple[int, torch.dtype]]
"""The requested results by number, with their dtypes."""

_ATEN: Any = torch.ops.aten
_ALIGNMENT = 16
FAR = 1 << 31
"""Span of a matrix, in elements, from which cuBLAS computes wrong addresses."""


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b, without intermediate rounding if the result is float32 and the operands have 16 bits.

    Args:
        a, b: (…, m, k) and (…, k, n), of one dtype; their leading dims broadcast.
        out: (…, m, n), contiguous, of their dtype or float32.
    """
    a, b = _compacted(a), _compacted(b)
    if out.dtype is a.dtype:
        torch.matmul(a, b, out=out)
    elif not out.is_cuda:
        torch.matmul(a.to(out.dtype), b.to(out.dtype), out=out)
    elif b.dim() == 2:
        torch.mm(a.reshape(-1, a.shape[-1]), b, out_dtype=out.dtype, out=out.view(-1, out.shape[-1]))
    else:
        torch.bmm(_batched(a, out), _batched(b, out), out_dtype=out.dtype, out=out.view(-1, *out.shape[-2:]))


def multiply_into(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out += a @ b, without intermediate rounding.

    Args:
        a, b: (m, k) and (k, n), of one dtype.
        out: (m, n), of their dtype or float32.
    """
    a, b = _compacted(a), _compacted(b)
    if out.dtype is a.dtype:
        torch.addmm(out, a, b, out=out)
    elif out.is_cuda:
        _ATEN.addmm.dtype_out(out, a, b, out.dtype, out=out)
    else:
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), out=out)


def _batched(operand: Tensor, out: Tensor) -> Tensor:
    """Expands an operand to the leading dims of the result, merged to one."""
    return operand.expand(*out.shape[:-2], *operand.shape[-2:]).reshape(-1, *operand.shape[-2:])


def _compacted(operand: Tensor) -> Tensor:
    """Copies an operand whose strides span too many gigabytes for cuBLAS."""
    span = sum((extent - 1) * stride for extent, stride in zip(operand.shape, operand.stride(), strict=True))
    return operand if span < FAR or operand.is_contiguous() else operand.contiguous()


def scatter_add(requested: ResultTypes, length: int, rows: Tensor, index: Tensor) -> list[Tensor]:
    """Sums rows with equal indices, at least in float32, in a deterministic order: (length, width).

    Args:
        requested: the dtype of the only result.
        rows: (n, width).
        index: (n,), int32 or int64, in [0, length).
    """
    ((_, dtype),), shape = requested, (length, rows.shape[1])
    sum_dtype = torch.float32 if rows.is_floating_point() and rows.itemsize < 4 else rows.dtype
    rows, out_dtype = (rows.to(sum_dtype), sum_dtype) if rows.itemsize == 1 else (rows, dtype)  # torch cannot scatter 8-bit floats
    if rows.is_cuda and rows.is_floating_point() and len(rows):
        return [_sorted_segment_sums(shape, out_dtype, rows, index, sum_dtype).to(dtype)]
    return [rows.new_zeros(shape, dtype=sum_dtype).index_add_(0, index, rows.to(sum_dtype)).to(dtype)]


def last(_: ResultTypes, length: int, index: Tensor) -> list[Tensor]:
    """Returns, for each number from 0 to length - 1, its last position in the index, or -1: (length,).

    Args:
        index: (n,), int64, in [0, length).
    """
    positions = torch.arange(len(index), device=index.device)
    return [index.new_full((length,), -1).scatter_reduce_(0, index, positions, "amax")]


def topk(requested: ResultTypes, descending: float, length: int, rows: Tensor) -> list[Tensor]:
    """Returns the first elements of each sorted row, and their indices: (…, length).

    A full sort is stable; for shorter results torch does not specify the order of equal values.

    Args:
        requested: the results: 0 for the values, 1 for the indices.
        descending: whether the largest come first; NaN is above all numbers.
        rows: (…, n).
    """
    results: Sequence[Tensor]
    if length == rows.shape[-1]:
        results = torch.sort(rows, stable=True, dim=-1, descending=bool(descending))
    else:
        results = torch.topk(rows, length, -1, bool(descending), sorted=True)
    return [results[number].to(dtype) for number, dtype in requested]


_DENSE_RATIO = 2  # up to this many sums per row, empty segments are computed too, which saves a copy
_CHUNK_ROWS = 64  # rows that one thread sums


def _sorted_segment_sums(shape: Sequence[int], dtype: torch.dtype, rows: Tensor, index: Tensor, sum_dtype: torch.dtype) -> Tensor:
    """Sums rows by sorting: equal indices form a segment. On a GPU, torch's index_add and embedding gradient sum in any order."""
    count, (length, width) = len(index), shape
    ordered, order = index.sort(stable=True)
    sorted_rows = rows.index_select(0, order).to(sum_dtype)
    if length <= _DENSE_RATIO * count:
        starts = torch.searchsorted(ordered, torch.arange(length + 1, device=index.device, dtype=index.dtype))
        return _segment_sums(sorted_rows, starts).to(dtype)
    is_last = torch.cat([ordered[1:] != ordered[:-1], ordered.new_ones(1, dtype=torch.bool)])
    segment = is_last.cumsum(0) - is_last.long()
    starts = torch.searchsorted(segment, torch.arange(count + 1, device=segment.device))  # the count for missing segments
    target = ordered.new_full((count + 1,), length)  # they go to an extra last row
    target[:count] = ordered
    sums = rows.new_zeros(length + 1, width, dtype=dtype)
    return sums.index_copy_(0, target[starts[:count]].long(), _segment_sums(sorted_rows, starts).to(dtype))[:length]


def _segment_sums(rows: Tensor, starts: Tensor) -> Tensor:
    """Sums each segment of rows. torch sums a segment in one thread, so a long one, e.g. of padding, is summed in chunks.

    Args:
        rows: (n, width).
        starts: the first row of each segment, then n: (segments + 1,).
    """
    count, segments = len(rows), len(starts) - 1
    if count <= _CHUNK_ROWS:
        return torch.segment_reduce(rows, "sum", offsets=starts, unsafe=True, initial=0)
    chunks = (starts.diff() + (_CHUNK_ROWS - 1)).div(_CHUNK_ROWS, rounding_mode="floor")
    chunk_starts = torch.cat([chunks.new_zeros(1), chunks.cumsum(0)])  # of each segment, then their total
    chunk = torch.arange(count // _CHUNK_ROWS + segments + 1, device=rows.device)  # an upper bound
    segment = torch.searchsorted(chunk_starts[1:], chunk, right=True)
    first_row = (starts[segment] + (chunk - chunk_starts[segment]) * _CHUNK_ROWS).clamp_(max=count)
    sums = torch.segment_reduce(rows, "sum", offsets=first_row, unsafe=True, initial=0)
    return torch.segment_reduce(sums, "sum", offsets=chunk_starts, unsafe=True, initial=0)


# Attention.

_FLASH, _EFFICIENT, _CUDNN = 1, 2, 3  # numbers of `torch.nn.attention.SDPBackend`
_ROWS = 32  # the memory-efficient kernel pads its logsumexp to a multiple of this


def attention(
    requested: ResultTypes, scale: float, causal: float, dropout: float, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None
) -> list[Tensor]:
    """Returns softmax(scale q kᵀ + bias) v and the logsumexp of the scores, at least in float32, by the kernel that torch selects.

    Args:
        requested: the results: 0 for the values (batch, head, query, channel), 1 for the logsumexp (batch, head, query), 2 for the
            state of torch's generator.
        causal: whether a query attends only to keys up to its own position.
        dropout: the share of dropped weights, for the flash kernel only.
        q: (batch, head, query, channel).
        k, v: (batch, key head, key, channel), with as many heads, or fewer (GQA).
        bias: broadcasts to (batch, head, query, key).
    """
    is_causal, needs_sums = bool(causal), any(number == 1 for number, _ in requested)
    if not q.numel() or not k.numel():
        shapes = q.shape, q.shape[:3], (2,)
        return [q.new_zeros(shapes[number], dtype=dtype) for number, dtype in requested]
    if dropout and not q.is_cuda:
        if any(number for number, _ in requested):
            what = "the emulator does not support attention with dropout and gradients"
            raise UnsupportedError(what, hint="run it on a GPU, or without dropout")
        k, v = _repeat_heads(k, q), _repeat_heads(v, q)
        return [_ATEN._scaled_dot_product_attention_math(q, k, v, None, dropout, is_causal, scale=scale)[0]]
    q, k, v, bias = _aligned_operand(q), _aligned_operand(k), _aligned_operand(v), _expand_keys(bias, k)
    if not q.is_cuda:
        outputs = _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale)
        if not outputs[1].all() and not math.isfinite(q.sum(dtype=torch.float64) + k.sum(dtype=torch.float64)):
            # For a query whose scores are all NaN, that kernel returns 0 and a logsumexp of 0.
            k, v = _repeat_heads(k, q), _repeat_heads(v, q)
            exact = _ATEN._scaled_dot_product_attention_math(q, k, v, bias, 0.0, is_causal, scale=scale)[0]
            outputs = exact, outputs[1]
        return [outputs[number] for number, _ in requested]
    kernel, state = _FLASH if dropout else _kernel_for(q, k, v, bias, is_causal, scale), q
    if kernel == _CUDNN:
        values, sums, *_ = _ATEN._scaled_dot_product_cudnn_attention(q, k, v, bias, needs_sums, 0.0, is_causal, False, scale=scale)
    elif kernel == _FLASH:
        outputs = _ATEN._scaled_dot_product_flash_attention(q, k, v, dropout, is_causal, False, scale=scale)
        values, sums, state = outputs[0], outputs[1], outputs[6].view(torch.int64)
    else:
        k, v, full = _repeat_heads(k, q), _repeat_heads(v, q), _aligned_bias(bias, q, k)
        values, sums, *_ = _ATEN._scaled_dot_product_efficient_attention(q, k, v, full, needs_sums, 0.0, is_causal, scale=scale)
    if needs_sums and sums.shape != q.shape[:3]:
        sums = sums.reshape(*q.shape[:2], -1)[:, :, : q.shape[2]]
    return [(values, sums, state)[number] for number, _ in requested]


def attention_backward(
    requested: ResultTypes,
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
    """Returns the requested gradients of q, k, v and bias (0 to 3).

    Args:
        scale, causal, dropout, q, k, v: as in the forward pass.
        gradient: the gradient of its values.
        values, sums: its results.
        last: the bias; with dropout, the state of torch's generator.
    """
    bias, state = (None, last) if dropout else (last, None)
    is_causal, options = bool(causal), {"scale": scale}
    if not q.numel() or not k.numel():
        operands = [q, k, v, *([] if bias is None else [bias])]
        return [torch.zeros_like(operands[number]) for number, _ in requested]
    gradient, values, q, k, v = (_aligned_operand(x) for x in (gradient, values, q, k, v))
    bias = _expand_keys(bias, k)
    if not q.is_cuda and any(number == 3 for number, _ in requested):  # only the emulator requests it on CPUs
        return _by_autograd(requested, scale, is_causal, gradient, [q, k, v, *([] if bias is None else [bias])])
    if not q.is_cuda:
        function = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
        k, v, key_heads = _repeat_heads(k, q), _repeat_heads(v, q), k.shape[1]
        by_q, by_k, by_v = function(gradient, q, k, v, values, sums, 0.0, is_causal, attn_mask=bias, **options)
        gradients = [by_q, _sum_heads(by_k, key_heads), _sum_heads(by_v, key_heads)]
        return [gradients[number] for number, _ in requested]
    needs_bias = any(number == 3 for number, _ in requested)  # only the memory-efficient kernel computes it
    kernel = _EFFICIENT if needs_bias else _FLASH if dropout else _kernel_for(q, k, v, bias, is_causal, scale)
    lengths, none = (q.shape[2], k.shape[2]), sums.new_empty((), dtype=torch.int64)  # read only with dropout
    if kernel == _CUDNN:
        function, empty = _ATEN._scaled_dot_product_cudnn_attention_backward, (none, none, bias, None, None)
        gradients = list(function(gradient, q, k, v, values, sums[..., None], *empty, *lengths, 0.0, is_causal, **options))
    elif kernel == _FLASH:
        function, seed = (
            _ATEN._scaled_dot_product_flash_attention_backward,
            none if state is None else state.view(torch.uint64),
        )
        gradients = list(function(gradient, q, k, v, values, sums, None, None, *lengths, dropout, is_causal, seed, none, **options))
    else:
        key_heads, full_bias = k.shape[1], _aligned_bias(bias, q, k)
        k, v = _repeat_heads(k, q), _repeat_heads(v, q)
        sums = F.pad(sums, (0, -sums.shape[2] % _ROWS), value=torch.inf)
        function, masks = _ATEN._scaled_dot_product_efficient_attention_backward, (True, True, True, needs_bias)
        gradients = list(function(gradient, q, k, v, full_bias, values, sums, none, none, 0.0, masks, is_causal, **options))
        gradients[1:3] = (_sum_heads(x, key_heads) for x in gradients[1:3])
        gradients[3] = gradients[3][..., : k.shape[2]] if needs_bias else None
    return [gradients[number] for number, _ in requested]


def _by_autograd(requested: ResultTypes, scale: float, is_causal: bool, gradient: Tensor, operands: list[Tensor]) -> list[Tensor]:
    with torch.enable_grad():
        q, k, v, bias = leaves = [x.detach().requires_grad_() for x in operands]
        values, _ = _ATEN._scaled_dot_product_attention_math(
            q, _repeat_heads(k, q), _repeat_heads(v, q), bias, 0.0, is_causal, scale=scale
        )
    return list(torch.autograd.grad(values, [leaves[number] for number, _ in requested], gradient))


def _kernel_for(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> int:
    """Returns torch's SDPA backend, or the memory-efficient one instead of the math fallback."""
    has_groups = q.shape[1] != k.shape[1]
    chosen: int = torch._fused_sdp_choice(q, k, v, bias, 0.0, is_causal, scale=scale, enable_gqa=has_groups)
    return chosen if chosen in (_FLASH, _CUDNN) else _EFFICIENT


def _aligned_operand(x: Tensor) -> Tensor:
    """Copies an operand unless its channels are contiguous and its rows aligned to 16 bytes, as all kernels require."""
    if not x.data_ptr() % _ALIGNMENT and _strides_are_aligned(x.stride(), x.itemsize):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=1024)
def _strides_are_aligned(strides: tuple[int, ...], itemsize: int) -> bool:
    return strides[-1] == 1 and not any(stride * itemsize % _ALIGNMENT for stride in strides[:-1])


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """Repeats key or value heads for each query head."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _sum_heads(gradient: Tensor, heads: int) -> Tensor:
    """Sums the gradients of repeated heads."""
    return gradient if gradient.shape[1] == heads else gradient.view(len(gradient), heads, -1, *gradient.shape[2:]).sum(2)


def _expand_keys(bias: Tensor | None, k: Tensor) -> Tensor | None:
    """Expands a bias along the keys, as the kernels require."""
    if bias is None or bias.shape[-1] == k.shape[2]:
        return bias
    return bias.expand(*bias.shape[:-1], k.shape[2]).contiguous()


def _aligned_bias(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Expands a bias to all scores, with rows aligned to 16 elements, as the memory-efficient kernel requires."""
    if bias is None:
        return None
    keys = k.shape[2]
    if bias.stride(-1) != 1 or any(stride % _ALIGNMENT for stride in bias.stride()[:-1]) or bias.data_ptr() % _ALIGNMENT:
        bias = F.pad(bias, (0, -keys % _ALIGNMENT))[..., :keys]
    return bias.expand(*q.shape[:3], keys)


@dataclass(frozen=True)
class LibraryFunction:
    """A library function. It takes the requested results, numbers, sizes, and tensors.

    Attributes:
        settings, sizes: the counts of numbers and sizes that it takes.
        operands: the count of tensors.
        results: the rank of each of its results; None for any.
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


# Matmuls are bound to one torch function on precomputed views: the checks of torch.matmul, or `multiply`, take as long as some
# kernels.


@dataclass(frozen=True)
class BufferView:
    """A strided view of a buffer; strides and offset in elements."""

    buffer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def is_near(self) -> bool:
        """True if cuBLAS computes its addresses correctly."""
        return sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True)) < FAR


def view_of(operand: StridedOperand, sizes: Mapping[str, int]) -> BufferView:
    """Evaluates the view of an operand at the sizes of a call."""
    shape, strides = (tuple(formula(sizes) for formula in formulas) for formulas in (operand.shape, operand.strides))
    return BufferView(operand.buffer, shape, strides, operand.offset(sizes))


def matmul_of(
    product: MatmulCall, sizes: Mapping[str, int], *, is_rounded_once: bool
) -> tuple[Any, BufferView, BufferView, BufferView]:
    """Returns the function that computes a matmul, and the views of both operands and the result.

    Args:
        sizes: values of all sizes and strides, by name.
        is_rounded_once: whether torch's own function rounds the result only once.
    """
    a, b, out = (view_of(operand, sizes) for operand in (product.a, product.b, product.out))
    if product.adds(sizes):
        return multiply_into, a, b, out
    return _function_of(a, b, out) if is_rounded_once and a.is_near and b.is_near else (multiply, a, b, out)


def _function_of(a: BufferView, b: BufferView, out: BufferView) -> tuple[Any, BufferView, BufferView, BufferView]:
    """Selects torch.mm or torch.bmm if the views allow it."""
    rows, results = _as_matrix(a), _as_matrix(out)
    if math.prod(b.shape[:-2]) == 1 and rows is not None and results is not None:
        return torch.mm, rows, replace(b, shape=b.shape[-2:], strides=b.strides[-2:]), results
    left, right, output = (_as_planes(view, out.shape[:-2]) for view in (a, b, out))
    if left is not None and right is not None and output is not None:
        return torch.bmm, left, right, output
    return multiply, a, b, out


def _as_matrix(view: BufferView) -> BufferView | None:
    """Merges the leading dims, if their strides allow it."""
    shape, strides = view.shape, view.strides
    merged = _merge_dims(shape[:-1], strides[:-1])
    return None if merged is None else replace(view, shape=(merged[0], shape[-1]), strides=(merged[1], strides[-1]))


def _as_planes(view: BufferView, batch: Sequence[int]) -> BufferView | None:
    """Expands the leading dims to those of the result and merges them, if the strides allow it."""
    missing = len(batch) + 2 - len(view.shape)
    extents, steps = (1,) * missing + view.shape[:-2], (0,) * missing + view.strides[:-2]
    repeated = [0 if extent == 1 else step for extent, step in zip(extents, steps, strict=True)]
    merged = _merge_dims(batch, repeated)
    if merged is None:
        return None
    return replace(view, shape=(merged[0], *view.shape[-2:]), strides=(merged[1], *view.strides[-2:]))


def _merge_dims(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int] | None:
    """Merges dims; returns the number of elements and their stride, or None."""
    dims = [dim for dim in range(len(shape)) if shape[dim] != 1]
    if any(strides[outer] != shape[inner] * strides[inner] for outer, inner in pairwise(dims)):
        return None
    last = dims[-1] if dims else len(shape) - 1
    return math.prod(shape), strides[last] if shape else 0
