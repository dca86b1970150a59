"""Runs a function on traced values, and watches what else it reads."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch

from fusegen.compiler.compile import Request
from fusegen.compiler.signature import hidden_spec
from fusegen.errors import TraceError, UnsupportedError
from fusegen.guards import Recorder, State
from fusegen.ir.graph import InputSpec
from fusegen.ir.symbolic import size_symbol
from fusegen.runtime.arguments import check_values
from fusegen.schedule.names import Namer, kernel_functions
from fusegen.trace import functions
from fusegen.trace.needs import NeedsLiteral, NeedsStatic, NeedsSum
from fusegen.trace.run import Trace, trace, traced_math
from fusegen.trace.scalars import TracedScalar
from fusegen.trace.tracer import Tracer
from fusegen.trace.user import here

_FILLED = functions  # importing the package fills the table of functions that can be traced


def trace_function(request: Request, parameters: Sequence[str]) -> tuple[Trace, State]:
    """Runs the function on traced values, as `watched_trace` does, for a check of what it read."""
    found, recorder = watched_trace(request, parameters)
    return found, recorder.state([parameters.index(spec.name) for spec in request.specs])


def watched_trace(request: Request, parameters: Sequence[str]) -> tuple[Trace, Recorder]:
    """Runs the function on traced values, watched by a recorder.

    Args:
        request: what to trace.
        parameters: names of the function's parameters, in order.

    Raises:
        TraceError: the function does something that no kernel can do.
        NeedsLiteral: a size must be literal.
        NeedsSum: a size must be the sum of others.
        NeedsStatic: it fails on run-time scalars, or asks for their type, and does not with their values.
    """
    numbers = tuple(name for name, _ in request.numbers)
    try:
        found, recorder = _traced(request, parameters)
    except Exception as error:
        if isinstance(error, (NeedsStatic, NeedsLiteral, NeedsSum)) or not numbers:
            raise
        _traced(_by_value(request), parameters)
        raise NeedsStatic(numbers) from None
    if recorder.asks_for_types and numbers:  # of which a traced number cannot give the answer
        raise NeedsStatic(numbers)
    if recorder.compares_identity and request.one_tensor_twice:
        twice = ", ".join(request.one_tensor_twice)
        what = f"{request.name} asks whether two tensors are one, and is given one tensor twice: {twice}"
        raise UnsupportedError(what, mend="pass a flag in place of the comparison")
    return found, recorder


def _by_value(request: Request) -> Request:
    """The same with values in place of run-time scalars."""
    return replace(request, scalars=(), numbers=(), statics=request.statics + request.numbers)


def _traced(request: Request, parameters: Sequence[str]) -> tuple[Trace, Recorder]:
    given = {parameters.index(name): value for name, value in request.statics}
    recorder = Recorder(
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

    def __init__(self, name: str, recorder: Recorder, parameters: Sequence[str]) -> None:
        self._name = name
        self._recorder: Recorder = weakref.proxy(recorder)  # values of the trace hold this, and may stay for long
        self._parameters = parameters

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
