"""Runs the user's function once on traced values and returns the graph with the assumptions of the trace.

During a trace, functions of Python's ``math`` accept run-time numbers: ``math.sqrt(1 - beta ** step)`` becomes host arithmetic at
each call. They are replaced because the C functions convert their argument to a float. For ordinary numbers, also in other
threads, they behave as before. A function imported by name (``from math import sqrt``) is not replaced, so the variant is
specialized to the number's value.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import sympy
import torch
from torch._C import _len_torch_function_stack as function_modes
from torch._C import _pop_torch_function_stack as pop_mode
from torch._C import _push_on_torch_function_stack as push_mode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._pytree import TreeSpec, register_pytree_node, tree_flatten, tree_leaves, tree_map

from fusegen.errors import TraceError, UnsupportedError
from fusegen.guards.changes import rejects_side_effects
from fusegen.ir.graph import NO_SCALARS, Graph, ScalarProgram
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import simplify_dim
from fusegen.threads import new_lock
from fusegen.trace import RUNNING, registry
from fusegen.trace.memory import require_filled
from fusegen.trace.scalars import SymbolicSize, TracedScalar, computed
from fusegen.trace.tracer import Tracer
from fusegen.trace.user import error_line, return_line, user_line
from fusegen.trace.values import OPERATORS, TracedTensor

ResultTree: TypeAlias = TreeSpec
"""The structure of a function's results: nested tuples, lists, dicts and NamedTuples of tensors and None."""


class Nothing:
    """Stands for a None in the result structure."""


register_pytree_node(Nothing, lambda _value: ([], None), lambda _parts, _context: None)


class ComplexResult:
    """Stands for a complex tensor in the result structure; its one leaf is the real view, with a last dim of 2."""

    def __init__(self, parts: Any) -> None:
        self.parts = parts


register_pytree_node(
    ComplexResult, lambda value: ([value.parts], None), lambda parts, _context: torch.view_as_complex(next(iter(parts)))
)


def _mark_leaves(value: object) -> object:
    if value is None:
        return Nothing()
    return ComplexResult(torch.view_as_real(value)) if isinstance(value, registry.Composite) else value  # type: ignore[arg-type]


@dataclass(frozen=True)
class Trace:
    """The result of a trace.

    Attributes:
        guards: assumptions about sizes.
        captured: the captured tensors.
        conditions: assumptions about scalars.
        switches_gradients: True if autograd would record something that the graph does not show.
    """

    graph: Graph
    guards: tuple[sympy.Basic, ...]
    captured: tuple[torch.Tensor, ...]
    structure: ResultTree
    conditions: ScalarProgram = NO_SCALARS
    switches_gradients: bool = False


class _Mode(TorchFunctionMode):
    """Handles torch calls without traced operands: creation functions (torch.arange), and functions of captured tensors only,
    whose values may change between calls."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        creator = registry.CREATORS.get(func)
        if creator is not None:
            return registry.located(registry.name_of(func), creator, (self.tracer, *args), kwargs or {})
        name = getattr(func, "__name__", "")
        writes = name in _WRITING or (name.endswith("_") and not name.endswith("__"))  # the first argument
        written = [*(args[:1] if writes else ()), (kwargs or {}).get("out")]
        if name == "requires_grad_" and args[0].requires_grad is [*args[1:], *(kwargs or {}).values(), True][0]:
            written = []  # no change
        if any(isinstance(a, torch.Tensor) and not isinstance(a, TracedTensor) for a in tree_leaves(written)):
            message = f"{name} would write to a captured tensor"
            raise UnsupportedError(
                message, where=user_line(), hint="pass it as a parameter, and declare it: @fg.kernel(mutates=(...))"
            )
        if any(isinstance(a, torch.Tensor) for a in tree_leaves(args)):
            twin = registry.PROPERTIES.get(func, func)
            traced = OPERATORS.get(func) if registry.handler_of(twin) is None else registry.calling(twin)
            if traced is not None:
                lifted = tree_map(lambda a: self.tracer.lift(a) if isinstance(a, torch.Tensor) else a, args)
                return traced(*lifted, **(kwargs or {}))
        if name in _DRAWING:
            message = f"torch.{func.__name__} draws random numbers, which kernels do not support yet"
            raise UnsupportedError(message, where=user_line(), hint="draw them outside of the kernel, and pass the tensor")
        result = func(*args, **(kwargs or {}))
        if not any(isinstance(a, (TracedTensor, registry.Composite)) for a in (*args, *(kwargs or {}).values())):
            self.tracer.recorder.observe(func, args, kwargs or {}, result)
        return result


@contextmanager
def _without_modes() -> Iterator[None]:
    """Suspends the caller's function modes and saved-tensor hooks, because later calls reuse the graph. The device mode stays."""
    modes = [pop_mode() for _ in range(function_modes())]
    if modes and isinstance(modes[-1], DeviceContext):
        push_mode(modes.pop())
    can_hook = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    try:
        with saved_tensors_hooks(_same, _same) if can_hook else nullcontext():
            yield
    finally:
        for mode in reversed(modes):
            push_mode(mode)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


