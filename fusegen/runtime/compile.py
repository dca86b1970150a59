"""From a function and what is known of its arguments to sources: the stages in their order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeAlias

import torch

from fusegen.dtypes import DType
from fusegen.emit import emit
from fusegen.errors import GradientError, TraceError, UnsupportedError
from fusegen.ir.formula import relation_text
from fusegen.ir.graph import Graph, InputSpec
from fusegen.lang import functions
from fusegen.lang.places import here
from fusegen.lang.tracer import Trace, Tracer, trace
from fusegen.lang.values import TracedTensor
from fusegen.passes.fuse import Group, fuse
from fusegen.passes.pipeline import run_passes
from fusegen.runtime.signature import Sizes, hidden_spec
from fusegen.schedule.lower import lower
from fusegen.schedule.program import Program
from fusegen.source import Source
from fusegen.state import Recorder, State
from fusegen.target import Target

_FILLED = functions  # importing the package fills the table of functions that can be traced


@dataclass(frozen=True)
class Request:
    """What is compiled.

    Attributes:
        name: the kernel's name.
        function: the user's.
        specs: its tensors, by parameter.
        scalars: its run-time scalars, by parameter, with their dtypes.
        statics: everything else, by parameter.
        sizes: the symbolic sizes.
        target: the machine.
        device: what ``x.device`` answers.
        wide: whether indices need 64 bits.
    """

    name: str
    function: Callable[..., Any]
    specs: tuple[InputSpec, ...]
    scalars: tuple[tuple[str, DType], ...]
    statics: tuple[tuple[str, object], ...]
    sizes: Sizes
    target: Target
    device: torch.device
    wide: bool


@dataclass(frozen=True)
class Variant:
    """One compiled form of a function.

    Attributes:
        request: what was asked for.
        traced: the graph as it was traced.
        graph: the graph in primitives.
        groups: what fusion decided.
        program: the steps of a call.
        sources: the text of each launch.
        guards: relations of sizes that must hold, as text.
        state: what else the function read, tensors that it closes over among it.
        returns_tuple: whether the function returns several results.
    """

    request: Request
    traced: Graph
    graph: Graph
    groups: tuple[Group, ...]
    program: Program
    sources: tuple[Source, ...]
    guards: tuple[str, ...]
    state: State
    returns_tuple: bool


Hidden: TypeAlias = tuple[torch.Tensor, ...]
"""The tensors that a function closes over, in the order of a variant's ``state.names``."""


def compile_variant(request: Request, parameters: Sequence[str]) -> tuple[Variant, Hidden]:
    """Traces, fuses, schedules and emits.

    Args:
        request: what to compile.
        parameters: names of the function's parameters, in order.

    Returns:
        The variant, and what the function closed over when it was traced.

    Raises:
        GradientError: a tensor that the function closes over requires a gradient.
        TraceError: the function does something that no kernel can do.
        UnsupportedError: a chain of operations is too long.
        NeedsLiteral: a size must be literal.
    """
    found, state = trace_function(request, parameters)
    try:
        return _compiled(request, found, state), found.hidden
    except RecursionError:
        what = f"{request.name} has {len(found.graph.nodes)} values that depend on each other in too long a chain"
        raise UnsupportedError(what, mend="split it into several kernels; some 150 operations in a row fit one") from None


def _compiled(request: Request, found: Trace, state: State) -> Variant:
    """Everything after the trace; a variant does not keep alive what it was traced with."""
    request = replace(request, statics=())
    graph = run_passes(found.graph)
    groups = fuse(graph, request.target)
    program = lower(graph, groups, request.target, wide=request.wide)
    sources = tuple(emit(launch, request.target) for launch in program.launches)
    guards = tuple(relation_text(g) for g in found.guards)
    return Variant(request, found.graph, graph, groups, program, sources, guards, state, found.returns_tuple)


def trace_function(request: Request, parameters: Sequence[str]) -> tuple[Trace, State]:
    """Runs the function on traced values, and watches what else it reads."""
    given = {parameters.index(name): value for name, value in request.statics}
    recorder = Recorder(request.function, given, frozenset(parameters))
    tracer = Tracer(request.name, dict(request.sizes.hints), request.device, _Outside(request.name, recorder))
    tracer.builder.multiples, tracer.builder.bounds = request.sizes.multiples, request.sizes.bounds
    values: dict[str, object] = dict(request.statics)
    values |= {spec.name: TracedTensor(tracer, tracer.builder.input(spec)) for spec in request.specs}
    values |= {name: TracedTensor(tracer, tracer.builder.scalar(name, dtype)) for name, dtype in request.scalars}
    with recorder:
        found = trace(tracer, _keyword_call(request.function, parameters), [values[p] for p in parameters], {})
    return found, recorder.state()


class _Outside:
    """Tensors that a function closes over.

    Args:
        name: the kernel's.
        recorder: knows where they are found again.
    """

    def __init__(self, name: str, recorder: Recorder) -> None:
        self._name = name
        self._recorder = recorder
        self.observe = recorder.observe

    def input_of(self, tensor: torch.Tensor) -> InputSpec:
        """A closed-over tensor as an input."""
        name = self._recorder.use(tensor)
        if name is None:
            raise TraceError(
                "the kernel uses a tensor that is neither a parameter nor a variable that it closes over",
                where=here(),
                mend="pass the tensor as a parameter; one that is computed inside from other tensors, compute outside",
            )
        with torch._C.DisableTorchFunction():  # what we ask of the tensor is not what the function asks
            refuse_gradient(self._name, name, tensor)
            return hidden_spec(name, tensor)


def refuse_gradient(kernel: str, name: str, tensor: torch.Tensor) -> None:
    """Refuses a closed-over tensor that requires a gradient.

    Raises:
        GradientError: naming it.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        raise GradientError(f"{kernel} closes over {name!r}, which requires a gradient", mend="call under torch.no_grad()")


def _keyword_call(function: Callable[..., Any], parameters: Sequence[str]) -> Callable[..., Any]:
    """The function with all parameters positional, however it declares them."""
    kinds = {name: p.kind for name, p in inspect.signature(function).parameters.items()}

    @wraps(function)
    def call(*values: object) -> Any:
        named: Mapping[str, object] = dict(zip(parameters, values, strict=True))
        positional = [named[n] for n in parameters if kinds[n] is not inspect.Parameter.KEYWORD_ONLY]
        return function(*positional, **{n: named[n] for n in parameters if kinds[n] is inspect.Parameter.KEYWORD_ONLY})

    return call
