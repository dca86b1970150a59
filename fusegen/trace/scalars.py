"""Run-time numbers in a traced function: int and float parameters, sizes, and arithmetic on them.

A `TracedScalar` behaves like a Python number. Arithmetic adds weak nodes, which the host evaluates at each call (`passes.hoist`). A
comparison is decided by its value in this call and becomes a condition of the variant. Operations that need the number itself
(``math.sqrt(s)``, ``f"{s}"``, ``range(n)``) restart the trace with the value as a constant.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, TypeAlias, cast

import numpy as np
import sympy
import torch

from fusegen.errors import TraceError
from fusegen.ir.formula import operation
from fusegen.ir.graph import Node
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim, same, simplify_dim
from fusegen.trace import registry
from fusegen.trace.user import is_shown_to_user, user_line

if TYPE_CHECKING:
    from fusegen.trace.tracer import Tracer


Fact: TypeAlias = Literal["static", "sizes", "tied", "literal"]
SizeSum: TypeAlias = tuple[str | int, tuple[str, ...], int]
"""A size's name or a literal extent; the sizes whose sum it is; an integer constant added to the sum."""


class NeedsFact(Exception):
    """Restarts the trace with a fact.

    Args:
        fact: "static" to specialize scalars, "sizes" to turn ints into size symbols, "tied" to let these share symbols with dims of
            equal size, "literal" to make a size literal.
        total: a sum that can replace the literal size, if a parameter's dim has that size.
    """

    def __init__(self, fact: Fact, names: tuple[str, ...], total: SizeSum | None = None) -> None:
        self.fact, self.names, self.total = fact, names, total
        super().__init__(f"{fact}: {', '.join(names)}")


class _Traced(Protocol):
    @property
    def _tracer(self) -> Tracer: ...

    @property
    def _position(self) -> int: ...

    @property
    def _node(self) -> Node: ...


def leaves_of(value: _Traced) -> list[Node]:
    """Returns the scalars, sizes and constants that a number depends on."""
    nodes = value._tracer.builder.nodes
    seen = {value._position: None}
    stack = [value._position]
    while stack:
        unseen = [a for a in nodes[stack.pop()].args if a not in seen]
        seen.update(dict.fromkeys(unseen))
        stack += unseen
    return [nodes[p] for p in seen if not nodes[p].args]


def require_static(value: _Traced) -> None:
    """Specializes the run-time scalars that a number depends on; if there are none, its sizes."""
    leaves = leaves_of(value)
    names = sorted({str(leaf.attr("name")) for leaf in leaves if leaf.op is Op.SCALAR})
    if names:
        value._tracer.restart("static", *names)
    for leaf in leaves:
        if leaf.op is Op.SIZE:
            value._tracer.require_literal(cast(Dim, leaf.attr("size")))


class TracedScalar:
    """A number that is only known at each call: a weak node of the graph."""

    __array_ufunc__ = None  # numpy leaves operators to this class

    def __init__(self, tracer: Tracer, position: int) -> None:
        self._tracer = tracer
        self._position = position

    @property
    def _node(self) -> Node:
        return self._tracer.builder.nodes[self._position]

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return number_type(self)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return registry.call(func, args, kwargs or {})

    def as_size(self) -> NoReturn:
        """Turns the ints that the number depends on into sizes if possible, else specializes them."""
        names = {str(leaf.attr("name")) for leaf in leaves_of(self) if leaf.op is Op.SCALAR}
        if names and self._tracer.can_be_sizes(names):
            self._tracer.restart("sizes", *sorted(names))
        self.number()

    def number(self, *args: object, **kwargs: object) -> NoReturn:
        require_static(self)
        self._tracer.refuse_number(self._position)

    def __getattr__(self, name: str) -> Any:
        kind = number_type(self)
        if not hasattr(kind, name) or name.startswith("__"):
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        self.number()

    def __index__(self) -> NoReturn:
        """Called by torch for each size argument."""
        self.as_size()

    def __bool__(self: Any) -> bool:
        return bool(self != 0)

    def __copy__(self) -> TracedScalar:
        return self

    def __deepcopy__(self, memo: object) -> TracedScalar:
        return self

    def __pos__(self) -> TracedScalar:
        return self

    def __divmod__(self: Any, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self: Any, other: Any) -> Any:
        return other // self, other % self


