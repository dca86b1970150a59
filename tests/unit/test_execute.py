"""Memory and arguments of a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fusegen as fg
from fusegen.calls.call import KernelLaunch
from fusegen.errors import ArgumentError
from fusegen.runtime.execute import Backend, bound_call
from fusegen.runtime.straight import Writer
from tests.unit.eager import agree, randn


class Recorder(Backend):
    """Notes the arguments of launches, and runs nothing."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def write_launch(self, writer: Writer, launch: KernelLaunch, kernel: Any) -> None:
        noted = writer.value(lambda *arguments: self.launches.append(arguments), "noted")
        writer.add(f"{noted}({', '.join(writer.arguments(launch.arguments))})")


def test_the_arguments_of_a_launch_in_the_order_of_its_parameters() -> None:
    def function(x: torch.Tensor, y: torch.Tensor, a: float, b: int) -> torch.Tensor:
        return x.mT * a - y * b

    x, y = randn(5, 40)[:, :7], randn(7, 5)
    low = fg.kernel(function).lower(x, y, 2.5, 3, target="sm_90a")
    (launch,) = low.program.launches
    recorder = Recorder()
    run = bound_call(low.program.call, None, low.sizes, torch.device("cpu"), recorder, [None])
    result = run((x, y), {"a": 2.5, "b": 3})
    (filled,) = recorder.launches
    pointers, sizes = len(launch.kernel.pointers), launch.kernel.sizes
    assert set(filled[:pointers]) == {x.data_ptr(), y.data_ptr(), result.data_ptr()}
    assert [filled[place] for place, p in enumerate(launch.kernel.pointers) if p.writable] == [result.data_ptr()]
    assert filled[pointers : pointers + len(sizes)] == tuple(low.sizes[name] for name in sizes)
    assert dict(zip((n for n, _ in launch.kernel.scalars), filled[pointers + len(sizes) :], strict=True)) == {"a": 2.5, "b": 3}
    assert [type(v) for v in filled[pointers + len(sizes) :]] == [float, int]


def test_an_address_of_zero_reaches_no_kernel() -> None:
    low = fg.kernel(lambda x: x * 2).lower(randn(8), target="cpu")
    recorder = Recorder()
    run = bound_call(low.program.call, None, low.sizes, torch.device("cpu"), recorder, [None])
    with pytest.raises(ArgumentError, match="tensor without memory"):
        run((randn(8).to("meta"),), {})
    assert not recorder.launches
    run((torch.empty(0),), {})
    assert recorder.launches[0][0] == 0


def test_a_program_of_several_steps_with_temporaries_of_many_sizes() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = (x - x.mean(0)) @ w
        return hidden.softmax(-1), (hidden * 2).sum(0), hidden.T @ x

    agree(function, *[(randn(n, 6), randn(6, 5)) for n in (1, 3, 33)])


@pytest.mark.parametrize("columns", [slice(0), slice(3, 3), slice(1, 4)])
def test_results_have_the_strides_of_torch(columns: slice) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[:, columns] * 2, x[columns] + 1, x.mT * 2, x.sum(-1)

    x = randn(5, 6)
    for ours, theirs in zip(fg.kernel(function)(x), function(x), strict=True):
        assert ours.stride() == torch.empty(theirs.shape).stride()
        torch.testing.assert_close(ours, theirs)
