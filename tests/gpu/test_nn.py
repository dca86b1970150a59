"""Modules of `fusegen.nn` on a GPU against the modules that they replace."""

from __future__ import annotations

import pytest
import torch

from tests.unit.eager import same
from tests.unit.nn.twins import TWINS, gradients, pair, results


@pytest.mark.parametrize("name", TWINS)
def test_results_and_gradients_are_those_of_the_twin(name: str) -> None:
    ours, theirs, arguments = pair(name, "cuda")
    same(ours(*arguments), theirs(*arguments), name)
    same(gradients(ours, arguments), gradients(theirs, arguments), name)


@pytest.mark.parametrize("name", TWINS)
def test_results_in_16_bits(name: str) -> None:
    ours, theirs, arguments = pair(name, "cuda", torch.bfloat16)
    for found, wanted in zip(results(ours(*arguments)), results(theirs(*arguments)), strict=True):
        assert found.dtype is wanted.dtype
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2 * wanted.abs().max().item())


@pytest.mark.parametrize("name", ["LayerNorm", "GatedMLP", "Attention"])
def test_autocast_gives_the_dtypes_that_torch_gives(name: str) -> None:
    ours, theirs, arguments = pair(name, "cuda")
    with torch.autocast("cuda", torch.bfloat16):
        found, wanted = ours(*arguments), theirs(*arguments)
    assert found.dtype is wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=3e-2, atol=3e-2 * wanted.abs().max().item())


def test_inductor_compiles_around_them() -> None:
    ours, theirs, arguments = pair("GatedMLP", "cuda")
    compiled = torch.compile(ours, fullgraph=True)
    same(gradients(compiled, arguments), gradients(theirs, arguments))
