"""Functions that read at indices which are values, with arguments: for every target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.eager import ints, randn

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
Case = tuple[Callable[..., Any], tuple[Any, ...]]


def indices(*shape: int, below: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return ints(*shape, low=0, high=below, dtype=dtype)


def embed_norm(ids: Tensor, wte: Tensor, wpe: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    positions = torch.arange(ids.shape[1], device=ids.device)
    return F.layer_norm(F.embedding(ids, wte) + F.embedding(positions, wpe), wte.shape[-1:], weight, bias)


def embed_norm_sliced(ids: Tensor, wte: Tensor, wpe: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(F.embedding(ids, wte) + wpe[: ids.shape[1]], wte.shape[-1:], weight, bias)


def embed_norm_given(ids: Tensor, positions: Tensor, wte: Tensor, wpe: Tensor) -> Tensor:
    return F.layer_norm(F.embedding(ids, wte, padding_idx=0) + F.embedding(positions, wpe), wte.shape[-1:])


def tables(columns: int, dtype: torch.dtype = F32, rows: int = 11) -> tuple[Tensor, ...]:
    return (
        randn(rows, columns, dtype=dtype),
        randn(9, columns, dtype=dtype),
        randn(columns, dtype=dtype),
        randn(columns, dtype=dtype),
    )


NORMS: dict[str, Case] = {
    **{
        f"{function.__name__} {dtype} {columns}": (function, (indices(2, 5, below=11), *tables(columns, dtype)))
        for function in (embed_norm, embed_norm_sliced)
        for dtype, columns in ((BF16, 64), (F16, 33), (F32, 8), (BF16, 600))
    },
    "shared positions": (embed_norm_given, (indices(3, 4, below=11), indices(4, below=9), *tables(16)[:2])),
    "strided ids": (embed_norm, (indices(5, 6, below=11).T[::2], *tables(16))),
    "strided table": (embed_norm, (indices(2, 5, below=11), randn(16, 22).T[::2], *tables(16)[1:])),
    "long rows": (embed_norm_given, (indices(2, 2, below=3), indices(2, below=9), *tables(20000, BF16, 3)[:2])),
}
"""Embedding, position and norm: one launch each."""

MODULE = torch.nn.Embedding(6, 8, padding_idx=2).requires_grad_(False)
X, IDS = randn(6, 8), indices(3, 4, below=6)
POINTWISE: dict[str, Case] = {
    "embedding": (lambda ids, t: F.embedding(ids, t) * 2, (IDS, X)),
    "embedding of strided indices": (lambda ids, t: F.embedding(ids, t) * 2, (IDS.T, X)),
    "a module": (lambda ids: MODULE(ids), (IDS,)),
    "gather": (lambda x, i: x.gather(1, i) + 1, (X, indices(6, 5, below=8))),
    "gather of no dims": (lambda x, i: x.gather(0, i), (X[0, 0], torch.tensor(0))),
    "gather in the middle": (lambda x, i: x.gather(-2, i), (randn(2, 6, 5), indices(2, 3, 5, below=6))),
    "gather of gather": (lambda x, i, j: x.gather(0, i).gather(1, j), (X, indices(6, 8, below=6), indices(6, 3, below=8))),
    "take_along_dim": (
        lambda x, i: torch.take_along_dim(x, i, 1),
        (randn(2, 1, 4), ints(1, 5, 4, low=-1, high=1, dtype=torch.int64)),
    ),
    "places under a condition": (
        lambda x, i: torch.stack([torch.arange(4, device=i.device)[i] * x[0, 0], x[1, :3]], 0),
        (X, torch.tensor([-4, 3, 1, 9, 9, 9])[:3]),  # what lies behind the index is out of range
    ),
    "index_select": (lambda x, i: x.index_select(1, i), (X, indices(5, below=8, dtype=torch.int32))),
    "brackets": (lambda x, i: x[i], (X, ints(7, low=-6, high=6, dtype=torch.int64))),
    "brackets in the middle": (lambda x, i: x[1:, :, i] * 2, (randn(3, 4, 5), ints(2, 2, low=-5, high=5))),
    "a list of numbers": (lambda x: x[[1, -1, 1]] * x[:3, [0]] + x[..., [-2]][1:4], (X,)),
    "a list behind a number": (lambda x: x[0, :, [1, 2]] + x[0, [2], 1:3], (randn(2, 4, 5),)),
    "an index of an index": (lambda x, a, b: x[a[b]], (X, ints(9, low=-6, high=6), ints(5, low=-9, high=9))),
    "positions from 2 on": (lambda x, y: y + x[torch.arange(4) + 2], (X, randn(4, 8))),
    "positions that are numbers too": (
        lambda x: (x * torch.arange(x.shape[-1], device=x.device)).mT[:, torch.arange(2) + 0],
        (randn(3, 4, 5),),
    ),
    "positions by twos": (lambda x: x[torch.arange(0, 6, 2)] * 1, (X,)),
    "a computed index": (lambda x, i: x[i.clamp(0, 5)], (X, ints(7))),
    "an index or another": (lambda x, i: x[torch.where(i != 9, i, 2)] * 2, (X, torch.tensor([9, 0, -6, 9, 5]))),
    "an index or a number's": (lambda x, i, n: x[torch.where(i != n, i, -1) + 1] * 2, (X, torch.tensor([7, 0, 4, -2]), 7)),
    "an index beside a float": (lambda x, i: x[torch.where(i != 2.5, i, 0)] * 2, (X, torch.tensor([5, 0, -6]))),
    "an index of floats": (lambda x, y: x[(y.abs() * 2).clamp(max=5).long()], (X, randn(7))),
    "an index by parts": (lambda x, a, b: x[torch.cat([a, b])], (X, indices(3, below=6), indices(2, below=6))),
    "a computed table": (lambda x, i: F.embedding(i, x.exp() * 2), (X, IDS)),
    "a table by parts": (lambda a, b, i: torch.cat([a, b])[i] * 2, (X, randn(3, 8), ints(7, low=-9, high=9))),
    "a table of positions": (lambda x, i: torch.arange(10)[i] * x, (randn(7), ints(7, low=-9, high=9))),
    "an expanded table": (lambda x, i: x.expand(6, 8).gather(0, i), (randn(8), indices(3, 8, below=6))),
    "a reshaped permuted table": (lambda x, i: x.T.reshape(4, 12)[:, i], (X, indices(7, below=12))),
    "rows beside rows": (lambda a, b, i, j: torch.cat([a[i], b[j]]) * 2, (X, X, indices(2, below=6), indices(3, below=6))),
    "none": (lambda x, i: x[i] + 1, (X, indices(0, below=6))),
}
"""Kernels without reductions."""

LOGITS, TARGETS = randn(5, 37), indices(5, 1, below=37)
REDUCED: dict[str, Case] = {
    "log-probabilities": (lambda x, t: torch.log_softmax(x, -1).gather(-1, t), (LOGITS, TARGETS)),
    "cross entropy by hand": (lambda x, t: -x.log_softmax(-1).gather(-1, t).mean(), (LOGITS, TARGETS)),
    "probabilities of rows": (lambda x, i: x.softmax(-1)[i], (LOGITS, ints(7, low=-5, high=5))),
    "a softmax of columns": (lambda x, i: x[:, i].softmax(-1), (LOGITS, ints(9, low=-37, high=37))),
    "a sum of rows": (lambda x, i: x[i].sum(0), (LOGITS, ints(9, low=-5, high=5))),
    "sums both ways": (lambda x, i: (x[i].sum(0), x[i].sum(1)), (LOGITS, ints(9, low=-5, high=5))),
    "a weight a row": (lambda x, w, t: x.softmax(-1) * w[t], (LOGITS, randn(37), TARGETS)),
    "a mean of gathered": (lambda x, i: x - x.gather(1, i).mean(1, keepdim=True), (LOGITS, indices(5, 4, below=37))),
    "a row's statistic": (lambda x, i: x - x.amax(-1)[i][:, None], (LOGITS, indices(5, below=5))),
}
