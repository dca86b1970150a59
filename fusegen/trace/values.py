"""Traced tensors: stand-ins for the caller's tensors, without values.

`TracedTensor` implements ``__torch_function__`` and Tensor's operators and methods; each call is looked up in `trace.registry` and
adds nodes to the graph. Operations that need a value raise an error that names the line.

`StrongTracedTensor` is also a ``torch.Tensor``, so that ``isinstance`` answers as without a kernel. The underlying tensor is empty
and never used. Members of ``torch.Tensor`` are replaced one by one, because torch's own would first parse their arguments and
reject run-time sizes; calls that still reach torch's operations are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from fusegen.errors import DimError, IndexRangeError, ShapeError, TraceError, UnsupportedError
from fusegen.ir.graph import Node
from fusegen.ir.symbolic import product, same, simplify_dim
from fusegen.trace import registry
from fusegen.trace.memory import TracedMemory, overwrite
from fusegen.trace.scalars import SymbolicSize, TracedScalar, require_static, stale
from fusegen.trace.user import user_line

if TYPE_CHECKING:
    from fusegen.trace.tracer import Tracer
    from fusegen.trace.user import CallerTensor


class TracedTensor:
    """A tensor (or run-time scalar) of the traced function: a node of the graph."""

    _argument: CallerTensor | None = None  # the caller's tensor, for a parameter

    def __init__(self, tracer: Tracer, position: int, memory: TracedMemory | None = None) -> None:
        self._tracer = tracer
        self._position = position
        self._memory = memory or TracedMemory(position=position)
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

    # Properties that need no value.

    @property
    def shape(self) -> TracedShape:
        return TracedShape(self._tracer.size(d) for d in self._node.shape)

    def size(self, dim: int | None = None) -> Any:
        if dim is not None and (isinstance(dim, bool) or not -self.ndim <= dim < self.ndim):
            raise DimError(
                f"dim {dim} does not exist in a tensor of {self.ndim} dims",
                where=user_line(),
                hint="count dims from 0, or from -1 at the end",
            )
        return self.shape if dim is None else self.shape[dim]

    @property
    def ndim(self) -> int:
        return len(self._node.shape)

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int | SymbolicSize:
        return self._tracer.size(simplify_dim(product(self._node.shape)))

    ndimension, nelement = dim, numel

    def element_size(self) -> int:
        return self._node.dtype.itemsize

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return self._node.dtype.torch

    @property
    def device(self) -> torch.device:
        return self._tracer.device

    @property
    def requires_grad(self) -> bool:
        """True if autograd records the value; the answer becomes a guard."""
        return self._tracer.requires_grad(self._position)

    @property
    def T(self) -> Any:
        return registry.call(torch.Tensor.t, (self,), {})

    @property
    def mT(self) -> Any:
        return registry.call(torch.adjoint, (self,), {})

    def is_floating_point(self) -> bool:
        return self._node.dtype.is_float

    def is_complex(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        method = getattr(torch.Tensor, name, None)
        if method is None or name.startswith("__"):
            self._require_no_attribute(name)
            raise AttributeError(f"'Tensor' object has no attribute {name!r}")
        if not callable(method):
            raise UnsupportedError(
                f"Tensor.{name} cannot be traced", where=user_line(), hint="use functions of the tensor's values and sizes"
            )
        return lambda *args, **kwargs: registry.call(method, (self, *args), kwargs)

    def _require_no_attribute(self, name: str) -> None:
        """Refuses to read an attribute that the caller set on the tensor; its absence becomes a guard."""
        if self._argument is None or name.startswith("__"):
            return
        argument = self._argument
        if name in argument.attributes:
            message = f"the kernel reads the attribute {name!r} of the argument {argument.name!r}, which is not traced"
            raise UnsupportedError(message, where=user_line(), hint=f"pass {argument.name}.{name} as a separate parameter")
        self._tracer.recorder.observe_argument(argument.name, name, False)

    def __getitem__(self, key: Any) -> Any:
        return registry.call(torch.Tensor.__getitem__, (self, key), {})

    def __len__(self) -> int:
        return int(self._leading())

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def _leading(self) -> int | SymbolicSize:
        if not self.ndim:
            raise TraceError(
                "a tensor without dims cannot be iterated", where=user_line(), hint="use the tensor itself, or unsqueeze it"
            )
        return self._tracer.size(self._node.shape[0])

    # Operations that need a value.

    def require_static(self) -> None:
        """Specializes the run-time scalars and sizes of a number; does nothing for a tensor."""
        if self._node.weak:
            require_static(self)

    def __bool__(self) -> NoReturn:
        self.require_static()
        raise TraceError(
            "a branch on a tensor's value cannot be traced",
            where=user_line(),
            hint="use torch.where(condition, a, b); for a flag, annotate the parameter as bool",
        )

    def __float__(self) -> NoReturn:
        self.require_static()
        raise TraceError(
            "a tensor's value is needed, but it has none during a trace",
            where=user_line(),
            hint="compute with the tensor by torch's functions, or pass the number as a parameter",
        )

    __int__ = __index__ = item = tolist = numpy = cpu = __float__

    def __setitem__(self, key: object, value: object) -> None:
        registry.call(torch.Tensor.__setitem__, (self, key, value), {})

    def __repr__(self) -> str:
        node = self._tracer.builder.nodes[self._position]  # also after the trace
        return f"<traced {node.dtype.short}[{', '.join(map(str, node.shape))}]>"

    __hash__ = object.__hash__


def _equality(function: Callable[..., Any]) -> Callable[[TracedTensor, Any], Any]:
    """Returns NotImplemented for other types, like torch: Python then compares identities, so that ``x == None`` is False."""

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
_OTHER_OPERATORS: dict[str, Callable[..., Any]] = {
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
    "neg": torch.neg, "abs": torch.abs, "invert": torch.Tensor.__invert__,
}  # fmt: skip

OPERATORS: dict[Callable[..., Any], Callable[..., Any]] = {}
"""Traced operators by torch.Tensor's operator methods, some of which have no equivalent torch function."""


