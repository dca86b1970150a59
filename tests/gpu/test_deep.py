"""Two matmuls of few rows in one launch: the same bits in every order of streams and graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen import tuning
from fusegen.families.gemm.plan import DeepPlan

pytestmark = pytest.mark.usefixtures("own_cache")

REPLAYS = 200
INPUTS, HIDDEN = 1024, 4096


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down) + x


def drawn(rows: int) -> tuple[Tensor, ...]:
    def weight(*shape: int) -> Tensor:
        return (torch.randn(shape, device="cuda") * shape[-1] ** -0.5).bfloat16()

    return (
        torch.randn(rows, INPUTS, device="cuda").bfloat16(),
        weight(HIDDEN, INPUTS),
        weight(HIDDEN, INPUTS),
        weight(INPUTS, HIDDEN),
    )


def deep_kernels(rows: int) -> Iterator[fg.Kernel[..., Tensor]]:
    """A kernel with each candidate for one launch."""
    arguments = drawn(rows)
    choice = tuning.candidates(fg.kernel(mlp), *arguments).launches[-1]
    for plan in (each.plan for each in choice.candidates if isinstance(each.plan, DeepPlan)):
        choice.pin(plan)
        yield fg.kernel(mlp)


def captured(kernel: fg.Kernel[..., Tensor], arguments: tuple[Tensor, ...]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        results = [kernel(*arguments) for _ in range(3)]
    return graph, results


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_replays_of_a_graph(rows: int) -> None:
    for kernel in deep_kernels(rows):
        inputs = [drawn(rows) for _ in range(2)]
        expected = [kernel(*each) for each in inputs]
        for each, result in zip(inputs, expected, strict=True):
            exact = mlp(*(tensor.double() for tensor in each))
            assert torch.linalg.vector_norm(result - exact) < 0.02 * torch.linalg.vector_norm(exact)
        placed = tuple(tensor.clone() for tensor in inputs[0])
        graph, results = captured(kernel, placed)
        for replay in range(REPLAYS):
            for tensor, value in zip(placed, inputs[replay % 2], strict=True):
                tensor.copy_(value)
            graph.replay()
            assert all(torch.equal(result, expected[replay % 2]) for result in results)


def test_streams_and_graphs_at_once() -> None:
    for kernel in deep_kernels(4):
        inputs = [drawn(4) for _ in range(4)]
        expected = [kernel(*each) for each in inputs]
        graphs = [captured(kernel, each) for each in inputs[:2]]
        streams = [torch.cuda.Stream() for _ in inputs]
        eager: list[list[Tensor]] = [[], []]
        torch.cuda.synchronize()
        for _ in range(REPLAYS):
            for (graph, _), stream in zip(graphs, streams[:2], strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
            for results, each, stream in zip(eager, inputs[2:], streams[2:], strict=True):
                with torch.cuda.stream(stream):
                    results.append(kernel(*each))
        torch.cuda.synchronize()
        for results, wanted in zip([graph[1] for graph in graphs] + eager, expected, strict=True):
            assert all(torch.equal(result, wanted) for result in results)
