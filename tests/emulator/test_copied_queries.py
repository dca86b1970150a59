"""Attention of few queries without TMA: all threads copy keys and values, contiguous ones and those in pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen import ops
from fusegen.families.attention.match import ATTENTION
from fusegen.families.attention.plan import FewQueriesPlan
from fusegen.schedule import context
from fusegen.schedule.kernel import Plan
from fusegen.schedule.program import Launch
from tests.emulator.tensor_cores import EVERY_TIMING, ONCE, check, run
from tests.emulator.test_pages import paged
from tests.emulator.test_tensor_cores import attended, over_cache, randn
from tests.naming import case

OLD = "sm_80"


def takes_few_queries(function: Callable[..., Any], *arguments: Any, target: str = OLD) -> bool:
    """True if a program is one launch of attention whose threads copy its operands."""
    steps: Sequence[object] = fg.kernel(function).lower(*arguments, target=target).program.steps
    plans = [step.kernel.body.chosen_plan if isinstance(step, Launch) else None for step in steps]
    return len(plans) == 1 and isinstance(plans[0], FewQueriesPlan) and plans[0].copies


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores that torch's kernels do not support."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    return torch.softmax(torch.tanh(q @ k.mT * 0.125) * 5, -1) @ v


SHAPES = {
    "one query": ((16, 1, 64), (4, 200), torch.bfloat16),
    "no shared heads": ((4, 1, 128), (4, 77), torch.float16),
    "wide heads": ((16, 1, 256), (4, 40), torch.bfloat16),
    "odd heads": ((8, 1, 72), (4, 100), torch.bfloat16),
    "rows of two slabs": ((68, 1, 64), (4, 70), torch.bfloat16),
    "fewer keys than a tile": ((4, 1, 24), (4, 3), torch.bfloat16),
}
"""Heads, queries and channels; heads and positions of keys."""


@pytest.mark.parametrize("name", SHAPES)
def test_scores_that_torch_does_not_support(name: str) -> None:
    (heads, queries, width), (kv_heads, keys), dtype = SHAPES[name]
    q, k, v = (randn(2, n, m, width, dtype=dtype) for n, m in ((heads, queries), (kv_heads, keys), (kv_heads, keys)))
    assert takes_few_queries(capped, q, k, v)
    check(capped, q, k, v, target=OLD, timings=EVERY_TIMING if name == "one query" else ONCE)


@pytest.mark.parametrize("target", ["sm_80", "sm_86"])
def test_a_cache_is_read_up_to_its_lengths(target: str) -> None:
    """Keys and values beyond a length are NaN, and a length of 0 gives 0."""
    keys, lengths = 200, torch.tensor([0, 33, 200, 128])
    q, k, v = randn(4, 8, 1, 64), randn(4, 4, keys, 64), randn(4, 4, keys, 64)
    beyond = (torch.arange(keys) >= lengths[:, None])[:, None, :, None]
    expected = torch.cat([attended(*values, int(length)) for *values, length in zip(q, k, v, lengths, strict=True)])
    k, v = (x.masked_fill(beyond, math.nan) for x in (k, v))
    assert takes_few_queries(over_cache, q, k, v, lengths, target=target)
    got = run(over_cache, q, k, v, lengths, target=target, timing=ONCE[0])
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=0.01)


@pytest.mark.parametrize(("page", "lengths"), [(16, (0, 33, 80, 64)), (48, (144, 97)), (16, (400,))], ids=str)
def test_pages_are_read_where_they_lie(page: int, lengths: tuple[int, ...]) -> None:
    """The table beyond a length has no page numbers, and pages are NaN there."""
    blocks = -(-max(lengths) // page)
    q, k, v = randn(len(lengths), 8, 1, 64), *(randn(len(lengths), 4, blocks * page, 64) for _ in "kv")
    expected = torch.cat([attended(*values, length) for *values, length in zip(q, k, v, lengths, strict=True)])
    table, pages = paged((k, v), torch.tensor(lengths), page)
    arguments = q, *pages, table, torch.tensor(lengths)
    assert takes_few_queries(ops.paged_attention.function, *arguments)
    got = run(ops.paged_attention.function, *arguments, target=OLD, timing=ONCE[0])
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=0.01)


def test_blocks_of_a_cluster_share_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(self: context.Context, candidates: tuple[Plan, ...]) -> Plan:
        self.candidates = candidates
        return next(plan for plan in candidates if isinstance(plan, FewQueriesPlan) and plan.splits == 4)

    monkeypatch.setattr(context.Context, "choose", choose)
    check(capped, randn(2, 16, 1, 64), randn(2, 4, 200, 64), randn(2, 4, 200, 64), target="sm_120", timings=EVERY_TIMING)


def test_other_attention_keeps_its_way() -> None:
    """Torch's kernels where they need no copies, many queries, a number of queries known at the call, and few heads of keys."""
    k = randn(2, 4, 200, 64)
    cases = {
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v): (randn(2, 4, 1, 64), k, k),
        capped: (randn(2, 4, 3, 64), k, k),
        lambda q, k, v: capped(q[:, :2], k[:, :2], v[:, :2]): (randn(2, 4, 1, 64), k, k),
    }
    for function, arguments in cases.items():
        with case(function.__name__):
            assert ATTENTION not in [group.kind for group in fg.kernel(function).lower(*arguments, target=OLD).groups]
