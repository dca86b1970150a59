"""Attention by a kernel of ours or by torch's: the choice is close to the best that was measured on an H100."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen import ops
from fusegen.families.attention.cost import AttentionSize, few_queries_time, takes_library
from fusegen.families.attention.plan import AttentionPlan, FewQueriesPlan
from fusegen.target import on_card, target

COSTS = Path(__file__).parents[2] / "docs/costs"
HOPPER = target("sm_90a")
H100 = on_card(HOPPER, "NVIDIA H100 80GB HBM3")


def test_the_choice_is_close_to_the_best_that_was_measured() -> None:
    ratios = []
    for case in json.loads((COSTS / "attention-h100.json").read_text())["cases"]:
        own, library = case.pop("own"), case.pop("library")
        chosen = library if takes_library([AttentionSize(**case)], H100) else own
        ratios.append(chosen / min(own, library))
    assert len(ratios) == 64 and statistics.mean(ratios) < 1.015 and max(ratios) < 1.2


def test_the_choice_for_few_queries_is_close_to_the_best_that_was_measured() -> None:
    ratios = []
    for size, _, times in _measured_plans("few-queries-h200.json"):
        expected = {splits: few_queries_time(size, size.queries, splits, HOPPER) for splits in times if splits}
        chosen = None if takes_library([size], HOPPER) else min(expected, key=lambda splits: expected[splits])
        ratios.append(times[chosen] / min(times.values()))
    assert len(ratios) == 42 and statistics.mean(ratios) < 1.01 and max(ratios) < 1.1


def test_the_choice_for_caches_is_close_to_the_best_that_was_measured() -> None:
    """Contiguous and paged, of 16 and 8 bits."""
    ratios = []
    for size, page, times in _measured_plans("caches-h200.json"):
        expected = {splits: few_queries_time(size, size.queries, splits, HOPPER, page=page) for splits in times if splits}
        ratios.append(times[min(expected, key=lambda splits: expected[splits])] / min(times.values()))
    assert len(ratios) == 30 and statistics.mean(ratios) < 1.03 and max(ratios) < 1.25


def _measured_plans(name: str) -> list[tuple[AttentionSize, int | None, dict[int | None, float]]]:
    """Returns the measured sizes with their pages, and the times by splits; None is torch's kernel."""
    measured = dict[tuple[AttentionSize, int | None], dict[int | None, float]]()
    for case in json.loads((COSTS / name).read_text())["cases"]:
        splits, time, page = case.pop("splits"), case.pop("microseconds"), case.pop("page", None)
        measured.setdefault((AttentionSize(**case), page), {})[splits] = time
    return [(*size, times) for size, times in measured.items()]


def test_few_queries_and_whole_sequences_have_plans_of_their_own() -> None:
    @fg.kernel
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).sin()

    for queries, kind in ((1, FewQueriesPlan), (16, FewQueriesPlan), (4096, AttentionPlan)):
        q, k, v = (torch.empty(4, n, m, 128, dtype=torch.bfloat16, device="meta") for n, m in ((16, queries), (4, 4096), (4, 4096)))
        (launch,) = attention.lower(q, k, v, target="sm_90a").program.launches
        assert isinstance(launch.plan, kind)


@pytest.mark.parametrize(
    ("machine", "batch", "kv_heads", "keys", "splits"),
    [
        ("sm_80", 1, 8, 8192, 16),
        ("sm_80", 4, 8, 4096, 4),
        ("sm_80", 1, 4, 100000, 32),
        ("sm_80", 64, 8, 8192, 1),
        ("sm_80", 1, 8, 300, 2),
        ("sm_80", 1, 8, 255, 1),
        ("sm_86", 1, 8, 8192, 8),
        ("sm_120", 1, 8, 8192, 8),
        ("sm_100", 1, 8, 8192, 16),
    ],
)
def test_without_measured_costs_blocks_fill_a_wave(machine: str, batch: int, kv_heads: int, keys: int, splits: int) -> None:
    """With two tiles of keys or more for each block; of 128 channels, an SM of sm_86 holds one block, one of sm_80 two."""
    q, cache = (torch.empty(batch, n, m, 128, dtype=torch.bfloat16, device="meta") for n, m in ((32, 1), (kv_heads, keys)))
    lengths = torch.empty(batch, dtype=torch.int32, device="meta")
    (launch,) = ops.cached_attention.lower(q, cache, cache, lengths, target=machine).program.launches
    assert isinstance(launch.plan, FewQueriesPlan) and launch.plan.splits == splits


def test_lengths_of_sequences_do_not_slow_a_block() -> None:
    """Unlike a mask, which has an element per key: more blocks would then be worth a cluster that leaves SMs idle."""
    q, cache = (torch.empty(1, n, m, 128, dtype=torch.bfloat16, device="meta") for n, m in ((32, 1), (8, 32768)))
    lengths = torch.empty(1, dtype=torch.int32, device="meta")
    (launch,) = ops.cached_attention.lower(q, cache, cache, lengths, target="sm_90a").program.launches
    assert isinstance(launch.plan, FewQueriesPlan) and launch.plan.splits == 8


def test_small_pages_slow_a_block() -> None:
    """Two blocks share the keys of 64 caches in pages of 16 keys, where one is enough for contiguous caches."""
    q, lengths = torch.empty(8, 32, 1, 128, dtype=torch.bfloat16, device="meta"), torch.empty(8, dtype=torch.int32, device="meta")
    pages = torch.empty(8192, 16, 8, 128, dtype=torch.bfloat16, device="meta")
    table = torch.empty(8, 1024, dtype=torch.int32, device="meta")
    (launch,) = ops.paged_attention.lower(q, pages, pages, table, lengths, target="sm_90a").program.launches
    assert isinstance(launch.plan, FewQueriesPlan) and launch.plan.splits == 2
