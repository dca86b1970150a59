"""The plan of attention on tensor cores, and what such a kernel does."""

from __future__ import annotations

from dataclasses import dataclass

from fusegen.dtypes import DType
from fusegen.ir.symbolic import Index
from fusegen.schedule.kernel import Body, Plan
from fusegen.schedule.math import LaneFunction, MathFunction, Reduction

_LINE = 64  # 16-bit values in the 128 bytes that the swizzle works on


@dataclass(frozen=True)
class AttentionPlan(Plan):
    """Streaming attention on tensor cores.

    Attributes:
        head_dim: channels of a head of queries and keys.
        value_dim: channels of a head of values, and of the result.
        tile_k: keys of a tile.
        stages: tiles of keys, and as many of values, that are under way.
        q_stages: tiles of queries, likewise.
        sharing: heads of queries that read one head of keys and values.
        consumers: warpgroups that compute, 64 queries each.
        producer_registers, consumer_registers: of a thread, once the warpgroups have traded them.
    """

    head_dim: int
    value_dim: int
    tile_k: int
    stages: int
    q_stages: int = 2
    sharing: int = 1
    consumers: int = 2
    producer_registers: int = 24
    consumer_registers: int = 240

    @property
    def tile_q(self) -> int:
        """Queries of a tile."""
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers and a warpgroup that brings tiles in."""
        return 128 * (self.consumers + 1)

    @property
    def shared_bytes(self) -> int:
        """Tiles of 16-bit values in whole lines, two barriers a tile, aligned as the swizzle needs."""
        keys, values = (2 * -(-width // _LINE) * _LINE for width in (self.head_dim, self.value_dim))
        tiles = keys * self.q_stages * self.tile_q + (keys + values) * self.stages * self.tile_k
        barriers = 8 * (2 * self.q_stages + 4 * self.stages)
        return -(-(tiles + barriers) // 1024) * 1024


@dataclass(frozen=True)
class AttentionBody(Body):
    """Streaming attention: the recurrence's functions around two products.

    Attributes:
        input_dtype, output_dtype: element types.
        score: from the product of a query with two neighbouring keys; axes are batch, head, query and pairs of keys.
        finish: from two neighbouring channels of the weighted sum; axes end in pairs of channels.
        weights: ``anchor``, ``weight`` and ``carry``.
        peak, mass: the reductions of scores and of weights.
        has_sink: whether ``finish`` also needs the peak of the scores.
        out_offset: of a query's first channel in the output, over the axes of ``finish``.
        seen: how many keys a query sees at most, over the axes of ``score``; None where they may be all.
    """

    input_dtype: DType
    output_dtype: DType
    score: LaneFunction
    finish: LaneFunction
    weights: tuple[MathFunction, ...]
    peak: Reduction
    mass: Reduction
    has_sink: bool
    out_offset: Index
    seen: Index | None
    plan: AttentionPlan

    @property
    def tile_dtypes(self) -> frozenset[DType]:
        """As of every body."""
        return frozenset({self.input_dtype, self.output_dtype})
