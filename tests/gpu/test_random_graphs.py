"""The random graphs of the unit tests on a GPU, where a kernel takes milliseconds to compile and there can be more of them."""

from __future__ import annotations

import pytest
import torch

from tests.unit.test_random_graphs import check_graph


@pytest.mark.parametrize("seed", range(200))
def test_random_graph_on_a_gpu(seed: int, device: torch.device) -> None:
    check_graph(seed, device)
