"""From a function and what is known of its arguments to sources: the stages in their order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from fusegen.dtypes import DType
from fusegen.emit import emit
from fusegen.errors import UnsupportedError
from fusegen.ir.formula import relation_text
from fusegen.ir.graph import Graph, InputSpec
from fusegen.lang import functions
from fusegen.lang.tracer import Structure, Trace, Tracer, trace
from fusegen.passes.fuse import Group, fuse
from fusegen.passes.pipeline import run_passes
from fusegen.runtime.signature import Sizes
from fusegen.schedule.lower import lower
from fusegen.schedule.program import Program
from fusegen.source import Source
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
        hidden: tensors that the function closes over.
        structure: how the function's results are put together.
    """

    request: Request
    traced: Graph
    graph: Graph
    groups: tuple[Group, ...]
    program: Program
    sources: tuple[Source, ...]
    guards: tuple[str, ...]
    hidden: tuple[tuple[str, torch.Tensor], ...]
    structure: Structure


def compile_variant(request: Request, hidden_spec: Callable[[torch.Tensor], InputSpec], parameters: Sequence[str]) -> Variant:
    """Traces, fuses, schedules and emits.

    Args:
        request: what to compile.
        hidden_spec: describes a closed-over tensor.
        parameters: names of the function's parameters, in order.

    Raises:
        TraceError: the function does something that no kernel can do.
        UnsupportedError: a chain of operations is too long.
        NeedsLiteral: a size must be literal.
    """
    found = trace_function(request, hidden_spec, parameters)
    try:
        return _compiled(request, found)
    except RecursionError:
        what = f"{request.name} has {len(found.graph.nodes)} values that depend on each other in too long a chain"
        raise UnsupportedError(what, mend="split it into several kernels; some 150 operations in a row fit one") from None


def _compiled(request: Request, found: Trace) -> Variant:
    """Everything after the trace."""
    graph = run_passes(found.graph)
    groups = fuse(graph, request.target)
    program = lower(graph, groups, request.target, wide=request.wide)
    sources = tuple(emit(launch, request.target) for launch in program.launches)
    guards = tuple(relation_text(g) for g in found.guards)
    return Variant(request, found.graph, graph, groups, program, sources, guards, found.hidden, found.structure)


def trace_function(request: Request, hidden_spec: Callable[[torch.Tensor], InputSpec], parameters: Sequence[str]) -> Trace:
    """Runs the function on traced values."""
    tracer = Tracer(request.name, dict(request.sizes.hints), request.device, hidden_spec)
    tracer.builder.multiples, tracer.builder.bounds = request.sizes.multiples, request.sizes.bounds
    values: dict[str, object] = dict(request.statics)
    values |= {spec.name: tracer.value(tracer.builder.input(spec)) for spec in request.specs}
    values |= {name: tracer.value(tracer.builder.scalar(name, dtype)) for name, dtype in request.scalars}
    return trace(tracer, _keyword_call(request.function), [values[p] for p in parameters], {})


def _keyword_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with all parameters positional, however it declares them."""
    declared = inspect.signature(function).parameters.values()
    named = [p.name for p in declared if p.kind is inspect.Parameter.KEYWORD_ONLY]  # behind all others

    @wraps(function)
    def call(*values: object) -> Any:
        first = len(values) - len(named)
        return function(*values[:first], **dict(zip(named, values[first:], strict=True)))

    return call
