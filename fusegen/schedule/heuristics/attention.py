"""Plans of streaming attention, measured on an H200."""

from __future__ import annotations

from dataclasses import replace

from fusegen.schedule.plan import AttentionPlan

_PLANS = {
    64: AttentionPlan(64, 64, tile_k=128, stages=3),
    128: AttentionPlan(128, 128, tile_k=128, stages=2),
    256: AttentionPlan(256, 256, tile_k=64, stages=2, q_stages=1),
}
"""By the channels of a head up to which they hold."""


def attention_plan(head_dim: int, value_dim: int, sharing: int = 1) -> AttentionPlan:
    """The plan for the width of a head, and as many heads of queries as share one of keys."""
    widest = min(width for width in _PLANS if width >= max(head_dim, value_dim))
    return replace(_PLANS[widest], head_dim=head_dim, value_dim=value_dim, sharing=sharing)
