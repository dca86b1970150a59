"""Attention beside a sink: one more score that takes part in the softmax, and whose weight is left out."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.families.attention.match import ATTENTION
from fusegen.ir.ops import Op
from tests.unit.eager import agree, randn
from tests.unit.gate import some

HEADS = 4


def of_heads(sinks: Tensor, scores: Tensor) -> Tensor:
    """A learned score a head, for each query."""
    return sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[-2], -1)


def as_in_gpt_oss(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """The scores less their largest, and a softmax that does that again."""
    scores = q @ k.mT * 0.125
    joined = torch.cat([scores, of_heads(sinks, scores)], dim=-1)
    joined = joined - joined.max(dim=-1, keepdim=True).values
    return F.softmax(joined, dim=-1, dtype=joined.dtype)[..., :-1] @ v


def masked(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """Causal, and computed in float32; the first query sees nothing but the sink."""
    scores = q @ k.mT * 0.125
    query, key = torch.arange(scores.shape[-2]), torch.arange(scores.shape[-1])
    scores = torch.where(key < query[:, None], scores, -math.inf)
    joined = torch.cat([scores, of_heads(sinks, scores)], dim=-1)
    return F.softmax(joined, dim=-1, dtype=torch.float32).to(q.dtype)[..., :-1] @ v


def in_front(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """The sink before the scores, of batch and heads merged, and an epilogue."""
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scores = torch.bmm(q, k.mT)
    sink = sinks.repeat(scores.shape[0] // HEADS)[:, None, None].expand(-1, scores.shape[1], -1)
    return torch.bmm(torch.softmax(torch.cat([sink, scores], -1), -1)[..., 1:], v) * 2 + 1


def of_each_query(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """A score that is computed of the query."""
    sink = (q * sinks[:, None, None]).sum(-1, keepdim=True)
    return torch.softmax(torch.cat([q @ k.mT, sink], -1), -1)[..., :-1] @ v


WAYS = (as_in_gpt_oss, masked, in_front, of_each_query)


def inputs(queries: int, keys: int, *, level: float = 0.0) -> tuple[Tensor, ...]:
    q, k, v = (randn(2, HEADS, length, 64) for length in (queries, keys, keys))
    return q, k, v, randn(HEADS) + level


@pytest.mark.parametrize("function", some(WAYS, [masked, in_front]), ids=lambda f: f.__name__)
def test_values(function: Callable[..., Tensor]) -> None:
    """Also of sinks that take all of the weight, or none; nothing is left of a row in which all scores are minus infinity."""
    levels = (-200.0, 0.0, 3.0, 200.0, *(() if function is of_each_query else (math.inf, -math.inf)))
    agree(function, *(inputs(5, 7, level=level) for level in levels))


@pytest.mark.parametrize("function", WAYS, ids=lambda f: f.__name__)
def test_one_launch(function: Callable[..., Tensor]) -> None:
    meta = (torch.empty(x.shape, dtype=torch.bfloat16, device="meta") for x in inputs(128, 192))
    low = fg.kernel(function).lower(*meta, target="sm_90a")
    kinds = [group.kind for group in low.groups]
    assert kinds[-1] is ATTENTION and len(low.program.steps) == (2 if function is of_each_query else 1)


def stays_apart(function: Callable[..., Tensor]) -> None:
    """The values are torch's, and the attention kernel, which would give others, has no part in them."""
    agree(function, inputs(5, 7))
    meta = (torch.empty(x.shape, dtype=torch.bfloat16, device="meta") for x in inputs(128, 192))
    low = fg.kernel(function).lower(*meta, target="sm_90a")
    assert ATTENTION not in {group.kind for group in low.groups}


ADDENDS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "another weight": lambda sink, k: (sink, sink + 1),
    "a number": lambda sink, k: (torch.full_like(sink, 0.5), torch.zeros_like(sink)),
    "of each key": lambda sink, k: (k[..., None, :, 0], k[..., None, :, 0]),
}


@pytest.mark.parametrize("name", some(ADDENDS, ["of each key"]))
def test_another_addend_is_no_sink(name: str) -> None:
    """Weights relative to the larger of the scores and a score, and a total with the weight of another one, or of one a key."""

    def function(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        scores = q @ k.mT
        own, other = ADDENDS[name](of_heads(sinks, scores), k)
        largest = torch.maximum(scores.amax(-1, keepdim=True), own)
        weights = (scores - largest).exp()
        return weights / (weights.sum(-1, keepdim=True) + (other - largest).exp()) @ v

    stays_apart(function)


def test_what_only_bounds_the_peak_is_no_sink() -> None:
    """Its own weight is not added."""

    def function(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        scores = q @ k.mT * 0.125
        weights = (scores - torch.maximum(scores.amax(-1, keepdim=True), of_heads(sinks, scores))).exp()
        return weights / weights.sum(-1, keepdim=True) @ v

    stays_apart(function)


def two(q: Tensor, k: Tensor, sinks: Tensor) -> Tensor:
    scores = q @ k.mT
    return torch.softmax(torch.cat([scores, of_heads(sinks, scores).repeat(1, 1, 1, 2)], -1), -1)[..., :-2]


def test_what_is_no_sink() -> None:
    q, k, _, sinks = inputs(5, 7)
    agree(two, (q, k, sinks))
    low = fg.kernel(two).lower(q, k, sinks, target="cpu")
    assert Op.CONCAT in {node.op for _, node in low.graph}
