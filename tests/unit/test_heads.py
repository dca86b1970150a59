"""Attention that is written in other dims than batch, head, position, channel: values, and that it is one launch all the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.families.attention import match
from fusegen.ir.ops import Op
from tests.naming import case
from tests.unit.eager import agree, randn
from tests.unit.gate import some

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


def of_matrices(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of any dims in front: of none, of a batch, of a batch and groups of heads."""
    return torch.softmax(q @ k.mT * 0.125, -1) @ v


def of_grouped_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Keys of a group of heads, read by each of them: (batch, group, head of it, query, key)."""
    q = q.unflatten(-1, (2, 2, CHANNELS)).permute(0, 2, 3, 1, 4)
    k, v = (x.unflatten(-1, (2, 1, CHANNELS)).permute(0, 2, 3, 1, 4) for x in (k, v))
    return torch.softmax((q @ k.mT).float() + mask, -1).to(v.dtype) @ v


def positions_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As in fairseq: (position, batch, head * channel), batch and heads merged for torch.bmm."""
    q, k, v = (x.view(x.shape[0], -1, CHANNELS).transpose(0, 1) for x in (q, k, v))
    weights = F.softmax(torch.bmm(q, k.transpose(1, 2)), -1)
    return torch.bmm(weights, v).transpose(0, 1).reshape(q.shape[1], -1, HEADS * CHANNELS)


def of_windows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As in Swin: windows are part of the batch, but for a mask of each window."""
    q, k, v = (x.unflatten(-1, (HEADS, CHANNELS)).transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT
    scores = scores.view(-1, mask.shape[0], *scores.shape[1:]) + mask[None, :, None]
    return (torch.softmax(scores.flatten(0, 1), -1) @ v).transpose(1, 2).flatten(2)


def with_an_epilogue(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return of_matrices(q, k, v) * gate.sigmoid() + gate


def of_one_another(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Layers without heads: each one's residual sum is the next one's queries."""
    for _ in range(3):
        q = q + of_matrices(q, k, v) * 0.5
    return q


def rows(*lengths: int, batch: int = 2) -> tuple[Tensor, ...]:
    return tuple(randn(batch, length, HEADS * CHANNELS) for length in lengths)


ATTENTION: dict[Callable[..., Tensor], tuple[Tensor, ...]] = {
    plain: rows(5, 7, 7),
    masked: (*rows(5, 7, 7), randn(2, 1, 5, 7)),
    biased: (*rows(5, 7, 7), randn(2 * HEADS, 1, 7)),
    of_one_table: (*rows(5, 7, 7), randn(1, 5, 7)),
    of_grouped_heads: (*rows(5), *(randn(2, 7, 2 * CHANNELS) for _ in "kv"), randn(2, 1, 1, 5, 7)),
    positions_first: tuple(randn(length, 2, HEADS * CHANNELS) for length in (5, 7, 7)),
    of_windows: (*(randn(6, 7, HEADS * CHANNELS) for _ in "qkv"), randn(3, 7, 7)),
    with_an_epilogue: (*(randn(2, n, CHANNELS) for n in (5, 7, 7)), randn(5, CHANNELS)),
}
"""Ways to write it, and small inputs."""


@pytest.mark.parametrize("function", some(ATTENTION, [biased, of_windows]), ids=lambda f: f.__name__)
def test_values(function: Callable[..., Tensor]) -> None:
    agree(function, ATTENTION[function])


def longer(tensor: Tensor) -> Tensor:
    """As many queries and keys as a layer has, where there are few of them."""
    shape = [{5: 128, 7: 192}.get(extent, extent) for extent in tensor.shape]
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def test_one_launch() -> None:
    for function, inputs in ATTENTION.items():
        with case(function.__name__):
            low = fg.kernel(function).lower(*map(longer, inputs), target="sm_90a")
            assert [group.kind for group in low.groups] == [match.ATTENTION] and len(low.program.steps) == 1


def test_layers_of_attention() -> None:
    inputs = tuple(randn(2, length, CHANNELS) for length in (5, 7, 7))
    agree(of_one_another, inputs)
    low = fg.kernel(of_one_another).lower(*map(longer, inputs), target="sm_90a")
    assert [group.kind for group in low.groups].count(match.ATTENTION) == 3


def test_what_the_kernel_cannot_read_stays_as_it_is_written() -> None:
    """One matrix of values for all batches, and rows that do not begin at a multiple of 16 bytes."""
    shared = tuple(randn(*shape) for shape in ((2, 5, CHANNELS), (2, 7, CHANNELS), (7, CHANNELS)))
    odd = tuple(randn(2, length, CHANNELS + 1)[..., 1:] for length in (5, 7, 7))
    for inputs in (shared, odd):
        agree(of_matrices, inputs)
        low = fg.kernel(of_matrices).lower(*inputs, target="sm_90a")
        assert {len(node.shape) for _, node in low.graph if node.op is Op.MATMUL} == {3}
