"""Products and attention for sm_90a in the emulator: the copy engine, barriers in shared memory and products of warpgroups, with
everything asynchronous as early and as late as it may come, and threads in either order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.compiler.emulator import EmulatedTiming
from fusegen.families.attention.plan import _PLANS, FewQueriesPlan
from fusegen.families.gemm.choice import MatmulChoice
from fusegen.families.gemm.heuristics import ExpectedSizes, candidates, shape_of
from fusegen.families.gemm.plan import ContractionPlan, FewRowsPlan
from fusegen.fusion import Group
from fusegen.ir.graph import Graph
from fusegen.schedule.choices import Choice
from fusegen.schedule.kernel import Plan
from fusegen.schedule.program import Launch
from fusegen.specs.attention import with_cache
from fusegen.target import Target
from tests.emulator import tensor_cores
from tests.emulator.tensor_cores import EVERY_TIMING, ONCE, UNIT, check, many_queries, run
from tests.naming import case
from tests.unit.test_heads import ATTENTION
from tests.unit.test_sinks import HEADS, WAYS
from tests.unit.test_visible import SEEN

BF16, F16 = torch.bfloat16, torch.float16


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape).to(dtype)


def in_one_launch(function: Callable[..., Any], *arguments: Any, timings: tuple[EmulatedTiming, ...] = EVERY_TIMING[1:3]) -> None:
    assert len(fg.kernel(function).lower(*arguments, target="sm_90a").program.steps) == 1
    check(function, *arguments, timings=timings, measured=many_queries)


# Products.


def bias_relu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.relu(F.linear(x, w) + b)


def residual(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return F.linear(x, w) - r


PRODUCTS = {
    "one-stage": (130, 72, 64, BF16),
    "tails-of-all-three": (200, 264, 200, BF16),
    "more-stages-than-the-ring": (150, 136, 704, BF16),
    "less-than-a-tile": (40, 8, 8, BF16),
    "halves": (200, 264, 72, F16),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_a_bias(name: str) -> None:
    rows, columns, depth, dtype = PRODUCTS[name]
    inputs = (randn(*shape, dtype=dtype) for shape in ((rows, depth), (columns, depth), (columns,)))
    check(bias_relu, *inputs, sms=16)


def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def takes_a_plan_for_few_rows(function: Callable[..., Any], *arguments: Any, target: str = "sm_90a") -> bool:
    program = fg.kernel(function).lower(*arguments, target=target).program
    (step,) = program.steps
    return isinstance(step, Launch) and isinstance(step.kernel.body.plan, FewRowsPlan)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("depth", [8, 72, 200, 1152], ids=lambda depth: f"depth-{depth}")
def test_few_rows(depth: int, dtype: torch.dtype) -> None:
    """Depths of less than a chunk, of whole and partial chunks, and of several chunks a warp."""
    for rows, columns in ((1, 72), (9, 8), (16, 40)):
        with case((rows, columns)):
            x, w = randn(rows, depth, dtype=dtype), randn(columns, depth, dtype=dtype)
            for function, others in ((bias_relu, (randn(columns, dtype=dtype),)), (gated, (w + 1,))):
                assert takes_a_plan_for_few_rows(function, x, w, *others)
                check(function, x, w, *others, timings=ONCE)


def test_few_rows_of_parts_in_their_own_layouts() -> None:
    """Matmuls of one operand are one launch; each result has a layout and an element type of its own."""

    def heads(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(F.linear(x, w)).float(), F.linear(x, v).view(2, 3, 2, 8).transpose(1, 2) * 2

    arguments = randn(2, 3, 72), randn(40, 72), randn(16, 72)
    assert takes_a_plan_for_few_rows(heads, *arguments)
    got, wanted = run(heads, *arguments), heads(*(tensor.float() for tensor in arguments))
    assert all(torch.allclose(a.float(), b, rtol=0.02, atol=0.05) for a, b in zip(got, wanted, strict=True))


def rotated_heads(x: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Queries and keys with their halves rotated, and values."""

    def rotated(heads: Tensor) -> Tensor:
        first, second = heads.chunk(2, -1)
        return heads * cos + torch.cat((-second, first), -1) * sin

    query, key, value = (F.linear(x, w).unflatten(-1, (-1, 64)).transpose(1, 2) for w in (q, k, v))
    return rotated(query), rotated(key), value


