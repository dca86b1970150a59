"""Random ways to write attention: dims in front, masks, forms of the softmax, a sink, and what follows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

FORMS = ("plain", "merged", "positions first")
"""Of any dims in front; batch and heads merged for torch.bmm, out of rows of heads; the same where positions come first."""

_MASKS = ("whole", "some dims", "a row", "hidden", "causal", "window", "cap", "scale")


@dataclass(frozen=True)
class Attention:
    """A way to write it, for tensors of some shapes.

    Attributes:
        form: one of `FORMS`.
        leading: dims in front, batch and heads where rows hold heads.
        group: heads of queries that read one of keys, where the last of the dims in front are heads that share them.
        queries, keys: how many.
        channels, values: of a head.
        masks: what becomes of the scores, in order.
        softmax: torch's own, in float32, written out, or relative to a peak that is bounded below.
        sink: whether one more score takes part.
        end: what follows.
    """

    form: str
    leading: tuple[int, ...]
    group: int
    queries: int
    keys: int
    channels: int
    values: int
    masks: tuple[str, ...]
    softmax: str
    sink: bool
    end: str

    @property
    def inner(self) -> tuple[int, ...]:
        """The dims in front of scores."""
        return self.leading if self.form == "plain" else (math.prod(self.leading),)

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Queries, keys, values, masks of all and of some dims, a sink, and an operand of what follows."""
        shared = (*self.leading[:-1], 1) if self.group > 1 else self.leading
        lengths = (
            (self.leading, self.queries, self.channels),
            (shared, self.keys, self.channels),
            (shared, self.keys, self.values),
        )
        operands = [torch.randn(self._given(*length)) for length in lengths]
        some = tuple(1 if k % 2 else extent for k, extent in enumerate(self.inner))
        others = [(*self.inner, self.queries, self.keys), (*some, self.queries, self.keys), (self.keys,), (*some, self.queries, 1)]
        others += [(*self.inner, self.queries, self.values)]
        return tuple(x.to(dtype) for x in (*operands, *(torch.randn(shape) for shape in others)))

    def _given(self, leading: tuple[int, ...], length: int, channels: int) -> tuple[int, ...]:
        if self.form == "plain":
            return (*leading, length, channels)
        batch, heads = leading
        return (length, batch, heads * channels) if self.form == "positions first" else (batch, length, heads * channels)

    def _matrices(self, x: Tensor, channels: int) -> Tensor:
        if self.form == "plain":
            return x
        heads = self.leading[1]
        if self.form == "positions first":
            return x.reshape(x.shape[0], x.shape[1] * heads, channels).transpose(0, 1)
        return x.unflatten(-1, (heads, channels)).transpose(1, 2).flatten(0, 1)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, whole: Tensor, some: Tensor, row: Tensor, sink: Tensor, other: Tensor
    ) -> Tensor:
        """What is computed, in torch's words."""
        q, k, v = self._matrices(q, self.channels), self._matrices(k, self.channels), self._matrices(v, self.values)
        scores = q @ k.mT
        for mask in self.masks:
            scores = self._masked(mask, scores, whole, some, row)
        if self.sink:
            scores = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], -1)
        weights = self._softmax(scores)
        return self._ended((weights[..., :-1] if self.sink else weights).to(v.dtype) @ v, other)

    def _masked(self, mask: str, scores: Tensor, whole: Tensor, some: Tensor, row: Tensor) -> Tensor:
        query, key = torch.arange(self.queries, device=scores.device), torch.arange(self.keys, device=scores.device)
        match mask:
            case "whole":
                return scores + whole
            case "some dims":
                return scores + some
            case "a row":
                return scores + row
            case "hidden":
                return torch.where(some > -0.6875, scores, -1e4)
            case "causal":
                return torch.where(key <= query[:, None], scores, -math.inf)
            case "window":
                return scores.masked_fill((key > query[:, None] + 1) | (key + 3 < query[:, None]), -1e4)
            case "cap":
                return 20 * torch.tanh(scores / 20)
        return scores * 0.3

    def _softmax(self, scores: Tensor) -> Tensor:
        if self.softmax in ("written out", "bounded"):
            peak = scores.amax(-1, keepdim=True)
            powers = (scores - (peak.clamp(min=-2.0) if self.softmax == "bounded" else peak)).exp()
            return powers / powers.sum(-1, keepdim=True)
        wide = torch.promote_types(scores.dtype, torch.float32)
        return F.softmax(scores, -1, dtype=wide if self.softmax == "float32" else None)

    def _ended(self, y: Tensor, other: Tensor) -> Tensor:
        match self.end:
            case "gate":
                return y * torch.sigmoid(other)
            case "sum":
                return y + other
            case "wide":
                return y.to(torch.promote_types(y.dtype, torch.float32)) * 2
            case "rows":
                return y.flatten(0, -2) if self.form == "plain" else y.unflatten(0, self.leading).transpose(1, 2).flatten(2)
        return y


@st.composite
def attentions(draw: st.DrawFn, *, lengths: tuple[int, ...]) -> Attention:
    """Ways to write it.

    Args:
        lengths: of which queries and keys are.
    """
    form = draw(st.sampled_from(FORMS))
    leading = tuple(draw(st.lists(st.integers(1, 3), min_size=2 * (form != "plain"), max_size=3 if form == "plain" else 2)))
    group = leading[-1] if form == "plain" and leading and draw(st.booleans()) else 1
    channels = draw(st.sampled_from((8, 16, 24, 64, 72)))
    return Attention(
        form,
        leading,
        group,
        draw(st.sampled_from(lengths)),
        draw(st.sampled_from(lengths)),
        channels,
        channels if form != "plain" else draw(st.sampled_from((channels, 8, 40))),
        tuple(draw(st.lists(st.sampled_from(_MASKS), max_size=3))),
        draw(st.sampled_from(("torch", "float32", "written out", "bounded"))),
        draw(st.booleans()),
        draw(st.sampled_from(("nothing", "gate", "sum", "wide", "rows"))),
    )
