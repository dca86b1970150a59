"""Quantisation to 8-bit floats, as users write it: one kernel where one pass over memory does, and the bits that torch gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusegen as fg
from tests.unit.quantized import E4M3, cases, into_a_cache, made
from tests.unit.test_float8 import same_bits

CASES = cases(5, 256)
LAUNCHES = {"tensor": 2}


def agree_in_bits(ours: Tensor | tuple[Tensor, ...], theirs: Tensor | tuple[Tensor, ...]) -> None:
    pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) and isinstance(theirs, tuple) else [(ours, theirs)]
    for a, b in pairs:
        assert isinstance(a, Tensor) and isinstance(b, Tensor)
        if b.dtype.itemsize == 1:
            same_bits(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=1e-6 if b.dtype is torch.float32 else 1e-2, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_torch(name: str) -> None:
    function, arguments = CASES[name]
    agree_in_bits(fg.kernel(function)(*arguments), function(*arguments))


@pytest.mark.parametrize("name", CASES)
def test_one_pass_is_one_launch(name: str) -> None:
    function, arguments = CASES[name]
    for target in ("sm_90a", "cpu"):
        assert len(fg.kernel(function).lower(*arguments, target=target).program.launches) == LAUNCHES.get(name, 1)


def test_a_cache_is_written() -> None:
    kernel = fg.kernel(into_a_cache, mutates=("cache",))
    ours = torch.zeros(8, 2, 16).to(E4M3)
    theirs, arguments = ours.clone(), (made(3, 2, 16) * 100, torch.tensor([6, 1, 3]), torch.tensor(0.5))
    kernel(ours, *arguments)
    into_a_cache(theirs, *arguments)
    same_bits(ours, theirs)
    assert len(kernel.lower(ours, *arguments, target="sm_90a").program.launches) == 1
