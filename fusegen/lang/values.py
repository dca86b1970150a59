"""What a traced function sees: tensors without values, and sizes without numbers.

`TracedTensor` implements ``__torch_function__`` and Tensor's operators and methods; each call is looked up in the table
of `lang.registry` and becomes nodes of the graph. Everything that would need a value is an error that names the line.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
import sympy
import torch

from fusegen.errors import DimError, IndexRangeError, TraceError, UnsupportedError
from fusegen.ir.formula import operation
from fusegen.ir.graph import Node
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim, product, same, simplify_dim
from fusegen.lang import registry
from fusegen.lang.memory import Memory
from fusegen.lang.places import here, is_shown_to_user
from fusegen.lang.scalars import TracedScalar, computed, require_static

if TYPE_CHECKING:
    from fusegen.lang.argument import Argument
    from fusegen.lang.tracer import Tracer


def stale() -> TraceError:
    """The error of a value that is used outside of the trace that it belongs to."""
    return TraceError(
        "a value of another trace is used: it was stored (in an attribute, a global, a list) while a kernel was traced, and means "
        "nothing afterwards",
        where=here(),
        mend="return it from the kernel, and store what the call gives",
    )


_INT = type("int", (int, torch.SymInt), {})
"""What a size says it is while it is traced: `torch.arange` and others look for nothing but numbers and torch's own sizes."""


class SymbolicSize:
    """A run-time size in a traced function. Arithmetic stays symbolic; a comparison becomes a guard of the variant."""

    def __init__(self, tracer: Tracer, expr: sympy.Expr) -> None:
        self.tracer = tracer
        self.expr = expr

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class that ``isinstance`` sees: torch's sizes are ints."""
        return int if self.tracer.finished else _INT

    def _size(self, value: Dim) -> int | SymbolicSize:
        return self.tracer.size(simplify_dim(value))

    def __add__(self, other: object) -> Any:
        return self._number(Op.ADD, torch.add, other) if _is_value(other) else self._size(self.expr + dim_of(other))

    def __sub__(self, other: object) -> Any:
        return self._number(Op.SUB, torch.sub, other) if _is_value(other) else self._size(self.expr - dim_of(other))

    def __rsub__(self, other: object) -> Any:
        return self._number(Op.SUB, torch.sub, other, swapped=True) if _is_value(other) else self._size(dim_of(other) - self.expr)

    def __mul__(self, other: object) -> Any:
        return self._number(Op.MUL, torch.mul, other) if _is_value(other) else self._size(self.expr * dim_of(other))

    def __floordiv__(self, other: object) -> Any:
        if _is_value(other):
            return self._number(Op.FLOOR_DIVIDE, torch.floor_divide, other)
        return self._size(self.tracer.divide(self.expr, dim_of(other)))

    def __mod__(self, other: object) -> Any:
        return self._number(Op.REMAINDER, torch.remainder, other) if _is_value(other) else self - self // other * other

    def __rfloordiv__(self, other: object) -> Any:
        if _is_value(other):
            return self._number(Op.FLOOR_DIVIDE, torch.floor_divide, other, swapped=True)
        return self._size(self.tracer.divide(dim_of(other), self.expr))

    def __rmod__(self, other: object) -> Any:
        if _is_value(other):
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
        """As of an int, whose value the variant is then bound to."""
        return int(self).bit_length()

    def _number(self, op: Op, function: Callable[..., Any], other: object, *, swapped: bool = False) -> Any:
        """A function of the size as a number: a feature extent becomes literal, another size a run-time number."""
        self.tracer.require_literal_feature(self.expr)
        if isinstance(other, np.generic):  # numpy has rules of its own
            return operation(op)(other, int(self)) if swapped else operation(op)(int(self), other)
        size, number = self.tracer.scalar(self), self.tracer.as_scalar(_plain(other))
        if number is None:
            return registry.call(function, (other, size) if swapped else (size, other), {})
        return computed(op, *((number, size) if swapped else (size, number)))

    @property
    def _as_number(self) -> Any:
        """The size as a scalar, which compares with any number."""
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

    def __lt__(self, other: object) -> bool:
        other = _plain(other)
        if _is_value(other):
            return cast(bool, self._as_number < other)
        return self.tracer.decide(sympy.Lt(self.expr, dim_of(other)))

    def __le__(self, other: object) -> bool:
        other = _plain(other)
        if _is_value(other):
            return cast(bool, self._as_number <= other)
        return self.tracer.decide(sympy.Le(self.expr, dim_of(other)))

    def __gt__(self, other: object) -> bool:
        other = _plain(other)
        if _is_value(other):
            return cast(bool, self._as_number > other)
        return self.tracer.decide(sympy.Gt(self.expr, dim_of(other)))

    def __ge__(self, other: object) -> bool:
        other = _plain(other)
        if _is_value(other):
            return cast(bool, self._as_number >= other)
        return self.tracer.decide(sympy.Ge(self.expr, dim_of(other)))

    def __sym_max__(self, other: object) -> Any:
        """What ``torch.sym_max`` asks a size for."""
        return self if self >= other else other

    def __sym_min__(self, other: object) -> Any:
        """What ``torch.sym_min`` asks a size for."""
        return self if self <= other else other

    def __hash__(self) -> int:
        """That of the number, which it equals: the variant is then good for this value only."""
        return hash(int(self))

    def __index__(self) -> int:
        """The size as a number: the variant is then good for this value only."""
        return self.tracer.specialize(self.expr)

    __int__ = __index__

    def __float__(self) -> float:
        """The size as a number, as a scale such as 1/√d needs it: a feature extent becomes literal."""
        self.tracer.require_literal_feature(self.expr)
        self.tracer.require_no_parameter(self.expr)
        raise TraceError(
            f"the run-time size {self.expr} is used as a number",
            where=here(),
            mend="compute from a literal size (the last dim), or pass the number as a scalar parameter",
        )

    def __repr__(self) -> str:
        return str(self._shown)

    def __format__(self, spec: str) -> str:
        return format(self._shown, spec) if spec else str(self._shown)

    @property
    def _shown(self) -> Dim:
        """The number, in texts of the user's, which may also select code: the variant is then good for this value only. The formula
        in texts of ours, and where no value is known."""
        is_known = not self.tracer.finished and {str(symbol) for symbol in self.expr.free_symbols} <= self.tracer.hints.keys()
        return int(self) if is_known and is_shown_to_user() else self.expr


