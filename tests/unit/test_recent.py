"""Calls like a recent one: known where their keys are the same, looked up where they are not."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import fusegen as fg
from fusegen.errors import ArgumentError
from fusegen.runtime import arguments
from fusegen.runtime.arguments import key_function
from fusegen.runtime.bound import NO_CAPTURED, Captured
from fusegen.runtime.executable import call_test
from tests.naming import case
from tests.unit.eager import randn
from tests.unit.test_keys import VALUES, Color

X = randn(6, 6)
MORE: dict[str, Any] = VALUES | {
    "another tensor": randn(3, 5),
    "one of another shape": randn(5, 3),
    "one of as many dims": randn(3, 6)[:, :5],
    "of another dtype": randn(3, 5).to(torch.bfloat16),
    "another float": 2.0,
    "negative zero": -0.0,
    "zero": 0.0,
    "one": 1,
    "the widest int": (1 << 63) - 1,
    "yes as a number": Color.RED,
    "other words": "none",
    "no": False,
    "a shape": (1, 5),
    "another shape": (1, 6),
    "one with a bool": (True, 5),
    "one of a list's values": [1, 5],
    "one as torch gives it": torch.Size((1, 5)),
}


class Seen(TorchDispatchMode):
    """Lets all operations through."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_what_is_known_has_the_same_key() -> None:
    for name, static in itertools.product(MORE, (False, True)):
        with case((name, static)):
            key_is_the_same(name, static)


def key_is_the_same(name: str, static: bool) -> None:
    """Whatever is known to be like a call has the key of the call."""
    key = key_function([False, static])
    knows = call_test((X, MORE[name]), [False, static], lambda _: NO_CAPTURED)
    if knows is None or key((X, MORE[name]))[1] == arguments._TOO_WIDE:  # no program is bound to such a number
        return
    assert knows((randn(6, 6), MORE[name])) == NO_CAPTURED
    for other in MORE.values():
        assert knows((X, other)) is None or key((X, other)) == key((X, MORE[name]))


def test_a_module_that_is_known_may_change() -> None:
    def scaled(module: nn.Linear, x: Tensor) -> Tensor:
        return torch.relu(F.linear(x, module.weight)) * (2 if module.training else 3)

    module, other = nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)
    kernel = settled(scaled, module, X)
    for change in (
        lambda: module.eval(),
        lambda: setattr(module, "weight", nn.Parameter(randn(5, 6))),
        lambda: setattr(module, "weight", nn.Parameter(randn(6, 5).mT)),
        lambda: module.weight.requires_grad_(False),
    ):
        change()
        torch.testing.assert_close(kernel(module, X), scaled(module, X))
    torch.testing.assert_close(kernel(other, X), scaled(other, X))


def settled(function: Callable[..., Any], *values: Any) -> fg.Kernel[..., Any]:
    """A kernel that has been called so often that it knows the call."""
    kernel = fg.kernel(function)
    for _ in range(3):
        kernel(*values)
    ((knows, _),) = kernel._dispatcher.executable.inline_cache.entries
    assert knows(values) is not None
    return kernel


def knows(kernel: fg.Kernel[..., Any], *values: Any) -> bool:
    return any(known(values) is not None for known, _ in kernel._dispatcher.executable.inline_cache.entries)


def scaled(x: Tensor, y: Tensor) -> Tensor:
    return x * 2 + y


OTHERS: dict[str, Callable[[], Tensor]] = {
    "of another shape": lambda: randn(4, 6),
    "that lies otherwise": lambda: randn(6, 6).T,
    "of another dtype": lambda: randn(6, 6).to(torch.bfloat16),
    "that starts anywhere": lambda: randn(37)[1:].view(6, 6),
    "a parameter": lambda: nn.Parameter(randn(6, 6), requires_grad=False),
    "of inference": lambda: _of_inference(),
}


def _of_inference() -> Tensor:
    with torch.inference_mode():
        return randn(6, 6)


def test_other_tensors_are_looked_up() -> None:
    for name, make in OTHERS.items():
        with case(name):
            kernel, x = settled(lambda x: x * 2, X), make()
            assert not knows(kernel, x)
            torch.testing.assert_close(kernel(x), x * 2)


def test_a_tensor_that_stands_twice_is_looked_up() -> None:
    kernel = settled(scaled, X, randn(6, 6))
    assert not knows(kernel, X, X)
    torch.testing.assert_close(kernel(X, X), scaled(X, X))


