"""What a traced tensor is to the user's Python: a torch.Tensor without values, which never shows the tensor underneath."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import FusegenError, ShapeError, TraceError, UnsupportedError
from fusegen.lang.values import SymbolicSize, TracedTensor
from tests.unit.eager import agree, ints, randn, refused

X = randn(4, 6)


def seen_by_a_kernel(look: Callable[[Any], Any], tensor: Tensor = X) -> Any:
    """What a function finds when a kernel is traced."""
    found: list[Any] = []

    def function(x: Any) -> Any:
        found.append(look(x))
        return x * 2

    fg.kernel(function).lower(tensor, target="cpu")
    return found[-1]


def test_it_is_a_tensor_and_a_number_is_none() -> None:
    assert seen_by_a_kernel(lambda x: isinstance(x, Tensor) and torch.is_tensor(x) and isinstance(x.sum(), Tensor))
    found = []
    fg.kernel(lambda x, s: (found.append(isinstance(s, Tensor)), x * s)[1]).lower(X, 2.5, target="cpu")
    assert found == [False]


ANSWERS: list[Callable[[Any], Any]] = [
    lambda x: (x.dtype, x.device, x.layout, x.ndim, x.dim(), x.itemsize, x.element_size(), x.requires_grad, x.is_leaf, x.grad_fn),
    lambda x: (x.is_cuda, x.is_cpu, x.is_sparse, x.is_meta, x.is_quantized, x.is_nested, x.is_mps, x.is_xpu, x.retains_grad),
    lambda x: (x[0].shape.numel(), x.shape[1:].numel(), x.is_floating_point(), x.is_complex(), x.shape[-1], x.size(-1)),
]


@pytest.mark.parametrize("look", ANSWERS)
def test_what_torch_knows_without_values(look: Callable[[Any], Any]) -> None:
    assert seen_by_a_kernel(look) == look(X)


HARMLESS = (str, bool, int, float, type(None), torch.dtype, torch.device, torch.layout, TracedTensor, SymbolicSize, tuple)


def test_every_member_is_traced_or_refused() -> None:
    def member(x: Any, name: str) -> Any:
        try:
            value = getattr(x, name)
            return value() if callable(value) and not inspect.isclass(value) else value
        except FusegenError:
            return None

    names = [n for n in dir(Tensor) if not n.startswith("__")]
    found = seen_by_a_kernel(lambda x: {name: member(x, name) for name in names})
    assert len(found) > 500
    strange = {name: value for name, value in found.items() if not isinstance(value, HARMLESS)}
    assert not strange
    assert not [name for name, value in found.items() if isinstance(value, Tensor) and not isinstance(value, TracedTensor)]


WITHOUT_VALUES: list[Callable[[Any], Any]] = [
    lambda x: 1 in x,
    lambda x: np.asarray(x),
    lambda x: np.sin(x),
    lambda x: list(reversed(x)),
    lambda x: complex(x.sum()),
    lambda x: f"{x.sum():.2f}",
    lambda x: torch.utils.dlpack.to_dlpack(torch.Tensor(x)),
    lambda x: torch.Tensor.as_subclass(x, torch.Tensor),
    lambda x: torch.nn.Parameter(x),
    lambda x: copy.copy([x.storage()]),
    lambda x: setattr(x, "data", x),
    lambda x: setattr(x, "requires_grad", True),
    lambda x: x.new_tensor([1.0]),
    lambda x: torch.ops.aten.relu.default(x),
]


@pytest.mark.parametrize("look", WITHOUT_VALUES)
def test_what_needs_the_elements_is_refused(look: Callable[[Any], Any]) -> None:
    with pytest.raises(TraceError):
        seen_by_a_kernel(look)


def test_it_prints_copies_and_keeps_attributes() -> None:
    assert seen_by_a_kernel(lambda x: (f"{x[0]}", str(x[0]), repr(x[0]))) == ("<traced f32[6]>",) * 3
    assert seen_by_a_kernel(lambda x: copy.deepcopy([x])[0] is x and copy.copy(x) is x and x.data is x and x.detach() is x)

    def marked(x: Any) -> Any:
        x.mark = 2
        return x * x.mark

    torch.testing.assert_close(fg.kernel(marked)(X), X * 2)


def test_operators_in_place_make_a_new_value_of_the_old_dtype() -> None:
    def steps(x: Tensor, y: Tensor) -> Tensor:
        z = x * 1
        z += y
        z *= 2
        z -= y[0]
        z /= 3
        return z

    kept = X.bfloat16()
    agree(steps, (X, randn(4, 6)), (X.double(), randn(4, 6)))
    assert fg.kernel(steps)(kept, randn(4, 6)).dtype is torch.bfloat16

    def whole(x: Tensor) -> Tensor:
        x += 0.5
        return x

    refused(whole, ints(4, 6), error=TraceError, says="does not hold", line="x += 0.5")

    def wider(x: Tensor) -> Tensor:
        y = x[:1] * 1
        y += x
        return y

    refused(wider, X, error=ShapeError, says="in place", line="y += x")


@pytest.mark.parametrize("function", [F.relu, F.relu6, F.silu, F.selu, F.celu, F.hardtanh, F.leaky_relu, F.elu, F.hardswish])
def test_functions_in_place_change_what_their_input_means(function: Callable[..., Any]) -> None:
    def kernel(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 3
        z = function(y, inplace=True)
        return y, z + 1

    agree(kernel, (X,))


KEPT: list[Any] = []


def test_a_value_of_another_trace() -> None:
    def keep(x: Tensor) -> Tensor:
        KEPT.append(x * 2)
        return x + 1

    fg.kernel(keep)(X)
    for use in (
        lambda: KEPT[0] + 1,
        lambda: KEPT[0].shape,
        lambda: KEPT[0].dtype,
        lambda: torch.exp(KEPT[0]),
        lambda: fg.kernel(keep)(KEPT[0]),
    ):
        with pytest.raises(TraceError, match="another trace"):
            use()
    assert "traced" in repr(KEPT[0])
    refused(lambda x: x + KEPT[0], X, error=TraceError, says="another trace", line="KEPT[0]")


def test_a_size_of_another_trace() -> None:
    KEPT.clear()
    fg.kernel(lambda x: (KEPT.append(x.shape[0]), x + 1)[1])(X)
    refused(lambda x: x.reshape(KEPT[0], -1), X, error=TraceError, says="another trace", line="KEPT[0]")


def test_a_name_of_a_property_stands_in_the_message() -> None:
    refused(lambda x: x.grad, X, error=UnsupportedError, says="Tensor.grad", line="x.grad")
    refused(lambda x: torch.Tensor.grad.__get__(x), X, error=UnsupportedError, says="grad", line="__get__")  # type: ignore[attr-defined]
