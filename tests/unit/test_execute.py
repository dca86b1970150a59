"""Memory of a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fusegen as fg
from fusegen.errors import ArgumentError
from fusegen.program.call import KernelLaunch
from fusegen.runtime.execute import Backend, bound_call
from fusegen.runtime.straight import Writer
from tests.unit.eager import randn


class Recorder(Backend):
    """Notes the arguments of launches, and runs nothing."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def write_launch(self, writer: Writer, launch: KernelLaunch, kernel: Any) -> None:
        noted = writer.value(lambda *arguments: self.launches.append(arguments), "noted")
        writer.add(f"{noted}({', '.join(writer.arguments(launch.arguments))})")


def test_an_address_of_zero_reaches_no_kernel() -> None:
    low = fg.kernel(lambda x: x * 2).lower(randn(8), target="cpu")
    recorder = Recorder()
    run = bound_call(low.program.call, None, low.sizes, torch.device("cpu"), recorder, [None])
    with pytest.raises(ArgumentError, match="tensor without memory"):
        run((randn(8).to("meta"),), {})
    assert not recorder.launches
    run((torch.empty(0),), {})
    assert recorder.launches[0][0] == 0


@pytest.mark.parametrize("columns", [slice(0), slice(3, 3), slice(1, 4)])
def test_results_have_the_strides_of_torch(columns: slice) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[:, columns] * 2, x[columns] + 1, x.mT * 2, x.sum(-1)

    x = randn(5, 6)
    for ours, theirs in zip(fg.kernel(function)(x), function(x), strict=True):
        assert ours.stride() == torch.empty(theirs.shape).stride()
        torch.testing.assert_close(ours, theirs)
