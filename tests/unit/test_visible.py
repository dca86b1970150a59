"""How far a query sees: what is found of conditions on positions, and that nothing is found where it would be wrong."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

import fusegen as fg
from fusegen.families.attention.plan import AttentionBody
from tests.naming import case

QUERIES, KEYS = 96, 160


def positions(s: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(s.shape[-2], device=s.device)[:, None], torch.arange(s.shape[-1], device=s.device)


def hidden_by(condition: Callable[[Tensor, Tensor], Tensor], by: float = -math.inf) -> Callable[[Tensor], Tensor]:
    return lambda s: s.masked_fill(condition(*positions(s)), by)


def kept_by(condition: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda s: torch.where(condition(*positions(s)), s, -math.inf)


SEEN: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "causal": (kept_by(lambda q, k: k <= q), 1),
    "before itself": (kept_by(lambda q, k: k < q), 0),
    "from behind": (kept_by(lambda q, k: q >= k), 1),
    "strictly from behind": (kept_by(lambda q, k: q > k), 0),
    "hidden": (hidden_by(lambda q, k: k > q), 1),
    "hidden from behind": (hidden_by(lambda q, k: q <= k), 0),
    "not hidden": (kept_by(lambda q, k: ~(k > q)), 1),
    "at an end": (kept_by(lambda q, k: k <= q + (KEYS - QUERIES)), KEYS - QUERIES + 1),
    "a difference": (kept_by(lambda q, k: k - q < 3), 3),
    "a window": (kept_by(lambda q, k: (k <= q) & (k > q - 16)), 1),
    "the nearer of two": (kept_by(lambda q, k: (k <= q + 9) & (k <= q + 2)), 3),
    "one after the other": (lambda s: kept_by(lambda q, k: k <= q + 1)(hidden_by(lambda q, k: k > q + 5)(s)), 2),
}
"""With how many keys more than its own position a query sees."""

FIRST: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "from its own on": (kept_by(lambda q, k: k >= q), 0),
    "a window": (kept_by(lambda q, k: (k <= q) & (k > q - 16)), -15),
    "a window from behind": (kept_by(lambda q, k: (q >= k) & (q < k + 16)), -15),
    "hidden": (hidden_by(lambda q, k: k < q - 3), -3),
    "hidden from behind": (hidden_by(lambda q, k: q - 3 >= k), -2),
    "the later of two": (kept_by(lambda q, k: (k > q - 9) & (k > q - 2)), -1),
    "one after the other": (lambda s: kept_by(lambda q, k: k > q - 2)(hidden_by(lambda q, k: k < q - 5)(s)), -1),
}
"""The distance of the first key that a query sees from its own position."""

NO_FIRST: dict[str, Callable[[Tensor], Tensor]] = {
    "causal": kept_by(lambda q, k: k <= q),
    "either": kept_by(lambda q, k: (k >= q) | (k > 100)),
    "not both": kept_by(lambda q, k: ~((k <= q) & (k > 8))),
    "half as far": kept_by(lambda q, k: 2 * k >= q),
    "backwards": kept_by(lambda q, k: k >= 90 - q),
    "from before all keys": kept_by(lambda q, k: k > -3),
    "a number that is not infinite": hidden_by(lambda q, k: k < q, -1e4),
}

ALL: dict[str, Callable[[Tensor], Tensor]] = {
    "a number that is not infinite": hidden_by(lambda q, k: k > q, -1e4),
    "what comes later": kept_by(lambda q, k: k >= q),
    "either": kept_by(lambda q, k: (k <= q) | (k > 100)),
    "not both": kept_by(lambda q, k: ~((k <= q) & (k > 8))),
    "twice as far": kept_by(lambda q, k: 2 * k <= q),
    "backwards": kept_by(lambda q, k: k <= 90 - q),
    "positions that repeat": lambda s: torch.where(positions(s)[1] <= torch.arange(32).repeat(3)[:, None], s, -math.inf),
    "positions that wrap": kept_by(lambda q, k: k.to(torch.int8) <= q),
    "beyond 32 bits": kept_by(lambda q, k: k <= q + 2**31),
    "floats": kept_by(lambda q, k: k.float() <= q),
    "lengths that are read": kept_by(lambda q, k: k < torch.tensor([KEYS, 9]).to(q.device)[:, None, None, None] + q),
    "added behind": lambda s: kept_by(lambda q, k: k <= q)(s) + 1,
}


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.softmax(mask(q @ k.mT * 0.125), -1) @ v


def body_of(mask: Callable[[Tensor], Tensor]) -> AttentionBody:
    q, k, v = (torch.empty(2, 4, count, 64, dtype=torch.bfloat16, device="meta") for count in (QUERIES, KEYS, KEYS))
    (launch,) = fg.kernel(lambda q, k, v: attention(q, k, v, mask)).lower(q, k, v, target="sm_90a").program.launches
    assert isinstance(launch.kernel.body, AttentionBody)
    return launch.kernel.body


def test_how_far_a_query_sees() -> None:
    for name, (mask, more) in SEEN.items():
        with case(name):
            body = body_of(mask)
            assert body.visible_keys is not None and body.visible_keys == body.score.axes.symbols[-2] + more


def test_the_first_key_that_a_query_sees() -> None:
    for name, (mask, more) in FIRST.items():
        with case(name):
            body = body_of(mask)
            assert body.first_key is not None and body.first_key == body.score.axes.symbols[-2] + more
    for name, mask in NO_FIRST.items():
        with case(name):
            assert body_of(mask).first_key is None


def test_a_bound_in_memory_that_may_wrap() -> None:
    q, k, v = (torch.empty(2, 4, count, 64, dtype=torch.bfloat16, device="meta") for count in (QUERIES, KEYS, KEYS))
    lengths = torch.empty(2, 1, 1, 1, dtype=torch.int64, device="meta")
    for dtype, is_read in ((torch.int64, True), (torch.int32, False)):

        def masked(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, dtype: torch.dtype = dtype) -> Tensor:
            return attention(q, k, v, lambda s: torch.where(positions(s)[1] < lengths.to(dtype), s, -math.inf))

        launch = fg.kernel(masked).lower(q, k, v, lengths, target="sm_90a").program.launches[-1]
        assert isinstance(launch.kernel.body, AttentionBody)
        assert (launch.kernel.body.visible_keys is not None) is is_read


def test_a_query_may_see_all() -> None:
    for name, mask in ALL.items():
        with case(name):
            assert body_of(mask).visible_keys is None
