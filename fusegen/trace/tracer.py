"""The tracer: the state of one trace, shared by all its traced values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
import sympy
import torch

from fusegen.dtypes import SATURATES, DType, from_torch
from fusegen.errors import TraceError, UnsupportedError
from fusegen.ir.formula import evaluate, extract, formula
from fusegen.ir.formula import relation as relation_of
from fusegen.ir.graph import GraphBuilder, InputSpec, ScalarProgram, dependencies
from fusegen.ir.infer import MismatchError, broadcast
from fusegen.ir.ops import DtypeRule, Family, Op
from fusegen.ir.symbolic import Dim, FloorDiv, exact_quotient, literal, same
from fusegen.program.numbers import ERRORS
from fusegen.trace.memory import TracedMemory, is_torch_view, require_current, require_filled, store
from fusegen.trace.modes import flat, require_wide, without_overflow
from fusegen.trace.scalars import Fact, NeedsFact, SizeSum, SymbolicSize, TracedScalar, stale
from fusegen.trace.user import CallerTensor, location, user_line
from fusegen.trace.values import StrongTracedTensor, TracedTensor

_NOT_FOR_BOOL = frozenset(
    {Op.NEG, Op.ABS, Op.SIGN, Op.FLOOR, Op.CEIL, Op.TRUNC, Op.ROUND, Op.FLOOR_DIVIDE, Op.REMAINDER, Op.POW, Op.RELU, Op.SQUARE}
)
"""Operations that are undefined for bool; torch refuses most of them as well."""


_UNCHECKED = object()


def _hooks_on_saved() -> object:
    """The innermost saved-tensor hooks, which checkpoints install; None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


