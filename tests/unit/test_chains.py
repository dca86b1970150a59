"""Long chains of operations: what compiles them takes a number of steps that grows with their length, not with its square."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import fusegen as fg
from fusegen.fusion import decide
from fusegen.passes import layouts

X = torch.empty(64, 32, device="meta")


def chained(length: int) -> Any:
    def chain(x: Any) -> Any:
        for _ in range(length):
            x = x * 1.01 + 0.5
        return x.sum(-1)

    return fg.kernel(chain)


def test_each_value_is_looked_at_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def count(*args: Any) -> Any:
            counts[name] += 1
            return original(*args)

        monkeypatch.setattr(owner, name, count)

    counted(decide._Readers, "_is_computed_with")
    counted(layouts, "_is_along_last")
    counted(layouts, "_reduction_subgraph")
    found = []
    for length in (20, 40):
        counts.clear()
        chained(length).lower(X, target="cpu")
        found.append(counts.total())
    assert 0 < found[1] < 2.5 * found[0]
