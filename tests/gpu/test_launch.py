"""Launching: streams, graphs, and that what runs is what `explain` says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import fusegen as fg
from fusegen.compiler.backends import machine_of
from fusegen.errors import LaunchError
from fusegen.runtime.execute import bound_call


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


def test_a_graph_keeps_the_arguments_of_its_capture() -> None:
    """Later calls of the same kernel, with other tensors and numbers, change nothing that is replayed."""
    x, others = torch.randn(8, 64, device="cuda"), [torch.randn(8, 64, device="cuda") for _ in range(4)]
    scaled(x, 0.5, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [scaled(x, 1.5, 2), scaled(x, -2.5, 3)]
    for turn, other in enumerate(others):
        assert torch.equal(scaled(other, float(turn), turn), other * turn + turn)
        x.copy_(other)
        graph.replay()
        assert torch.equal(captured[0], x * 1.5 + 2) and torch.equal(captured[1], x * -2.5 + 3)


def test_a_launch_that_the_driver_refuses() -> None:
    x = torch.randn(8, 64, device="cuda")
    low = scaled.lower(x, 1.5, 2)
    machine, call = machine_of(x.device), low.program.call
    kernels = machine.kernels(low.sources, call.launches)
    wide = replace(call, steps=tuple(replace(launch, block=4096) for launch in call.launches))
    run = bound_call(wide, None, low.sizes, x.device, machine.backend, kernels)
    with pytest.raises(LaunchError, match=r"cannot launch fg_scaled: CUDA_ERROR_(INVALID_VALUE|LAUNCH_OUT_OF_RESOURCES): "):
        run.call((x,), {name: 1.0 for name, _ in call.scalars.results})
    assert torch.equal(scaled(x, 1.5, 2), x * 1.5 + 2)


def test_run_time_scalars_do_not_recompile() -> None:
    x = torch.ones(8, 64, device="cuda")
    for factor, count in ((1.5, 2), (-0.25, 7), (float("inf"), 0)):
        assert torch.equal(scaled(x, factor, count), x * factor + count)
    assert len(scaled._dispatcher.variants.known) == 1


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
