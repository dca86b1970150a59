"""Whole blocks of transformers against float64: no worse than torch eager, launch by launch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fusegen as fg
from tests.unit.blocks import BLOCKS, stacked

WIDTH, HEADS = 512, 8


def error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", BLOCKS, ids=lambda make: make.__name__)
def test_blocks_are_as_exact_as_eager(make: Callable[[int, int], nn.Module], dtype: torch.dtype) -> None:
    blocks = stacked(make, 2, WIDTH, HEADS).cuda().to(dtype)
    exact = copy.deepcopy(blocks).double()
    kernel = fg.kernel(lambda x: blocks(x))
    for shape in ((4, 256), (1, 77), (3, 128)):
        x = torch.randn(*shape, WIDTH, device="cuda", dtype=dtype)
        wanted = exact(x.double())
        assert error(kernel(x), wanted) <= 1.1 * error(blocks(x), wanted)
