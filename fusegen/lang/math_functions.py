"""Functions of Python's ``math`` on run-time numbers: ``math.sqrt(1 - beta ** step)`` is arithmetic of the host at each call.

The module's functions are C and ask for a float at once, so that they are replaced while a trace runs. To anybody who calls them
with ordinary numbers (other threads too) they are as they were. A function that was imported by name is not replaced: it needs the
number, and its value selects code.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fusegen.ir.ops import Op
from fusegen.lang.scalars import TracedScalar, computed
from fusegen.lang.values import SymbolicSize
from fusegen.threads import new_lock

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


def _of(op: Op) -> Callable[..., Any]:
    return lambda x: computed(op, x)


def _log(x: Any, base: Any = None) -> Any:
    return computed(Op.LOG, x) if base is None else computed(Op.LOG, x) / math.log(base)


_TRACED: dict[str, Callable[..., Any]] = {name: _of(op) for name, op in _OPS.items()} | {
    "log": _log,
    "pow": lambda x, y: (x * 1.0) ** y,
    "fabs": lambda x: abs(x * 1.0),
    "isnan": lambda x: x != x,
    "isinf": lambda x: abs(x) == math.inf,
    "isfinite": lambda x: abs(x) < math.inf,
}
"""By name in ``math``; the first argument is a traced scalar."""


@contextmanager
def traced_math() -> Iterator[None]:
    """While it lasts, functions of ``math`` take run-time numbers."""
    global _traces
    with _LOCK:
        _traces += 1
        if _traces == 1:
            _replace()
    try:
        yield
    finally:
        with _LOCK:
            _traces -= 1
            if not _traces:
                for name, function in _ORIGINALS.items():
                    setattr(math, name, function)


def _replace() -> None:
    for name, traced in _TRACED.items():
        _ORIGINALS[name] = getattr(math, name)
        setattr(math, name, _wrapped(_ORIGINALS[name], traced))


def _wrapped(function: Callable[..., Any], traced: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        first = _number(args[0]) if args else None
        return function(*args) if first is None else traced(first, *args[1:])

    return call


def _number(value: Any) -> TracedScalar | None:
    """A run-time number; None of a Python number and of anything else."""
    if type(value) is SymbolicSize:
        value.tracer.require_literal_feature(value.expr)
        return value.tracer.scalar(value)
    return value if type(value) is TracedScalar else None
