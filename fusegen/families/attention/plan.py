"""The plan and the kernel body of attention on tensor cores."""

from __future__ import annotations

from dataclasses import dataclass

from fusegen.dtypes import DType
from fusegen.ir.symbolic import Index
from fusegen.schedule.kernel import Body, Plan
from fusegen.schedule.math import LaneFunction, MathFunction, Reduction

_LINE = 64  # 16-bit values in a 128-byte line of the swizzle


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
class AttentionBody(Body):
    """Streaming attention: the recurrence's functions around two matmuls.

    Attributes:
        score: maps the dot products of a query with two neighbouring keys to scores; axes are batch, head, query and pairs of keys.
        finish: maps two neighbouring channels of the weighted sum to the result; axes end in pairs of channels.
        weights: ``anchor``, ``weight`` and ``carry``.
        row_max, row_sum: the reductions to row max and row sum; with `has_sink`, ``finish`` also reads the row max.
        out_offset: the offset of a query's first channel in the output, over the axes of ``finish``.
        visible_keys: a bound on the keys that a query sees, over the axes of ``score``; None if it may see all.
    """

    input_dtype: DType
    output_dtype: DType
    score: LaneFunction
    finish: LaneFunction
    weights: tuple[MathFunction, ...]
    row_max: Reduction
    row_sum: Reduction
    has_sink: bool
    out_offset: Index
    visible_keys: Index | None
    plan: AttentionPlan

    @property
    def tile_dtypes(self) -> frozenset[DType]:
        return frozenset({self.input_dtype, self.output_dtype})
