"""Plans of streaming attention, measured on an H200."""

from __future__ import annotations

from dataclasses import replace

from fusegen.schedule.plan import AttentionPlan

_PLANS = {64: AttentionPlan(64, tile_k=128, stages=3), 128: AttentionPlan(128, tile_k=128, stages=2)}


def attention_plan(head_dim: int, sharing: int = 1) -> AttentionPlan:
    """The plan for the width of a head, and as many heads of queries as share one of keys."""
    return replace(_PLANS[head_dim], sharing=sharing)
