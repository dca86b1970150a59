"""8-bit floats in emitted CUDA: conversions, accesses of several elements, and the ways to quantise."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from tests.emulator.tensor_cores import run
from tests.unit.eight_bits import E4M3, E5M2, agree_in_bits, every, same_bits, wide
from tests.unit.quantized import cases, into_a_cache, made

pytestmark = pytest.mark.usefixtures("own_cache", "emulated", "made_up_times")
CASES = cases(3, 256)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_conversions(dtype: torch.dtype) -> None:
    def narrowed(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.to(dtype), x.to(dtype).float()

    kernel, some = fg.kernel(narrowed), wide(dtype)[-1500:]
    for x in (some, some.double(), some[1:].clone(), every(torch.float16)[::13].clone(), every(E5M2)):
        for ours, theirs in zip(kernel(x), narrowed(x), strict=True):
            same_bits(ours, theirs)


def test_sixteen_at_a_time() -> None:
    x = made(5, 64).to(E4M3)
    same_bits(fg.kernel(lambda x: torch.cat([x[1:], x[:1]]))(x), torch.cat([x[1:], x[:1]]))


@pytest.mark.parametrize("name", CASES)
def test_quantized(name: str) -> None:
    function, arguments = CASES[name]
    agree_in_bits(fg.kernel(function)(*arguments), function(*arguments))


def test_a_cache_is_written() -> None:
    ours = torch.zeros(8, 2, 16).to(E4M3)
    theirs, arguments = ours.clone(), (made(3, 2, 16) * 100, torch.tensor([6, 1, 3]), torch.tensor(0.5))
    fg.kernel(into_a_cache, mutates=("cache",))(ours, *arguments)
    into_a_cache(theirs, *arguments)
    same_bits(ours, theirs)


@pytest.mark.parametrize(("target", "columns"), [("sm_90a", 264), ("sm_80", 72), ("sm_80", 37)])
def test_epilogues_store_eight_bits(target: str, columns: int) -> None:
    """Sums add up in another order, which moves few numbers across the middle between two others."""

    def quantized(x: Tensor, w: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        y = F.gelu(F.linear(x, w)).float() / scale
        return (y.clamp(-448, 448).to(E4M3), y.clamp(-57344, 57344).to(E5M2), y.clamp(-127, 127).round().to(torch.int8))

    x, w, scale = torch.randn(130, 64).bfloat16(), torch.randn(columns, 64).bfloat16() / 8, torch.tensor(0.02)
    wanted = quantized(x.double(), w.double(), scale)
    for number in range(3):
        got = run(lambda x, w, scale, number=number: quantized(x, w, scale)[number], x, w, scale, target=target)
        exact = wanted[number].float()
        steps = exact.abs().clamp(min=2**-6) / 4 if got.dtype is E5M2 else exact.abs().clamp(min=2**-6) / 8
        apart = (got.float() - exact).abs()
        assert got.dtype is wanted[number].dtype and float((apart > 0).float().mean()) < 0.01
        assert bool((apart <= (1 if got.dtype is torch.int8 else steps)).all())
