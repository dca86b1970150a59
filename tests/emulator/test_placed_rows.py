"""Rows that a kernel stores where an index says, as normalized keys in a cache; positions before the batch that shares them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import IndexRangeError
from tests.unit.eager import agree, randn

pytestmark = pytest.mark.usefixtures("emulated", "first_plans")


def normalized_into(cache: Tensor, x: Tensor, weight: Tensor, stage_vectors: Tensor) -> None:
    cache[stage_vectors] = F.rms_norm(x, x.shape[-1:], weight)


def keys_into(cache: Tensor, x: Tensor, weight: Tensor, stage_vectors: Tensor) -> None:
    """Rows of heads, of a projection whose heads come first."""
    cache[stage_vectors] = F.rms_norm(x, x.shape[-1:], weight)[0].transpose(0, 1)


def placed(x: Tensor, positions: Tensor) -> Tensor:
    return x + positions


def masked(scores: Tensor, mask: Tensor) -> Tensor:
    return (scores + mask).softmax(-1)


def slots_of(rows: int) -> Tensor:
    found = torch.randperm(2 * rows)[:rows]
    found[::3] -= 2 * rows  # from the end
    return found


@pytest.mark.parametrize("columns", [8, 64, 1024, 33, 1001])
def test_rows_at_slots(columns: int) -> None:
    x, stage_vectors = randn(7, columns, dtype=torch.bfloat16), slots_of(7)
    cache, weight = randn(14, columns, dtype=torch.bfloat16), randn(columns, dtype=torch.bfloat16)
    wanted = cache.clone()
    normalized_into(wanted, x, weight, stage_vectors)
    kernel = fg.kernel(normalized_into, mutates=("cache",))
    assert len(kernel.lower(cache, x, weight, stage_vectors, target="sm_90a").program.call.steps) == 1
    kernel(cache, x, weight, stage_vectors)
    torch.testing.assert_close(cache, wanted, rtol=2e-2, atol=2e-2)


def test_heads_at_slots() -> None:
    x, stage_vectors = randn(1, 3, 5, 32), slots_of(5)
    cache, weight = randn(10, 3, 32), randn(32)
    wanted = cache.clone()
    keys_into(wanted, x, weight, stage_vectors)
    kernel = fg.kernel(keys_into, mutates=("cache",))
    assert len(kernel.lower(cache, x, weight, stage_vectors, target="sm_90a").program.call.steps) == 1
    kernel(cache, x, weight, stage_vectors)
    torch.testing.assert_close(cache, wanted)


def test_a_slot_out_of_range_is_refused() -> None:
    kernel = fg.kernel(normalized_into, mutates=("cache",))
    with pytest.raises(IndexRangeError):
        kernel(randn(4, 64), randn(2, 64), randn(64), torch.tensor([1, 4]))


def test_positions_go_before_the_batch() -> None:
    """The order of the points is not that of the result."""
    x, positions = randn(3, 5, 1400), randn(5, 1400)
    kernel = agree(placed, (x, positions), (x[:1, :2].clone(), positions[:2]))
    assert "/ x_dim0" in kernel.lower(x, positions, target="sm_90a").asm["cuda"]


def test_rows_of_a_mask_go_before_batch_and_heads() -> None:
    scores, mask = randn(2, 3, 5, 1400), randn(5, 1400)
    kernel = agree(masked, (scores, mask), (scores[:1, :, :4].clone(), mask[:4]))
    assert "/ (scores_dim0 * scores_dim1)" in kernel.lower(scores, mask, target="sm_90a").asm["cuda"]


def test_what_a_cache_holds_leaves_the_order_alone() -> None:
    scores, mask = randn(2, 3, 5, 264), randn(5, 264)
    text = fg.kernel(masked).lower(scores, mask, target="sm_90a").asm["cuda"]
    assert "/ (scores_dim0 * scores_dim1)" not in text