def test_what_no_kernel_takes_is_refused_as_at_first() -> None:
    kernel, leaf, gone = settled(scaled, X, randn(6, 6)), randn(6, 6).requires_grad_(), randn(6, 6)
    gone.untyped_storage().resize_(0)
    assert kernel(X, leaf).requires_grad
    with torch.no_grad():
        torch.testing.assert_close(kernel(X, leaf), scaled(X, leaf))
    with pytest.raises(ArgumentError):
        kernel(X, torch._neg_view(randn(6, 6)))
    with pytest.raises(ArgumentError):
        kernel(X, gone)
    with pytest.warns(UserWarning, match="under a transform"):
        x, y = randn(3, 6, 6), randn(3, 6, 6)
        torch.testing.assert_close(torch.vmap(kernel)(x, y), scaled(x, y))


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a mode that sees operations": Seen,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a forward-mode level": forward_ad.dual_level,
}


@pytest.mark.parametrize("name", SURROUNDINGS)
@pytest.mark.filterwarnings("ignore:under a transform")
def test_surroundings_in_which_calls_are_looked_up(name: str) -> None:
    y = randn(6, 6)
    kernel = settled(scaled, X, y)
    with SURROUNDINGS[name]():
        assert not knows(kernel, X, y)
        torch.testing.assert_close(kernel(X, y), scaled(X, y))
    assert knows(kernel, X, y)


def test_the_default_dtype_is_looked_at() -> None:
    def offset(x: Tensor) -> Tensor:
        return x + torch.full((6,), 0.1)

    kernel, half = settled(offset, X), X.to(torch.float16)
    torch.set_default_dtype(torch.float64)
    try:
        assert not knows(kernel, X)
        assert kernel(X).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert kernel(half).dtype is torch.float32


def test_numbers_and_settings() -> None:
    def chosen(x: Tensor, scale: Any, mode: Any) -> Tensor:
        return x * scale if mode is None else F.gelu(x * scale, approximate=mode) if isinstance(mode, str) else x + mode * scale

    kernel = settled(chosen, X, 2.0, None)
    assert knows(kernel, X, 5.0, None)
    assert not knows(kernel, X, 5, None)
    assert not knows(kernel, X, 5.0, "tanh")
    for scale in (2.0, -0.5, math.pi, 3, True):
        for mode in (None, "tanh", "none"):
            torch.testing.assert_close(kernel(X, scale, mode), chosen(X, scale, mode), equal_nan=True)
    counted = settled(chosen, X, 3, None)
    assert knows(counted, X, -(1 << 63), None)
    assert not knows(counted, X, 1 << 63, None)
    assert not knows(counted, X, True, None)


SETTINGS = {"slope": 0.5}


def test_state_is_looked_at() -> None:
    def sloped(x: Tensor) -> Tensor:
        return torch.where(x > 0, x, x * SETTINGS["slope"])

    kernel = settled(sloped, X)
    try:
        SETTINGS["slope"] = 0.25
        assert not knows(kernel, X)
        torch.testing.assert_close(kernel(X), sloped(X))
    finally:
        SETTINGS["slope"] = 0.5
    torch.testing.assert_close(kernel(X), sloped(X))


def test_modules_are_looked_at() -> None:
    layer = nn.Linear(6, 6).requires_grad_(False)
    kernel = settled(lambda x: F.silu(layer(x)), X)
    layer.weight.data = torch.zeros(6, 6)
    assert knows(kernel, X)  # another tensor of the same kind is no other program
    torch.testing.assert_close(kernel(X), F.silu(layer(X)))
    layer.register_parameter("bias", None)
    assert not knows(kernel, X)
    torch.testing.assert_close(kernel(X), F.silu(layer(X)))


def test_a_look_up_that_is_under_way_brings_nothing_back() -> None:
    """Another thread forgets between the look-up and what it notes."""
    kernel = fg.kernel(scaled)
    kernel(X, randn(6, 6))
    executable = kernel._dispatcher.executable
    ((bound,),) = executable._programs.values()
    find = bound.find

    def forgetting(values: arguments.Values) -> Captured | None:
        executable.forget()
        return find(values)

    bound.hits, bound.find = 1, forgetting  # its next look-up makes it a recent one
    kernel(X, randn(6, 6))
    assert bound.hits == 2 and not executable.inline_cache.entries


def test_no_tensor_is_kept_alive() -> None:
    x = randn(6, 6)
    kernel, there = settled(lambda x: x * 2, x), weakref.ref(x)
    del x
    gc.collect()
    assert there() is None
    assert knows(kernel, randn(6, 6))


def test_calls_without_gradients_are_no_calls_with_them() -> None:
    """As a checkpoint makes them: the same tensors first without gradients, then with them."""
    kernel, x = fg.kernel(lambda x: x * 2 + 1), randn(3, 4).requires_grad_()
    for _ in range(3):
        with torch.no_grad():
            for _ in range(3):
                assert not kernel(x).requires_grad
        for _ in range(3):
            assert kernel(x).requires_grad
