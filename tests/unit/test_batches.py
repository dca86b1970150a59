"""Products of merged batches and heads: values on each target that needs no GPU, and what is launched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.passes.fuse.groups import GroupKind
from tests.unit.eager import agree, randn

HEADS, CHANNELS = 4, 64


def merged(x: Tensor) -> Tensor:
    """(batch, position, head * channel) as (batch * head, position, channel)."""
    return x.unflatten(-1, (HEADS, CHANNELS)).transpose(1, 2).flatten(0, 1)


def gathered(x: Tensor, batch: int) -> Tensor:
    return x.view(batch, HEADS, -1, CHANNELS).transpose(1, 2).flatten(2)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.bmm(merged(q), merged(k).transpose(1, 2)) * 0.125
    return gathered(torch.bmm(F.softmax(scores, -1), merged(v)), q.shape[0])


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As in the first models of fairseq and transformers: back and forth for a mask of each batch."""
    scores = torch.bmm(merged(q), merged(k).transpose(1, 2))
    scores = (scores.view(q.shape[0], HEADS, *scores.shape[1:]) + mask).view(scores.shape)
    return gathered(torch.bmm(F.softmax(scores, -1), merged(v)), q.shape[0])


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """As in BLOOM: a bias of each batch and head, keys transposed before they are merged."""
    keys = k.unflatten(-1, (HEADS, CHANNELS)).permute(0, 2, 3, 1).flatten(0, 1)
    scores = bias.baddbmm(merged(q), keys, beta=0.5, alpha=0.125)
    return gathered(torch.bmm(F.softmax(scores, -1), merged(v)), q.shape[0])


def of_one_table(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = torch.bmm(merged(q), merged(k).transpose(1, 2)) + bias
    return gathered(torch.bmm(F.softmax(scores, -1), merged(v)), q.shape[0])


def reduced(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """Statistics of either dim, of which some are wanted merged."""
    scores = torch.bmm(merged(q), merged(k).transpose(1, 2))
    return scores.amax(1), scores.sum((1, 2)) * 2, scores.mean(0), (scores - scores.amax(2, keepdim=True)).exp().sum(-1)


def rows(*lengths: int, batch: int = 2) -> tuple[Tensor, ...]:
    return tuple(randn(batch, length, HEADS * CHANNELS) for length in lengths)


ATTENTION: dict[Callable[..., Tensor], tuple[Tensor, ...]] = {
    plain: rows(5, 7, 7),
    masked: (*rows(5, 7, 7), randn(2, 1, 5, 7)),
    biased: (*rows(5, 7, 7), randn(2 * HEADS, 1, 7)),
    of_one_table: (*rows(5, 7, 7), randn(1, 5, 7)),
}


@pytest.mark.parametrize("function", ATTENTION, ids=lambda f: f.__name__)
def test_values(function: Callable[..., Tensor]) -> None:
    agree(function, ATTENTION[function])


def test_values_of_statistics_and_of_one_batch() -> None:
    agree(reduced, rows(5, 7), rows(4, 4))
    agree(plain, rows(5, 7, 7, batch=1))


@pytest.mark.parametrize("function", ATTENTION, ids=lambda f: f.__name__)
@pytest.mark.parametrize("batch", [1, 2])
def test_one_launch(function: Callable[..., Tensor], batch: int) -> None:
    extra = {masked: (batch, 1, 128, 192), biased: (batch * HEADS, 1, 192), of_one_table: (1, 128, 192)}
    shapes = [*((batch, length, HEADS * CHANNELS) for length in (128, 192, 192)), *(s for f, s in extra.items() if f is function)]
    tensors = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    low = fg.kernel(function).lower(*tensors, target="sm_90a")
    assert [group.kind for group in low.groups] == [GroupKind.ATTENTION] and len(low.program.steps) == 1
