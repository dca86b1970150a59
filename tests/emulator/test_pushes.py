"""What blocks of a cluster send each other: right in every timing, and each mistake is reported."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from fusegen.compiler.emulator import EARLY, EmulatedSource, EmulatedTiming, load_emulated
from fusegen.errors import EmulationError
from tests.naming import case

Launch = Callable[..., None]
TIMINGS = [EARLY, EmulatedTiming.LATE, EmulatedTiming.BACKWARDS, EmulatedTiming.LATE | EmulatedTiming.BACKWARDS]

SUM = """
extern "C" __global__ void __cluster_dims__(4) fg_sum(const double* x, double* out) {
  auto parts = shared_array<double>(0);
  u64* const arrived = &*shared_array<u64>(32);
  if (thread_id() == 0) {
    mbarrier_init(arrived, 1);
    mbarrier_init_fence();
    mbarrier_expect(arrived, 32);
  }
  cluster_arrive();
  double sum = load(x, block_id() * 32 + thread_id());
  for (i32 mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  cluster_wait();
  if (lane_id() < 4) cluster_push(parts, cluster_rank(), sum, lane_id(), arrived);
  mbarrier_wait_cluster(arrived, 0);
  sum = 0.0;
  for (i32 rank = 0; rank < 4; ++rank) sum += shared_load(parts, rank);
  if (thread_id() == 0) store(out, block_id(), sum);
}
"""


def run(launch: Launch, text: str, timing: EmulatedTiming = EARLY) -> tuple[Tensor, Tensor]:
    """What each of eight blocks in two clusters has summed, and what it should have."""
    x, out = torch.randint(-9, 9, (2, 128)).double(), torch.empty(8, dtype=torch.float64)
    launch(text, {"x": x, "out": out}, grid=8, cluster=4, shared_bytes=40, timing=timing)
    return out, x.sum(1).repeat_interleave(4)


EMPTIED = "if (thread_id() < 4) shared_store(parts, thread_id(), 0.0);"

MISTAKES = {
    "to a block that may not have begun": ("cluster_wait();", "", "may not be initialised yet"),
    "no arrival": ("cluster_arrive();", "", "at which it has not arrived"),
    "arrived twice": ("cluster_arrive();", "cluster_arrive(); cluster_arrive();", "twice, with no cluster_wait between"),
    "without a fence": ("mbarrier_init_fence();", "", "not fenced after its initialisation"),
    "too few bytes": ("arrived, 32", "arrived, 24", "was not told|still bringing|nobody has written"),
    "too many bytes": ("arrived, 32", "arrived, 40", "waits for ever at mbarrier_wait"),
    "all to one place": ("parts, cluster_rank(), sum", "parts, 0, sum", "to which another thread sends"),
    "behind the end": ("parts, cluster_rank(), sum", "parts, 5, sum", "out of bounds: sends 8 bytes at byte 40"),
    "to a block that is not there": ("lane_id(), arrived", "lane_id() + 1, arrived", "cluster_push to block 4 of a cluster of 4"),
    "told to no barrier": ("lane_id(), arrived", "lane_id(), &*shared_array<u64>(24)", "whose barrier at byte 24"),
    "a wait that sees the block alone": ("mbarrier_wait_cluster", "mbarrier_wait", "with no mbarrier_wait_cluster between"),
    "read too early": ("mbarrier_wait_cluster(arrived, 0);", "", "no mbarrier_wait_cluster|still bringing|nobody has written"),
    "the block ends before all has come": (
        "mbarrier_wait_cluster(arrived, 0);",
        "return;",
        "may still send to its shared memory|which has ended",
    ),
    "over what was written behind the arrival": ("cluster_wait();", f"{EMPTIED} cluster_wait();", "no cluster_sync|still bringing"),
}


def test_mistakes_are_reported(launch: Launch) -> None:
    assert all(old in SUM for old, _, _ in MISTAKES.values())
    texts = {name: SUM.replace(old, new) for name, (old, new, _) in MISTAKES.items()}
    load_emulated([EmulatedSource(text, "fg_sum") for text in texts.values()])
    for name, timing in product(MISTAKES, TIMINGS):
        with case((name, timing)), pytest.raises(EmulationError, match=MISTAKES[name][2]):
            run(launch, texts[name], timing)


def test_a_sum(launch: Launch) -> None:
    """Also over what was written before the arrival."""
    for text, timing in product((SUM, SUM.replace("cluster_arrive();", f"{EMPTIED} cluster_arrive();")), TIMINGS):
        with case(timing):
            got, wanted = run(launch, text, timing)
            assert torch.equal(got, wanted)
