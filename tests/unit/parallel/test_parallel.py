"""Modules that are split over ranks give one device's results: two processes of a gloo group on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from fusegen.errors import ArgumentError
from fusegen.parallel import ColumnParallelLinear
from tests.unit.parallel import pair

QUICK = ("linear_layers", "gated_mlp", "attention", "dtensors", "kernels_of_local_tensors", "refused")
"""Checks for the gate; two processes take seconds to start, so all run in one pair."""


def test_two_ranks(tmp_path: Path) -> None:
    failed = pair.failures(tmp_path, QUICK)
    assert not failed, "\n".join(failed.values())


@pytest.mark.deep
def test_two_ranks_at_length(tmp_path: Path) -> None:
    failed = pair.failures(tmp_path, [name for name in pair.CHECKS if name not in QUICK])
    assert not failed, "\n".join(failed.values())


def test_without_a_group_there_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="not initialized"):
        ColumnParallelLinear.from_module(nn.Linear(4, 4))