@pytest.mark.parametrize("rows", [(1, 1), (2, 7)])
def test_few_rows_of_rotated_heads(rows: tuple[int, int]) -> None:
    """A tile has 16 columns of the first half of a head and those of the second that rotate with them."""
    x, *weights = randn(*rows, 136), *(randn(columns, 136) * 0.1 for columns in (256, 128, 128))
    arguments = x, *weights, randn(rows[0], 1, rows[1], 64), randn(rows[0], 1, rows[1], 64)
    assert takes_a_plan_for_few_rows(rotated_heads, *arguments)
    for got, expected in zip(run(rotated_heads, *arguments), rotated_heads(*(a.double() for a in arguments)), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=0.01, atol=0.03)


def test_few_rows_request_weights_before_they_wait() -> None:
    """A weight of the caller, and one that is computed by the launch before the first matmul, which waits first."""

    def chain(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        weight = v.cumsum(1)
        return torch.tanh(torch.tanh(torch.tanh(x @ weight.mT) @ w.mT) @ weight.mT)

    arguments = randn(3, 72), randn(72, 72) / 8, randn(72, 72) / 8
    low = fg.kernel(chain).lower(*arguments, target="sm_90a")
    assert [isinstance(launch.kernel.body.plan, FewRowsPlan) for launch in low.program.launches] == [False, True, True, True]
    assert ["load_b(chunks[stage]" in source.pipeline for source in low.sources] == [False, False, True, True]
    check(chain, *arguments, unit=2.0**-7)


def test_few_rows_with_columns_shifted_within_heads() -> None:
    """Columns are combined that no tile of two slabs holds together."""

    def shifted(x: Tensor, w: Tensor) -> Tensor:
        heads = F.linear(x, w).unflatten(-1, (-1, 64))
        return (heads + F.pad(heads[..., 16:], (0, 16))).flatten(-2)

    check(shifted, randn(3, 72), randn(128, 72), timings=ONCE)


def test_missing_rows_and_columns_do_not_touch_others() -> None:
    """NaN and infinity stay in their row and column, also where a tile is partial and the depth ends within a chunk."""
    x, w, b = torch.ones(3, 72, dtype=BF16), torch.ones(24, 72, dtype=BF16), torch.zeros(24, dtype=BF16)
    x[2, 71], w[23, 0] = float("inf"), float("nan")
    got = run(bias_relu, x, w, b)
    assert (got[:2, :23] == 72).all() and (got[2, :23] == float("inf")).all() and got[:, 23].isnan().all()


@pytest.mark.parametrize(("consumers", "rows"), [(1, 17), (2, 32), (2, 72)])
def test_rows_of_a_tile_that_are_not_loaded(consumers: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def partial(graph: Graph, group: Group, target: Target, expected: ExpectedSizes) -> MatmulChoice:
        plans = candidates(shape_of(graph, group, expected), target)
        found = (plan for plan in plans if isinstance(plan, ContractionPlan) and plan.consumers == consumers)
        return MatmulChoice(next(plan for plan in found if rows <= plan.loaded_rows < plan.tile_m))

    monkeypatch.setattr(tensor_cores, "choose", partial)
    check(residual, randn(rows, 584), randn(72, 584), randn(rows, 72), timings=EVERY_TIMING[1:3])


def test_rows_that_are_known_to_be_few_take_one_warpgroup() -> None:
    """A literal number of rows: as many as the product's columns."""
    check(residual, randn(64, 128), randn(64, 128), randn(64, 64))


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "sms"),
    [(1300, 512, 16, 1), (1300, 72, 64, 3), (300, 520, 128, 3)],
    ids=["more-rows-of-tiles-than-are-walked-together", "one-chunk-a-tile", "rows-and-columns-of-tiles"],
)
def test_blocks_stride_over_tiles(rows: int, columns: int, depth: int, sms: int) -> None:
    inputs = randn(rows, depth), randn(columns, depth), randn(rows, columns)
    check(residual, *inputs, sms=sms, timings=EVERY_TIMING[1:3])


