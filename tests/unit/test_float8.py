"""8-bit floats: what torch stores in them and how it converts them, bit by bit; they are moved, and computed in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen.errors import TraceError
from tests.naming import case
from tests.unit.eager import agree, refused
from tests.unit.eight_bits import E4M3, E5M2, every, same_bits, wide

DTYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)


@DTYPES
def test_conversions_are_those_of_torch(dtype: torch.dtype) -> None:
    def narrowed(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.to(dtype), x.to(dtype).float()

    kernel = fg.kernel(narrowed)
    for x in (every(torch.bfloat16), every(torch.float16), wide(dtype), wide(dtype).double(), torch.arange(-600, 600), every(E5M2)):
        with case(x.dtype):
            for ours, theirs in zip(kernel(x), narrowed(x), strict=True):
                same_bits(ours, theirs)


@DTYPES
def test_loads_widen(dtype: torch.dtype) -> None:
    def widened(x: Tensor) -> tuple[Tensor, ...]:
        return x.float(), x.to(torch.bfloat16), x.half(), x.double(), x.bool()

    for ours, theirs in zip(fg.kernel(widened)(every(dtype)), widened(every(dtype)), strict=True):
        same_bits(ours, theirs)


def test_what_is_too_large_is_nan_where_torch_has_it_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusegen.trace.tracer.SATURATES", False)
    x = torch.tensor([448.0, 464.0, 464.1, 480.0, -465.0, float("inf"), float("nan"), -3.0])
    for given in (x, x.double(), x.half()):
        got = fg.kernel(lambda x: x.to(E4M3).float())(given)
        bounded = given.float().where(given.float().abs() <= 464, float("nan"))
        same_bits(got, bounded.to(E4M3).float())


def test_what_is_clamped_is_not_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusegen.trace.tracer.SATURATES", False)
    x = torch.tensor([1e30, -1e30, float("nan"), 464.0, 3.0])
    clamped = fg.kernel(lambda x: x.clamp(-448, 448).to(E4M3))
    same_bits(clamped(x).float(), torch.tensor([448.0, -448.0, float("nan"), 448.0, 3.0]))
    assert "gt" not in str(clamped.lower(x, target="cpu").graph)
    for function in (
        lambda x: x.clamp(min=-448).to(E4M3),
        lambda x: x.clamp(-448, 500).to(E4M3),
        lambda x: x.clamp(max=448).to(E4M3),
    ):
        assert "gt" in str(fg.kernel(function).lower(x, target="cpu").graph)


MOVES: list[Callable[[Any], Any]] = [
    lambda x: x[1:, ::2],
    lambda x: x.mT,
    lambda x: x.view(3, 2, 4).permute(2, 0, 1),
    lambda x: torch.stack([x, x]),
    lambda x: torch.cat([x, x[:1]], 0),
    lambda x: x[torch.tensor([2, 0])],
    lambda x: x.index_select(1, torch.tensor([1, 1, 7])),
    lambda x: torch.where(x.float() > 0, x, torch.zeros_like(x)),
    lambda x: torch.where(x.float() > 0, x, 0.3),
    lambda x: (x == x, x != 0, x.isnan()),
    lambda x: x.abs(),
    lambda x: x.repeat(2, 1),
    lambda x: torch.nn.functional.pad(x, (1, 1)),
    lambda x: torch.full_like(x, 1.3),
    lambda x: x.clone(),
    lambda x: x.sum(-1, dtype=torch.float32),
]


@DTYPES
def test_they_are_moved(dtype: torch.dtype) -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, 0] = float("nan")
    for number, move in enumerate(MOVES):
        with case(number):
            ours, theirs = fg.kernel(move)(x), move(x)
            pairs = zip(ours, theirs, strict=True) if isinstance(theirs, tuple) else [(ours, theirs)]
            for a, b in pairs:
                same_bits(a, b)


@DTYPES
def test_an_access_moves_sixteen_of_them(dtype: torch.dtype) -> None:
    text = fg.kernel(lambda x: x[1:]).lower(torch.zeros(8, 64).to(dtype), target="sm_90a").asm["cuda"]
    assert "LANES = 16;" in text and "load_lanes<LANES>(x_raw" in text and "store_lanes<LANES>(out_ptr" in text


def test_closed_over_and_widened() -> None:
    table = torch.randn(5, 16, generator=torch.Generator().manual_seed(2)).to(E4M3)
    agree(lambda x, rows: x + table[rows].float(), (torch.randn(3, 16), torch.tensor([4, 0, 4])))


COMPUTED: dict[str, Callable[[Any], Any]] = {
    "add of float8_e4m3fn": lambda x: x + x,
    "mul of float8_e4m3fn": lambda x: x * 2.0,
    "gt of float8_e4m3fn": lambda x: x > 0,
    "exp of float8_e4m3fn": lambda x: x.exp(),
    "sum of float8_e4m3fn": lambda x: x.sum(),
    "amax of float8_e4m3fn": lambda x: x.amax(-1),
    "matmul of float8_e4m3fn": lambda x: x @ x.mT,
    "float8_e4m3fn and float32 have no common dtype": lambda x: torch.where(x.float() > 0, x, x.float()),
    "float8_e4m3fn and float8_e5m2 have no common dtype": lambda x: torch.cat([x, x.to(E5M2)]),
}


def test_nothing_is_computed_in_them() -> None:
    for says, function in COMPUTED.items():
        with case(says):
            refused(function, torch.randn(3, 8).to(E4M3), error=TraceError, says=says)


DIFFERENTIABLE: list[Callable[[Any], Any]] = [
    lambda x: x.to(E4M3),
    lambda x: x.to(E5M2).float() * 3.3,
    lambda x: x.float() * 2.7,
    lambda x: x[torch.tensor([0, 0, 1])].float(),
]


@pytest.mark.parametrize("dtype", [torch.float32, E4M3], ids=str)
def test_gradients_are_rounded_where_torch_rounds_them(dtype: torch.dtype) -> None:
    """A gradient has the dtype of what it is by, on both sides of a conversion."""
    for number, function in enumerate(DIFFERENTIABLE):
        with case(number):
            found = []
            for called in (fg.kernel(function), function):
                x = torch.randn(4, 16, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()
                result = called(x)
                result.backward(torch.linspace(-3, 3, result.numel()).view(result.shape).to(result.dtype))
                found.append(x.grad)
            assert found[0] is not None and found[1] is not None
            same_bits(found[0], found[1])
