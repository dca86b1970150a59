"""8-bit floats on a GPU: conversions by its instructions have the bits of torch's own, and ways to quantise stay within a unit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusegen as fg
from tests.unit.eight_bits import E4M3, E5M2, every, same_bits, wide
from tests.unit.quantized import cases

CASES = cases(512, 4096)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_conversions_are_those_of_torch(dtype: torch.dtype, device: torch.device) -> None:
    def narrowed(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.to(dtype), x.to(dtype).float()

    kernel = fg.kernel(narrowed)
    for x in (every(torch.bfloat16), every(torch.float16), wide(dtype), wide(dtype)[1:], wide(dtype).double(), every(E5M2)):
        for ours, theirs in zip(kernel(x.to(device)), narrowed(x.to(device)), strict=True):
            same_bits(ours, theirs)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_loads_widen(dtype: torch.dtype, device: torch.device) -> None:
    x = every(dtype).to(device)
    same_bits(fg.kernel(lambda x: x.float())(x), x.float())
    same_bits(fg.kernel(lambda x: x[1:].float())(x), x[1:].float())


@pytest.mark.parametrize("name", CASES)
def test_quantized(name: str, device: torch.device) -> None:
    """Sums add up in another order, which moves few numbers across the middle between two others."""
    function, arguments = CASES[name]
    given = [a.to(device) for a in arguments]
    ours, theirs = (r if isinstance(r, tuple) else (r,) for r in (fg.kernel(function)(*given), function(*given)))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype is b.dtype and torch.equal(a.float().isnan(), b.float().isnan())
        assert ((a.float() != b.float()) & ~b.float().isnan()).double().mean() < 1e-3 or a.dtype.itemsize > 1
        torch.testing.assert_close(a.float(), b.float(), rtol=0.25 if a.dtype is E5M2 else 0.125, atol=2**-8, equal_nan=True)