def _on_bits(function: Callable[[Any, Any], int], *, swapped: bool = False) -> Callable[[SymbolicSize, Any], int]:
    """An operation on a size's bits, of which nothing is symbolic: the variant is then good for this value only."""

    def apply(self: SymbolicSize, other: Any) -> int:
        return function(other, int(self)) if swapped else function(int(self), other)

    return apply


for _name in ("and_", "or_", "xor", "lshift", "rshift"):
    _bits = getattr(operator, _name)
    setattr(SymbolicSize, f"__{_name.strip('_')}__", _on_bits(_bits))
    setattr(SymbolicSize, f"__r{_name.strip('_')}__", _on_bits(_bits, swapped=True))


def _plain(value: object) -> object:
    """A number as Python has it: bools and numpy's."""
    if isinstance(value, np.generic):
        value = value.item()
    return int(value) if isinstance(value, bool) else value


def _is_value(value: object) -> bool:
    """Whether arithmetic with a size gives a number of the kernel, not another size."""
    return isinstance(value, (bool, float, np.generic, TracedScalar, TracedTensor, torch.Tensor))


def dim_of(value: object) -> Dim:
    """A size as the graph writes it.

    Raises:
        TraceError: when the value is no size.
    """
    if isinstance(value, SymbolicSize):
        if value.tracer.finished:
            raise stale()
        return value.expr
    if isinstance(value, TracedScalar):
        value.as_size()
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, TracedTensor):
        value.require_static()
        raise TraceError("a tensor is used as a size", where=here(), mend="use an int or a size of a traced tensor")
    raise TraceError(f"{value!r} is no size", where=here(), mend="use an int or a size of a traced tensor")


