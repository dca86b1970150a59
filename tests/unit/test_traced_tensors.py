"""What a traced tensor is to the user's Python: a torch.Tensor without values, which never shows the tensor underneath."""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import FusegenError, ShapeError, TraceError, UnsupportedError
from fusegen.trace.scalars import SymbolicSize
from fusegen.trace.values import TracedTensor
from tests.naming import case
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
    lambda x: (x.dtype, x.device, x.layout, x.ndim, x.dim(), x.itemsize, x.element_size(), x.requires_grad),
    lambda x: (x.is_cuda, x.is_cpu, x.is_sparse, x.is_meta, x.is_quantized, x.is_nested, x.is_mps, x.is_xpu, x.retains_grad),
    lambda x: (x[0].shape.numel(), x.shape[1:].numel(), x.is_floating_point(), x.is_complex(), x.shape[-1], x.size(-1)),
]


def test_what_torch_knows_without_values() -> None:
    for look in ANSWERS:
        with case(look):
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
    lambda x: torch.utils.dlpack.to_dlpack(torch.Tensor(x)),  # type: ignore[attr-defined]
    lambda x: torch.Tensor.as_subclass(x, torch.Tensor),
    lambda x: torch.nn.Parameter(x),
    lambda x: copy.copy([x.storage()]),
    lambda x: setattr(x, "data", x),
    lambda x: setattr(x, "requires_grad", True),
    lambda x: x.new_tensor([1.0]),
    lambda x: torch.ops.aten.relu.default(x),
]


def test_what_needs_the_elements_is_refused() -> None:
    for look in WITHOUT_VALUES:
        with case(look), pytest.raises(TraceError):
            seen_by_a_kernel(look)


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

    refused(whole, ints(4, 6), error=TraceError, says="cannot be stored as torch.int32", line="x += 0.5")

    def wider(x: Tensor) -> Tensor:
        y = x[:1] * 1
        y += x
        return y

    refused(wider, X, error=ShapeError, says="in place", line="y += x")


def test_functions_in_place_change_what_their_input_means() -> None:
    functions: list[Callable[..., Any]] = [F.relu, F.relu6, F.silu, F.selu, F.celu, F.hardtanh, F.leaky_relu, F.elu, F.hardswish]

    def changed(x: Tensor, function: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        y = x * 3
        z = function(y, inplace=True)
        return y, z + 1

    agree(lambda x: [part for function in functions for part in changed(x, function)], (X,))


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


class Holds:
    """Something with an attribute."""

    z: Tensor


def _by_attribute(x: Tensor) -> Any:
    holder = Holds()
    holder.z = x * 2
    y = holder.z
    holder.z *= 3
    return y, holder.z


def _by_helper(x: Tensor) -> Any:
    def change(a: Tensor) -> None:
        a += 1

    y = x * 2
    change(y)
    return y


def _by_names(x: Tensor) -> Any:
    y = x * 2
    z, kept = y, y.clone()
    held = [y] * 2
    held[0] += 1
    y -= 3
    return y, z, held[1], kept


def _by_function(x: Tensor) -> Any:
    y = x * 2
    z = torch.relu(y)
    w = F.relu(y, inplace=True)
    w += 1
    return y, z, w


def _by_the_tensor_itself(x: Tensor) -> Any:
    y = x * 2
    z = y.contiguous().to(y.dtype)
    z += 1
    return y, z


def test_other_names_of_a_value_in_place() -> None:
    for function in [_by_attribute, _by_helper, _by_names, _by_function, _by_the_tensor_itself]:
        with case(function):
            agree(function, (X.clone(),))


def _of_a_row(x: Tensor) -> Any:
    y = x * 2
    row = y[0]
    row += 1
    return y


def _of_a_part(x: Tensor) -> Any:
    y = x * 2
    a, b = y.chunk(2, -1)
    a += b
    return a, y


def _of_the_whole(x: Tensor) -> Any:
    y = x * 2
    z = y.T
    y += 1
    return z


def _of_each_row(x: Tensor) -> Any:
    y = x * 2
    for row in y.unbind():
        row *= 2
    return y


def test_views_of_what_changed_in_place() -> None:
    for function in [_of_a_row, _of_a_part, _of_the_whole, _of_each_row]:
        with case(function):
            agree(function, (X.clone(),))


def _of_a_reshaped_one(x: Tensor) -> Any:
    y = x * 2
    z = y.reshape(-1)
    y += 1
    return z


def _of_a_contiguous_one(x: Tensor) -> Any:
    y = x * 2
    z = y.T.contiguous()
    y += 1
    return z


def _by_a_contiguous_one(x: Tensor) -> Any:
    y = x * 2
    z = y.T.contiguous()
    z += 1
    return y


def test_views_that_may_be_copies_are_refused_once_changed() -> None:
    for function in [_of_a_reshaped_one, _of_a_contiguous_one, _by_a_contiguous_one]:
        with case(function), pytest.raises(UnsupportedError, match="changed in place"):
            fg.kernel(function)(X.clone())


def test_what_is_right_of_views_in_place_stays() -> None:
    def function(x: Tensor) -> Any:
        y = (x * 2).view(-1)
        y += 1
        return y.view(x.shape) * 2

    agree(function, (X.clone(),))


def test_closed_over_tensors_are_not_written_to() -> None:
    weight = torch.ones(4)

    def function(x: Tensor) -> Tensor:
        weight.add_(1)
        return x * weight

    with pytest.raises(UnsupportedError, match="captured tensor"):
        fg.kernel(function)(X)
    assert torch.equal(weight, torch.ones(4))


def test_bits_of_closed_over_tensors_are_not_written_to() -> None:
    flags = torch.ones(4, dtype=torch.int32)
    for write in (operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift):
        with case(write), pytest.raises(UnsupportedError, match="captured tensor"):
            fg.kernel(lambda x, write=write: x * write(flags, 1))(torch.ones(4))
        assert torch.equal(flags, torch.ones(4, dtype=torch.int32))


def test_identity_of_arguments() -> None:
    kernel = fg.kernel(lambda x, y: x if x is y else x + 1)
    agree(kernel, (X, X.clone()))
    with pytest.raises(UnsupportedError, match="one tensor twice"):
        kernel(X, X)
