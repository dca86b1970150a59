"""Runs traced functions as whole programs on the CPU target, beside the float64 oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import pytest
import torch
from torch import Tensor

import fusegen.lang.functions  # noqa: F401 - registers torch's functions with the tracer
from fusegen.dtypes import DType, from_torch
from fusegen.emit import emit
from fusegen.ir.graph import Graph, InputSpec
from fusegen.ir.reference import evaluate
from fusegen.ir.strided import contiguous_strides
from fusegen.ir.symbolic import Dim, size_symbol
from fusegen.lang.run import trace
from fusegen.lang.tracer import Tracer
from fusegen.lang.values import TracedTensor
from fusegen.passes.fuse import fuse
from fusegen.passes.pipeline import run_passes
from fusegen.runtime.execute import HostBackend, bound_call
from fusegen.runtime.host_launch import host_kernels
from fusegen.runtime.scalars import scalars_of
from fusegen.schedule.lower import lower
from fusegen.schedule.program import Program
from fusegen.settings import settings
from fusegen.source import Source
from fusegen.target import target

Symbolic = Mapping[str, Sequence[str | None]]


@dataclass(frozen=True)
class Ran:
    """What a program gave, what the oracle gives, and how it was computed."""

    results: tuple[Tensor, ...]
    wanted: tuple[Tensor, ...]
    program: Program
    sources: tuple[Source, ...]

    @property
    def kinds(self) -> list[str]:
        """The kinds of the launches."""
        return [launch.group.kind.value for launch in self.program.launches]


class Runner:
    """A traced function as a program for the CPU.

    Args:
        function: the user's function of tensors and then scalars.
        inputs: example tensors, whose strides become literals unless they are contiguous.
        symbolic: for inputs, names of their dims; None keeps a size literal.
        scalars: values of run-time scalars.
    """

    def __init__(
        self, function: Callable[..., object], inputs: Mapping[str, Tensor], symbolic: Symbolic, scalars: Mapping[str, float]
    ) -> None:
        self.sizes: dict[str, int] = {}
        self.graph = self._trace(function, inputs, symbolic, tuple(scalars))
        device = target("cpu")
        lowered = run_passes(self.graph)
        self.program = lower(lowered, fuse(lowered, device), device, {})
        computed = scalars_of(self.program.call.scalars, self.sizes, tuple(scalars))
        self.scalars = computed(tuple(scalars.values())) if computed else {}
        self.sources = tuple(emit(launch, device) for launch in self.program.launches)
        kernels, cpu = host_kernels(self.sources), torch.device("cpu")
        self.run = bound_call(self.program.call, tuple, self.sizes, cpu, HostBackend(), kernels)

    def _trace(
        self, function: Callable[..., object], inputs: Mapping[str, Tensor], symbolic: Symbolic, scalars: Sequence[str]
    ) -> Graph:
        tracer = Tracer(function.__name__, self.sizes, torch.device("cpu"), _Nothing())
        values = [self._input(tracer, name, x, symbolic.get(name, [None] * x.dim())) for name, x in inputs.items()]
        tracer.hints.update(self.sizes)
        values += [tracer.value(tracer.builder.scalar(name, DType.FLOAT64)) for name in scalars]
        return trace(tracer, function, values, {}).graph

    def _input(self, tracer: Tracer, name: str, x: Tensor, dims: Sequence[str | None]) -> TracedTensor:
        named = list(zip(x.shape, dims, strict=True))
        self.sizes.update({dim: size for size, dim in named if dim is not None})
        shape: tuple[Dim, ...] = tuple(size if dim is None else size_symbol(dim) for size, dim in named)
        strides = contiguous_strides(shape) if x.is_contiguous() else x.stride()
        return tracer.value(tracer.builder.input(InputSpec(name, from_torch(x.dtype), shape, strides, x.element_size())))

    def __call__(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The results, in fresh memory."""
        results: tuple[Tensor, ...] = self.run([inputs[name] for _, name in self.program.inputs], self.scalars)
        return results


class _Nothing:
    """Around these functions there are no tensors."""

    def input_of(self, tensor: Tensor) -> NoReturn:
        raise NotImplementedError("these tests close over no tensors")

    def observe(self, *asked: object) -> None:
        """Nothing is asked of closed-over tensors."""


def run_program(
    function: Callable[..., object],
    symbolic: Symbolic | None = None,
    scalars: Mapping[str, float] | None = None,
    /,
    **inputs: Tensor,
) -> Ran:
    """Runs a function through the CPU target and through the oracle."""
    runner = Runner(function, inputs, symbolic or {}, scalars or {})
    return Ran(runner(inputs), evaluate(runner.graph, inputs, scalars), runner.program, runner.sources)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests compile goes to a folder of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        settings.cache_clear()
        yield
    settings.cache_clear()


@pytest.fixture(scope="session")
def run() -> Callable[..., Ran]:
    """`run_program`."""
    return run_program