class TracedTensor:
    """A tensor (or run-time scalar) of the traced function: a node of the graph."""

    _argument: Argument | None = None  # the caller's tensor, of a parameter

    def __init__(self, tracer: Tracer, position: int, memory: Memory | None = None) -> None:
        self._tracer = tracer
        self._position = position
        self._memory = memory or Memory(position=position)
        self._writes, self._root = self._memory.writes, self._memory.value

    @property
    def _node(self) -> Node:
        if self._tracer.finished:
            raise stale()
        return self._tracer.builder.nodes[self._position]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return registry.call(func, args, kwargs or {})

    # What torch.Tensor knows without a value.

    @property
    def shape(self) -> Shape:
        """Sizes: literal ones as ints, the others symbolic."""
        return Shape(self._tracer.size(d) for d in self._node.shape)

    def size(self, dim: int | None = None) -> Any:
        """All sizes, or one."""
        if dim is not None and (isinstance(dim, bool) or not -self.ndim <= dim < self.ndim):
            raise DimError(f"size of dim {dim} of a tensor of {self.ndim} dims", where=here(), mend="count dims from 0, or from -1")
        return self.shape if dim is None else self.shape[dim]

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self._node.shape)

    def dim(self) -> int:
        """Number of dims."""
        return self.ndim

    def numel(self) -> int | SymbolicSize:
        """Number of elements."""
        return self._tracer.size(simplify_dim(product(self._node.shape)))

    ndimension, nelement = dim, numel

    def element_size(self) -> int:
        """Bytes of an element."""
        return self._node.dtype.itemsize

    @property
    def is_cuda(self) -> bool:
        """Whether the kernel is traced for a GPU."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """torch's dtype."""
        return self._node.dtype.torch

    @property
    def device(self) -> torch.device:
        """The device that the kernel is traced for."""
        return self._tracer.device

    @property
    def requires_grad(self) -> bool:
        """True if autograd records the value, by the tensors that it depends on; the answer becomes a guard."""
        return self._tracer.requires_grad(self._position)

    @property
    def T(self) -> Any:
        """The transpose of a matrix."""
        return registry.call(torch.Tensor.t, (self,), {})

    @property
    def mT(self) -> Any:
        """The transpose of the last two dims."""
        return registry.call(torch.adjoint, (self,), {})

    def is_floating_point(self) -> bool:
        """Whether the dtype is a float."""
        return self._node.dtype.is_float

    def is_complex(self) -> bool:
        """Always False: there are no complex numbers."""
        return False

    def __getattr__(self, name: str) -> Any:
        method = getattr(torch.Tensor, name, None)
        if method is None or name.startswith("__"):
            self._require_no_attribute(name)
            raise AttributeError(f"'Tensor' object has no attribute {name!r}")
        if not callable(method):
            raise UnsupportedError(
                f"Tensor.{name} cannot be traced", where=here(), mend="use functions of the tensor's values and sizes"
            )
        return lambda *args, **kwargs: registry.call(method, (self, *args), kwargs)

    def _require_no_attribute(self, name: str) -> None:
        """Refuses to read what the caller set on the tensor; that it is absent becomes a guard.

        Raises:
            UnsupportedError: the argument carries an attribute of that name.
        """
        if self._argument is None or name.startswith("__"):
            return
        argument = self._argument
        if name in argument.attributes:
            what = f"the kernel reads the attribute {name!r} that the argument {argument.name!r} carries, which is not traced"
            raise UnsupportedError(what, where=here(), mend=f"pass {argument.name}.{name} as a parameter of its own")
        self._tracer.outside.argument_asked(argument.name, name, False)

    def __getitem__(self, key: Any) -> Any:
        return registry.call(torch.Tensor.__getitem__, (self, key), {})

    def __len__(self) -> int:
        return int(self._leading())

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def _leading(self) -> int | SymbolicSize:
        if not self.ndim:
            raise TraceError("iteration over a scalar", where=here(), mend="unsqueeze it, or use it as it is")
        return self._tracer.size(self._node.shape[0])

    # What needs a value.

    def require_static(self) -> None:
        """Asks for the run-time scalars and sizes that this value is made of to select code instead; a tensor is left as it is.

        Raises:
            NeedsStatic: the value is made of run-time scalars, and of sizes.
            NeedsLiteral: it is made of sizes alone.
        """
        if self._node.weak:
            require_static(self)

    def __bool__(self) -> NoReturn:
        self.require_static()
        raise TraceError(
            "a branch on a tensor's value cannot be traced",
            where=here(),
            mend="use torch.where(condition, a, b); for a flag, annotate the parameter as bool",
        )

    def __float__(self) -> NoReturn:
        self.require_static()
        raise TraceError("a tensor's value is needed while tracing, when there is none", where=here(), mend="keep it a tensor")

    __int__ = __index__ = item = tolist = numpy = cpu = __float__

    def __setitem__(self, key: object, value: object) -> None:
        registry.call(torch.Tensor.__setitem__, (self, key, value), {})

    def __repr__(self) -> str:
        node = self._tracer.builder.nodes[self._position]  # of a finished trace as well
        return f"<traced {node.dtype.short}[{', '.join(map(str, node.shape))}]>"

    __hash__ = object.__hash__


