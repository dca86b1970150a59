"""The plan and the kernel body of attention on tensor cores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from fusegen.dtypes import DType
from fusegen.ir.symbolic import Axes, Index
from fusegen.schedule.kernel import Body, Plan
from fusegen.schedule.math import LaneFunction, MathFunction, Reduction
from fusegen.target import Target

_LINE = 64  # 16-bit values in a 128-byte line of the swizzle
_SLAB = 16  # rows, and keys, of an instruction of few queries


@dataclass(frozen=True)
class AttentionPlan(Plan):
    """Streaming attention on tensor cores.

    Attributes:
        head_dim: channels of a query and a key.
        value_dim: channels of a value and of the result.
        stages, q_stages: pipeline stages of key and value tiles, and of query tiles.
        gqa_group: size of the GQA group.
        consumers: warpgroups that compute 64 queries each.
    """

    head_dim: int
    value_dim: int
    tile_k: int
    stages: int
    q_stages: int = 2
    gqa_group: int = 1
    consumers: int = 2
    producer_registers: int = 24
    consumer_registers: int = 240

    @property
    def description(self) -> str:
        return f"tiles of {self.tile_q} queries and {self.tile_k} keys"

    @property
    def box_q(self) -> tuple[int, ...]:
        """The sides of a box of queries: batch, heads, positions, channels."""
        return 1, 1, self.tile_q, _LINE

    @property
    def tile_q(self) -> int:
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)

    @property
    def shared_bytes(self) -> int:
        """Bytes of 16-bit tiles in whole lines and of two barriers per tile, aligned for the swizzle."""
        keys, values = (2 * -(-width // _LINE) * _LINE for width in (self.head_dim, self.value_dim))
        tiles = keys * self.q_stages * self.tile_q + (keys + values) * self.stages * self.tile_k
        barriers = 8 * (2 * self.q_stages + 4 * self.stages)
        return -(-(tiles + barriers) // 1024) * 1024


@dataclass(frozen=True)
class FewQueriesPlan(Plan):
    """Attention of few queries, bound by the bandwidth of reading keys and values.

    The queries of all heads of a GQA group are the rows of one tile, so that keys and values are read once. `splits` blocks share
    the keys of a tile. They join their results in the distributed shared memory of a cluster; without clusters, they store them,
    and further blocks of the launch join them.

    Attributes:
        head_dim, value_dim: as in `AttentionPlan`.
        queries: positions of each head in a tile.
        splits: blocks that share the keys of a tile.
        stages: pipeline stages of key and value tiles.
        gqa_group: size of the GQA group.
        blocks_per_sm: blocks per SM that registers must leave room for.
        copies: True if all threads copy tiles by address; else a further warp loads them with TMA.
        itemsize: bytes of an element of keys and values in memory.
        joins_in_memory: True if blocks that share keys store their results in global memory.
    """

    head_dim: int
    value_dim: int
    gqa_group: int
    queries: int
    splits: int
    tile_k: int
    stages: int
    blocks_per_sm: int = 1
    copies: bool = False
    itemsize: int = 2
    joins_in_memory: bool = False

    @property
    def description(self) -> str:
        blocks = "1 block" if self.splits == 1 else f"{self.splits} blocks"
        return f"tiles of {self.rows} rows and {self.tile_k} keys, keys split over {blocks}"

    @property
    def rows(self) -> int:
        """Rows of a tile: positions of all heads of the group."""
        return self.gqa_group * self.queries

    @property
    def box_q(self) -> tuple[int, ...]:
        """The sides of a box of queries: batch, heads, positions, channels."""
        return 1, self.gqa_group, self.queries, _LINE

    @property
    def warps(self) -> int:
        """Warps that compute; each has 16 rows and 16 keys of a tile."""
        return -(-self.rows // _SLAB) * self.tile_k // _SLAB

    @property
    def threads(self) -> int:
        return 32 * (self.warps + (not self.copies))

    @property
    def joiners(self) -> int:
        """Blocks that join the stored results of a tile: a thread computes four pairs of channels."""
        return -(-self.rows * self.value_dim // (8 * self.threads)) if self.joins_in_memory else 0

    @property
    def stored(self) -> int:
        """Floats that the blocks of a tile store: sums of all channels and two statistics of each row."""
        return self.splits * self.rows * (self.value_dim + 2) if self.joins_in_memory else 0

    @property
    def shared_bytes(self) -> int:
        """Bytes of tiles in whole lines and of their barriers; afterwards, of the sums of the warps and of the block."""
        queries, lines = -(-self.head_dim // _LINE), [-(-width * self.itemsize // 128) for width in (self.head_dim, self.value_dim)]
        tiles = 128 * (queries * -(-self.rows // 8) * 8 + sum(lines) * self.stages * self.tile_k) + 8 * (1 + 4 * self.stages)
        slab = _SLAB * 2 // self.itemsize  # channels that are loaded at once
        row = 4 * (-(-self.value_dim // slab) * slab + 8 + 2)  # with two statistics
        sums = row * (self.warps * _SLAB + self.rows)
        return -(-max(tiles, sums) // 1024) * 1024


MOST_ROWS = 64
"""Rows of a tile of few queries."""
SPLITS = (1, 2, 4, 8, 16)
"""Blocks that share the keys of a tile of few queries, in a cluster."""
_STORED_SPLITS = (*SPLITS, 32, 64)  # without clusters

StreamingPlan: TypeAlias = AttentionPlan | FewQueriesPlan


@dataclass(frozen=True)
class PagedKeys:
    """Keys and values in pages.

    Attributes:
        number: the page of a block, a `CheckedIndex` over `axes`: batch, block, and a last one that is unused.
        box: keys that are read at once, from one page.
        size: keys of a page; None if it is symbolic.
    """

    number: Index
    axes: Axes
    box: int
    size: int | None


@dataclass(frozen=True)
class AttentionBody(Body):
    """Streaming attention: the recurrence's functions around two matmuls.

    Attributes:
        input_dtype: the dtype of queries.
        cache_dtype: the dtype of keys and values in memory.
        score: maps the dot products of a query with two neighbouring keys to scores; axes are batch, head, query and pairs of keys.
        finish: maps two neighbouring channels of the weighted sum to the result; axes end in pairs of channels.
        weights: ``anchor`` and ``weight``.
        row_max, row_sum: the reductions to row max and row sum; with `has_sink`, ``finish`` also reads the row max.
        out_offset: the offset of a query's first channel in the output, over the axes of ``finish``.
        visible_keys: a bound on the keys that a query sees, over the axes of ``score``; None if it may see all.
        first_key: the first key that a query may see, over these axes; None for 0.
        present_keys: the number of keys with values, over these axes; later values are 0. None if all keys have values.
        pages: the pages of keys and values; None if they are not in pages.
        matrices: the buffers of queries, keys and values that are read by address; empty if TMA loads them.
    """

    input_dtype: DType
    cache_dtype: DType
    output_dtype: DType
    score: LaneFunction
    finish: LaneFunction
    weights: tuple[MathFunction, ...]
    row_max: Reduction
    row_sum: Reduction
    has_sink: bool
    out_offset: Index
    visible_keys: Index | None
    first_key: Index | None
    present_keys: Index | None
    pages: PagedKeys | None
    plan: StreamingPlan
    matrices: tuple[int, ...] = ()

    @property
    def chosen_plan(self) -> StreamingPlan:
        return self.plan

    @property
    def cluster(self) -> int:
        return self.plan.splits if isinstance(self.plan, FewQueriesPlan) and not self.plan.joins_in_memory else 1

    @property
    def blocks_per_sm(self) -> int:
        return self.plan.blocks_per_sm if isinstance(self.plan, FewQueriesPlan) else 1

    @property
    def tile_dtypes(self) -> frozenset[DType]:
        converted = {DType.FLOAT16} if self.cache_dtype.itemsize == 1 else set()
        return frozenset({self.input_dtype, self.cache_dtype, self.output_dtype, *converted})

    def describe(self, kind: str) -> str:
        stored = [f"of {self.cache_dtype}"] if self.cache_dtype is not self.input_dtype else []
        stored += [] if self.pages is None else ["in pages"]
        cache = f", keys and values {' '.join(stored)}" if stored else ""
        if not isinstance(self.plan, FewQueriesPlan):
            return f"{kind}{cache}"
        blocks = "" if self.plan.joins_in_memory else "a cluster of "
        split = f", keys split over {blocks}{self.plan.splits} blocks" if self.plan.splits > 1 else ""
        return f"{kind}, few queries{cache}{split}"


# Plans of streaming attention, measured on an H200.


_PLANS = {
    64: AttentionPlan(64, 64, tile_k=128, stages=3),
    128: AttentionPlan(128, 128, tile_k=128, stages=2),
    256: AttentionPlan(256, 256, tile_k=64, stages=2, q_stages=1),
}
"""Plans by the largest head dim that they support."""

_RING = 96 << 10  # bytes of the key and value tiles of a block, of which an SM holds two
_COPIED_RING = 48 << 10  # without TMA: GPUs with less bandwidth need fewer bytes in flight


def attention_plans(
    head_dim: int,
    value_dim: int,
    gqa_group: int,
    queries: int | None,
    target: Target,
    *,
    is_paged: bool = False,
    itemsize: int = 2,
) -> tuple[StreamingPlan, ...]:
    """Returns the candidate plans: for any number of queries first, then for few; `queries` is None for a symbolic number.

    Only plans for few queries read keys and values of `itemsize` 1. Without `wgmma`, the only plans are those for few queries that
    fit the shared memory of a block.
    """
    widest = min(width for width in _PLANS if width >= max(head_dim, value_dim))
    plan = replace(_PLANS[widest], head_dim=head_dim, value_dim=value_dim, gqa_group=gqa_group)
    if is_paged:
        plan = replace(plan, producer_registers=40, consumer_registers=232)  # the producer reads pages
    tiles = [n for n in (1, 2, 4, 8, 16) if n * gqa_group <= MOST_ROWS]
    if queries is not None:
        tiles = [next((n for n in tiles if n >= queries), 0)]
    splits = _STORED_SPLITS if target.cluster == 1 else [each for each in SPLITS if each <= target.cluster]
    few = [_few_queries_plan(plan, n, each, target, itemsize) for n in tiles if n for each in splits]
    if not target.wgmma:
        return tuple(each for each in few if each.shared_bytes <= target.shared_bytes)
    return (plan, *few) if itemsize > 1 else tuple(few)


def _few_queries_plan(plan: AttentionPlan, queries: int, splits: int, target: Target, itemsize: int) -> FewQueriesPlan:
    slabs = -(-queries * plan.gqa_group // 16)
    lines = sum(-(-width * itemsize // 128) for width in (plan.head_dim, plan.value_dim))
    tile_k = 64 if slabs <= 2 and lines * 2 <= 4 * itemsize else 32
    stages = max(2, (_RING if target.wgmma else _COPIED_RING) // (128 * lines * tile_k))
    few = FewQueriesPlan(plan.head_dim, plan.value_dim, plan.gqa_group, queries, splits, tile_k, stages)
    few = replace(few, blocks_per_sm=2 if slabs == 1 else 1, copies=not target.wgmma, itemsize=itemsize)
    return replace(few, joins_in_memory=splits > 1 and target.cluster == 1)
