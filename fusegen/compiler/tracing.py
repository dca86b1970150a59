"""Runs a function on traced values, watches what else it reads, and makes scalars of the numbers that change."""

from __future__ import annotations

import inspect
import itertools
import math
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, TypeAlias, cast

import torch

from fusegen.compiler.compile import Request, Variant, guards_of
from fusegen.compiler.signature import hidden_spec
from fusegen.dtypes import DType
from fusegen.errors import FusegenError, TraceError, UnsupportedError
from fusegen.guards import StateGuard, StateRecorder, exact
from fusegen.ir.formula import numbers_of
from fusegen.ir.graph import Graph, GraphBuilder, InputSpec, Node
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import size_symbol
from fusegen.passes.rewrite import rebuilt
from fusegen.runtime.arguments import check_values
from fusegen.schedule.names import Namer, kernel_functions
from fusegen.trace import functions
from fusegen.trace.run import Trace, trace, traced_math
from fusegen.trace.scalars import NeedsFact, TracedScalar
from fusegen.trace.tracer import Tracer
from fusegen.trace.user import here

_FILLED = functions  # importing the package fills the table of functions that can be traced


def trace_function(request: Request, parameters: Sequence[str]) -> tuple[Trace, StateGuard]:
    """Runs the function on traced values, as `watched_trace` does, for a check of what it read."""
    found, recorder = watched_trace(request, parameters)
    return found, recorder.state([parameters.index(spec.name) for spec in request.specs])


def watched_trace(request: Request, parameters: Sequence[str]) -> tuple[Trace, StateRecorder]:
    """Runs the function on traced values, watched by a recorder.

    Args:
        request: what to trace.
        parameters: names of the function's parameters, in order.

    Raises:
        TraceError: the function does something that no kernel can do.
        NeedsFact: a size must be literal, say; or it fails on run-time scalars, and does not with their values.
    """
    numbers = tuple(name for name, _ in request.numbers)
    try:
        found, recorder = _traced(request, parameters)
    except Exception as error:
        if isinstance(error, NeedsFact) or not numbers:
            raise
        by_value = replace(request, scalars=(), numbers=(), statics=request.statics + request.numbers)
        _traced(by_value, parameters)
        raise NeedsFact("static", numbers) from None
    if recorder.asks_for_types and numbers:  # of which a traced number cannot give the answer
        raise NeedsFact("static", numbers)
    if recorder.compares_identity and request.one_tensor_twice:
        twice = ", ".join(request.one_tensor_twice)
        what = f"{request.name} asks whether two tensors are one, and is given one tensor twice: {twice}"
        raise UnsupportedError(what, hint="pass a flag in place of the comparison")
    return found, recorder


def _traced(request: Request, parameters: Sequence[str]) -> tuple[Trace, StateRecorder]:
    given = {parameters.index(name): value for name, value in request.statics}
    recorder = StateRecorder(
        request.function, given, Namer(reserved=False, taken=parameters, functions=kernel_functions(request.name)).take
    )
    outside = _Outside(request.name, recorder, parameters)
    tracer = Tracer(request.name, dict(request.sizes.hints), request.device, outside, dict(request.numbers))
    tracer.builder.multiples, tracer.builder.bounds = request.sizes.multiples, request.sizes.bounds
    tracer.parameter_sizes = {symbol: name for name, symbol in request.sizes.parameters.items()}
    tracer.builder.fast_math = request.fast_math
    tracer.tied = request.tied
    values: dict[str, object] = {name: tracer.size(size_symbol(symbol)) for name, symbol in request.sizes.parameters.items()}
    values |= request.statics
    for spec, argument in zip(request.specs, request.arguments, strict=True):
        values[spec.name] = tracer.parameter(spec, argument, declared=spec.name in request.mutates)
    values |= {name: TracedScalar(tracer, tracer.builder.scalar(name, dtype)) for name, dtype in request.scalars}
    with traced_math(), recorder:
        found = trace(tracer, _keyword_call(request.function), [values[p] for p in parameters], {})
    return found, recorder