def _operator(function: Callable[..., Any], *, swapped: bool = False) -> Callable[[TracedTensor, Any], Any]:
    def apply(self: TracedTensor, other: Any) -> Any:
        return registry.call(function, (other, self) if swapped else (self, other), {})

    return apply


def _equality(function: Callable[..., Any]) -> Callable[[TracedTensor, Any], Any]:
    """With what is no operand, as torch has it: Python then compares identities, so that ``x == None`` is False."""

    def apply(self: TracedTensor, other: Any) -> Any:
        return registry.call(function, (self, other), {}) if isinstance(other, _OPERANDS) else NotImplemented

    return apply


_OPERANDS = (TracedTensor, TracedScalar, SymbolicSize, torch.Tensor, np.generic, bool, int, float)


BINARY_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "truediv": torch.div,
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "pow": torch.pow,
    "matmul": torch.matmul,
    "and": torch.Tensor.__and__,
    "or": torch.Tensor.__or__,
    "xor": torch.Tensor.__xor__,
    "lshift": torch.Tensor.__lshift__,
    "rshift": torch.Tensor.__rshift__,
}
_EQUALITIES = {"eq": torch.eq, "ne": torch.ne}
_ORDERS = {"lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge}

OPERATORS: dict[Callable[..., Any], Callable[..., Any]] = {}
"""The operators of traced tensors by those of torch's tensors, some of which are no function of torch by another name."""


def _implement(name: str, operator: Callable[..., Any]) -> None:
    setattr(TracedTensor, name, operator)
    if hasattr(torch.Tensor, name):
        OPERATORS[getattr(torch.Tensor, name)] = operator


for _name, _function in BINARY_OPERATORS.items():
    _implement(f"__{_name}__", _operator(_function))
    _implement(f"__r{_name}__", _operator(_function, swapped=True))
for _name, _function in _EQUALITIES.items():
    _implement(f"__{_name}__", _equality(_function))
for _name, _function in _ORDERS.items():
    _implement(f"__{_name}__", _operator(_function))
for _name, _unary in {"neg": torch.neg, "abs": torch.abs, "invert": torch.Tensor.__invert__}.items():
    _implement(f"__{_name}__", lambda self, _f=_unary: registry.call(_f, (self,), {}))


# The sizes of a traced tensor, as a tuple that behaves like ``torch.Size``.


class Shape(tuple[Any, ...]):
    """The sizes of a traced tensor: a ``torch.Size`` whose elements may be run-time sizes."""

    __slots__ = ()

    def numel(self) -> Any:
        """The product of the sizes."""
        return math.prod(self)

    def __getitem__(self, key: Any) -> Any:
        try:
            found = super().__getitem__(key)
        except IndexError:
            what = f"the size of dim {key} of a tensor of {len(self)} dims"
            raise IndexRangeError(what, where=here(), mend="give a tensor that has the dim") from None
        return Shape(found) if isinstance(key, slice) else found

    def __add__(self, other: Any) -> Any:
        return Shape(super().__add__(tuple(other))) if isinstance(other, tuple) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return Shape((*other, *self)) if isinstance(other, tuple) else NotImplemented

    def __mul__(self, count: Any) -> Any:
        return Shape(super().__mul__(count))

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"torch.Size([{', '.join(map(repr, self))}])"