class CaptureRecorder(Protocol):
    def input_of(self, tensor: torch.Tensor) -> InputSpec:
        """Returns a captured tensor as an input; raises `TraceError` if later calls cannot find it again."""

    def observe(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Records the result of a torch query of captured tensors during the trace, such as sizes or values."""

    def observe_argument(self, parameter: str, attribute: str, answer: bool) -> None:
        """Records a query of a tensor argument and its result: the presence of an attribute, or ``requires_grad``."""


class Tracer:
    """The state of one trace: the graph under construction, and the guards.

    Args:
        hints: example values of the symbolic sizes, by name; may be incomplete.
        device: the device that ``x.device`` reports.
        recorder: describes captured tensors.
        numbers: values of the run-time scalars in this call, by name.
    """

    def __init__(
        self,
        name: str,
        hints: Mapping[str, int],
        device: torch.device,
        recorder: CaptureRecorder,
        numbers: Mapping[str, int | float] | None = None,
    ) -> None:
        self.builder = GraphBuilder(name)
        self.hints = dict(hints)
        self.device = device
        self.guards: dict[sympy.Basic, None] = {}
        self.captured: dict[int, tuple[torch.Tensor, TracedTensor]] = {}
        self.memories: list[TracedMemory] = []  # of the parameters
        self._arguments: dict[int, CallerTensor] = {}
        self.recorder = recorder
        self.numbers = dict(numbers or {})
        self.parameter_sizes: dict[str, str] = {}  # int parameters that are used as sizes, by symbol
        self.tied: frozenset[str] = frozenset()  # int parameters that share symbols with dims of equal size
        self.needs: NeedsFact | None = None
        self._conditions: dict[int, None] = {}
        self.switches_gradients = False
        self.records = torch.is_grad_enabled()
        self._hooks: object = _UNCHECKED
        self.finished = False  # its traced values are invalid from then on
        self._streams = itertools.count()

    def refuse_hooks(self) -> None:
        """Makes later operations fail under saved-tensor hooks other than the current ones."""
        self._hooks = _hooks_on_saved()

    # Values.

    def value(self, position: int, memory: TracedMemory | None = None) -> TracedTensor:
        """Wraps a node for the user's function; `memory` is the aliased memory of a view."""
        kind = TracedTensor if self.builder.nodes[position].weak else StrongTracedTensor
        return kind(self, position, memory)

    def parameter(self, spec: InputSpec, argument: CallerTensor, *, declared: bool) -> TracedTensor:
        """Adds a tensor parameter; `declared` means that the kernel declares to mutate it."""
        position = self.builder.input(spec)
        self.memories.append(TracedMemory(argument.parameter, declared=declared, position=position))
        value = self.value(position, self.memories[-1])
        value._argument = self._arguments[position] = argument
        return value

    def requires_grad(self, position: int) -> bool:
        """True if autograd records a value, because a tensor that it depends on requires a gradient."""
        sources = dependencies(self.builder.nodes, position)
        answers = [self._leaf_requires_grad(source) for source in sources]
        return any(answers) and (position in sources or torch.is_grad_enabled())

    def _leaf_requires_grad(self, source: int) -> bool:
        if source in self._arguments:
            argument = self._arguments[source]
            self.recorder.observe_argument(argument.name, "requires_grad", argument.requires_grad)
            return argument.requires_grad
        tensor = next((tensor for tensor, value in self.captured.values() if value._position == source), None)
        if tensor is None:
            return False
        with torch._C.DisableTorchFunction():
            answer = tensor.requires_grad
        self.recorder.observe(torch.Tensor.requires_grad.__get__, (tensor,), {}, answer)  # type: ignore[attr-defined]
        return answer

    def stored(self) -> list[int]:
        for memory in self.memories:
            if memory.value != memory.version:
                store(self.builder, memory)
        return [memory.version for memory in self.memories if memory.is_written]

    def add(self, op: Op, *args: TracedTensor, **attrs: object) -> TracedTensor:
        if self.finished or any(a._tracer is not self for a in args):
            raise stale()
        if self._hooks is not _UNCHECKED and self._hooks != _hooks_on_saved():
            raise UnsupportedError(
                "its saved tensors are checkpointed, or have hooks",
                where=user_line(),
                hint="use checkpoints and hooks outside of the kernel",
            )
        for operand in args:
            require_current(operand)
            if operand._memory.unfilled and (op.family is not Family.VIEW or op is Op.CONCAT):
                require_filled(operand)
        require_wide(op, [a._node.dtype for a in args])
        if op is Op.CAST and attrs["dtype"] is DType.FLOAT8_E4M3FN and not SATURATES:
            args = (without_overflow(args[0]),)
        positions = [self._operand(op, a) for a in args]
        numbers = {name: value for name, value in attrs.items() if name in op.row.numbers and type(value) is TracedScalar}
        if numbers:
            positions += [self.lift(value)._position for value in numbers.values()]
            attrs = {name: value for name, value in attrs.items() if name not in numbers} | {"numbers": tuple(numbers)}
        _require_numbers(attrs.values())
        try:
            position = self.builder.add(op, positions, location=location(), **attrs)
            value = self.value(position, self._memory_of(op, args, position))
        except MismatchError as error:
            self.require_equal(error.sizes)
            raise
        if torch.get_default_dtype() is not torch.float32:
            _check_default_dtype(op, args, value)
        if op in _NOT_FOR_BOOL and all(a._node.dtype is DType.BOOL for a in args):
            raise TraceError(f"{op.row.name} of bool is not supported", where=user_line(), hint="convert to a numeric dtype first")
        return self._without_elements(value) if 0 in value._node.shape else value

    def _memory_of(self, op: Op, args: Sequence[TracedTensor], position: int) -> TracedMemory | None:
        """The existing memory that a new view aliases; None for a value with its own memory."""
        if op.family is not Family.VIEW or op is Op.CONCAT:
            return None
        memory = args[0]._memory
        return None if op is Op.RESHAPE and self.is_copied(position, memory) else memory

    def is_copied(self, position: int, memory: TracedMemory, *, contiguous: bool = False) -> bool:
        """True if torch copies a view of a declared parameter to reshape it or make it contiguous.

        If so, guards record which sizes are 1: a view with other sizes of 1 may need no copy.
        """
        if not memory.declared or is_torch_view(self.builder, position, memory, contiguous=contiguous):
            return False
        dims = self.builder.nodes[memory.version].shape
        for symbol in sorted({s for dim in dims for s in getattr(dim, "free_symbols", ())}, key=str):
            self.decide(sympy.Eq(symbol, 1))
        return True

    def _without_elements(self, value: TracedTensor) -> TracedTensor:
        """Replaces an empty value by a constant, so that nothing is read for it and no index is divided by its sizes."""
        kind, shape = value._node.dtype, value._node.shape
        zero = self.builder.constant(False if kind is DType.BOOL else 0.0 if kind.is_float else 0, dtype=kind)
        return self.value(self.builder.add(Op.EXPAND, [zero], shape=shape))

    def new_stream(self) -> int:
        return next(self._streams)

    def lift(self, value: object) -> TracedTensor:
        """Converts any operand to a traced value: numbers become constants, captured tensors inputs."""
        if isinstance(value, TracedTensor):
            if value._tracer is not self:
                raise stale()
            require_current(value)
            return value
        if type(value) is TracedScalar:
            if value._tracer is not self:
                raise stale()
            return TracedTensor(self, value._position)
        if isinstance(value, SymbolicSize):
            return TracedTensor(self, self.builder.size(value.expr))
        if isinstance(value, np.generic):
            value = float(value) if isinstance(value, np.bool_) else value.item()  # torch treats it as a float
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise TraceError(f"the number {value} does not fit 64 bits", hint="use a float")
        if isinstance(value, (bool, int, float)):
            return self.value(self.builder.constant(value))
        if isinstance(value, torch.Tensor):
            return self._capture(value)
        raise TraceError(
            f"a {type(value).__name__} cannot be used in a kernel", where=user_line(), hint="pass a tensor or a number"
        )

    def _capture(self, tensor: torch.Tensor) -> TracedTensor:
        if self.finished:
            raise stale()
        if id(tensor) not in self.captured:
            spec = self.recorder.input_of(tensor)
            position = self.builder.input(spec)
            self.captured[id(tensor)] = (tensor, self.value(position, TracedMemory(spec.name, captured=True, position=position)))
        return self.captured[id(tensor)][1]

    def constant(self, value: float | int | bool, dtype: DType | None = None) -> TracedTensor:
        """Adds a literal; with a dtype, a zero-dimensional tensor of that type."""
        return self.value(self.builder.constant(value, dtype=dtype))

    def _operand(self, op: Op, value: TracedTensor) -> int:
        """An operand's node; outside of pointwise operations, a number becomes a tensor of torch's default dtype."""
        node = value._node
        if op.family in (Family.POINTWISE, Family.LEAF) or not node.weak:
            return value._position
        dtype = from_torch(torch.get_default_dtype()) if node.dtype.is_float else node.dtype
        return self.builder.add(Op.CAST, [value._position], location=location(), dtype=dtype)

    # Numbers.

    def scalar(self, value: object) -> TracedScalar:
        return value if type(value) is TracedScalar else TracedScalar(self, self.lift(value)._position)

    def as_scalar(self, value: object) -> TracedScalar | None:
        is_number = type(value) in (TracedScalar, SymbolicSize, int, float)
        return self.scalar(value) if is_number else None

    def is_tensor(self, value: object) -> bool:
        return isinstance(value, (TracedTensor, torch.Tensor))

    def add_number(self, op: Op, *positions: int) -> int:
        return self.builder.add(op, positions, location=location())

    def decide_number(self, condition: TracedScalar) -> bool:
        """Evaluates a comparison of numbers in this call and records it as a condition of the variant."""
        try:
            holds = bool(evaluate(self.builder.nodes, condition._position, self.numbers, self.hints))
        except ERRORS:
            condition.number()
        except KeyError as missing:
            message = f"the function needs the value of {missing}, which is unknown here"
            raise TraceError(message, where=user_line(), hint="lower with example tensors and numbers") from None
        position = condition._position if holds else self.add_number(Op.LOGICAL_NOT, condition._position)
        self._conditions[position] = None
        return holds

    def conditions(self) -> ScalarProgram:
        return extract(self.builder.nodes, [(str(number), position) for number, position in enumerate(self._conditions)])

    def refuse_number(self, position: int) -> NoReturn:
        raise TraceError(
            f"a run-time size is used as a number by {self.builder.nodes[position].op.row.name}",
            where=user_line(),
            hint="compute from a literal size (the last dim), or pass the number as a scalar parameter",
        )

    def restart(self, fact: Fact, *names: str, total: SizeSum | None = None) -> NoReturn:
        """Aborts the trace, to be restarted with a fact. If the function catches the exception, the trace fails at its end."""
        need = NeedsFact(fact, names, total)
        self.needs = self.needs or need
        raise need

    def can_be_sizes(self, names: Iterable[str]) -> bool:
        """True if scalars can become size symbols: ints other than 0, 1 and negative ones, which are specialized."""
        return all(type(self.numbers.get(name)) is int for name in names)

    def require_no_parameter(self, expr: object) -> None:
        """Specializes int parameters that are used as sizes, because their values are needed."""
        symbols = {str(s) for s in getattr(expr, "free_symbols", ())} & self.parameter_sizes.keys()
        if symbols:
            self.restart("static", *sorted(self.parameter_sizes[name] for name in symbols))

    # Sizes.

    def size(self, dim: Dim) -> int | SymbolicSize:
        """Returns a size for the user's function: an int or a symbolic size."""
        if self.finished:
            raise stale()
        value = literal(dim)
        return SymbolicSize(self, dim) if value is None else value

    def divide(self, a: Dim, b: Dim) -> Dim:
        """Divides sizes with Python's rounding and errors; exact if that can be proved."""
        if same(b, 0):
            raise ZeroDivisionError("integer division or modulo by zero")
        quotient = exact_quotient(a, b)
        if quotient is not None:
            return quotient
        if not self._is_positive(b):
            a, b = -a, -b
        if self._is_positive(a + 1):
            return FloorDiv(sympy.sympify(a), sympy.sympify(b))
        return -FloorDiv(sympy.expand(b - 1 - a), sympy.sympify(b))  # the dividend is non-negative here as well

    def _is_positive(self, size: Dim) -> bool:
        """True if a size is positive; adds a guard if that is not certain."""
        relation = sympy.Gt(sympy.expand(size), 0)
        return self.decide(relation)

    def decide(self, relation: sympy.Basic) -> bool:
        """Evaluates a relation of sizes in this call; it becomes a guard unless it always holds."""
        if self.finished:
            raise stale()
        if relation in (sympy.true, sympy.false):
            return bool(relation)
        holds = relation_of(relation)(self._known_sizes(relation))
        self.guards[relation if holds else sympy.Not(relation)] = None
        return holds

    def specialize(self, expr: sympy.Expr) -> int:
        """Returns the value of a size, and specializes the variant to it."""
        if self.finished:
            raise stale()
        self.require_no_parameter(expr)
        value = formula(expr)(self._known_sizes(expr))
        self.guards[sympy.Eq(expr, value)] = None
        return value

    def require_literal(self, *dims: Dim) -> None:
        """Makes sizes with known values literal. First, int parameters share the symbols of equal dims, which may suffice."""
        size = self._size_to_make_literal(dims)
        if size is not None:
            self.restart("literal", size)

    def _size_to_make_literal(self, dims: Sequence[Dim]) -> str | None:
        """A symbolic input size with a known value that occurs in some dims."""
        symbols = {str(symbol) for dim in dims for symbol in getattr(dim, "free_symbols", ())}
        untied = {name for symbol, name in self.parameter_sizes.items() if symbol in symbols} - self.tied
        if untied:
            self.restart("tied", *sorted(untied))
        for dim in dims:
            self.require_no_parameter(dim)
            for symbol in sorted(getattr(dim, "free_symbols", ()), key=str):
                if symbol.name in self.hints:
                    return str(symbol.name)
        return None

    def require_literal_feature(self, dim: Dim) -> None:
        """Makes a size literal if it depends only on last dims; leading sizes vary between calls and stay symbolic."""
        symbols = {symbol.name for symbol in getattr(dim, "free_symbols", ())}
        if symbols <= set(dict(self.builder.bounds)):
            self.require_literal(dim)

    def expects_at_most(self, dim: Dim, most: int) -> bool:
        """True if a size is known to be at most a number in this call; adds no guard."""
        return self._are_known([dim]) and formula(dim)(self.hints) <= most

    def _are_known(self, dims: Iterable[Dim]) -> bool:
        return all(symbol.name in self.hints for dim in dims for symbol in getattr(dim, "free_symbols", ()))

    def require_literal_features(self) -> None:
        """Makes every size of last dims literal, for functions that take plain numbers only."""
        for name, _ in self.builder.bounds:
            self.require_literal(sympy.Symbol(name))

    def common_shape(self, *shapes: Sequence[Dim]) -> tuple[Dim, ...]:
        try:
            return broadcast([tuple(shape) for shape in shapes])
        except MismatchError as error:
            self.require_equal(error.sizes)
            raise

    def require_equal(self, sizes: Sequence[tuple[Dim, Dim]]) -> None:
        """Handles pairs of sizes that are not provably equal.

        If all pairs are equal in this call, restarts the trace with a size as the sum of others, or as a literal. Else adds a
        guard on the pair that differs.
        """
        if not self._are_known(itertools.chain(*sizes)):
            return
        for left, right in sizes:
            if formula(left)(self.hints) != formula(right)(self.hints):
                self.decide(sympy.Eq(left, right))
                return
        size = self._size_to_make_literal(list(itertools.chain(*sizes)))
        if size is not None:
            self.restart("literal", size, total=next(filter(None, itertools.starmap(_sum_of, sizes)), None))

    def _known_sizes(self, expr: sympy.Basic) -> dict[str, int]:
        missing = [s.name for s in expr.free_symbols if s.name not in self.hints]
        if missing:
            raise TraceError(
                f"the function needs the value of the size {missing[0]}, which is symbolic here",
                where=user_line(),
                hint="lower with example tensors, or avoid branching on this size",
            )
        return {s.name: self.hints[s.name] for s in expr.free_symbols}


def _require_numbers(values: Iterable[object]) -> None:
    """Specializes numbers in attributes for which the graph has no node."""
    for value in flat(values):
        if isinstance(value, TracedScalar):
            value.number()
        if isinstance(value, SymbolicSize):
            float(value)


def _sum_of(left: Dim, right: Dim) -> SizeSum | None:
    """Expresses one of two sizes as the other one, if that is a sum of symbols and a number. Returns None if neither is.

    A literal that equals a single symbol does not count: it is a coincidence, or a feature's extent.
    """
    for size, total in ((right, left), (left, right)):
        terms = sympy.Add.make_args(sympy.sympify(total))
        symbols = tuple(str(term) for term in terms if term.is_Symbol)
        numbers = [int(term) for term in terms if term.is_Integer]
        if left == right or not symbols or len(symbols) + len(numbers) < len(terms) or str(size) in symbols:
            continue
        if getattr(size, "is_Symbol", False):
            return str(size), symbols, sum(numbers)
        if literal(size) is not None and len(terms) > 1:
            return int(size), symbols, sum(numbers)
    return None


def _check_default_dtype(op: Op, args: Sequence[TracedTensor], value: TracedTensor) -> None:
    """Refuses an integer operation whose result has torch's default dtype if that is not float32."""
    if value._node.dtype is not DType.FLOAT32 or value._node.weak or op.row.result is DtypeRule.EXPLICIT:
        return
    if not any(a._node.dtype is DType.FLOAT32 and not a._node.weak for a in args):
        message = f"{op.row.name} of integers gives torch's default dtype, which is {torch.get_default_dtype()} here"
        raise TraceError(message, where=user_line(), hint="cast first, e.g. by .to(torch.float32)")
