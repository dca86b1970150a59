"""Random statistics behind products: of rows of any width or of heads, alone, beside what they are made of, or within it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

_WIDTHS = (24, 64, 104, 256, 288, 320, 384, 640)
_HEADS = (8, 16, 32, 64, 96, 128)
_DEPTH = 64

STATISTICS: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "sum": lambda y, keep: y.sum(-1, keepdim=keep),
    "mean": lambda y, keep: y.mean(-1, keepdim=keep),
    "squares": lambda y, keep: (y * y).mean(-1, keepdim=keep),
    "amax": lambda y, keep: y.amax(-1, keepdim=keep),
    "least": lambda y, keep: y.abs().amin(-1, keepdim=keep),
    "rstd": lambda y, keep: torch.rsqrt(y.var(-1, keepdim=keep, correction=0) + 1e-3),
    "std": lambda y, keep: y.std(-1, keepdim=keep),
    "norm": lambda y, keep: torch.linalg.vector_norm(y, dim=-1, keepdim=keep),
    "logsumexp": lambda y, keep: torch.logsumexp(y, -1, keepdim=keep),
    "index": lambda y, keep: y.argmax(-1, keepdim=keep).to(y.dtype) * 0 + y.amax(-1, keepdim=keep),
}

POINTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bias": lambda y, b: y + b,
    "gelu": lambda y, b: F.gelu(y),
    "silu": lambda y, b: F.silu(y),
    "scaled": lambda y, b: y * 0.5,
    "float": lambda y, b: y.float() if y.dtype is not torch.float64 else y,
    "far": lambda y, b: y + 16.0,
    "masked": lambda y, b: y.masked_fill(b > 1.0, -torch.inf),
}


@dataclass(frozen=True)
class Behind:
    """What is computed of one product, or of two of one first operand.

    Attributes:
        rows, width: of the product.
        gated: whether it is the product of two.
        points: functions in turn.
        head: columns of a head; 0 for whole rows.
        statistics: of rows or heads.
        keep: whether they keep the dim.
        within: whether the first is used within the row, too.
        whole: whether the row is a result.
    """

    rows: tuple[int, ...]
    width: int
    gated: bool
    points: tuple[str, ...]
    head: int
    statistics: tuple[str, ...]
    keep: bool
    within: bool
    whole: bool

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """An operand, two weights, and a vector of as many elements as there are columns."""
        weights = [torch.randn(self.width, _DEPTH, dtype=torch.float64) / _DEPTH**0.5 for _ in range(2)]
        vector = torch.randn(self.width, dtype=torch.float64)
        return tuple(t.to(dtype) for t in (torch.randn(*self.rows, _DEPTH, dtype=torch.float64), *weights, vector))

    def __call__(self, x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        """The function, in torch."""
        y = F.linear(x, w)
        if self.gated:
            y = F.silu(y) * F.linear(x, v)
        for name in self.points:
            y = POINTS[name](y, b)
        if self.head:
            y = y.unflatten(-1, (-1, self.head))
        found = [STATISTICS[name](y, self.keep) for name in self.statistics]
        results = [y] if self.whole else []
        if self.within:
            results.append(y * STATISTICS[self.statistics[0]](y, True))
        return (*results, *found)


def behinds() -> st.SearchStrategy[Behind]:
    """Any of them."""
    return st.builds(
        _fitting,
        rows=st.sampled_from([(5,), (70,), (2, 33), (130,)]),
        width=st.sampled_from(_WIDTHS),
        gated=st.booleans(),
        points=st.lists(st.sampled_from(sorted(POINTS)), max_size=3).map(tuple),
        head=st.sampled_from((0, 0, *_HEADS)),
        statistics=st.lists(st.sampled_from(sorted(STATISTICS)), min_size=1, max_size=3, unique=True).map(tuple),
        keep=st.booleans(),
        within=st.booleans(),
        whole=st.booleans(),
    )


def _fitting(head: int, width: int, **others: Any) -> Behind:
    return Behind(head=head if width % (head or 1) == 0 else 0, width=width, **others)
