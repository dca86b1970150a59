"""Runs a function on traced values, records the Python state that it reads, and turns changing constants into scalars."""

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
from fusegen.compiler.signature import captured_spec
from fusegen.dtypes import DType
from fusegen.errors import FusegenError, TraceError, UnsupportedError
from fusegen.guards.check import StateGuard
from fusegen.guards.recorder import StateRecorder
from fusegen.guards.values import exact_key
from fusegen.ir.formula import numbers_of
from fusegen.ir.graph import Graph, GraphBuilder, InputSpec, Node
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import size_symbol
from fusegen.passes.rewrite import rebuilt
from fusegen.runtime.arguments import check_values
from fusegen.schedule.names import Namer, identifier, kernel_functions
from fusegen.trace import functions
from fusegen.trace.run import Trace, trace, traced_math
from fusegen.trace.scalars import NeedsFact, TracedScalar
from fusegen.trace.tracer import Tracer
from fusegen.trace.user import result_names, user_line

_FILLED = functions  # importing the package fills the table of functions that can be traced


def trace_function(request: Request, parameters: Sequence[str]) -> tuple[Trace, StateGuard]:
    """Traces a function. Returns the trace and a guard of the Python state that the function read."""
    found, recorder = watched_trace(request, parameters)
    return found, recorder.state([parameters.index(spec.name) for spec in request.specs])


def watched_trace(request: Request, parameters: Sequence[str]) -> tuple[Trace, StateRecorder]:
    """Traces a function under a recorder of Python state.

    Args:
        parameters: names of the function's parameters, in order.

    Raises:
        TraceError: the function does something that no kernel can do.
        NeedsFact: the trace needs, e.g., a literal size, or the values of run-time scalars.
    """
    numbers = tuple(name for name, _ in request.numbers)
    try:
        traced, recorder = _traced(request, parameters)
    except Exception as error:
        if isinstance(error, NeedsFact) or not numbers:
            raise
        by_value = replace(request, scalars=(), numbers=(), statics=request.statics + request.numbers)
        _traced(by_value, parameters)
        raise NeedsFact("static", numbers) from None
    if recorder.asks_for_types and numbers:  # a traced number would give the wrong answer
        raise NeedsFact("static", numbers)
    if recorder.compares_identity and request.repeated_tensors:
        twice = ", ".join(request.repeated_tensors)
        what = f"{request.name} compares tensors by identity, but gets one tensor twice: {twice}"
        raise UnsupportedError(what, hint="pass a bool parameter instead of comparing tensors")
    return traced, recorder


def _traced(request: Request, parameters: Sequence[str]) -> tuple[Trace, StateRecorder]:
    statics = {parameters.index(name): value for name, value in request.statics}
    functions = kernel_functions(identifier(request.name))
    recorder = StateRecorder(request.function, statics, Namer(reserved=False, taken=parameters, functions=functions).take)
    captures = _CaptureRecorder(request.name, recorder, parameters)
    tracer = Tracer(request.name, dict(request.sizes.hints), request.device, captures, dict(request.numbers))
    tracer.builder.multiples, tracer.builder.bounds = request.sizes.multiples, request.sizes.bounds
    tracer.parameter_sizes = {symbol: name for name, symbol in request.sizes.parameters.items()}
    tracer.builder.fast_math, tracer.builder.plans = request.fast_math, request.plans
    tracer.tied, tracer.builder.result_names = request.tied, result_names(request.function)
    values: dict[str, object] = {name: tracer.size(size_symbol(symbol)) for name, symbol in request.sizes.parameters.items()}
    values |= request.statics
    for spec, argument in zip(request.specs, request.arguments, strict=True):
        values[spec.name] = tracer.parameter(spec, argument, declared=spec.name in request.mutates)
    values |= {name: TracedScalar(tracer, tracer.builder.scalar(name, dtype)) for name, dtype in request.scalars}
    with traced_math(), recorder:
        traced = trace(tracer, _keyword_call(request.function), [values[p] for p in parameters], {})
    return traced, recorder


