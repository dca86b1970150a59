"""Calls that are recorded and replayed, with a tape of torch's operations in the place of a GPU's graphs."""

from __future__ import annotations

import pytest
import torch

from fusegen.graphs import graphed, recording
from fusegen.graphs.forward import GraphedForward
from tests.unit.patching.models import small_model
from tests.unit.tapes import Tapes


@pytest.fixture(autouse=True)
def _tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "GraphPool", Tapes)
    monkeypatch.setattr(graphed, "DEVICE", "cpu")


def with_graphs(model: torch.nn.Module) -> GraphedForward:
    found = GraphedForward(model, recording.Pools())
    found.put()
    return found


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "GPTNeoX"])
def test_generate_records_one_step(name: str) -> None:
    model = small_model(name).eval()
    ids = torch.arange(1, 13).view(2, 6)
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
    expected = [model.generate(ids + n, **options) for n in range(3)]
    graphs = with_graphs(model)
    for n in range(3):
        assert torch.equal(model.generate(ids + n, **options), expected[n])
    assert graphs.recorded == 1 and graphs.replayed > 15, graphs.reasons
