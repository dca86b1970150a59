"""Memory and arguments of a call."""

from __future__ import annotations

import torch

import fusegen as fg
from fusegen.runtime.execute import argument_filler
from tests.unit.eager import agree, randn


def test_the_arguments_of_a_launch_in_the_order_of_its_parameters() -> None:
    def function(x: torch.Tensor, y: torch.Tensor, a: float, b: int) -> torch.Tensor:
        return x.mT * a - y * b

    low = fg.kernel(function).lower(randn(5, 40)[:, :7], randn(7, 5), 2.5, 3, target="sm_90a")
    (launch,) = low.program.launches
    given = {key: torch.empty(1) for key in (p.buffer for p in launch.kernel.pointers)}
    filled = argument_filler(launch.call, low.sizes)(given, {"a": 2.5, "b": 3})
    pointers, sizes = len(launch.kernel.pointers), launch.kernel.sizes
    assert filled[:pointers] == [given[p.buffer].data_ptr() for p in launch.kernel.pointers]
    assert filled[pointers : pointers + len(sizes)] == [low.sizes[name] for name in sizes]
    assert dict(zip((n for n, _ in launch.kernel.scalars), filled[pointers + len(sizes) :], strict=True)) == {"a": 2.5, "b": 3}
    assert [type(v) for v in filled[pointers + len(sizes) :]] == [float, int]


def test_a_program_of_several_steps_with_temporaries_of_many_sizes() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = (x - x.mean(0)) @ w
        return hidden.softmax(-1), (hidden * 2).sum(0), hidden.T @ x

    agree(function, *[(randn(n, 6), randn(6, 5)) for n in (1, 3, 33)])
