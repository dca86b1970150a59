"""What a traced tensor is to torch: a real ``torch.Tensor``, so that ``isinstance`` answers as it does without a kernel.

The tensor underneath is empty and never asked for anything. Members of ``torch.Tensor`` are replaced one by one, as torch's
own would first read their arguments, among which a run-time size is no number; what still reaches torch's operations is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from fusegen.errors import ShapeError, TraceError, UnsupportedError
from fusegen.ir.symbolic import same
from fusegen.lang import registry
from fusegen.lang.memory import overwrite
from fusegen.lang.places import here
from fusegen.lang.values import BINARY_OPERATORS, TracedTensor

_EMPTY = torch.empty(0, device="meta")


class StrongTracedTensor(TracedTensor, torch.Tensor):  # type: ignore[misc,override]
    """A tensor of the traced function; a number of it, which is weak, is a `TracedTensor` alone."""

    def __new__(cls, *_: object) -> StrongTracedTensor:
        """A tensor for torch to recognise."""
        return torch.Tensor._make_subclass(cls, _EMPTY)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class that ``isinstance`` sees: that of the caller's tensor; what the function computes is a plain tensor."""
        return torch.Tensor if self._argument is None else self._argument.type

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> NoReturn:
        """Refuses what torch computes without asking ``__torch_function__``.

        Raises:
            UnsupportedError: always; there are no elements.
        """
        raise UnsupportedError(
            f"torch's {func} needs a tensor's elements while tracing, when there are none",
            where=here(),
            mend="write it with torch's functions and operators, or call it outside of the kernel",
        )

    def __copy__(self) -> TracedTensor:
        """The value itself, as torch has it."""
        return self

    def __deepcopy__(self, memo: object) -> TracedTensor:
        """A value that no write to a parameter changes."""
        return registry.call(torch.clone, (self,), {}) if self._memory.declared else self

    def __format__(self, spec: str) -> str:
        """As it prints; a number's format needs a number.

        Raises:
            UnsupportedError: with a format.
        """
        return format(repr(self), spec) if not spec else self._refused(f"the format {spec!r} of a tensor")

    def __setattr__(self, name: str, value: object) -> None:
        """Sets an attribute that torch's tensors do not have.

        Raises:
            UnsupportedError: for those that they have, and of an argument, which is the caller's.
        """
        own = vars(self)
        if name not in own and (own.get("_argument") is not None or hasattr(torch.Tensor, name)) and not name.startswith("__"):
            self._refused(f"setting Tensor.{name}")
        object.__setattr__(self, name, value)

    def _refused(self, what: str) -> NoReturn:
        raise UnsupportedError(f"{what} cannot be traced", where=here(), mend="use functions of the tensor's values and sizes")

    # What is the same for every tensor of a kernel: dense, without a history of gradients.

    data = property(lambda self: registry.call(torch.Tensor.detach, (self,), {}))
    real = property(lambda self: self)
    layout = property(lambda self: torch.strided)
    is_cpu = property(lambda self: self.device.type == "cpu")
    itemsize = property(TracedTensor.element_size)
    nbytes = property(lambda self: self.numel() * self.element_size())
    H = property(
        lambda self: registry.call(torch.Tensor.t, (self,), {}) if self.ndim in (0, 2) else self._refused("H of no matrix")
    )
    mH = TracedTensor.mT


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: TracedTensor, *args: Any, **kwargs: Any) -> Any:
        return registry.call(function, (self, *args), kwargs)

    return call


def _in_place(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: assigned(name, self, registry.call(function, (self, other), {}))


def assigned(name: str, target: TracedTensor, result: TracedTensor) -> TracedTensor:
    """An operation in place: a new value, of the old one's shape and dtype, which all names of the tensor then mean.

    Args:
        name: of the operation.
        target: the tensor, which is given back.
        result: what the operation gives.

    Raises:
        TraceError: the tensor's dtype does not hold the result.
        ShapeError: the result has another shape.
        UnsupportedError: the tensor is a parameter that the kernel does not declare to write to.
    """
    if not torch.can_cast(result.dtype, target.dtype):
        what = f"{name} in place: the result is {result.dtype}, which {target.dtype} does not hold"
        raise TraceError(what, where=here(), mend="write x = x + y, or convert an operand, as torch asks as well")
    shapes = result._node.shape, target._node.shape
    if len(shapes[0]) != len(shapes[1]) or not all(map(same, *shapes)):
        what = f"{name} in place: the result has the shape {result.shape}, the tensor {target.shape}"
        raise ShapeError(what, where=here(), mend="write x = x + y")
    overwrite(target, registry.call(torch.Tensor.to, (result, target.dtype), {}))
    return target


def _refusal(name: str) -> property:
    return property(lambda self: self._refused(f"Tensor.{name}"))


def _never() -> property:
    return property(lambda self: False)


_SORTS = """
    is_ipu is_maia is_meta is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr is_vulkan is_xla is_xpu
    retains_grad
"""
"""What no tensor of a kernel is."""

_NEVER = frozenset(_SORTS.split())
_SPECIAL = """
    __array__ __complex__ __contains__ __cuda_array_interface__ __delitem__ __dlpack__ __dlpack_device__ __pos__ __reduce_ex__
    __reversed__
"""
"""Members with underscores that torch does not ask ``__torch_function__`` about as we want it."""

_OTHERS = frozenset(_SPECIAL.split())


def _replaced(name: str) -> Any:
    """What stands for a member of torch's tensors."""
    member = getattr(torch.Tensor, name)
    return _method(member) if callable(member) else _never() if name in _NEVER else _refusal(name)


for _name in dir(torch.Tensor):
    if (_name in _OTHERS or not _name.startswith("__")) and _name not in {*vars(StrongTracedTensor), *vars(TracedTensor)}:
        setattr(StrongTracedTensor, _name, _replaced(_name))
for _name, _function in BINARY_OPERATORS.items():
    if _name != "matmul":  # which torch does not have in place
        setattr(StrongTracedTensor, f"__i{_name}__", _in_place(_name, _function))