_UNKNOWN = (
    "the kernel uses a tensor that is neither a parameter nor a variable that it closes over",
    "pass the tensor as a parameter; if it is computed in the kernel's Python code, compute it outside",
)
_MADE_SHARDED = (
    "the kernel computes with a DTensor, as hooks of torch.distributed.tensor.parallel make them",
    "fuse the operations between such layers, or split the module by fusegen.parallel",
)


class _CaptureRecorder:
    """Captured tensors.

    Args:
        name: the kernel's name.
        recorder: records the locations from which later calls read them.
        parameters: names of the function's parameters, in order.
    """

    def __init__(self, name: str, recorder: StateRecorder, parameters: Sequence[str]) -> None:
        self._name = name
        self._recorder: StateRecorder = weakref.proxy(recorder)  # traced values refer to this and may live long
        self._parameters = parameters

    def input_of(self, tensor: torch.Tensor) -> InputSpec:
        """The graph input of a captured tensor."""
        name = self._recorder.use(tensor)
        if name is None:
            what, hint = _MADE_SHARDED if type(tensor).__name__ == "DTensor" else _UNKNOWN
            raise TraceError(what, where=user_line(), hint=hint)
        with torch._C.DisableTorchFunction():  # our own reads of the tensor are not recorded
            check_values(self._name, name, tensor)
            return captured_spec(name, tensor)

    def observe(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Records a torch function that was called on captured tensors."""
        self._recorder.observe(function, args, kwargs, result)

    def observe_argument(self, parameter: str, attribute: str, answer: bool) -> None:
        """Records a query of a tensor argument and its result: the presence of an attribute, or ``requires_grad``."""
        self._recorder.observe_argument(self._parameters.index(parameter), attribute, answer)


def _keyword_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper that takes keyword-only parameters by position."""
    declared = inspect.signature(function).parameters.values()
    named = [p.name for p in declared if p.kind is inspect.Parameter.KEYWORD_ONLY]  # they come last

    @wraps(function)
    def call(*values: object) -> Any:
        first = len(values) - len(named)
        return function(*values[:first], **dict(zip(named, values[first:], strict=True)))

    return call


# Promotion: a literal that differs from trace to trace becomes a run-time scalar of one program.
#
# If a function needs a number's value (``math.sqrt(1 - beta ** step)``) or reads a number from an object (``self.eps``), the value
# becomes literals in the graph: constants, and arguments of compositions (`Row.numbers`). If a later trace
# differs in such literals alone, they are promoted: one program takes them as scalars, and a further value costs a trace but no
# compilation. Structure (dims, sizes, the number of nodes) is never promoted.


Compile: TypeAlias = Callable[[Request, Trace, StateGuard], Variant]

_ANY = "any"


@dataclass
class _Family:
    """Programs of graphs that differ only in constants.

    Attributes:
        members: for each trace, its constants, the positions of those that are scalars of the program, and the variant.
    """

    members: list[tuple[tuple[str, ...], frozenset[int], Variant]] = field(default_factory=list)


class ProgramFamilies:
    """The programs of a kernel, in families of graphs that differ only in constants."""

    def __init__(self) -> None:
        self._families: dict[Hashable, _Family] = {}

    @property
    def count(self) -> int:
        return sum(len(family.members) for family in self._families.values())

    def variant(self, request: Request, traced: Trace, state: StateGuard, compile: Compile, fixed: Hashable) -> Variant:
        """The variant of a trace: an earlier program with other constants, or a new program.

        Args:
            state: the guard of the Python state that the function read.
            compile: compiles a trace.
            fixed: values that select code because the user requested it.
        """
        pipeline, constants = _split_constants(traced.graph)
        key = (pipeline, request.target, request.index64, str(traced.structure), fixed)
        family = self._families.setdefault(key, _Family())
        for other, promoted, variant in family.members:
            if all(n in promoted or a == b for n, (a, b) in enumerate(zip(other, constants, strict=True))):
                return _with(variant, request, traced, state, constants, promoted)
        promoted = _changed(family, constants) if family.members else frozenset[int]()
        if promoted:
            variant, promoted = _compiled(request, traced, state, compile, promoted)
            variant = _with(variant, request, traced, state, constants, promoted)
        else:
            variant = compile(request, traced, state)
        family.members.append((constants, promoted, variant))
        return variant


def _split_constants(graph: Graph) -> tuple[Graph, tuple[str, ...]]:
    """The graph with placeholders for its finite numbers, and these numbers as text."""
    nodes, constants = [], []
    for node in graph.nodes:
        names = _literals(node)
        constants += [str(node.attr(name)) for name in names]
        attrs = tuple((name, (_ANY, type(value)) if name in names else exact_key(value)) for name, value in node.attrs)
        nodes.append(replace(node, attrs=attrs))
    return replace(graph, nodes=tuple(nodes)), tuple(constants)


def _literals(node: Node) -> tuple[str, ...]:
    """Attributes of a node that are finite numbers: a constant's value, and arguments that an operand can replace."""
    if node.op is Op.CONSTANT:
        is_number = node.dtype is not DType.BOOL and str(node.attr("value")) not in ("inf", "-inf", "nan")
        return ("value",) if is_number else ()
    names = node.op.row.numbers
    return tuple(n for n, value in node.attrs if n in names and type(value) in (int, float) and math.isfinite(cast(float, value)))


def _changed(family: _Family, constants: tuple[str, ...]) -> frozenset[int]:
    """Positions of the constants to promote: those that differ from the family's first trace, and those promoted before."""
    first = family.members[0][0]
    changed = {n for n, (a, b) in enumerate(zip(first, constants, strict=True)) if a != b}
    return frozenset(changed).union(*(promoted for _, promoted, _ in family.members))


def _compiled(
    request: Request, traced: Trace, state: StateGuard, compile: Compile, promoted: frozenset[int]
) -> tuple[Variant, frozenset[int]]:
    """The variant with these constants as scalars, and their positions. If that cannot be compiled, all stay constants."""
    try:
        return compile(request, replace(traced, graph=_promoted(traced.graph, promoted)), state), promoted
    except FusegenError:  # emitted text depends on the constant
        return compile(request, traced, state), frozenset()


def _name(number: int) -> str:
    """The name of a promoted constant; its dot makes it differ from all parameters."""
    return f"constant.{number}"


def _promoted(graph: Graph, numbers: frozenset[int]) -> Graph:
    """The graph with some literals replaced by scalars."""
    counter = itertools.count()
    literals = [{name: next(counter) for name in _literals(node)} for node in graph.nodes]

    def replaced(builder: GraphBuilder, operands: Sequence[int], position: int) -> int | None:
        node, location = graph.nodes[position], graph.locations[position]
        promoted = {name: number for name, number in literals[position].items() if number in numbers}
        if not promoted:
            return None
        if node.op is not Op.CONSTANT:
            moved = replace(node, args=tuple(operands[a] for a in node.args))
            return builder.add_node(_with_operands(builder, moved, promoted), location)
        scalar = builder.scalar(_name(promoted["value"]), DType.FLOAT64 if node.dtype.is_float else DType.INT64)
        return scalar if node.attr("weak") else builder.add(Op.CAST, [scalar], location=location, dtype=node.dtype)

    return rebuilt(graph, replaced)


def _with_operands(builder: GraphBuilder, node: Node, promoted: Mapping[str, int]) -> Node:
    """The node with numeric attributes replaced by scalar operands."""
    types = {name: DType.FLOAT64 if type(node.attr(name)) is float else DType.INT64 for name in promoted}
    scalars = [builder.scalar(_name(number), types[name]) for name, number in promoted.items()]
    attrs = {name: value for name, value in node.attrs if name not in promoted} | {"numbers": (*node.numbers, *promoted)}
    return replace(node, args=(*node.args, *scalars), attrs=tuple(sorted(attrs.items())))


def _with(
    variant: Variant, request: Request, traced: Trace, state: StateGuard, constants: tuple[str, ...], promoted: frozenset[int]
) -> Variant:
    """A variant that reuses an earlier program for a new trace, with the new constants."""
    values = tuple((_name(n), _number(constants[n])) for n in sorted(promoted))
    return replace(
        variant,
        request=replace(request, statics=()),
        traced=traced.graph,
        trace=replace(traced, captured=()),
        guards=guards_of(traced),
        state=state,
        conditions=numbers_of(traced.conditions),
        switches_gradients=traced.switches_gradients,
        constants=values,
    )


def _number(text: str) -> int | float:
    return int(text) if text.lstrip("-").isdigit() else float(text)
