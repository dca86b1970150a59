"""From a function and what is known of its arguments to sources: the stages in their order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch

from fusegen.dtypes import DType
from fusegen.emit import emit
from fusegen.errors import FusegenError, UnsupportedError
from fusegen.ir.formula import relation_text
from fusegen.ir.graph import Graph, InputSpec, ScalarProgram
from fusegen.ir.symbolic import size_symbol
from fusegen.lang import functions
from fusegen.lang.math_functions import traced_math
from fusegen.lang.scalars import NeedsStatic, TracedScalar
from fusegen.lang.tracer import NeedsLiteral, Trace, Tracer, trace
from fusegen.lang.values import TracedTensor
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
        numbers: their values in this call, and those of ints that are used as sizes.
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
    numbers: tuple[tuple[str, int | float], ...] = ()


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
        conditions: what must hold of the scalars.
        hidden: tensors that the function closes over.
        returns_tuple: whether the function returns several results.
        constants: values of scalars that are none of the function's own (`runtime.promotion`).
    """

    request: Request
    traced: Graph
    graph: Graph
    groups: tuple[Group, ...]
    program: Program
    sources: tuple[Source, ...]
    guards: tuple[str, ...]
    hidden: tuple[tuple[str, torch.Tensor], ...]
    returns_tuple: bool
    conditions: ScalarProgram
    constants: tuple[tuple[str, int | float], ...] = ()


def compile_trace(request: Request, found: Trace) -> Variant:
    """Fuses, schedules and emits what was traced.

    Raises:
        UnsupportedError: a chain of operations is too long.
        NeedsStatic: ints that are used as sizes must be literal for it.
    """
    try:
        return _compiled(request, found)
    except RecursionError:
        what = f"{request.name} has {len(found.graph.nodes)} values that depend on each other in too long a chain"
        raise UnsupportedError(what, mend="split it into several kernels; some 150 operations in a row fit one") from None
    except FusegenError:
        symbols = request.sizes.of_parameters
        if not symbols:
            raise
        raise NeedsStatic(tuple(symbols.values())) from None


def _compiled(request: Request, found: Trace) -> Variant:
    """Everything after the trace."""
    graph = run_passes(found.graph)
    groups = fuse(graph, request.target)
    program = lower(graph, groups, request.target, wide=request.wide)
    sources = tuple(emit(launch, request.target) for launch in program.launches)
    guards = guards_of(found)
    return Variant(
        request, found.graph, graph, groups, program, sources, guards, found.hidden, found.returns_tuple, found.conditions
    )


def guards_of(found: Trace) -> tuple[str, ...]:
    """What a trace assumed of sizes, as text."""
    return tuple(map(relation_text, found.guards))


def trace_function(request: Request, hidden_spec: Callable[[torch.Tensor], InputSpec], parameters: Sequence[str]) -> Trace:
    """Runs the function on traced values.

    Args:
        request: what to trace.
        hidden_spec: describes a closed-over tensor.
        parameters: names of the function's parameters, in order.

    Raises:
        TraceError: the function does something that no kernel can do.
        NeedsLiteral: a size must be literal.
        NeedsStatic: it fails on run-time scalars, and does not with their values.
    """
    try:
        return _traced(request, hidden_spec, parameters)
    except Exception as error:
        if isinstance(error, (NeedsStatic, NeedsLiteral)) or not request.numbers:
            raise
        _traced(_by_value(request), hidden_spec, parameters)
        raise NeedsStatic(tuple(name for name, _ in request.numbers)) from None


def _by_value(request: Request) -> Request:
    """The same with values in place of run-time scalars."""
    return replace(request, scalars=(), numbers=(), statics=request.statics + request.numbers)


def _traced(request: Request, hidden_spec: Callable[[torch.Tensor], InputSpec], parameters: Sequence[str]) -> Trace:
    tracer = Tracer(request.name, dict(request.sizes.hints), request.device, hidden_spec, dict(request.numbers))
    tracer.builder.multiples, tracer.builder.bounds = request.sizes.multiples, request.sizes.bounds
    tracer.parameter_sizes = request.sizes.of_parameters
    values: dict[str, object] = {name: tracer.size(size_symbol(symbol)) for symbol, name in tracer.parameter_sizes.items()}
    values |= request.statics
    values |= {spec.name: TracedTensor(tracer, tracer.builder.input(spec)) for spec in request.specs}
    values |= {name: TracedScalar(tracer, tracer.builder.scalar(name, dtype)) for name, dtype in request.scalars}
    with traced_math():
        return trace(tracer, _keyword_call(request.function, parameters), [values[p] for p in parameters], {})


def _keyword_call(function: Callable[..., Any], parameters: Sequence[str]) -> Callable[..., Any]:
    """The function with all parameters positional, however it declares them."""
    kinds = {name: p.kind for name, p in inspect.signature(function).parameters.items()}

    @wraps(function)
    def call(*values: object) -> Any:
        named: Mapping[str, object] = dict(zip(parameters, values, strict=True))
        positional = [named[n] for n in parameters if kinds[n] is not inspect.Parameter.KEYWORD_ONLY]
        return function(*positional, **{n: named[n] for n in parameters if kinds[n] is inspect.Parameter.KEYWORD_ONLY})

    return call
