"""Quantisation to 8-bit floats, as users write it: one kernel where one pass over memory does, and the bits that torch gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen.errors import ArgumentError
from tests.unit.bundles import built
from tests.unit.eight_bits import E4M3, E5M2, agree_in_bits, same_bits
from tests.unit.quantized import cases, dequantized, into_a_cache, made, of_a_gate, of_a_weight

CASES = {**cases(5, 256), "weight": (of_a_weight, (made(256, 384),))}


@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_torch(name: str) -> None:
    function, arguments = CASES[name]
    agree_in_bits(fg.kernel(function)(*arguments), function(*arguments))


@pytest.mark.parametrize("name", CASES)
def test_one_pass_is_one_launch(name: str) -> None:
    function, arguments = CASES[name]
    for target in ("sm_90a", "cpu"):
        assert len(fg.kernel(function).lower(*arguments, target=target).program.launches) == 1


def test_a_cache_is_written() -> None:
    kernel = fg.kernel(into_a_cache, mutates=("cache",))
    ours = torch.zeros(8, 2, 16).to(E4M3)
    theirs, arguments = ours.clone(), (made(3, 2, 16) * 100, torch.tensor([6, 1, 3]), torch.tensor(0.5))
    kernel(ours, *arguments)
    into_a_cache(theirs, *arguments)
    same_bits(ours, theirs)
    assert len(kernel.lower(ours, *arguments, target="sm_90a").program.launches) == 1


def test_a_built_kernel_takes_and_gives_them(tmp_path: Path) -> None:
    x, scale = made(9, 256).to(E4M3), made(9, 1).abs()
    kernel = built(tmp_path / "down", dequantized, (x[:4], scale[:4]))
    assert torch.equal(kernel(x, scale), dequantized(x, scale))
    with pytest.raises(ArgumentError, match="'x' is float8_e5m2"):
        kernel(x.to(E5M2), scale)
    gate, up = made(9, 256), made(9, 256, seed=1)
    agree_in_bits(built(tmp_path / "up", of_a_gate, (gate[:4], up[:4]))(gate, up), of_a_gate(gate, up))


@pytest.mark.deep
def test_an_operator_of_the_other_compiler_takes_and_gives_them() -> None:
    def again(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.to(E5M2), x.abs()

    x = made(5, 64).to(E4M3)
    for ours, theirs in zip(fg.kernel(again, compiler="extension")(x), again(x), strict=True):
        same_bits(ours, theirs)


def test_bfloat16_is_within_a_unit_of_torch() -> None:
    """Steps are not rounded in between, as torch rounds them."""
    gate, up = made(64, 256).bfloat16(), made(64, 256, seed=1).bfloat16()
    for ours, theirs in zip(fg.kernel(of_a_gate)(gate, up), of_a_gate(gate, up), strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2**-3, atol=2**-9)
