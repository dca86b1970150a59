"""Modules that are split over ranks give one device's results: two processes of a gloo group on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from fusegen.errors import ArgumentError
from fusegen.parallel import ColumnParallelLinear
from tests.unit.parallel import pair


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The reports of all checks, which run in one pair of processes."""
    folder: Path = tmp_path_factory.mktemp("pair")
    return pair.run(folder)


@pytest.mark.parametrize("name", pair.CHECKS)
def test_two_ranks(name: str, reports: dict[str, str]) -> None:
    assert not reports[name], reports[name]


def test_without_a_group_there_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="not initialized"):
        ColumnParallelLinear.from_module(nn.Linear(4, 4))