_NEED_THE_NUMBER = [
    "float",
    "int",
    "trunc",
    "round",
    "floor",
    "ceil",
    "complex",
    "hash",
    "str",
    "repr",
    "format",
    "reduce_ex",
    "array",
    "invert",
]
_BINARY: dict[str, tuple[Op, Callable[..., Any]]] = {
    "add": (Op.ADD, torch.add),
    "sub": (Op.SUB, torch.sub),
    "mul": (Op.MUL, torch.mul),
    "truediv": (Op.DIV, torch.div),
    "floordiv": (Op.FLOOR_DIVIDE, torch.floor_divide),
    "mod": (Op.REMAINDER, torch.remainder),
    "pow": (Op.POW, torch.pow),
    "and": (Op.BITWISE_AND, torch.Tensor.__and__),
    "or": (Op.BITWISE_OR, torch.Tensor.__or__),
    "xor": (Op.BITWISE_XOR, torch.Tensor.__xor__),
    "lshift": (Op.LEFT_SHIFT, torch.Tensor.__lshift__),
    "rshift": (Op.RIGHT_SHIFT, torch.Tensor.__rshift__),
}
_COMPARISONS: dict[str, tuple[Op, Callable[..., Any]]] = {
    "eq": (Op.EQ, torch.eq),
    "ne": (Op.NE, torch.ne),
    "lt": (Op.LT, torch.lt),
    "le": (Op.LE, torch.le),
    "gt": (Op.GT, torch.gt),
    "ge": (Op.GE, torch.ge),
}
_INTEGER_OPS = (Op.BITWISE_AND, Op.BITWISE_OR, Op.BITWISE_XOR, Op.LEFT_SHIFT, Op.RIGHT_SHIFT)


def _operator(op: Op, function: Callable[..., Any], *, swapped: bool = False) -> Callable[[TracedScalar, Any], Any]:
    def apply(self: TracedScalar, other: Any) -> Any:
        if self._tracer.is_tensor(other):
            return registry.call(function, (other, self) if swapped else (self, other), {})
        number = _number(self, other)
        if number is None:
            return NotImplemented
        pair = (number, self) if swapped else (self, number)
        return computed(op, *pair)

    return apply


def _number(scalar: TracedScalar, other: Any) -> TracedScalar | None:
    """Converts an operand to a scalar; None for other types. Numbers that only Python can compute with are specialized."""
    if type(other) is bool:
        other = int(other)
    if type(other) is not int or -(2**63) <= other < 2**63:
        number = scalar._tracer.as_scalar(other)
        if number is not None or not isinstance(other, (numbers.Number, np.generic)):
            return number
    return scalar.number()


def computed(op: Op, *operands: TracedScalar) -> Any:
    """Computes an operation of numbers: a number, or the truth of a comparison."""
    tracer = operands[0]._tracer
    if op in _INTEGER_OPS and any(o._node.dtype.is_float for o in operands):
        operands[0].number()
    if op is Op.POW:
        operands = (_base(*operands), operands[1])
    result = TracedScalar(tracer, tracer.add_number(op, *(o._position for o in operands)))
    if result._node.dtype.torch is not torch.bool:
        return result
    holds = tracer.decide_number(result)
    return np.bool_(holds) if number_type(result) is np.float64 else holds


def number_type(value: _Traced) -> type:
    """Returns the type that Python would compute: numpy's if an operand is a numpy scalar."""
    scalars = value._tracer.numbers
    if any(type(scalars.get(str(leaf.attr("name")))) is np.float64 for leaf in leaves_of(value) if leaf.op is Op.SCALAR):
        return np.float64
    return float if value._node.dtype.is_float else int


def _base(base: Any, exponent: Any) -> Any:
    """Returns the base of a power, as a float if an int has a negative exponent."""
    if base._node.dtype.is_float or exponent._node.dtype.is_float or exponent >= 0:
        return base
    return base * 1.0


def _unary(op: Op) -> Callable[[TracedScalar], Any]:
    return lambda self: computed(op, self)


for _name, (_op, _function) in _BINARY.items():
    setattr(TracedScalar, f"__{_name}__", _operator(_op, _function))
    setattr(TracedScalar, f"__r{_name}__", _operator(_op, _function, swapped=True))
