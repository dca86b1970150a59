"""Launching: streams, graphs, and that what runs is what `explain` says."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import fusegen as fg


@fg.kernel
def norm_gelu(x: Tensor, weight: Tensor) -> Tensor:
    return F.gelu(F.rms_norm(x, (x.shape[-1],), weight, 1e-6))


@fg.kernel
def scaled(x: Tensor, factor: float, count: int) -> Tensor:
    return x * factor + count


def arguments(rows: int = 64) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 1024, device="cuda"), torch.randn(1024, device="cuda")


def test_the_current_stream_is_used() -> None:
    x, weight = arguments()
    expected = norm_gelu(x, weight)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        late = norm_gelu(x.mul(1.0), weight)
    side.synchronize()
    assert torch.equal(late, expected)


def test_capture_in_a_cuda_graph() -> None:
    x, weight = arguments()
    expected = norm_gelu(x, weight).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = norm_gelu(x, weight)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, expected)


def test_run_time_scalars_do_not_recompile() -> None:
    x = torch.ones(8, 64, device="cuda")
    for factor, count in ((1.5, 2), (-0.25, 7), (float("inf"), 0)):
        assert torch.equal(scaled(x, factor, count), x * factor + count)
    assert sum(map(len, scaled._dispatcher._variants.values())) == 1


def test_launches_are_what_explain_says() -> None:
    x, weight = arguments()
    norm_gelu(x, weight)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        norm_gelu(x, weight)
        torch.cuda.synchronize()
    launched = [e.name for e in recorded.events() if e.device_type.name == "CUDA" and not e.name.startswith(("Mem", "Activity"))]
    assert launched == [f"fg_{launch.kernel.name}" for launch in norm_gelu.lower(x, weight).program.launches]


def test_tensors_on_two_devices_are_refused() -> None:
    x, weight = arguments()
    with pytest.raises(fg.FusegenError, match=r"'weight' is on cpu, but 'x' is on cuda:0"):
        norm_gelu(x, weight.cpu())
