"""Patched modules that change more than they return: later calls must do again what the first one did."""

from __future__ import annotations

import copy
import functools
import io
import logging
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fusegen as fg
from tests.unit.patching.models import small_model

WIDTH = 16
SEEN: list[Tensor] = []


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls, self.last = 0, torch.zeros(1)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + torch.tanh(self.linear(self.norm(x)))
        return y


class Counting(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class Keeping(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


class Averaging(Layer):
    mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y + self.mean


class Appending(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        SEEN.append(y.mean())
        return y


class Drawing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if random.random() < 0.5 else x


@pytest.mark.parametrize("kind", [Counting, Keeping, Averaging, Appending, Drawing])
def test_what_a_layer_changes_is_changed_by_each_call(kind: Callable[[], Layer]) -> None:
    plain = nn.ModuleList([kind()])
    model = copy.deepcopy(plain)
    fg.patch(model)
    for seed in range(4):
        x, found = torch.randn(3, WIDTH), []
        for layer in (plain[0], model[0]):
            random.seed(seed)
            SEEN.clear()
            found.append((layer(x), layer.calls, layer.last, layer.mean, list(SEEN), random.random()))
        torch.testing.assert_close(found[1], found[0])


class World:
    """What layers change, of all kinds."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.counts, self.counted, self.seen, self.queue = {"n": 0}, Counter[str](), {0}, SimpleQueue[int]()
        self.array, self.bytes, self.text = np.zeros(2), bytearray(), io.StringIO()
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record.getMessage())

    def state(self) -> tuple[object, ...]:
        """All of it, as something to compare."""
        names = (list(self.calls), dict(self.counts), dict(self.counted), set(self.seen), self.queue.qsize(), list(self.records))
        return (*names, self.array.tolist(), bytes(self.bytes), self.text.getvalue(), COUNT, vars(Tally).get("n"), VARIABLE.get(),
                vars(_tallied).get("calls"), os.environ.get(_NAME))  # fmt: skip


class Tally:
    n = 0


COUNT, VARIABLE, LOGGER, _NAME = 0, ContextVar("VARIABLE", default=0), logging.getLogger(__name__), "FUSEGEN_TEST_COUNT"


def _tallied() -> Callable[[World, nn.Module], None]:
    count = 0

    def tally(world: World, _: nn.Module) -> None:
        nonlocal count
        count += 1
        world.calls.append(count)

    return tally


def _global(*_: object) -> None:
    global COUNT
    COUNT += 1


def _of_class(*_: object) -> None:
    Tally.n += 1


def _of_function(*_: object) -> None:
    _tallied.calls = getattr(_tallied, "calls", 0) + 1  # type: ignore[attr-defined]


def _of_module(*_: object) -> None:
    sys.modules[__name__].COUNT = sys.modules[__name__].COUNT + 1  # type: ignore[attr-defined]


def _of_parameter(world: World, layer: nn.Module) -> None:
    weight: Any = layer.weight
    weight.calls = getattr(weight, "calls", 0) + 1
    world.calls[:] = [weight.calls]


def _written(world: World, _: nn.Module) -> None:
    world.array[0] += 1


def _filled(world: World, _: nn.Module) -> None:
    np.add(world.array, 1, out=world.array)


def _managed() -> Callable[[World, nn.Module], None]:
    count = [0]

    @contextmanager
    def counted(world: World) -> Iterator[None]:
        count[0] += 1
        yield
        world.calls.append(1)

    def effect(world: World, _: nn.Module) -> None:
        with counted(world):
            pass

    return effect


EFFECTS: dict[str, Callable[[World, Any], object]] = {
    "global": _global, "class": _of_class, "function": _of_function, "module": _of_module, "parameter": _of_parameter,
    "cell": _tallied(), "array": _written, "ufunc": _filled,
    "context manager": _managed(),
    "callback": lambda world, layer: layer.told(1),
    "update": lambda world, _: world.counts.update(n=world.counts["n"] + 1),
    "new key": lambda world, _: world.counts.setdefault(str(len(world.counts)), 1),
    "counter": lambda world, _: world.counted.update("a"),
    "set": lambda world, _: world.seen.add(len(world.seen)),
    "bytes": lambda world, _: world.bytes.append(1),
    "text": lambda world, _: world.text.write("x"),
    "queue": lambda world, _: world.queue.put(1),
    "log": lambda world, _: LOGGER.info("called"),
    "print": lambda world, _: print("called", file=world.text),
    "context": lambda world, _: VARIABLE.set(VARIABLE.get() + 1),
    "environment": lambda world, _: os.environ.update({_NAME: os.environ.get(_NAME, "") + "x"}),
}  # fmt: skip


class Affecting(nn.Module):
    """A layer with an effect; whether it can be traced or not."""

    def __init__(self, world: World, effect: Callable[[World, Any], object], *, is_traceable: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.world, self.effect, self.is_traceable, self.told = world, effect, is_traceable, world.calls.append

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x * self.weight)
        self.effect(self.world, self)
        return y if self.is_traceable or y.sum() < 1e9 else x


@pytest.mark.parametrize("is_traceable", [True, False])
@pytest.mark.parametrize("effect", EFFECTS)
def test_effects_happen_once_a_call(effect: str, is_traceable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def states(*, is_patched: bool) -> list[tuple[object, ...]]:
        monkeypatch.setattr(sys.modules[__name__], "COUNT", 0)
        monkeypatch.setattr(Tally, "n", 0)
        monkeypatch.setenv(_NAME, "")
        _tallied.__dict__.clear()
        VARIABLE.set(0)
        EFFECTS["cell"].__closure__[0].cell_contents = 0
        world = World()
        monkeypatch.setattr(LOGGER, "handlers", [type("Handler", (logging.Handler,), {"emit": lambda _, r: world.emit(r)})()])
        layer = Affecting(world, EFFECTS[effect], is_traceable=is_traceable)
        if is_patched:
            fg.patch(layer)
        found = []
        with torch.no_grad():
            for _ in range(3):
                layer(torch.ones(WIDTH))
                found.append(world.state())
        return found

    LOGGER.setLevel(logging.INFO)
    expected = copy_context().run(states, is_patched=False)
    assert copy_context().run(states, is_patched=True) == expected
    assert expected[0] != expected[1]


class Caching(Layer):
    """A layer that computes a table when it is first called."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.calls:
            self.calls = 3
        return super().forward(x) * self.calls


def test_a_layer_that_changes_something_in_its_first_call_alone() -> None:
    layer, x = Caching(), torch.randn(3, WIDTH)
    expected = copy.deepcopy(layer)(x)
    report = fg.patch(layer)
    for _ in range(2):
        torch.testing.assert_close(layer(x), expected)
    assert [(row.fused, row.reason) for row in report.rows if row.kind == "Caching"] == [(True, "")]


@functools.lru_cache
def ramp(width: int) -> Tensor:
    return torch.arange(width) / width


class Tabled(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + ramp(WIDTH)


def test_layers_that_share_a_function_that_keeps_its_results() -> None:
    layers, x = nn.ModuleList([Tabled(), Tabled()]), torch.randn(3, WIDTH)
    expected = [layer(x) for layer in copy.deepcopy(layers)]
    report = fg.patch(layers)
    for _ in range(2):
        torch.testing.assert_close([layer(x) for layer in layers], expected)
        ramp.cache_clear()
    assert type(ramp(WIDTH)) is Tensor and all(row.fused for row in report.rows)


class Marking(nn.Module):
    """A layer that sets what is set already, but for the first time."""

    mark = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight: Any = nn.Parameter(torch.ones(WIDTH))
        self.forget()

    def forget(self) -> None:
        global COUNT
        self.own = self.weight.mark = Marking.mark = COUNT = 0

    def forward(self, x: Tensor) -> Tensor:
        global COUNT
        self.own = self.weight.mark = Marking.mark = COUNT = 1
        return torch.tanh(x * self.weight)


def test_what_is_set_again_stays_set() -> None:
    layer, x = Marking(), torch.randn(3, WIDTH)
    report = fg.patch(layer)
    for _ in range(3):
        layer(x)
    for forget in (
        layer.forget,
        lambda: setattr(layer.weight, "mark", 0),
        lambda: setattr(Marking, "mark", 0),
        lambda: globals().update(COUNT=0),
    ):
        forget()
        layer(x)
        assert (layer.own, layer.weight.mark, Marking.mark, COUNT) == (1, 1, 1, 1)
        layer(x)
    assert [row.fused for row in report.rows if row.kind == "Marking"] == [True]


class Heads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (4, 4)).transpose(0, 1)


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(WIDTH), Heads()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        if y.sum() > -1e9:  # so that the modules inside are kernels, not the whole
            self.heads(y).mul_(2)
        return y


def test_views_of_arguments_stay_views() -> None:
    model, x = Writing(), torch.randn(3, WIDTH)
    with torch.no_grad():
        expected = model(x)
        report = fg.patch(model)
        torch.testing.assert_close(model(x), expected)
    assert {row.path: row.fused for row in report.rows} == {"": False, "norm": True, "heads": False}


class Tagging(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.tag = 1  # type: ignore[attr-defined]
        return y


class Doubling(Layer):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, y


@pytest.mark.parametrize(
    ("layer", "as_it_is"), [(Tagging(), lambda y: y.tag == 1), (Doubling(), lambda y: y[0] is y[1])], ids=["attribute", "twice"]
)
def test_results_are_the_objects_that_the_layer_makes(layer: Layer, as_it_is: Callable[[Any], bool]) -> None:
    report, x = fg.patch(layer), torch.randn(3, WIDTH)
    assert all(as_it_is(layer(x)) for _ in range(3))
    assert {row.path: row.fused for row in report.rows} == {"": False, "norm": True}


def test_a_cache_is_updated_once_where_the_rest_of_a_layer_cannot_be_traced() -> None:
    experts = {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    }
    model = small_model("Qwen2Moe", num_hidden_layers=1, num_key_value_heads=2, **experts)
    ids = torch.arange(3, 13).view(2, 5)
    settings = {"max_new_tokens": 2, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    expected = model.generate(ids, **settings)
    fg.patch(model)
    assert torch.equal(model.generate(ids, **settings), expected)
