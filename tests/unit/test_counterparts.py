"""A trace of one layer serves other layers, as long as its function cannot tell them apart."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node
from torch.utils.weak import WeakTensorKeyDictionary

import fusegen as fg
from fusegen.compiler import variants
from fusegen.compiler.tracing import trace_function
from tests.unit.eager import randn

WIDTH = 8


class Layer(nn.Module):
    """A layer with a part, and whatever a test gives it."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.weight = nn.Parameter(randn(WIDTH, WIDTH))
        self.register_buffer("scale", torch.tensor(2.0))
        self.eps, self.activation, self.parts, self.factor = 1e-5, F.gelu, [1, 2], 3
        for name, value in given.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(F.linear(self.norm(x) * self.factor + self.eps, self.weight)) * self.parts[0]


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what is traced."""
    found: list[str] = []
    monkeypatch.setattr(
        variants, "trace_function", lambda request, *given: found.append(request.name) or trace_function(request, *given)
    )
    return found


def agree(*layers: nn.Module, kernels: Sequence[Any] = ()) -> None:
    """A kernel for each layer gives what the layer gives."""
    kernels = kernels or [fg.kernel(type(layer).forward) for layer in layers]
    for kernel, layer in zip(kernels, layers, strict=True):
        x = randn(3, WIDTH, dtype=layer.weight.dtype)
        torch.testing.assert_close(kernel(layer, x), type(layer).forward(layer, x))


def test_layers_that_are_alike_are_traced_once(traces: list[str]) -> None:
    agree(*(Layer() for _ in range(4)))
    assert len(traces) == 1


def test_layers_that_hold_functions_with_arguments_and_containers_of_their_own(traces: list[str]) -> None:
    agree(*(Layer(activation=functools.partial(F.gelu, approximate="tanh"), parts=[4, {"a": 1}]) for _ in range(2)))
    assert len(traces) == 1


def test_a_function_with_arguments_that_changed_before_the_kernel_was_copied() -> None:
    shift, x = functools.partial(torch.add, other=2.0), randn(3, WIDTH)
    kernel = fg.kernel(lambda x, function: function(x))
    kernel(x, shift)
    shift.keywords["other"] = 3.0
    torch.testing.assert_close(copy.deepcopy(kernel)(x, shift), x + 3)


def test_gradients_are_those_of_each_layer(traces: list[str]) -> None:
    x, layers = randn(3, WIDTH), [Layer() for _ in range(3)]
    for kernel, layer in [(fg.kernel(Layer.forward), layer) for layer in layers]:
        kernel(layer, x).square().sum().backward()
        found = [p.grad for p in layer.parameters()]
        wanted = torch.autograd.grad(layer(x).square().sum(), [*layer.parameters()])
        torch.testing.assert_close(found, list(wanted), rtol=1e-5, atol=1e-5)  # the sums' order depends on the processor
    assert len(traces) == 1


def test_arguments_that_hold_tensors(traces: list[str]) -> None:
    class Rotated(Layer):
        def forward(self, x: Tensor, embeddings: tuple[Tensor, Tensor]) -> Tensor:
            return super().forward(x) * embeddings[0] + embeddings[1]

    x, kernels = randn(3, WIDTH), [fg.kernel(Rotated.forward) for _ in range(3)]
    for kernel, layer in [(kernel, Rotated()) for kernel in kernels]:
        torch.testing.assert_close(kernel(layer, x, (x, x + 1)), layer(x, (x, x + 1)))
    assert len(traces) == 1


def test_a_later_change_of_either_layer_is_seen(traces: list[str]) -> None:
    one, other = Layer(), Layer()
    kernels = [fg.kernel(Layer.forward) for _ in range(2)]
    agree(one, other, kernels=kernels)
    for change in (lambda: setattr(one, "factor", 5), lambda: setattr(other, "factor", 7), lambda: other.parts.insert(0, 9)):
        change()
        agree(one, other, kernels=kernels)
    other.weight = nn.Parameter(randn(WIDTH, WIDTH))
    agree(one, other, kernels=kernels)
    assert len(traces) == 4


def test_a_container_that_has_changed_since_it_was_read(traces: list[str]) -> None:
    one, other = Layer(), Layer(parts=[9, 2])
    agree(one)
    one.parts[0] = 9
    agree(other)
    assert len(traces) == 2


def test_a_layer_that_is_gone_leaves_nothing_alive(traces: list[str]) -> None:
    layer, kernel = Layer(), fg.kernel(Layer.forward)
    kernel(layer, randn(3, WIDTH))
    gone = weakref.ref(layer)
    del layer
    gc.collect()
    assert gone() is None
    agree(Layer())
    assert len(traces) == 2


def test_layers_whose_parts_are_other_layers(traces: list[str]) -> None:
    class Chained(Layer):
        before: nn.Module

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + F.linear(x, self.before.weight)

    layers = [Chained() for _ in range(4)]
    for before, layer in itertools.pairwise(layers):
        object.__setattr__(layer, "before", before)
    agree(*layers[1:])
    assert len(traces) == 1


def test_a_size_that_another_kernel_needs_as_a_number_stays_a_size() -> None:
    def either(x: Tensor, has_windows: bool) -> Tensor:
        return x.unfold(0, 2, 1) + 1 if has_windows else x + 1

    kernels, x = [fg.kernel(either) for _ in range(2)], randn(3, WIDTH)
    windows, others = (kernel.lower(x, flag).traced.inputs[0].shape for kernel, flag in zip(kernels, (True, False), strict=True))
    assert windows == (3, WIDTH) != others


@dataclass
class Held:
    """A result, and the layer that it is of."""

    result: Tensor
    layer: nn.Module


register_pytree_node(Held, lambda held: ([held.result], held.layer), lambda results, layer: Held(*results, layer))


def test_results_that_hold_the_layer() -> None:
    def held(layer: Layer, x: Tensor) -> Held:
        return Held(layer(x), layer)

    x, layers = randn(3, WIDTH), [Layer() for _ in range(2)]
    for kernel, layer in [(fg.kernel(held), layer) for layer in layers]:
        found = kernel(layer, x)
        assert found.layer is layer
        torch.testing.assert_close(found.result, layer(x))


class Tied(Layer):
    """Two weights that may be one."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.weight), self.second)


