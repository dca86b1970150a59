"""Sums of columns that stand apart from what is reduced along their rows: the same numbers out of two kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen.compiler import specialize
from fusegen.families import rows
from fusegen.families.rows.match import COLUMN, ROW
from fusegen.specs import SPECS
from tests.naming import case
from tests.unit.eager import agree, randn

pytestmark = pytest.mark.usefixtures("own_cache", "emulated")


def sums_of_what_is_written(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.softmax(x * w, -1)
    return y, y.sum(0), (y - x.amax(-1, keepdim=True)).amax(0)


def rows_of_two_axes(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w
    return y, y.logsumexp(-1), (x * y).sum((0, 1))


def several_components(x: Tensor) -> tuple[Tensor, Tensor]:
    h = x - x.mean(-1, keepdim=True)
    return h, h.argmax(0)


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "a norm": (SPECS["layer_norm_backward"].kernel.function, (randn(37, 264), randn(37, 264), randn(264))),
    "sums of what is written": (sums_of_what_is_written, (randn(33, 64), randn(64))),
    "rows of two axes": (rows_of_two_axes, (randn(5, 7, 40), randn(40))),
    "several components": (several_components, (randn(21, 24),)),
}


@pytest.mark.parametrize("names", [[*CASES][:2], [*CASES][2:]], ids=["a norm", "others"])
def test_two_kernels_give_what_torch_gives(names: Sequence[str]) -> None:
    for name in names:
        function, inputs = CASES[name]
        with case(name):
            launches = fg.kernel(function).lower(*inputs, target="sm_90a").program.launches
            assert {launch.group.kind for launch in launches} == {ROW, COLUMN}
            agree(function, inputs)


@pytest.mark.usefixtures("made_up_times", "compared")
def test_two_kernels_can_be_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specialize, "is_faster_split", rows.is_faster_split)  # which `made_up_times` does not ask
    function, inputs = CASES["a norm"]
    tuned = fg.tune(fg.kernel(function), *inputs)
    assert len(tuned.launches) == 2