for _name, (_op, _function) in _COMPARISONS.items():
    setattr(TracedScalar, f"__{_name}__", _operator(_op, _function))
for _name in _NEED_THE_NUMBER:
    setattr(TracedScalar, f"__{_name}__", TracedScalar.number)
for _name, _op in {"neg": Op.NEG, "abs": Op.ABS}.items():
    setattr(TracedScalar, f"__{_name}__", _unary(_op))


def stale() -> TraceError:
    """Returns the error for a value that is used outside of its trace."""
    return TraceError(
        "a value of another trace is used: a kernel stored it in an attribute, a global or a list, but it is "
        "valid only during its own trace",
        where=user_line(),
        hint="return it from the kernel, and store the call's result",
    )


_INT = type("int", (int, torch.SymInt), {})
"""The class of a traced size: `torch.arange` and others only accept numbers and torch's own sizes."""


def _comparison(
    function: Callable[[Any, Any], bool], relation: Callable[[Any, Any], sympy.Basic]
) -> Callable[[SymbolicSize, object], bool]:
    """Returns a comparison of sizes. With an int or a size it adds a guard, with a float or run-time number a condition."""

    def compare(self: SymbolicSize, other: object) -> bool:
        other = _plain(other)
        if self._is_value(other):
            return function(self._as_number, other)
        return self.tracer.decide(relation(self.expr, dim_of(other)))

    return compare


