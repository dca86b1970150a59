"""Memory of a call."""

from __future__ import annotations

import pytest
import torch

import fusegen as fg
from fusegen.errors import ArgumentError
from fusegen.runtime.execute import HostBackend, bound_call
from tests.unit.eager import randn


def test_an_address_of_zero_reaches_no_kernel() -> None:
    low = fg.kernel(lambda x: x * 2).lower(randn(8), target="cpu")
    launches: list[bytes] = []
    run = bound_call(low.program.call, None, low.sizes, torch.device("cpu"), HostBackend(), [launches.append])
    with pytest.raises(ArgumentError, match="tensor without memory"):
        run.call((randn(8).to("meta"),), {})
    assert not launches
    run.call((torch.empty(0),), {})
    assert launches[0].startswith(bytes(8))


@pytest.mark.parametrize("columns", [slice(0), slice(3, 3), slice(1, 4)])
def test_results_have_the_strides_of_torch(columns: slice) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[:, columns] * 2, x[columns] + 1, x.mT * 2, x.sum(-1)

    x = randn(5, 6)
    for ours, theirs in zip(fg.kernel(function)(x), function(x), strict=True):
        assert ours.stride() == torch.empty(theirs.shape).stride()
        torch.testing.assert_close(ours, theirs)
