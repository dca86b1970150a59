"""`fg.benchmark` on a GPU: launches as a profiler counts them, and memory above the arguments."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg


@fg.kernel
def scaled(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w) * 2


@pytest.mark.parametrize("backward", [False, True])
def test_a_call_has_all_figures(backward: bool) -> None:
    x, w = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((4096, 2048), (2048,)))
    result = fg.benchmark(scaled, x, w, backward=backward, quick=True)
    for timing in (result.fusegen, result.eager, result.compile):
        assert timing is not None and timing.error is None, str(result)
        assert timing.microseconds and timing.low and timing.high and timing.launches
        assert timing.peak_bytes is not None and timing.peak_bytes >= x.numel() * 2, "the result alone"
        assert timing.max_error is not None and timing.max_error < 0.1
    assert result.fusegen and result.eager and result.fusegen.launches and result.eager.launches
    assert result.fusegen.launches <= result.eager.launches
