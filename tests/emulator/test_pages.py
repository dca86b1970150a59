"""Attention over caches in pages, and over windows of keys, in the emulator."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen import ops
from fusegen.compiler import specialize
from fusegen.errors import IndexRangeError
from fusegen.families.attention.match import ATTENTION
from fusegen.families.attention.plan import AttentionBody
from fusegen.lowered import Lowered
from fusegen.schedule import context
from tests.emulator.tensor_cores import EVERY_TIMING, ONCE, check, run
from tests.emulator.test_tensor_cores import attended, randn
from tests.naming import case

PAGES: dict[str, tuple[int, int, bool, tuple[int, ...]]] = {
    "pages of a box": (16, 1, False, (0, 33, 80, 64)),
    "pages of two boxes": (32, 1, True, (96, 0, 31, 1)),
    "several queries": (16, 3, True, (2, 64, 65, 48)),
    "pages of half a tile and more": (48, 2, False, (144, 97)),
    "more tiles than a warp reads pages of at once": (16, 1, False, (1200,)),
}
"""Keys of a page, queries, whether the heads of a page come before its keys, and lengths."""


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_read_where_they_lie(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels of few and of many queries; what is beyond a length in the table is no page, and in a page NaN."""
    page, queries, is_by_head, lengths = PAGES[name]
    blocks = -(-max(lengths) // page)
    q, k, v = randn(len(lengths), 4, queries, 64), *(randn(len(lengths), 2, blocks * page, 64) for _ in "kv")
    expected = torch.cat([attended(*values, length) for *values, length in zip(q, k, v, lengths, strict=True)])
    table, pages = paged((k, v), torch.tensor(lengths), page)

    def attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        k, v = (x.transpose(1, 2) if is_by_head else x for x in (k, v))
        return ops.paged_attention.function(q, k, v, table, lengths)

    pages = [x.transpose(1, 2).contiguous() if is_by_head else x for x in pages]
    arguments = q, *pages, table, torch.tensor(lengths)
    assert len(fg.kernel(attention).lower(*arguments, target="sm_90a").program.steps) == 1
    monkeypatch.setattr(specialize, "preferred", lambda *_: None)
    for number in (0, 1, -2):
        monkeypatch.setattr(context.Context, "choose", lambda _, candidates, number=number: candidates[number])
        for timing in EVERY_TIMING if (name, number) in (("pages of a box", 1), ("pages of two boxes", 0)) else ONCE:
            with case((number, timing)):
                got = run(attention, *arguments, timing=timing)
                torch.testing.assert_close(got.double(), expected, rtol=0, atol=0.01)


def test_a_page_number_out_of_range_is_refused() -> None:
    table, pages = paged((randn(1, 2, 32, 64), randn(1, 2, 32, 64)), torch.tensor([17]), 16)
    table[0, 1] = 2
    with pytest.raises(IndexRangeError, match="index of 'k_cache' out of range"):
        run(ops.paged_attention.function, randn(1, 4, 1, 64), *pages, table, torch.tensor([17]))


def side_by_side(q: Tensor, pages: Tensor, table: Tensor) -> Tensor:
    """Keys and values in one cache, without a length."""
    k, v = (pages[:, part][table].flatten(1, 2).transpose(1, 2) for part in (0, 1))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def computed_numbers(q: Tensor, pages: Tensor, table: Tensor) -> Tensor:
    """Page numbers that the kernel cannot compute."""
    return side_by_side(q, pages, (table * 2).long() // 2)


def literal_pages(q: Tensor, pages: Tensor, table: Tensor) -> Tensor:
    return side_by_side(q, pages.flatten(0, 1).view(-1, 2, 16, *pages.shape[3:]), table)


def test_pages_that_differ_by_head_are_copied() -> None:
    """The kernel would read one page for all heads of a block."""

    def attention(q: Tensor, pages: Tensor, table: Tensor) -> Tensor:
        keys = pages[table].view(2, 3, 80, 64)
        return F.scaled_dot_product_attention(q, keys, keys, enable_gqa=True)

    check(attention, randn(2, 6, 1, 64), randn(9, 16, 64), torch.randint(9, (2, 3, 5)), timings=ONCE)


@pytest.mark.parametrize("heads", [2, 6], ids=lambda heads: f"{heads} heads")
@pytest.mark.parametrize("function", [side_by_side, computed_numbers, literal_pages], ids=lambda f: f.__name__)
def test_other_declarations(function: Callable[..., Tensor], heads: int) -> None:
    for queries in (1, 70):
        with case(queries):
            check(function, randn(2, heads, queries, 64), randn(9, 2, 16, 2, 64), torch.randint(9, (2, 5)), timings=ONCE)


def test_values_of_fewer_heads_than_keys_are_not_read_in_place() -> None:
    """The matmul expands them."""

    def attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        k, v = (pages[table].flatten(1, 2).transpose(1, 2) for pages in (k, v))
        return torch.softmax(q @ k.mT * 0.125, -1) @ v

    arguments = randn(2, 4, 1, 64), randn(9, 16, 4, 64), randn(9, 16, 1, 64), torch.randint(9, (2, 5))
    assert ATTENTION not in [group.kind for group in fg.kernel(attention).lower(*arguments, target="sm_90a").groups]


def body_of(low: Lowered) -> AttentionBody:
    body = low.program.launches[-1].kernel.body
    assert isinstance(body, AttentionBody)
    return body


def test_keys_that_the_function_writes_are_read() -> None:
    """The write is a launch before; the attention reads the same memory."""

    def step(q: Tensor, pages: Tensor, table: Tensor, slots: Tensor, new: Tensor) -> Tensor:
        pages[slots // 16, :, slots % 16] = new
        return side_by_side(q, pages, table)

    q, pages, table, slots, new = (
        randn(2, 4, 1, 64),
        randn(9, 2, 16, 2, 64),
        torch.randperm(9)[:8].view(2, 4),
        torch.tensor([3, 77]),
        randn(2, 2, 2, 64),
    )
    low = fg.kernel(mutates=("pages",))(step).lower(q, pages, table, slots, new, target="sm_90a")
    assert low.groups[-1].kind is ATTENTION and body_of(low).pages is not None


def window_of_cache(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return ops.cached_attention.function(q, k, v, lengths, window=40)


def causal_window(q: Tensor, k: Tensor, v: Tensor, _lengths: Tensor) -> Tensor:
    return cast(Tensor, ops.flash_attention.function(q, k, v, is_causal=True, window=40, offset=k.shape[2] - q.shape[2]))


def from_a_key_on(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """The padding is on the left."""
    scores = q @ k.repeat_interleave(2, 1).mT * 0.125
    scores = torch.where(torch.arange(k.shape[2]) >= lengths.view(-1, 1, 1, 1), scores, -math.inf)
    return torch.softmax(scores, -1) @ v.repeat_interleave(2, 1)


@pytest.mark.parametrize("queries", [1, 3, 130])
@pytest.mark.parametrize("function", [window_of_cache, causal_window, from_a_key_on], ids=lambda f: f.__name__)
def test_keys_before_a_window_are_not_read(function: Callable[..., Tensor], queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels of few and of many queries, with the keys of a tile split over blocks, too."""
    arguments = randn(2, 4, queries, 64), randn(2, 2, 300, 64), randn(2, 2, 300, 64), torch.tensor([290, 131])
    monkeypatch.setattr(specialize, "preferred", lambda *_: None)
    for number in {1: (0, -2), 3: (1,), 130: (0,)}[queries]:
        monkeypatch.setattr(context.Context, "choose", lambda _, candidates, number=number: candidates[number])
        with case(number):
            low = fg.kernel(function).lower(*arguments, target="sm_90a")
            assert body_of(low).first_key is not None
            check(function, *arguments, timings=ONCE)


def test_pages_before_a_window_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values there are NaN, which no weight of 0 would remove."""
    lengths = torch.tensor([300, 320, 64])
    q, k, v = randn(3, 4, 1, 64), randn(3, 2, 320, 64), randn(3, 2, 320, 64)
    early = (torch.arange(320) < (lengths[:, None] - 40) // 128 * 128)[:, None, :, None]
    expected = ops.cached_attention.function(q.double(), k.double(), v.double(), lengths, window=40)
    table, pages = paged((k, v.masked_fill(early, math.nan)), lengths, 16)

    def attention(*arguments: Tensor) -> Tensor:
        return ops.paged_attention.function(*arguments, window=40)

    monkeypatch.setattr(specialize, "preferred", lambda *_: None)
    for number in (0, 1):
        monkeypatch.setattr(context.Context, "choose", lambda _, candidates, number=number: candidates[number])
        with case(number):
            got = run(lambda q, k, v, t, n: attention(q, k, v, t, n), q, *pages, table, lengths, timing=ONCE[0])
            torch.testing.assert_close(got.double(), expected, rtol=0, atol=0.01)


def paged(caches: tuple[Tensor, ...], lengths: Tensor, page: int) -> tuple[Tensor, list[Tensor]]:
    """Caches of (batch, head, key, channel) as a table and pages in random order; entries that are not in use are no pages."""
    batch, _, keys, _ = caches[0].shape
    order = torch.randperm(batch * keys // page)
    table = order.view(batch, -1).int()
    used = torch.arange(keys // page) * page < lengths[:, None]
    beyond = (torch.arange(keys) >= lengths[:, None])[:, None, :, None]
    pages = [c.masked_fill(beyond, math.nan).unflatten(2, (-1, page)).permute(0, 2, 3, 1, 4).flatten(0, 1) for c in caches]
    return torch.where(used, table, 10**6), [p[order.argsort()].contiguous() for p in pages]
