"""Run-time numbers in a traced function: parameters that are ints or floats, sizes in arithmetic with floats, what is made of them.

A `TracedScalar` does as a Python number does. Arithmetic with numbers becomes weak nodes, which the host evaluates at each call
(`passes.hoist`). A comparison is decided by the value that it has in this call, and becomes a condition of the variant. What needs
the number itself (``math.sqrt(s)``, ``f"{s}"``, ``range(n)``) asks for the trace to begin again with the value in its place.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

import numpy as np
import torch

from fusegen.ir.graph import Node
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim
from fusegen.lang import registry

if TYPE_CHECKING:
    from fusegen.lang.tracer import Tracer


class NeedsStatic(Exception):
    """Run-time scalars are used where only a number will do; whoever traces starts again with their values."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        super().__init__(", ".join(names))


class NeedsSize(NeedsStatic):
    """Run-time ints are used as sizes; whoever traces starts again with symbols in their place."""


class NeedsTie(NeedsStatic):
    """Ints that are used as sizes must equal other sizes, as they do in this call; whoever traces starts again with one symbol for
    those that are equal."""


class _Traced(Protocol):
    @property
    def _tracer(self) -> Tracer: ...

    @property
    def _position(self) -> int: ...

    @property
    def _node(self) -> Node: ...


def leaves_of(value: _Traced) -> list[Node]:
    """The scalars, sizes and constants that a number is made of."""
    nodes = value._tracer.builder.nodes
    below = {value._position: None}
    stack = [value._position]
    while stack:
        new = [a for a in nodes[stack.pop()].args if a not in below]
        below.update(dict.fromkeys(new))
        stack += new
    return [nodes[p] for p in below if not nodes[p].args]


def require_static(value: _Traced) -> None:
    """Asks for the run-time scalars and sizes that a number is made of to select code instead.

    Raises:
        NeedsStatic: the value is made of run-time scalars, and of sizes.
        NeedsLiteral: it is made of sizes alone.
    """
    leaves = leaves_of(value)
    names = sorted({str(leaf.attr("name")) for leaf in leaves if leaf.op is Op.SCALAR})
    if names:
        value._tracer.start_again(NeedsStatic(tuple(names)))
    for leaf in leaves:
        if leaf.op is Op.SIZE:
            value._tracer.require_literal(cast(Dim, leaf.attr("size")))


class TracedScalar:
    """A number of the traced function that is known at each call only: a weak node of the graph."""

    __array_ufunc__ = None  # numpy leaves operators to this class

    def __init__(self, tracer: Tracer, position: int) -> None:
        self._tracer = tracer
        self._position = position

    @property
    def _node(self) -> Node:
        return self._tracer.builder.nodes[self._position]

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class that ``isinstance`` sees: the number's own type."""
        return number_type(self)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return registry.call(func, args, kwargs or {})

    def as_size(self) -> NoReturn:
        """Asks for the ints that it is made of to become sizes where that can be, else to select code.

        Raises:
            NeedsSize, NeedsStatic: always, but of sizes alone.
        """
        names = {str(leaf.attr("name")) for leaf in leaves_of(self) if leaf.op is Op.SCALAR}
        if names and self._tracer.can_be_sizes(names):
            self._tracer.start_again(NeedsSize(tuple(sorted(names))))
        self.number()

    def number(self, *args: object, **kwargs: object) -> NoReturn:
        """What only a number can do.

        Raises:
            NeedsStatic, NeedsLiteral: always, but for a size that has no value.
        """
        require_static(self)
        self._tracer.refuse_number(self._position)

    def __getattr__(self, name: str) -> Any:
        kind = number_type(self)
        if not hasattr(kind, name) or name.startswith("__"):
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        self.number()

    def __index__(self) -> NoReturn:
        """torch asks sizes for it where it takes them one by one."""
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
_OF_INTS = (Op.BITWISE_AND, Op.BITWISE_OR, Op.BITWISE_XOR, Op.LEFT_SHIFT, Op.RIGHT_SHIFT)


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
    """A number that meets a scalar; None of what is no number. One that Python alone can compute with needs the value."""
    if type(other) is bool:
        other = int(other)
    if type(other) is not int or -(2**63) <= other < 2**63:
        found = scalar._tracer.as_scalar(other)
        if found is not None or not isinstance(other, (numbers.Number, np.generic)):
            return found
    return scalar.number()


def computed(op: Op, *operands: TracedScalar) -> Any:
    """The result of an operation of numbers: a number, or the truth of a comparison."""
    tracer = operands[0]._tracer
    if op in _OF_INTS and any(o._node.dtype.is_float for o in operands):
        operands[0].number()
    if op is Op.POW:
        operands = (_base(*operands), operands[1])
    result = TracedScalar(tracer, tracer.add_number(op, *(o._position for o in operands)))
    if result._node.dtype.torch is not torch.bool:
        return result
    holds = tracer.decide_number(result)
    return np.bool_(holds) if number_type(result) is np.float64 else holds


def number_type(value: _Traced) -> type:
    """The type that Python would see: numpy's where a scalar of numpy's takes part."""
    numbers = value._tracer.numbers
    if any(type(numbers.get(str(leaf.attr("name")))) is np.float64 for leaf in leaves_of(value) if leaf.op is Op.SCALAR):
        return np.float64
    return float if value._node.dtype.is_float else int


def _base(base: Any, exponent: Any) -> Any:
    """The base of a power: of ints with a negative exponent, which Python computes in floats, a float."""
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
