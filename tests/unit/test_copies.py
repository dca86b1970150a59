"""Kernels as parts of what is copied, pickled and sent to other processes."""

from __future__ import annotations

import copy
import inspect
import io
import multiprocessing
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn

import fusegen as fg
from tests.unit.eager import randn


@fg.kernel
def doubled(x: Tensor, factor: float = 2.0) -> Tensor:
    """Doubles."""
    return x * factor


def halved(x: Tensor) -> Tensor:
    return x * 0.5


class Holder(nn.Module):
    """A module that holds kernels of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = doubled, fg.kernel(halved)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


class Scaled:
    """An object that holds a kernel of its own method."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.kernel = fg.kernel(self.scale)
        self.passes = fg.vjp(self.kernel, torch.ones(4))

    def scale(self, x: Tensor) -> Tensor:
        return x * self.factor


def called(module: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = module(x)
    return result


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def test_a_module_that_holds_kernels() -> None:
    """Before its first call, and after it."""
    module, x = Holder(), randn(4, 8)
    for _ in range(2):
        for way in (copy.deepcopy, copy.copy, lambda module: pickle.loads(pickle.dumps(module)), saved):
            assert torch.equal(way(module)(x), x * 2.0 + x * 0.5)
        module(x)


@pytest.mark.deep
def test_a_module_that_holds_kernels_in_another_process() -> None:
    x = randn(4, 8)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        result = pool.apply(called, (Holder(), x))
    assert torch.equal(result, x * 2.0 + x * 0.5)


def test_a_kernel_at_the_top_of_a_module_is_pickled_by_name() -> None:
    assert pickle.loads(pickle.dumps(doubled)) is doubled


def test_a_copied_object_s_kernel_is_the_copy_s() -> None:
    x = randn(4)
    one = Scaled(2.0)
    one.kernel(x)
    other = copy.deepcopy(one)
    other.factor = 3.0
    assert torch.equal(other.kernel(x), x * 3.0) and torch.equal(one.kernel(x), x * 2.0)
    for each, factor in ((other, 3.0), (one, 2.0)):
        y, saved = each.passes.forward(x)
        assert torch.equal(y, x * factor)
        assert torch.equal(each.passes.backward(saved, torch.ones(4))[0], torch.full((4,), factor))


def test_a_kernel_that_has_no_name() -> None:
    kernel = fg.kernel(lambda x: x * 2)
    for send in (pickle.dumps, lambda value: torch.save(value, io.BytesIO())):
        with pytest.raises(pickle.PicklingError, match=r"(?s)cannot be pickled.*try: define the function at the top"):
            send(kernel)
    assert torch.equal(copy.deepcopy(kernel)(torch.ones(3)), torch.full((3,), 2.0))


def test_a_kernel_looks_like_its_function() -> None:
    assert list(inspect.signature(doubled).parameters) == ["x", "factor"]
    assert (doubled.__name__, doubled.__doc__, doubled.__module__) == ("doubled", "Doubles.", __name__)
    assert weakref.ref(doubled)() is doubled and len({doubled, doubled, copy.deepcopy(doubled)}) == 2
