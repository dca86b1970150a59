"""The tracer: runs the user's function once on traced values and keeps the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from torch.overrides import TorchFunctionMode

from fusegen.dtypes import DType
from fusegen.errors import TraceError
from fusegen.ir.graph import Graph, GraphBuilder, InputSpec
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim, FloorDiv, exact_quotient, literal, simplify_dim
from fusegen.lang import registry
from fusegen.lang.places import here, location
from fusegen.lang.values import SymbolicSize, TracedTensor

HiddenSpec: TypeAlias = Callable[[torch.Tensor], InputSpec]


@dataclass(frozen=True)
class Trace:
    """What tracing found: the graph, what it assumed of sizes, and the tensors that the function closes over."""

    graph: Graph
    guards: tuple[sympy.Basic, ...]
    hidden: tuple[tuple[str, torch.Tensor], ...]
    returns_tuple: bool


class NeedsLiteral(Exception):
    """A size must be literal for what the function does with it; whoever traces starts again with it so."""

    def __init__(self, size: str) -> None:
        self.size = size
        super().__init__(size)


class Tracer:
    """State of one trace: the graph in the making, and the guards.

    Args:
        name: the function's name.
        hints: example values of the symbolic sizes, by name; may be incomplete.
        device: what ``x.device`` answers.
        hidden_spec: describes a closed-over tensor as an input.
    """

    def __init__(self, name: str, hints: Mapping[str, int], device: torch.device, hidden_spec: HiddenSpec) -> None:
        self.builder = GraphBuilder(name)
        self.hints = dict(hints)
        self.device = device
        self.guards: dict[sympy.Basic, None] = {}
        self.hidden: dict[int, tuple[torch.Tensor, TracedTensor]] = {}
        self._hidden_spec = hidden_spec

    # Values.

    def add(self, op: Op, *args: TracedTensor, **attrs: object) -> TracedTensor:
        """A new value."""
        positions = [a._position for a in args]
        return TracedTensor(self, self.builder.add(op, positions, location=location(), **attrs))

    def lift(self, value: object) -> TracedTensor:
        """Any operand as a traced value: numbers become constants, closed-over tensors hidden inputs."""
        if isinstance(value, TracedTensor):
            return value
        if isinstance(value, (bool, int, float)):
            return TracedTensor(self, self.builder.constant(value))
        if isinstance(value, torch.Tensor):
            return self._close_over(value)
        if isinstance(value, SymbolicSize):
            return TracedTensor(self, self.builder.size(value.expr))
        raise TraceError(f"a {type(value).__name__} cannot take part in a kernel", where=here(), mend="pass a tensor or a number")

    def _close_over(self, tensor: torch.Tensor) -> TracedTensor:
        if id(tensor) not in self.hidden:
            spec = self._hidden_spec(tensor)
            self.hidden[id(tensor)] = (tensor, TracedTensor(self, self.builder.input(spec)))
        return self.hidden[id(tensor)][1]

    def constant(self, value: float | int | bool, dtype: DType | None = None) -> TracedTensor:
        """A literal; with a dtype, as a zero-dimensional tensor of that type."""
        return TracedTensor(self, self.builder.constant(value, dtype=dtype))

    # Sizes.

    def size(self, dim: Dim) -> int | SymbolicSize:
        """A size as the user's function sees it."""
        value = literal(dim)
        return SymbolicSize(self, dim) if value is None else value

    def divide(self, a: sympy.Expr, b: Dim) -> Dim:
        """The quotient of a size; exact where that can be seen."""
        quotient = exact_quotient(a, b)
        return FloorDiv(a, sympy.sympify(b)) if quotient is None else quotient

    def decide(self, relation: sympy.Basic) -> bool:
        """The truth of a relation of sizes, which becomes a guard unless it always holds.

        Raises:
            TraceError: when an example size is missing.
        """
        if relation in (sympy.true, sympy.false):
            return bool(relation)
        holds = bool(relation.subs(self._hinted(relation)))
        self.guards[relation if holds else sympy.Not(relation)] = None
        return holds

    def specialize(self, expr: sympy.Expr) -> int:
        """The value of a size, which the variant is then bound to."""
        value = int(expr.subs(self._hinted(expr)))
        self.guards[sympy.Eq(expr, value)] = None
        return value

    def require_literal(self, dim: Dim) -> None:
        """Asks for a size to be literal.

        Raises:
            NeedsLiteral: it is an input's symbolic size whose value is known.
        """
        if isinstance(dim, sympy.Symbol) and dim.name in self.hints:
            raise NeedsLiteral(dim.name)

    def _hinted(self, expr: sympy.Basic) -> dict[sympy.Symbol, int]:
        missing = [s.name for s in expr.free_symbols if s.name not in self.hints]
        if missing:
            raise TraceError(
                f"the function needs the value of the size {missing[0]}, which is symbolic here",
                where=here(),
                mend="lower with example tensors, or avoid branching on this size",
            )
        return {s: self.hints[s.name] for s in expr.free_symbols}


class _Mode(TorchFunctionMode):
    """Catches calls that have no traced operand, such as torch.arange, while a trace is running."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        creator = registry.creator_of(func)
        if creator is not None and not types:
            return creator(self.tracer, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def trace(tracer: Tracer, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Trace:
    """Runs a function on traced values.

    Args:
        tracer: a fresh tracer, whose inputs have been made.
        function: the user's function.
        args: traced values and static values, as the function takes them.
        kwargs: likewise.

    Raises:
        TraceError: when the function does something that no kernel can do.
    """
    with _Mode(tracer):
        returned = function(*args, **kwargs)
    results = returned if isinstance(returned, (tuple, list)) else (returned,)
    outputs = [_output(tracer, value)._position for value in results]
    graph = tracer.builder.build(outputs)
    hidden = tuple((str(value._node.attr("name")), tensor) for tensor, value in tracer.hidden.values())
    return Trace(graph, tuple(tracer.guards), hidden, isinstance(returned, (tuple, list)))


def _output(tracer: Tracer, value: object) -> TracedTensor:
    if value is None:
        raise TraceError("the kernel returns None", mend="return a tensor or a tuple of tensors")
    result = tracer.lift(value)
    shape = tuple(simplify_dim(d) for d in result._node.shape)
    if result._node.weak:
        raise TraceError("the kernel returns a number, not a tensor", mend="return a tensor that depends on an input")
    return result if shape == result._node.shape else tracer.add(Op.RESHAPE, result, shape=shape)
