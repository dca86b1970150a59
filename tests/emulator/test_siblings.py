"""Pointwise values that an epilogue stores as well, since it reads the same elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.families import gemm
from fusegen.families.gemm import choice
from fusegen.families.gemm.epilogue import CONTRACTION
from fusegen.families.pointwise.lower import POINTWISE
from fusegen.lowered import Lowered
from tests.emulator.test_epilogues import tensor, weight
from tests.naming import case
from tests.unit.lowering import kinds, lowered, meta
from tests.unit.ptxas import figures


def gated(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(activation(F.linear(x, gate)) * F.linear(x, up), down)

    return mlp


def biased(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def mlp(x: Tensor, fc1: Tensor, bias: Tensor, fc2: Tensor) -> Tensor:
        return F.linear(activation(F.linear(x, fc1, bias)), fc2)

    return mlp


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


GATED = {"SwiGLU": gated(F.silu), "GEGLU": gated(F.gelu), "ReGLU": gated(F.relu)}
BIASED = {"GELU": biased(F.gelu), "tanh GELU": biased(tanh_gelu), "SiLU": biased(F.silu)}


def arguments_of(name: str, make: Callable[..., Tensor], *rows: int, width: int, inner: int) -> list[Tensor]:
    second = make(inner, width) if name in GATED else make(inner)
    return [make(*rows, width), make(inner, width), second, make(width, inner)]


def backward(function: Callable[..., Any], *arguments: Tensor, target: str = "sm_90a") -> Lowered:
    return fg.vjp(fg.kernel(function), *arguments, target=target).backward.lower()


def results_of_epilogues(low: Lowered) -> list[int]:
    return [len(group.outputs) for group in low.groups if group.kind is CONTRACTION]


# Plans.


@pytest.mark.parametrize("name", [*GATED, *BIASED])
def test_gradients_of_an_mlp_read_its_activation_from_an_epilogue(name: str) -> None:
    low = backward((GATED | BIASED)[name], *arguments_of(name, meta, 8192, width=4096, inner=14336))
    assert POINTWISE not in kinds(low)
    assert results_of_epilogues(low)[0] == (3 if name in GATED else 2)


def test_three_results_spill_no_registers() -> None:
    low = backward(GATED["SwiGLU"], *arguments_of("SwiGLU", meta, 8192, width=4096, inner=14336))
    found = figures(low.sources[0])
    assert found.spilled == 0 and not found.warnings


def test_a_forward_pass_has_them_too() -> None:
    def function(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, w) * y, y.relu()

    assert kinds(lowered(function, meta(4096, 4096), meta(4096, 4096), meta(4096, 4096))) == [CONTRACTION]


def operand(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The matmul reads the value."""
    z = y.exp()
    return F.linear(x, F.linear(z, w)) * y, z


def reads_operand(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The epilogue does not read the matmul's operand."""
    return F.linear(x, w).relu() + y, x.exp()


def reads_more(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return F.linear(x, w) * y, x + y


def other_elements(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return F.linear(x, w) * y, y[:, :64].exp()


def long_lived(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """The value takes twice the bytes that are read, also while another matmul has a large result."""
    large = (F.linear(x, w) * y) @ torch.cat((w, w), -1)
    return y.float().exp() @ large.sum(0).view(4096, 2).float()


APART = {each.__name__: each for each in (operand, reads_operand, reads_more, other_elements, long_lived)}


@pytest.mark.parametrize("name", APART)
def test_values_that_stay_apart(name: str) -> None:
    low = lowered(APART[name], meta(4096, 4096), meta(4096, 4096), meta(4096, 4096))
    assert POINTWISE in kinds(low) and set(results_of_epilogues(low)) <= {1}


@pytest.mark.parametrize("target", ["sm_80", "cpu"])
def test_without_a_cost_model_they_stay_apart(target: str) -> None:
    assert POINTWISE in kinds(backward(BIASED["GELU"], *arguments_of("GELU", meta, 512, width=256, inner=512), target=target))


# Values.


def exact(function: Callable[..., Any], arguments: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [argument.clone().requires_grad_() for argument in arguments]
    return list(torch.autograd.grad(function(*leaves), leaves, grad))


def error(found: Tensor, wanted: Tensor) -> float:
    return (found.double() - wanted).square().mean().sqrt().item()


@pytest.mark.usefixtures("own_cache", "emulated")
@pytest.mark.parametrize("name", [*GATED, *BIASED])
def test_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the bits of a kernel of their own. The library would compute such small matmuls."""
    function, grad = (GATED | BIASED)[name], tensor(2, 33, 64)
    arguments = [tensor(2, 33, 64), *arguments_of(name, weight, 1, width=64, inner=136)[1:]]
    renamed = lambda *values: function(*values)  # noqa: E731 - a kernel of another name has no cached plan
    merged, apart = (fg.vjp(fg.kernel(each), *arguments) for each in (function, renamed))
    saved, saved_apart = (passes.forward(*arguments)[1] for passes in (merged, apart))
    monkeypatch.setattr(choice, "library_time", lambda *_: math.inf)
    got = merged.backward(saved, grad)
    assert results_of_epilogues(merged.backward.lower())[0] == (3 if name in GATED else 2)
    monkeypatch.setattr(gemm, "_with_siblings", lambda _graph, groups, *_: groups)
    usual = apart.backward(saved_apart, grad)
    assert POINTWISE in kinds(apart.backward.lower())
    eager = exact(function, arguments, grad)
    wanted = exact(function, [a.double() for a in arguments], grad.double())
    for ours, other, theirs, right in zip(got, usual, eager, wanted, strict=True):
        with case(str(ours.shape)):
            assert torch.equal(ours, other)
            assert error(ours, right) <= 1.25 * error(theirs, right)