def test_tiles_of_an_odd_number_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks take turns between two buffers, also from one tile to the next."""

    def three_chunks(graph: Graph, group: Group, target: Target, expected: ExpectedSizes) -> MatmulChoice:
        plans = candidates(shape_of(graph, group, expected), target)
        return MatmulChoice(next(plan for plan in plans if (plan.consumers, plan.tile_n) == (2, 192)))

    monkeypatch.setattr(tensor_cores, "choose", three_chunks)
    check(residual, randn(300, 128), randn(520, 128), randn(300, 520), timings=EVERY_TIMING[1:3])


@pytest.mark.parametrize(("consumers", "splits", "depth"), [(1, 3, 584), (2, 2, 256), (1, 4, 64)])
def test_blocks_of_a_cluster_share_the_depth(monkeypatch: pytest.MonkeyPatch, consumers: int, splits: int, depth: int) -> None:
    """Their spans may differ by a step, or be empty."""

    def shared(graph: Graph, group: Group, target: Target, expected: ExpectedSizes) -> MatmulChoice:
        plans = candidates(shape_of(graph, group, expected), target)
        plan = next(plan for plan in plans if isinstance(plan, ContractionPlan) and plan.consumers == consumers)
        return MatmulChoice(replace(plan, splits=splits))

    monkeypatch.setattr(tensor_cores, "choose", shared)
    check(residual, randn(150, depth), randn(136, depth), randn(150, 136), timings=EVERY_TIMING[1:3])


def test_a_float32_result_leaves_in_chunks_of_32_columns() -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return (F.linear(x, w) * 0.5 + b).to(torch.float32 if x.dtype is BF16 else x.dtype)

    check(function, randn(150, 192), randn(200, 192), randn(200))


def test_what_reads_a_product_of_one_row_comes_behind_it() -> None:
    def heads(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        q, k, v = F.linear(F.layer_norm(x, x.shape[-1:]), w, b).view(1, 4, 48).chunk(3, -1)
        return q * k + v

    check(heads, randn(1, 64), randn(192, 64), randn(192), timings=ONCE)


def test_operands_contiguous_along_either_dim() -> None:
    rows, columns, depth = 136, 152, 144

    def function(x: Tensor, w: Tensor, x_turned: bool, w_turned: bool) -> Tensor:
        return torch.tanh((x.mT if x_turned else x) @ (w.mT if w_turned else w) * 0.1)

    for turned in product((False, True), repeat=2):
        with case(turned):
            a = randn(depth, rows) if turned[0] else randn(rows, depth)
            b = randn(columns, depth) if turned[1] else randn(depth, columns)
            check(function, a, b, *turned, sms=16, timings=EVERY_TIMING[1:3])


def test_operands_at_an_offset_with_gaps_between_their_rows() -> None:
    a, b, r = randn(140, 208), randn(100, 160), randn(130, 72)
    check(residual, a[3:133, 8:136], b[10:82, 16:144], r)
    check(lambda x, w, r: residual(x[3:133, 8:136], w[10:82, 16:144], r), a, b, r)


def test_an_epilogue_that_mixes_two_columns() -> None:
    def rotary(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = F.linear(x, w)
        even, odd = y[..., 0::2], y[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)

    check(rotary, randn(2, 70, 64), randn(72, 64), randn(70, 36), randn(70, 36))


# Attention.


check_attention = partial(check, measured=many_queries)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def qkv(queries: int, keys: int, width: int = 64, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    """Two batches of two heads; the scores differ enough for the peak to move from tile to tile."""
    q, k, v = (randn(2, 2, length, width, dtype=dtype) for length in (queries, keys, keys))
    return q * 3, k * 2, v


LENGTHS = {
    "one-tile": (128, 128, 64),
    "tails-of-both": (150, 300, 64),
    "less-than-a-tile": (3, 77, 64),
    "a-single-one": (1, 1, 64),
    "more-tiles-than-the-ring": (130, 640, 64),
    "wide heads": (130, 300, 128),
    "wider heads": (130, 150, 256),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_plain_attention(name: str) -> None:
    queries, keys, width = LENGTHS[name]
    check_attention(plain, *qkv(queries, keys, width), timings=EVERY_TIMING[1:3] if keys > 300 or width > 64 else EVERY_TIMING)


TILE = _PLANS[64].tile_k
AROUND_TILES = {
    "plain": (1, TILE - 1, TILE, TILE + 1, 2 * TILE - 1, 2 * TILE + 1),
    "causal": (TILE - 1, TILE, 2 * TILE - 1, 2 * TILE + 1),
    "masked": (TILE - 1, TILE + 1, 2 * TILE - 1),
    "wide": (_PLANS[128].tile_k - 1, _PLANS[128].tile_k + 1),
}


@pytest.mark.parametrize("kind", AROUND_TILES)
def test_the_last_tile_ends_where_the_keys_do(kind: str) -> None:
    """One key more or less than a tile holds; what is not there would outweigh scores far below zero."""

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q @ k.mT * 0.125
        if kind == "causal":
            query, key = torch.arange(scores.shape[-2]), torch.arange(scores.shape[-1])
            scores = torch.where(key <= query[:, None] * 40 + 100, scores, -math.inf)
        return torch.softmax(scores + mask if kind == "masked" else scores, -1) @ v

    for keys in AROUND_TILES[kind]:
        with case(keys):
            q, k, v = qkv(66, keys, 128 if kind == "wide" else 64, dtype=F16)
            mask = torch.randn(2, 1, 1, keys).half()
            check_attention(attention, q.abs(), -k.abs() * 2, v, mask, timings=ONCE)


FEW_QUERIES: dict[str, tuple[tuple[int, int, int], tuple[int, int], torch.dtype]] = {
    "one query": ((8, 1, 64), (2, 200), BF16),
    "rows of two slabs": ((8, 5, 64), (2, 130), BF16),
    "more queries than a tile": ((16, 9, 64), (1, 70), BF16),
    "no shared heads": ((2, 3, 128), (2, 77), F16),
    "wide heads": ((4, 1, 256), (1, 40), BF16),
    "odd heads": ((4, 2, 72), (2, 100), BF16),
}
"""Heads, queries and channels; heads and positions of keys."""


@pytest.mark.parametrize("name", FEW_QUERIES)
def test_few_queries(name: str) -> None:
    """Heads that share keys are rows of one tile, whose keys are split over the blocks of a cluster; some blocks get no key."""
    (heads, queries, width), (kv_heads, keys), dtype = FEW_QUERIES[name]
    q, k, v = (randn(2, n, m, width, dtype=dtype) for n, m in ((heads, queries), (kv_heads, keys), (kv_heads, keys)))
    mask = torch.rand(2, 1, queries, keys) > 0.3
    for splits in (1, 2, 8):

        def split(choice: Choice, splits: int = splits) -> Plan:
            return [plan for plan in choice.candidates if isinstance(plan, FewQueriesPlan) and plan.splits == splits][-1]

        with case(splits):
            timings = EVERY_TIMING if name == "one query" else ONCE
            check(shared_masked, q * 3, k * 2, v, mask, timings=timings, measured=split)


def shared_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


@pytest.mark.parametrize("queries", [1, 3])
def test_a_cache_is_read_up_to_its_lengths(queries: int) -> None:
    """By the kernels of few and of many queries; keys and values beyond a length are NaN, and a length of 0 gives 0."""
    keys, lengths = 200, torch.tensor([0, 33, 200, 128])
    q, k, v = randn(4, 4, queries, 64), randn(4, 2, keys, 64), randn(4, 2, keys, 64)
    beyond = (torch.arange(keys) >= lengths[:, None])[:, None, :, None]
    expected = torch.cat([attended(*values, int(length)) for *values, length in zip(q, k, v, lengths, strict=True)])
    k, v = (x.masked_fill(beyond, math.nan) for x in (k, v))
    for number in (0, 1, -2):

        def nth(choice: Choice, number: int = number) -> Plan:
            return choice.candidates[number]

        with case(number):
            got = run(over_cache, q, k, v, lengths, timing=ONCE[0], measured=nth)
            torch.testing.assert_close(got.double(), expected, rtol=0, atol=0.01)


def few_queries(choice: Choice) -> Plan | None:
    return next((plan for plan in choice.candidates if isinstance(plan, FewQueriesPlan)), None)


def test_values_that_are_masked_by_more_than_a_length() -> None:
    """By other conditions, and differently in heads that share keys, which one block computes where queries are few."""

    def also_by_others(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        key = torch.arange(k.shape[2], device=k.device)[:, None]
        v = torch.where((key < lengths.view(-1, 1, 1, 1)) & (key % 3 != 0), v, 0.0)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def by_head(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        key = torch.arange(k.shape[2], device=k.device)[:, None]
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        return plain(q, k, torch.where(key < lengths.view(1, -1, 1, 1), v, 0.0))

    arguments = randn(2, 4, 1, 64), randn(2, 2, 150, 64), randn(2, 2, 150, 64)
    for function, lengths in ((also_by_others, (150, 70)), (by_head, (30, 150, 100, 64))):
        with case(function.__name__):
            check(function, *arguments, torch.tensor(lengths), timings=ONCE, measured=few_queries)


def over_cache(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return with_cache(q, k, v, lengths, None, None, None, None, None, None)


def attended(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
    """Attention of the last queries of one sequence in float64, in heads that share keys."""
    q, k, v = (x.double() for x in (q, k[:, :length].repeat_interleave(2, 0), v[:, :length].repeat_interleave(2, 0)))
    position = length - q.shape[1] + torch.arange(q.shape[1])
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(torch.arange(length) > position[:, None], -math.inf)
    return torch.where(position[:, None] >= 0, scores.softmax(-1) @ v, 0.0)[None]


WIDTHS = ((8, 8), (24, 40), (32, 32), (72, 80), (80, 72), (96, 96), (64, 128), (128, 64), (192, 128), (160, 160), (256, 256))
"""Channels of queries and keys, and of values: fewer than a line of 64, no whole lines, no whole steps of 16, more than a tile."""


def values_of(width: int, channels: int, dtype: torch.dtype = BF16) -> tuple[Tensor, ...]:
    """q, k and v as heads of longer rows: what lies beyond a head is another one's."""
    q, k, v = (randn(2, length, 2 * n, dtype=dtype) for length, n in ((70, width), (100, width), (100, channels)))
    return q * 3, k * 2, v


