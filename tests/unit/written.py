"""Functions that write to their parameters, with arguments: for every target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from tests.unit.eager import ints, randn, same

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
Case = tuple[Callable[..., Any], tuple[str, ...], tuple[Any, ...]]
"""A function, what it declares to write to, and arguments."""


def agree_in_place(function: Callable[..., Any], mutates: Sequence[str], *calls: tuple[Any, ...]) -> fg.Kernel[..., Any]:
    """Each call leaves in its arguments what torch leaves there, and returns what torch returns: an argument where torch does."""
    kernel = fg.kernel(mutates=mutates)(function)
    for number, given in enumerate(calls):
        ours, theirs = copies(given), copies(given)
        results = [_listed(kernel(*ours)), _listed(function(*theirs))]
        same(tuple(a for a in ours if isinstance(a, Tensor)), tuple(a for a in theirs if isinstance(a, Tensor)), f"call {number}")
        same(tuple(results[0]), tuple(results[1]), f"call {number}")
        for our, their in zip(*results, strict=True):
            assert [our is a for a in ours] == [their is a for a in theirs], "an argument is returned where torch returns one"
    return kernel


def _listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [] if result is None else [result]


def copies(arguments: Sequence[Any]) -> list[Any]:
    """Arguments in memory of their own, laid out as they are, so that views of one tensor stay views of one."""
    memo: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in memo:
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
            memo[storage.data_ptr()] = whole.clone()
        return memo[storage.data_ptr()].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return [copy(a) if isinstance(a, Tensor) else a for a in arguments]


# Caches.


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


def split_rotate_write(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor, slots: Tensor
) -> Tensor:
    """One step of a decoder: q, k and v of a packed projection, both rotated, k and v into a cache at their slots."""
    q, k, v = qkv.view(qkv.shape[0], 3, -1, cos.shape[-1]).unbind(1)
    c, s = cos[positions], sin[positions]
    k_cache[slots] = rotated(k, c, s)
    v_cache[slots] = v
    return rotated(q, c, s)


def grouped_write(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    """Fewer heads of k and v, side by side in one paged cache (2, blocks, block, heads, dim)."""
    pages = cache.view(2, -1, *cache.shape[-2:])
    pages[0][slots] = rotated(k, cos, sin)
    pages[1, slots] = v
    return rotated(q, cos, sin)


def normalized_write(k: Tensor, weight: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    """Normalized keys in a cache, and their mean."""
    cache[slots] = F.rms_norm(k, k.shape[-1:], weight)
    return k.mean(-1)


def static_cache(cache: Tensor, positions: Tensor, k: Tensor) -> Tensor:
    cache.index_copy_(2, positions, k)
    return cache


def linear_cache(cache: Tensor, k: Tensor, start: int) -> Tensor:
    cache[:, start : start + k.shape[1]] = k * 2
    return cache[:, : start + k.shape[1]].sum(1)


def attend_to_what_was_written(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, at: Tensor) -> Tensor:
    k_cache[:, :, at] = k
    v_cache[:, :, at] = v
    return torch.softmax(q @ k_cache.mT * 0.25, -1) @ v_cache


# In place.


def add_norm(residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    residual.add_(x)
    return F.rms_norm(residual, residual.shape[-1:], weight)


def operators(x: Tensor, y: Tensor) -> Tensor:
    x += y
    x *= 2
    x -= y[:1]
    x.div_(3).clamp_(-1, 1)
    return x + 1


def moments(p: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: float) -> None:
    """A step of an optimizer."""
    m.lerp_(g, 0.1)
    v.mul_(0.99).addcmul_(g, g, value=0.01)
    p.addcdiv_(m, v.sqrt().add_(1e-8), value=-lr)


def shifted(x: Tensor) -> Tensor:
    x[1:] = x[:-1].clone()
    return x


def before_and_after(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    old = x.clone()
    first = x[0] * 2
    total = x.sum(-1)
    x[:, 1:3] = y
    middle = x.sum(-1)
    x.mul_(2)
    return old, first, total, middle, x, x.sum(-1), old.sum() + x[0]


def old_and_new_at_a_point(x: Tensor, y: Tensor) -> Tensor:
    old = x * 3
    x[:2] = y[:2]
    return x + old.exp()


def rows_twice(x: Tensor, at: Tensor) -> Tensor:
    x[at] += 1
    x[at] *= x[0]
    return x


def scattered(x: Tensor, at: Tensor, values: Tensor) -> Tensor:
    return x.scatter_(1, at, values).scatter_(0, at[:1], 7.0)


def product_added(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    x += a @ b
    return x * 2


def reduced_into(total: Tensor, x: Tensor) -> None:
    total.copy_(x.sum(-1))


def filled(x: Tensor, n: int) -> Tensor:
    x.fill_(n)
    x[0] = 1
    x[:, 0].zero_()
    return x


def reshaped(x: Tensor) -> tuple[Tensor, Tensor]:
    flat, copied = x.view(-1), x.T.reshape(-1)
    flat[::3] = 0
    contiguous = x.T.contiguous()
    x += 1
    return copied * 1, contiguous * 1


def into_another_dtype(x: Tensor, y: Tensor) -> Tensor:
    x.copy_(y)
    x[0] = y[1]
    return x


def flipped(x: Tensor, at: Tensor) -> Tensor:
    x.logical_not_()
    x[at] = True
    return x


def counted(count: Tensor, x: Tensor) -> Tensor:
    count += 1
    return x / count


def swapped(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    kept = x.clone()
    x.copy_(y)
    y.copy_(kept)
    return y, x


def _decoder(heads: int, dtype: torch.dtype, tokens: int = 5, dim: int = 16) -> tuple[Any, ...]:
    caches = [randn(12, heads, dim, dtype=dtype) for _ in range(2)]
    tables = [randn(9, dim, dtype=dtype) for _ in range(2)]
    positions = ints(tokens, low=0, high=9, dtype=torch.int64)
    return randn(tokens, 3 * heads * dim, dtype=dtype), *tables, *caches, positions, torch.randperm(12)[:tokens]


def _grouped(dtype: torch.dtype) -> tuple[Any, ...]:
    q, k, v = randn(5, 8, 16, dtype=dtype), randn(5, 2, 16, dtype=dtype), randn(5, 2, 16, dtype=dtype)
    return q, k, v, randn(5, 16, dtype=dtype), randn(5, 16, dtype=dtype), randn(2, 3, 4, 2, 16, dtype=dtype), torch.randperm(12)[:5]


def _attention() -> tuple[Any, ...]:
    q, k, v = randn(2, 3, 1, 16), randn(2, 3, 2, 16), randn(2, 3, 2, 16)
    return q, k, v, randn(2, 3, 9, 16), randn(2, 3, 9, 16), torch.tensor([4, 8])


CASES: dict[str, Case] = {
    **{f"split_rotate_write {d}": (split_rotate_write, ("k_cache", "v_cache"), _decoder(4, d)) for d in (BF16, F16, F32)},
    "split_rotate_write odd": (split_rotate_write, ("k_cache", "v_cache"), _decoder(3, F32, 1, 6)),
    "grouped_write": (grouped_write, ("cache",), _grouped(BF16)),
    "normalized_write": (
        normalized_write,
        ("cache",),
        (randn(5, 2, 64, dtype=BF16), randn(64, dtype=BF16), randn(12, 2, 64, dtype=BF16), torch.randperm(12)[:5]),
    ),
    "static_cache": (static_cache, ("cache",), (randn(2, 3, 9, 8), torch.tensor([3, 0]), randn(2, 3, 2, 8))),
    "static_cache strided": (
        static_cache,
        ("cache",),
        (randn(2, 3, 8, 9).mT, torch.tensor([3, 0]), randn(2, 3, 2, 8)),
    ),
    "linear_cache": (linear_cache, ("cache",), (randn(2, 9, 3, 8), randn(2, 4, 3, 8), 3)),
    "attend": (attend_to_what_was_written, ("k_cache", "v_cache"), _attention()),
    **{
        f"add_norm {dtype} {n}": (
            add_norm,
            ("residual",),
            (randn(3, n, dtype=dtype), randn(3, n, dtype=dtype), randn(n, dtype=dtype)),
        )
        for dtype, n in ((BF16, 64), (F16, 33), (F32, 600), (BF16, 20000))
    },
    "add_norm strided": (add_norm, ("residual",), (randn(3, 100)[:, ::2], randn(3, 50), randn(50))),
    "operators": (operators, ("x",), (randn(4, 7), randn(4, 7))),
    "operators strided": (operators, ("x",), (randn(7, 4, dtype=BF16).T, randn(4, 7, dtype=BF16))),
    "moments": (moments, ("p", "m", "v"), (randn(5, 9), randn(5, 9), randn(5, 9), randn(5, 9).abs(), 0.01)),
    "shifted": (shifted, ("x",), (randn(6, 9),)),
    "before_and_after": (before_and_after, ("x",), (randn(6, 9), randn(6, 2))),
    "old_and_new_at_a_point": (old_and_new_at_a_point, ("x",), (randn(6, 9), randn(6, 9))),
    "rows_twice": (rows_twice, ("x",), (randn(6, 9), torch.tensor([4, 2, 0]))),
    "scattered": (scattered, ("x",), (randn(4, 9), torch.tensor([[0, 3], [1, 2], [8, 4]]), randn(3, 2))),
    "product_added": (product_added, ("x",), (randn(6, 9), randn(6, 4), randn(4, 9))),
    "reduced_into": (reduced_into, ("total",), (randn(6), randn(6, 40))),
    "filled": (filled, ("x",), (randn(4, 9), 3)),
    "reshaped": (reshaped, ("x",), (randn(4, 9),)),
    "into_another_dtype": (into_another_dtype, ("x",), (randn(4, 9, dtype=BF16), randn(4, 9))),
    "into integers": (into_another_dtype, ("x",), (ints(4, 9), randn(4, 9))),
    "flipped": (flipped, ("x",), (ints(6, 9) > 0, torch.tensor([4, 1]))),
    "counted": (counted, ("count",), (torch.tensor(2.0), randn(4, 9))),
    "operators double": (operators, ("x",), (randn(4, 7, dtype=F64), randn(4, 7, dtype=F64))),
    "swapped": (swapped, ("x", "y"), (randn(4, 9), randn(4, 9))),
    "parts of one tensor": (swapped, ("x", "y"), tuple(randn(4, 18).chunk(2, 1))),
}