_OPERATORS = "add sub mul truediv div floordiv mod pow and or xor lshift rshift"
_WRITING = frozenset({"__setitem__", "__set__"} | {f"__i{name}__" for name in _OPERATORS.split()})
_DRAWING = frozenset({"randperm", "multinomial", "poisson", "random_", "cauchy_", "geometric_", "log_normal_"})


_RESULTS = "return a tensor, or a tuple, a list, a dict or a NamedTuple of tensors"


def trace(tracer: Tracer, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Trace:
    """Runs a function on traced values; raises `TraceError` for anything that a kernel cannot do."""
    try:
        return _traced(tracer, function, args, kwargs)
    except Exception:
        if tracer.needs is not None:  # torch may have wrapped the exception in another one
            raise tracer.needs from None
        raise
    finally:
        tracer.finished = True
        tracer.captured.clear()  # traced values reference the tracer and may outlive the trace


def _traced(tracer: Tracer, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Trace:
    with _without_modes(), _Mode(tracer):
        if rejects_side_effects() and tracer.records:  # a patched layer in training: its checkpoints are not traced
            tracer.refuse_hooks()
        RUNNING.count += 1
        try:
            returned = function(*args, **kwargs)
            if inspect.iscoroutine(returned):
                returned.close()  # it is refused below, and Python would warn that nothing awaits it
        except TypeError as error:
            if not any(name in str(error) for name in ("SymbolicSize", "TracedScalar", "TracedTensor")):
                raise
            if "SymbolicSize" in str(error):
                tracer.require_literal_features()
            raise TraceError(
                f"a function does not accept a traced value: {error}",
                where=error_line(error),
                hint="use torch's function for it, or call it outside of the kernel",
            ) from error
        except RuntimeError as error:
            if "TorchScript interpreter" not in str(error) or not str(error).rstrip().endswith("RuntimeError:"):
                raise
            hint = "call the Python function that it was compiled from, or call it outside of the kernel"
            raise TraceError("a TorchScript function was called with a traced value", where=error_line(error), hint=hint) from None
        finally:
            RUNNING.count -= 1
    writes = tracer.stored()
    results, structure = tree_flatten(returned if returned is None else tree_map(_mark_leaves, returned))
    if returned is None and writes:
        results = []  # the writes are its only effect
    elif not results and not writes:
        raise TraceError("the kernel returns no tensor", where=return_line(function), hint=_RESULTS)
    if rejects_side_effects() and not writes:
        _require_computed(results)
    if rejects_side_effects():
        _require_plain(returned)
    outputs = [_result(_output(tracer, value, function)) for value in results]
    if tracer.needs is not None:
        raise tracer.needs
    names = tracer.builder.result_names
    lengths = [result.num_leaves for result in structure.children()]  # a result may be a list of tensors, or None
    tracer.builder.result_names = names if lengths == [1] * len(names) else ()
    graph = tracer.builder.build(outputs, writes)
    captured = tuple(tensor for tensor, _ in tracer.captured.values())
    return Trace(graph, tuple(tracer.guards), captured, structure, tracer.conditions(), tracer.switches_gradients)


def _require_computed(results: Sequence[object]) -> None:
    """Refuses a function that only returns its arguments or views of them: a kernel would return copies."""
    if results and all(isinstance(value, TracedTensor) and value._memory.parameter for value in results):
        raise UnsupportedError("it computes nothing: its results are its arguments, or views of them")


def _require_plain(returned: object) -> None:
    """Refuses results with attributes, or with one tensor twice, because a kernel returns distinct plain tensors."""
    names = {name for value in tree_leaves(returned) if isinstance(value, TracedTensor) for name in vars(value)} - _OWN_ATTRIBUTES
    if names:
        raise UnsupportedError(f"it sets the attribute {min(names)!r} of its result, which a kernel's result does not have")
    elements = returned.values() if isinstance(returned, dict) else returned if isinstance(returned, (tuple, list)) else ()
    tensors = [id(value) for value in elements if isinstance(value, TracedTensor)]
    if len(set(tensors)) < len(tensors):
        raise UnsupportedError("it returns one tensor twice, and a kernel would return two tensors")


_OWN_ATTRIBUTES = frozenset({"_tracer", "_position", "_memory", "_writes", "_root", "_argument"})
"""Attributes that `TracedTensor` sets itself."""


def _result(value: TracedTensor) -> int:
    """The node of a result; for a mutated parameter, its last version."""
    memory = value._memory
    if memory.is_written and value._position == value._root:
        return memory.version
    is_copy = value._node.op is Op.PUT
    return value._tracer.add(Op.COPY, value, role="result", write=0)._position if is_copy else value._position


def _output(tracer: Tracer, value: object, function: Callable[..., Any]) -> TracedTensor:
    if value is None:
        raise TraceError("the kernel returns None", where=return_line(function), hint=_RESULTS)
    if not isinstance(value, (TracedTensor, TracedScalar, torch.Tensor, SymbolicSize, int, float, np.generic)):
        raise TraceError(f"the kernel returns a {type(value).__name__}", where=return_line(function), hint=_RESULTS)
    result = tracer.lift(value)
    require_filled(result)
    shape = tuple(simplify_dim(d) for d in result._node.shape)
    if result._node.weak:
        message = "the kernel returns a number, not a tensor"
        raise TraceError(message, where=return_line(function), hint="return a tensor that depends on an input")
    return result if shape == result._node.shape else tracer.add(Op.RESHAPE, result, shape=shape)


# Python's math module.

_OPS = {
    "sqrt": Op.SQRT,
    "exp": Op.EXP,
    "expm1": Op.EXPM1,
    "log1p": Op.LOG1P,
    "log2": Op.LOG2,
    "sin": Op.SIN,
    "cos": Op.COS,
    "tanh": Op.TANH,
    "erf": Op.ERF,
}
_ORIGINALS: dict[str, Callable[..., Any]] = {}
_LOCK = new_lock()
_traces = 0


def _log(x: Any, base: Any = None) -> Any:
    return computed(Op.LOG, x) if base is None else computed(Op.LOG, x) / math.log(base)


_TRACED: dict[str, Callable[..., Any]] = {name: partial(computed, op) for name, op in _OPS.items()} | {
    "log": _log,
    "pow": lambda x, y: (x * 1.0) ** y,
    "fabs": lambda x: abs(x * 1.0),
    "isnan": lambda x: x != x,
    "isinf": lambda x: abs(x) == math.inf,
    "isfinite": lambda x: abs(x) < math.inf,
}
"""Replacements by name in ``math``; the first argument is a traced scalar."""


@contextmanager
def traced_math() -> Iterator[None]:
    """Lets functions of ``math`` accept run-time numbers while the context is active."""
    global _traces
    with _LOCK:
        _traces += 1
        if _traces == 1:
            for name, traced in _TRACED.items():
                _ORIGINALS[name] = getattr(math, name)
                setattr(math, name, _wrapped(_ORIGINALS[name], traced))
    try:
        yield
    finally:
        with _LOCK:
            _traces -= 1
            if not _traces:
                for name, function in _ORIGINALS.items():
                    setattr(math, name, function)


def _wrapped(function: Callable[..., Any], traced: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        first = _number(args[0]) if args else None
        return function(*args) if first is None else traced(first, *args[1:])

    return call


def _number(value: Any) -> TracedScalar | None:
    if type(value) is SymbolicSize:
        value.tracer.require_literal_feature(value.expr)
        return value.tracer.scalar(value)
    return value if type(value) is TracedScalar else None
