"""Calls that are recorded and replayed, with a tape of torch's operations in the place of a GPU's graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fusegen.graphs import forward, recording
from fusegen.graphs.forward import GraphedForward
from tests.unit.patching.models import small_model


class Tape(TorchDispatchMode):
    """Records operations as a graph of CUDA does: what they do to memory happens at a replay alone."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []
        self._made: set[int] = set()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function._schema.is_mutable:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self._made:
                    self._before.setdefault(tensor.untyped_storage().data_ptr(), (tensor, tensor.clone()))
        result = function(*args, **kwargs)
        self._steps.append((function, args, kwargs, result))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        self._made |= {t.untyped_storage().data_ptr() for t in tree_leaves(result) if isinstance(t, Tensor)} - given
        return result

    def rewind(self) -> None:
        for tensor, before in self._before.values():
            tensor.copy_(before)

    def replay(self) -> None:
        for function, args, kwargs, result in self._steps:
            given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            for old, new in zip(tree_leaves(result), tree_leaves(function(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.untyped_storage().data_ptr() not in given:
                    old.copy_(new)


class Tapes:
    """In the place of a `GraphPool`."""

    def __init__(self, device: torch.device) -> None:
        pass

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        with Tape() as tape:
            result = run()
        tape.rewind()
        return tape.replay, result

    @contextmanager
    def in_order(self) -> Iterator[None]:
        yield


@pytest.fixture(autouse=True)
def _tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "GraphPool", Tapes)
    monkeypatch.setattr(forward, "DEVICE", "cpu")


def graphed(model: torch.nn.Module) -> GraphedForward:
    found = GraphedForward(model)
    found.put()
    return found


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "GPTNeoX"])
def test_generate_records_one_step(name: str) -> None:
    model = small_model(name).eval()
    ids = torch.arange(1, 13).view(2, 6)
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
    expected = [model.generate(ids + n, **options) for n in range(3)]
    graphs = graphed(model)
    for n in range(3):
        assert torch.equal(model.generate(ids + n, **options), expected[n])
    assert graphs.recorded == 1 and graphs.replayed > 15, graphs.reasons
