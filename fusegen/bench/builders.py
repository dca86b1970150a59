"""Arguments of cases: meta tensors of a dtype and sizes."""

from __future__ import annotations

import torch

from fusegen.bench.case import Sizes
from fusegen.specs import meta
from fusegen.specs.attention import alibi_slopes
from fusegen.specs.spec import Arguments


def _over(sizes: Sizes, dtype: torch.dtype, **extents: int) -> Arguments:
    """Tensors by parameter, each over the last so many dims."""
    return {name: meta(*sizes[len(sizes) - rank :], dtype=dtype) for name, rank in extents.items()}


def one(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    """A tensor."""
    return _over(sizes, dtype, x=len(sizes))


def residual(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    """Two tensors that are added."""
    return _over(sizes, dtype, x=2, residual=2)


def bias_residual(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    """Two tensors and a row that are added."""
    return _over(sizes, dtype, x=2, bias=1, residual=2)


def gated(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    """Two tensors, of which one gates the other."""
    return _over(sizes, dtype, gate=2, up=2)


def weight(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    """What a norm without a bias takes."""
    return _over(sizes, dtype, x=2, weight=1)


def weight_residual(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    """What a norm of a sum takes."""
    return _over(sizes, dtype, x=2, residual=2, weight=1)


def affine(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    """What a norm takes."""
    return _over(sizes, dtype, x=2, weight=1, bias=1)


def affine_residual(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    """What a norm takes, and what is added to it."""
    return _over(sizes, dtype, x=2, weight=1, bias=1, residual=2)


def norm_backward(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    """What a norm's backward takes."""
    return _over(sizes, dtype, x=2, dy=2, weight=1)


def product(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    """Rows, outputs and inputs of a product with a bias."""
    m, n, k = sizes
    return {"x": meta(m, k, dtype=dtype), "weight": meta(n, k, dtype=dtype), "bias": meta(n, dtype=dtype)}


def heads(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    """Queries, keys and values of one shape."""
    return {name: meta(*sizes, dtype=dtype) for name in "qkv"}


def heads_and_slopes(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    """The same, with the slopes of ALiBi."""
    return heads(dtype, sizes) | {"slopes": alibi_slopes(sizes[1])}
