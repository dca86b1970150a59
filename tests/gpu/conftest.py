"""Tests on a GPU. They are not part of the default run; asked for on a machine without a GPU they fail, they do not skip."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    """The GPU under test."""
    if not torch.cuda.is_available():
        pytest.fail("tests/gpu needs a CUDA device and a torch that was built for CUDA", pytrace=False)
    return torch.device("cuda", torch.cuda.current_device())