class _Outside:
    """Tensors that a function closes over.

    Args:
        name: the kernel's.
        recorder: knows where they are found again.
        parameters: names of the function's parameters, in order.
    """

    def __init__(self, name: str, recorder: StateRecorder, parameters: Sequence[str]) -> None:
        self._name = name
        self._recorder: StateRecorder = weakref.proxy(recorder)  # values of the trace hold this, and may stay for long
        self._parameters = parameters

    def input_of(self, tensor: torch.Tensor) -> InputSpec:
        """A closed-over tensor as an input."""
        name = self._recorder.use(tensor)
        if name is None:
            raise TraceError(
                "the kernel uses a tensor that is neither a parameter nor a variable that it closes over",
                where=here(),
                hint="pass the tensor as a parameter; one that is computed inside from other tensors, compute outside",
            )
        with torch._C.DisableTorchFunction():  # what we ask of the tensor is not what the function asks
            check_values(self._name, name, tensor)
            return hidden_spec(name, tensor)

    def observe(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Notes that torch was asked something of tensors that the function closes over."""
        self._recorder.observe(function, args, kwargs, result)

    def argument_asked(self, parameter: str, attribute: str, answer: bool) -> None:
        """Notes what a tensor argument answered: whether it has an attribute, or the value of ``requires_grad``."""
        self._recorder.argument_asked(self._parameters.index(parameter), attribute, answer)


def _keyword_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with all parameters positional, however it declares them."""
    declared = inspect.signature(function).parameters.values()
    named = [p.name for p in declared if p.kind is inspect.Parameter.KEYWORD_ONLY]  # behind all others

    @wraps(function)
    def call(*values: object) -> Any:
        first = len(values) - len(named)
        return function(*values[:first], **dict(zip(named, values[first:], strict=True)))

    return call


# Values that select code, and change: literals that differ from trace to trace become run-time scalars of one program.
#
# A function that needs a number (``math.sqrt(1 - beta ** step)``), or reads one of its surroundings (``self.eps``), is traced with
# it, and the number leaves literals in the graph: constants, and arguments of compositions (`Row.numbers`). Where a later trace
# differs in nothing but such literals, these are promoted: one program takes them as scalars, and a further value costs a trace but
# nothing of what follows it. What is structure (dims, sizes, the number of nodes) remains.


Compile: TypeAlias = Callable[[Request, Trace, StateGuard], Variant]

_ANY = "any"


@dataclass
class _Family:
    """Programs of graphs that differ in constants alone.

    Attributes:
        members: for each, the constants of the trace that it was made of, and the positions of those that it takes as scalars.
    """

    members: list[tuple[tuple[str, ...], frozenset[int], Variant]] = field(default_factory=list)


class Promotions:
    """The families of a kernel."""

    def __init__(self) -> None:
        self._families: dict[Hashable, _Family] = {}

    @property
    def count(self) -> int:
        """The number of programs."""
        return sum(len(family.members) for family in self._families.values())

    def variant(self, request: Request, found: Trace, state: StateGuard, compile: Compile, fixed: Hashable) -> Variant:
        """The variant of a trace: an earlier program with other constants, or a new one.

        Args:
            request: what was asked for.
            state: what else the function read.
            compile: makes a variant of a trace.
            fixed: values that the user wants to select code.
        """
        pipeline, constants = _taken_apart(found.graph)
        key = (pipeline, request.target, request.wide, str(found.structure), fixed)
        family = self._families.setdefault(key, _Family())
        for theirs, promoted, variant in family.members:
            if all(n in promoted or a == b for n, (a, b) in enumerate(zip(theirs, constants, strict=True))):
                return _with(variant, request, found, state, constants, promoted)
        promoted = _to_promote(family, constants) if family.members else frozenset[int]()
        if promoted:
            variant, promoted = _compiled(request, found, state, compile, promoted)
            variant = _with(variant, request, found, state, constants, promoted)
        else:
            variant = compile(request, found, state)
        family.members.append((constants, promoted, variant))
        return variant


def _taken_apart(graph: Graph) -> tuple[Graph, tuple[str, ...]]:
    """A graph without its numbers, and the numbers as text; truths and what is no finite number stay."""
    nodes, constants = [], []
    for node in graph.nodes:
        names = _literals(node)
        constants += [str(node.attr(name)) for name in names]
        attrs = tuple((name, (_ANY, type(value)) if name in names else exact(value)) for name, value in node.attrs)
        nodes.append(replace(node, attrs=attrs))
    return replace(graph, nodes=tuple(nodes)), tuple(constants)


def _literals(node: Node) -> tuple[str, ...]:
    """Attributes of a node that are finite numbers: the value of a constant, and arguments that operands can stand for."""
    if node.op is Op.CONSTANT:
        is_number = node.dtype is not DType.BOOL and str(node.attr("value")) not in ("inf", "-inf", "nan")
        return ("value",) if is_number else ()
    names = node.op.row.numbers
    return tuple(n for n, value in node.attrs if n in names and type(value) in (int, float) and math.isfinite(cast(float, value)))


def _to_promote(family: _Family, constants: tuple[str, ...]) -> frozenset[int]:
    """Constants in which a trace differs from the first one of its family, and those that were promoted before."""
    first = family.members[0][0]
    changed = {n for n, (a, b) in enumerate(zip(first, constants, strict=True)) if a != b}
    return frozenset(changed).union(*(promoted for _, promoted, _ in family.members))


def _compiled(
    request: Request, found: Trace, state: StateGuard, compile: Compile, promoted: frozenset[int]
) -> tuple[Variant, frozenset[int]]:
    """The variant with these constants as scalars, or with none where that cannot be compiled."""
    try:
        return compile(request, replace(found, graph=_promoted(found.graph, promoted)), state), promoted
    except FusegenError:  # a constant that an emitted form depends on
        return compile(request, found, state), frozenset()


def _name(number: int) -> str:
    """A name that no parameter has, for what takes a constant's place."""
    return f"constant.{number}"


def _promoted(graph: Graph, numbers: frozenset[int]) -> Graph:
    """The graph with scalars in place of some of its literals."""
    counted = itertools.count()
    literals = [{name: next(counted) for name in _literals(node)} for node in graph.nodes]

    def replaced(builder: GraphBuilder, moved: Sequence[int], position: int) -> int | None:
        node, location = graph.nodes[position], graph.locations[position]
        chosen = {name: number for name, number in literals[position].items() if number in numbers}
        if not chosen:
            return None
        if node.op is not Op.CONSTANT:
            return builder.put(_with_operands(builder, replace(node, args=tuple(moved[a] for a in node.args)), chosen), location)
        scalar = builder.scalar(_name(chosen["value"]), DType.FLOAT64 if node.dtype.is_float else DType.INT64)
        return scalar if node.attr("weak") else builder.add(Op.CAST, [scalar], location=location, dtype=node.dtype)

    return rebuilt(graph, replaced)


def _with_operands(builder: GraphBuilder, node: Node, chosen: Mapping[str, int]) -> Node:
    """A node with scalars in place of some of its attributes, which are numbers."""
    types = {name: DType.FLOAT64 if type(node.attr(name)) is float else DType.INT64 for name in chosen}
    scalars = [builder.scalar(_name(number), types[name]) for name, number in chosen.items()]
    kept = {name: value for name, value in node.attrs if name not in chosen}
    attrs = kept | {"numbers": (*node.numbers, *chosen)}
    return replace(node, args=(*node.args, *scalars), attrs=tuple(sorted(attrs.items())))


def _with(
    variant: Variant, request: Request, found: Trace, state: StateGuard, constants: tuple[str, ...], promoted: frozenset[int]
) -> Variant:
    """A variant for a trace that its program serves: with the trace's constants."""
    values = tuple((_name(n), _number(constants[n])) for n in sorted(promoted))
    return replace(
        variant,
        request=replace(request, statics=()),
        traced=found.graph,
        trace=replace(found, hidden=()),
        guards=guards_of(found),
        state=state,
        conditions=numbers_of(found.conditions),
        switches_gradients=found.switches_gradients,
        constants=values,
    )


def _number(text: str) -> int | float:
    return int(text) if text.lstrip("-").isdigit() else float(text)