@pytest.mark.parametrize(("width", "channels"), WIDTHS)
def test_channels_of_a_head(width: int, channels: int) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (2, -1)).transpose(1, 2) for x in (q, k, v))
        return plain(q, k, v).transpose(1, 2).flatten(-2)

    in_one_launch(attention, *values_of(width, channels), timings=ONCE)


@pytest.mark.parametrize("fifth", range(5))
def test_other_dims(fifth: int) -> None:
    """Ways to write attention, of more queries and keys than a tile, neither a multiple of one."""

    def longer(tensor: Tensor) -> Tensor:
        return randn(*({5: 70, 7: 140}.get(extent, extent) for extent in tensor.shape))

    for function in list(ATTENTION)[fifth::5]:
        with case(function.__name__):
            in_one_launch(function, *map(longer, ATTENTION[function]), timings=ONCE)


def test_queries_behind_a_number_of_keys() -> None:
    """The number is one of the call; blocks of keys that no query sees are left out."""

    def behind(q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
        scores = q @ k.mT * 0.125
        query, key = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
        return torch.softmax(torch.where(key <= query[:, None] + first, scores, -math.inf), -1) @ v

    values = tuple(randn(1, HEADS, length, 64) for length in (70, 300, 300))
    for first in (7, 130):
        with case(first):
            check_attention(behind, *values, first, timings=ONCE)


@pytest.mark.parametrize("function", WAYS, ids=lambda f: f.__name__)
def test_a_sink(function: Callable[..., Tensor]) -> None:
    for level in (-3.0, 3.0, 60.0) if function is WAYS[0] else (3.0,):
        with case(level):
            values = (*(randn(2, HEADS, length, 64) for length in (70, 140, 140)), randn(HEADS) + level)
            check_attention(function, *values, timings=ONCE)


def test_a_sink_that_takes_all_of_the_weight_leaves_nothing() -> None:
    """Its weight relative to the others' peak is beyond what a float holds."""
    values = (*(randn(2, HEADS, length, 64) for length in (70, 140, 140)), randn(HEADS) + 300)
    assert not run(WAYS[0], *values, timing=EmulatedTiming.LATE, measured=many_queries).any()


def test_a_float32_result_of_ragged_heads_with_an_epilogue() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
        wide = torch.float32 if q.dtype is BF16 else q.dtype
        return (plain(q, k, v).to(wide) + bias) * gate

    check_attention(attention, *qkv(70, 150, 40), randn(2, 2, 70, 40), randn(40), timings=ONCE, unit=UNIT[BF16])


@pytest.mark.parametrize("name", ["causal", "at an end", "a window", "one after the other"])
def test_keys_that_no_query_of_a_tile_sees(name: str) -> None:
    mask, _ = SEEN[name]

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(mask(q @ k.mT * 0.125), -1) @ v

    for queries, keys in ((200, 333), (300, 130), (1, 200), (129, 128)):
        with case((queries, keys)):
            q, k, v = (x[:1] for x in qkv(queries, keys))
            if name == "a window":
                k, v = k[..., :queries, :], v[..., :queries, :]  # else the last queries see none
                q = q[..., : k.shape[-2], :]
            timings = EVERY_TIMING[1:3] if queries == 200 else ONCE
            check_attention(function, *(x.contiguous() for x in (q, k, v)), sms=3, timings=timings)


@pytest.mark.parametrize("keys", [130, 77])
def test_a_mask_is_read_in_bounds_and_may_hide_whole_tiles(keys: int) -> None:
    def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT * 0.125 + mask, -1) @ v

    mask = torch.zeros(2, 1, 1, keys).bfloat16()
    mask[0, ..., keys // 2 :] = -math.inf
    check_attention(masked, *qkv(100, keys), mask)


def test_keys_are_as_many_as_their_lengths_say() -> None:
    def ragged(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(k.shape[2], device=q.device) < lengths[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])

    check_attention(ragged, *qkv(70, 130), torch.tensor([130, 33]))


@pytest.mark.parametrize(("keys", "is_bool"), [(130, True), (77, False)])
def test_queries_that_see_no_key_get_nothing(keys: int, is_bool: bool) -> None:
    """As torch's own attention has it; a softmax of the user's stays NaN there."""
    seen = torch.rand(100, keys) > 0.5
    seen[3] = seen[99] = False
    mask = seen if is_bool else torch.zeros(100, keys, dtype=BF16).masked_fill(~seen, -math.inf)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask if mask.dtype is torch.bool else mask.to(q.dtype))

    values = qkv(100, keys)
    check_attention(attend, *values, mask)
    own = run(lambda q, k, v, m: torch.softmax(torch.where(m, q @ k.mT, -math.inf), -1) @ v, *values, seen, measured=many_queries)
    assert own[..., 3, :].isnan().all() and not own[..., 4, :].isnan().any()


def shared_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def of_one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Which the products broadcast."""
    return plain(*(x.unflatten(-1, (-1, 64)).transpose(1, 2) for x in (q, k, v)))


def of_wide_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As in GPT-J: what is multiplied has 16 bits all the same."""
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    scores = q.to(wide) @ k.to(wide).transpose(-1, -2) / 8
    return torch.softmax(scores, -1).to(v.dtype) @ v


KEYS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "shared heads": (shared_heads, (2, 4, 70, 64), (2, 2, 130, 64)),
    "one head": (of_one_head, (2, 70, 256), (2, 130, 64)),
    "wide scores": (of_wide_scores, (2, 2, 70, 64), (2, 2, 130, 64)),
}
"""Ways to read keys, and the shapes of queries and keys."""


@pytest.mark.parametrize("name", KEYS)
def test_queries_share_keys_that_nobody_copies(name: str) -> None:
    function, queries, keys = KEYS[name]
    in_one_launch(function, randn(*queries) * 3, randn(*keys) * 2, randn(*keys))
