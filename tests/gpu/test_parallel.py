"""Modules that are split over two GPUs, by NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.parallel import pair


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_the_results_of_one(tmp_path: Path) -> None:
    failed = pair.failures(tmp_path, [*pair.CHECKS], "cuda")
    assert not failed, "\n".join(failed.values())