class SymbolicSize:
    """A run-time size in a traced function. Arithmetic stays symbolic; a comparison becomes a guard of the variant."""

    def __init__(self, tracer: Tracer, expr: sympy.Expr) -> None:
        self.tracer = tracer
        self.expr = expr

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return int if self.tracer.finished else _INT

    def _size(self, value: Dim) -> int | SymbolicSize:
        return self.tracer.size(simplify_dim(value))

    def __add__(self, other: object) -> Any:
        return self._number(Op.ADD, torch.add, other) if self._is_value(other) else self._size(self.expr + dim_of(other))

    def __sub__(self, other: object) -> Any:
        return self._number(Op.SUB, torch.sub, other) if self._is_value(other) else self._size(self.expr - dim_of(other))

    def __rsub__(self, other: object) -> Any:
        return (
            self._number(Op.SUB, torch.sub, other, swapped=True) if self._is_value(other) else self._size(dim_of(other) - self.expr)
        )

    def __mul__(self, other: object) -> Any:
        return self._number(Op.MUL, torch.mul, other) if self._is_value(other) else self._size(self.expr * dim_of(other))

    def __floordiv__(self, other: object) -> Any:
        if self._is_value(other):
            return self._number(Op.FLOOR_DIVIDE, torch.floor_divide, other)
        return self._size(self.tracer.divide(self.expr, dim_of(other)))

    def __mod__(self, other: object) -> Any:
        return self._number(Op.REMAINDER, torch.remainder, other) if self._is_value(other) else self - self // other * other

    def __rfloordiv__(self, other: object) -> Any:
        if self._is_value(other):
            return self._number(Op.FLOOR_DIVIDE, torch.floor_divide, other, swapped=True)
        return self._size(self.tracer.divide(dim_of(other), self.expr))

    def __rmod__(self, other: object) -> Any:
        if self._is_value(other):
            return self._number(Op.REMAINDER, torch.remainder, other, swapped=True)
        return other - other // self * self  # a size or an int

    def __divmod__(self, other: object) -> tuple[Any, Any]:
        return self // other, self % other

    def __rdivmod__(self, other: object) -> tuple[Any, Any]:
        return other // self, other % self

    def __truediv__(self, other: object) -> Any:
        return self._number(Op.DIV, torch.div, other)

    def __rtruediv__(self, other: object) -> Any:
        return self._number(Op.DIV, torch.div, other, swapped=True)

    def __pow__(self, other: object) -> Any:
        return self._number(Op.POW, torch.pow, other)

    def __rpow__(self, other: object) -> Any:
        return other ** int(self)  # type: ignore[operator]

    def __neg__(self) -> Any:
        return self._size(-self.expr)

    def __abs__(self) -> Any:
        return self if self >= 0 else -self

    def bit_length(self) -> int:
        return int(self).bit_length()

    def _number(self, op: Op, function: Callable[..., Any], other: object, *, swapped: bool = False) -> Any:
        """Applies a function to the size as a number: a feature extent becomes literal, another size a run-time number."""
        self.tracer.require_literal_feature(self.expr)
        if isinstance(other, np.generic):  # numpy has its own rules
            return operation(op)(other, int(self)) if swapped else operation(op)(int(self), other)
        size, number = self.tracer.scalar(self), self.tracer.as_scalar(_plain(other))
        if number is None:
            return registry.call(function, (other, size) if swapped else (size, other), {})
        return computed(op, *((number, size) if swapped else (size, number)))

    def _is_value(self, other: object) -> bool:
        """True if arithmetic with the operand gives a number or tensor instead of a size."""
        return isinstance(other, (bool, float, np.generic, TracedScalar)) or self.tracer.is_tensor(other)

    @property
    def _as_number(self) -> Any:
        return self.tracer.scalar(self)

    __radd__, __rmul__ = __add__, __mul__

    def __bool__(self) -> bool:
        return self != 0

    def __eq__(self, other: object) -> bool:
        other = _plain(other)
        if isinstance(other, (float, TracedScalar)):
            return bool(self._as_number == other)
        if not isinstance(other, (int, SymbolicSize)):
            return NotImplemented
        return same(self.expr, dim_of(other)) or self.tracer.decide(sympy.Eq(self.expr, dim_of(other)))

    __lt__ = _comparison(operator.lt, sympy.Lt)
    __le__ = _comparison(operator.le, sympy.Le)
    __gt__ = _comparison(operator.gt, sympy.Gt)
    __ge__ = _comparison(operator.ge, sympy.Ge)

    def __sym_max__(self, other: object) -> Any:
        return self if self >= other else other

    def __sym_min__(self, other: object) -> Any:
        return self if self <= other else other

    def __hash__(self) -> int:
        """Hashes the value; specializes the variant to it."""
        return hash(int(self))

    def __index__(self) -> int:
        return self.tracer.specialize(self.expr)

    __int__ = __index__

    def __float__(self) -> float:
        """Used for scales such as 1/√d: makes a feature extent literal."""
        self.tracer.require_literal_feature(self.expr)
        self.tracer.require_no_parameter(self.expr)
        raise TraceError(
            f"the run-time size {self.expr} is used as a float, but its value is not part of the trace",
            where=user_line(),
            hint="compute from a literal size (the last dim), or pass the number as a scalar parameter",
        )

    def __repr__(self) -> str:
        return str(self._shown)

    def __format__(self, spec: str) -> str:
        return format(self._shown, spec) if spec else str(self._shown)

    @property
    def _shown(self) -> Dim:
        """The text of the size. The user's strings get the value, which specializes the variant to it; fusegen's messages get the
        formula."""
        is_known = not self.tracer.finished and {str(symbol) for symbol in self.expr.free_symbols} <= self.tracer.hints.keys()
        return int(self) if is_known and is_shown_to_user() else self.expr


def _on_bits(function: Callable[[Any, Any], int], *, swapped: bool = False) -> Callable[[SymbolicSize, Any], int]:
    def apply(self: SymbolicSize, other: Any) -> int:
        return function(other, int(self)) if swapped else function(int(self), other)

    return apply


for _name in ("and_", "or_", "xor", "lshift", "rshift"):
    _bits = getattr(operator, _name)
    setattr(SymbolicSize, f"__{_name.strip('_')}__", _on_bits(_bits))
    setattr(SymbolicSize, f"__r{_name.strip('_')}__", _on_bits(_bits, swapped=True))


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        value = value.item()
    return int(value) if isinstance(value, bool) else value


def dim_of(value: object) -> Dim:
    """Converts an int or a traced size to a graph size."""
    if isinstance(value, SymbolicSize):
        if value.tracer.finished:
            raise stale()
        return value.expr
    if isinstance(value, TracedScalar):
        value.as_size()
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    if hasattr(value, "require_static"):  # a traced tensor
        value.require_static()
        raise TraceError("a tensor cannot be a size", where=user_line(), hint="use an int or a size of a traced tensor")
    raise TraceError(f"{value!r} is not a size", where=user_line(), hint="use an int or a size of a traced tensor")
