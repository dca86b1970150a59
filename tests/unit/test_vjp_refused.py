"""What forward and backward passes refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen.errors import ArgumentError, FusegenError, GradientError, UnsupportedError
from tests.naming import case
from tests.unit.bundles import built
from tests.unit.test_vjp import fresh, meta, rms_norm


def halved(x: Tensor) -> Tensor:
    return x / 2


def test_what_is_no_declared_kernel(tmp_path: Path) -> None:
    for given in (torch.relu, lambda x: x * 2, built(tmp_path / "built", halved, (torch.randn(4),)), 5):
        with case(given), pytest.raises(ArgumentError, match=r"(?s)fg.vjp differentiates kernels that fg.kernel declared.*try: "):
            fg.vjp(given, torch.randn(4))


def test_wrong_gradients_and_saved_values() -> None:
    x, weight = torch.randn(4, 16), torch.randn(16)
    passes = fg.vjp(fresh(rms_norm), x, weight)
    y, saved = passes.forward(x, weight)
    good = torch.ones_like(y)
    other = fg.vjp(fresh(rms_norm), x, weight).forward(x, weight)[1]
    for match, arguments in {
        "needs 1 gradient, but got 0": (saved,),
        "needs 1 gradient, but got 2": (saved, good, good),
        r"'grad' has shape \(5, 16\), but needs \(x_dim0, 16\), with x_dim0=4": (saved, torch.ones(5, 16)),
        r"'grad' has shape \(4, 17\)": (saved, torch.ones(4, 17)),
        r"'grad' has shape \(16,\)": (saved, torch.ones(16)),
        "'grad' is torch.float64, but must be torch.float32": (saved, good.double()),
        "'grad' is on meta, but 'x' is on cpu": (saved, good.to("meta")),
        "'grad' is a float, not a tensor": (saved, 1.0),
        "not saved by its forward pass": (other, good),
        "first argument was not saved by its forward pass": ((x, weight), good),
        "needs 3 saved tensors, but got 2": (saved.with_tensors(saved.tensors[:2]), good),
        r"'weight' has shape \(4, 16\)": (saved.with_tensors((x, x, saved.tensors[2])), good),
        r"'saved' is torch.bfloat16": (saved.with_tensors((x, weight, saved.tensors[2].bfloat16())), good),
    }.items():
        with pytest.raises(ArgumentError, match=match):
            passes.backward(*arguments)
    with pytest.raises(GradientError, match="'grad' requires a gradient"):
        passes.backward(saved, good.clone().requires_grad_())
    with pytest.raises(ArgumentError, match="give 3 tensors in the order"):
        saved.with_tensors("x")
    passes.backward(saved, good)


def test_wrong_arguments() -> None:
    x, weight = torch.randn(4, 16), torch.randn(16)
    passes = fg.vjp(fresh(rms_norm), x, weight)
    for match, arguments in {
        r"rms_norm: weight or bias of shape \(16,\) does not fit an input": (torch.randn(4, 17), weight),
        r"rms_norm: weight or bias of shape \(\) does not fit an input": (x, 2.0),
        "'x' has no elements": (x[:0], weight),
        "missing a required argument: 'weight'": (x,),
        "'x' is a meta tensor": (x.to("meta"), weight.to("meta")),
    }.items():
        with pytest.raises(FusegenError, match=match):
            passes.forward(*arguments)
    with pytest.raises(GradientError, match="'x' requires a gradient"):
        passes.forward(x.clone().requires_grad_(), weight)
    elsewhere = fg.vjp(fresh(rms_norm), meta(4, 16).float(), meta(16).float(), target="sm_90a")
    with pytest.raises(ArgumentError, match=r"compiled for sm_90a, but its tensors are on cpu \(cpu\)"):
        elsewhere.forward(x, weight)


def test_what_changes_between_the_passes_is_refused() -> None:
    x, weight = torch.randn(4, 16), torch.randn(16)
    passes = fg.vjp(fresh(rms_norm), x, weight)
    y, saved = passes.forward(x, weight)
    weight += 1
    with pytest.raises(ArgumentError, match="'weight' was modified in place after the forward pass"):
        passes.backward(saved, torch.ones_like(y))


def test_what_inference_mode_would_hide_is_refused() -> None:
    """Torch counts no writes to its tensors, so that a change between the passes would be one of the gradients, in silence."""
    passes = fg.vjp(fresh(rms_norm), *(plain := (torch.randn(4, 16), torch.randn(16))))
    with torch.inference_mode():
        x, weight = (tensor.clone() for tensor in plain)
        with pytest.raises(ArgumentError, match=r"'\w+' is a tensor of inference mode(.|\n)*try: .*no_grad"):
            passes.forward(x, weight)
    _, saved = passes.forward(*plain)
    with pytest.raises(ArgumentError, match="inference mode"):
        saved.with_tensors([x] * len(saved.tensors))


class StraightThrough(torch.autograd.Function):
    """A step whose gradient is that of the identity."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _tripled_in_place(x: Tensor) -> Tensor:
    """In torch the result keeps the history that it had before the write."""
    y = x * 2
    with torch.no_grad():
        y.mul_(3)
    return y


def _straight_through(x: Tensor) -> Tensor:
    return x * StraightThrough.apply(x)


@pytest.mark.parametrize("called_under", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("function", [_tripled_in_place, _straight_through])
def test_what_the_graph_does_not_show_is_refused(function: Callable[[Tensor], Tensor], called_under: Any) -> None:
    """Also where no call could tell."""
    kernel, x = fg.kernel(function), torch.randn(4, 6)
    with called_under():
        torch.testing.assert_close(kernel(x), function(x))
        with pytest.raises(UnsupportedError, match=r"calls a torch.autograd.Function, enables gradients, or writes"):
            fg.vjp(kernel, x)
    with pytest.raises(UnsupportedError, match=r"calls a torch.autograd.Function"):
        kernel(x.requires_grad_())


def test_nothing_to_differentiate() -> None:
    for function in (lambda x: x > 0, lambda x: x.detach()):
        with pytest.raises(GradientError, match="no result has a derivative with respect to x"):
            fg.vjp(fg.kernel(function), torch.randn(4, 6))