def _implement(name: str, operator: Callable[..., Any]) -> None:
    setattr(TracedTensor, name, operator)
    if hasattr(torch.Tensor, name):
        OPERATORS[getattr(torch.Tensor, name)] = operator


for _name, _function in BINARY_OPERATORS.items():
    _implement(f"__{_name}__", registry.calling(_function))
    _implement(f"__r{_name}__", registry.calling(_function, swapped=True))
for _name, _function in _EQUALITIES.items():
    _implement(f"__{_name}__", _equality(_function))
for _name, _function in _OTHER_OPERATORS.items():
    _implement(f"__{_name}__", registry.calling(_function))


class TracedShape(tuple[Any, ...]):
    __slots__ = ()

    def numel(self) -> Any:
        return math.prod(self)

    def __getitem__(self, key: Any) -> Any:
        try:
            sizes = super().__getitem__(key)
        except IndexError:
            message = f"dim {key} does not exist in a tensor of {len(self)} dims"
            raise IndexRangeError(message, where=user_line(), hint="pass a tensor that has the dim") from None
        return TracedShape(sizes) if isinstance(key, slice) else sizes

    def __add__(self, other: Any) -> Any:
        return TracedShape(super().__add__(tuple(other))) if isinstance(other, tuple) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return TracedShape((*other, *self)) if isinstance(other, tuple) else NotImplemented

    def __mul__(self, count: Any) -> Any:
        return TracedShape(super().__mul__(count))

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"torch.Size([{', '.join(map(repr, self))}])"


_EMPTY = torch.empty(0, device="meta")