def _tied(layer: Layer) -> Layer:
    layer.second = layer.weight
    return layer


def _apart(layer: Layer) -> Layer:
    layer.second = nn.Parameter(randn(WIDTH, WIDTH))
    return layer


REGISTRY: dict[Any, float] = {}
FIRST: list[nn.Module] = []
MARKED: Any = weakref.WeakKeyDictionary()


class Registered(Layer):
    """A layer that finds a number by what it is."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.number()

    def number(self) -> float:
        raise NotImplementedError


class ById(Registered):
    def number(self) -> float:
        return REGISTRY[id(self)]


class ByHash(Registered):
    def number(self) -> float:
        return REGISTRY[hash(self)]


class ByItself(Registered):
    def number(self) -> float:
        return REGISTRY.get(self, 1.0)


class ByReference(Registered):
    def number(self) -> float:
        return MARKED.get(self, 1.0)


class IsFirst(Registered):
    def number(self) -> float:
        return 2.0 if self is FIRST[0] else 3.0


@functools.lru_cache
def factor_of(layer: Layer) -> int:
    return layer.factor


class Cached(Registered):
    def number(self) -> float:
        return factor_of(self)


class Asks(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.scale.item() > 1 else x * 3


class ByOwnHash(Registered):
    def number(self) -> float:
        return REGISTRY[self.__hash__()]


class ByWords(Registered):
    def number(self) -> float:
        return REGISTRY[object.__repr__(self)]


identity = id


class ByAlias(Registered):
    def number(self) -> float:
        return REGISTRY[identity(self)]


WEIGHTED: Any = WeakTensorKeyDictionary()


class ByWeight(Registered):
    def number(self) -> float:
        return WEIGHTED[self.weight]


class IsNamed(Registered):
    def number(self) -> float:
        return 2.0 if self is NAMED["first"] else 3.0


NAMED: Any = weakref.WeakValueDictionary()


class Scaled(Layer):
    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale


class Inheriting(Scaled):
    base: Any

    def forward(self, x: Tensor) -> Tensor:
        return self.base.scaled(x)


class Tagged(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * getattr(self.norm.weight, "tag", 3)


def _registered(cls: type[Layer], key: Callable[[Any], Any]) -> tuple[Layer, Layer]:
    one, other = cls(), cls()
    REGISTRY.update({key(one): 2.0, key(other): 5.0})
    MARKED.update({one: 2.0, other: 5.0})
    WEIGHTED.update({one.weight: 2.0, other.weight: 5.0})
    NAMED["first"] = one
    FIRST[:] = [one]
    return one, other


def _method_of_the_first(wrapped: Callable[[Any], Any]) -> tuple[Layer, Layer]:
    one, other = Scaled(), Scaled(scale=torch.tensor(3.0))
    one.activation = other.activation = wrapped(one.scaled)
    return one, other


def _base_of_the_first() -> tuple[Layer, Layer]:
    one, other = Inheriting(), Inheriting(scale=torch.tensor(3.0))
    one.base = other.base = super(Inheriting, one)
    return one, other


def _tagged() -> tuple[Layer, Layer]:
    other = Tagged()
    other.norm.weight.tag = 2  # type: ignore[attr-defined]
    return Tagged(), other


def _hooked() -> tuple[Layer, Layer]:
    other = Layer()
    other.norm.register_forward_hook(lambda *_: _[-1] + 1)
    return Layer(), other


def _own_forward() -> tuple[Layer, Layer]:
    other = Layer()
    other.norm.forward = lambda x: x + 1  # type: ignore[method-assign, assignment]
    return Layer(), other


def _transposed() -> tuple[Layer, Layer]:
    other = Layer()
    other.weight = nn.Parameter(randn(WIDTH, WIDTH).T)
    return Layer(), other


OTHERS: dict[str, Callable[[], tuple[nn.Module, nn.Module]]] = {
    "a number": lambda: (Layer(), Layer(eps=0.5)),
    "zeros of two signs": lambda: (Layer(eps=0.0), Layer(eps=-0.0)),
    "a function": lambda: (Layer(), Layer(activation=F.silu)),
    "a function of a function's own": lambda: (Layer(activation=lambda x: x * 2), Layer(activation=lambda x: x * 3)),
    "an argument of a function": lambda: (
        Layer(activation=functools.partial(F.softmax, dim=0)),
        Layer(activation=functools.partial(F.softmax, dim=1)),
    ),
    "a list": lambda: (Layer(), Layer(parts=[4, 2])),
    "a method of the first": lambda: _method_of_the_first(lambda method: method),
    "a method of the first with arguments": lambda: _method_of_the_first(functools.partial),
    "the base of the first": _base_of_the_first,
    "a part of another class": lambda: (Layer(), Layer(norm=nn.Linear(WIDTH, WIDTH))),
    "a part without a bias": lambda: (Layer(), Layer(norm=nn.LayerNorm(WIDTH, bias=False))),
    "one weight in place of two": lambda: (_apart(Tied()), _tied(Tied())),
    "two weights in place of one": lambda: (_tied(Tied()), _apart(Tied())),
    "a weight of another dtype": lambda: (Layer(), Layer().double().requires_grad_(False)),
    "a weight that lies otherwise": _transposed,
    "a hook": _hooked,
    "a forward pass of its own": _own_forward,
    "by its identity": lambda: _registered(ById, id),
    "by its hash": lambda: _registered(ByHash, hash),
    "by its own hash": lambda: _registered(ByOwnHash, hash),
    "by its words": lambda: _registered(ByWords, object.__repr__),
    "by another name of its identity": lambda: _registered(ByAlias, id),
    "by its weight": lambda: _registered(ByWeight, id),
    "as a weak value": lambda: _registered(IsNamed, id),
    "an attribute of a weight": _tagged,
    "as a key": lambda: _registered(ByItself, lambda layer: layer),
    "as a weak key": lambda: _registered(ByReference, id),
    "the first": lambda: _registered(IsFirst, id),
    "what a cache keeps": lambda: (Cached(factor=2), Cached(factor=3)),
    "a buffer that is asked for": lambda: (Asks(), Asks(scale=torch.tensor(0.5))),
    "another mode": lambda: (Layer(norm=nn.Dropout()).eval(), Layer(norm=nn.Identity())),
}


@pytest.mark.parametrize("name", OTHERS)
def test_layers_that_a_function_can_tell_apart(name: str, traces: list[str]) -> None:
    agree(*OTHERS[name]())
    assert len(traces) == 2