class StrongTracedTensor(TracedTensor, torch.Tensor):  # type: ignore[misc,override]
    """A traced tensor that torch accepts as one; numbers (weak nodes) are plain `TracedTensor` objects."""

    def __new__(cls, *_: object) -> StrongTracedTensor:
        return torch.Tensor._make_subclass(cls, _EMPTY)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the caller's tensor, for ``isinstance``; torch.Tensor for computed values."""
        return torch.Tensor if self._argument is None else self._argument.type

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> NoReturn:
        raise UnsupportedError(
            f"torch's {func} needs a tensor's elements, but tensors have none during a trace",
            where=user_line(),
            hint="write it with torch's functions and operators, or call it outside of the kernel",
        )

    def __copy__(self) -> TracedTensor:
        return self

    def __deepcopy__(self, memo: object) -> TracedTensor:
        """Returns a copy: later writes to a parameter do not change it."""
        return registry.call(torch.clone, (self,), {}) if self._memory.declared else self

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec) if not spec else self._refused(f"formatting a tensor by {spec!r}")

    def __setattr__(self, name: str, value: object) -> None:
        """Allows new attributes; refuses torch's own attributes and attributes on parameters."""
        own = vars(self)
        if name not in own and (own.get("_argument") is not None or hasattr(torch.Tensor, name)) and not name.startswith("__"):
            self._refused(f"setting Tensor.{name}")
        object.__setattr__(self, name, value)

    def _refused(self, message: str) -> NoReturn:
        raise UnsupportedError(
            f"{message} cannot be traced", where=user_line(), hint="use functions of the tensor's values and sizes"
        )

    # Constant properties: kernel tensors are dense and have no gradient history.

    data = property(lambda self: registry.call(torch.Tensor.detach, (self,), {}))
    real = property(lambda self: self)
    layout = property(lambda self: torch.strided)
    is_cpu = property(lambda self: self.device.type == "cpu")
    itemsize = property(TracedTensor.element_size)
    nbytes = property(lambda self: self.numel() * self.element_size())
    H = property(
        lambda self: (
            registry.call(torch.Tensor.t, (self,), {}) if self.ndim in (0, 2) else self._refused("Tensor.H of a non-matrix")
        )
    )
    mH = TracedTensor.mT


def _in_place(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: assigned(name, self, registry.call(function, (self, other), {}))


def assigned(name: str, target: TracedTensor, result: TracedTensor) -> TracedTensor:
    """Performs an in-place operation: all aliases of the target refer to a new value of the same shape and dtype."""
    if not torch.can_cast(result.dtype, target.dtype):
        message = f"{name} in place: the result is {result.dtype}, which cannot be stored as {target.dtype}"
        raise TraceError(message, where=user_line(), hint="write x = x + y, or convert an operand, as torch requires too")
    shapes = result._node.shape, target._node.shape
    if len(shapes[0]) != len(shapes[1]) or not all(map(same, *shapes)):
        message = f"{name} in place: the result has shape {result.shape}, the tensor {target.shape}"
        raise ShapeError(message, where=user_line(), hint="write x = x + y")
    overwrite(target, registry.call(torch.Tensor.to, (result, target.dtype), {}))
    return target


_FALSE_FLAGS = """
    is_ipu is_maia is_meta is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr is_vulkan is_xla is_xpu
    retains_grad
"""
"""Tensor kinds that kernels do not support."""

_ALWAYS_FALSE = frozenset(_FALSE_FLAGS.split())
_SPECIAL = """
    __array__ __complex__ __contains__ __cuda_array_interface__ __delitem__ __dlpack__ __dlpack_device__ __pos__ __reduce_ex__
    __reversed__
"""
"""Special methods that must be replaced, because torch does not route them through ``__torch_function__``."""

_REPLACED_SPECIAL = frozenset(_SPECIAL.split())


def _replaced(name: str) -> Any:
    member = getattr(torch.Tensor, name)
    if callable(member):
        return registry.calling(member)
    return property(lambda self: False if name in _ALWAYS_FALSE else self._refused(f"Tensor.{name}"))


for _name in dir(torch.Tensor):
    if (_name in _REPLACED_SPECIAL or not _name.startswith("__")) and _name not in {*vars(StrongTracedTensor), *vars(TracedTensor)}:
        setattr(StrongTracedTensor, _name, _replaced(_name))
for _name, _function in BINARY_OPERATORS.items():
    if _name != "matmul":  # torch has no in-place matmul
        setattr(StrongTracedTensor, f"__i{_name}__", _in_place(_name, _function))
