"""Arguments of a call: memory layout, cache keys, and validation at the first call of a kind.

Kernels read addresses. So a tensor must not have the negative bit, wrap another tensor, or be tracked by a transform of torch.func:
its values would not be the numbers at its address. A tensor without memory would crash the process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fusegen.dtypes import autocast_dtype
from fusegen.errors import ArgumentError, GradientError
from fusegen.guards.values import contents, exact_key, has_identity, is_plain

# Memory layout.


WIDE = (1 << 31) - (1 << 22)
"""Element count from which on indices need 64 bits: below it, a launch rounded up to whole blocks still fits 31 bits."""

MAX_ALIGNMENT = 16
"""Bytes of the widest access."""


def alignment(tensor: torch.Tensor, is_symbol: Sequence[bool]) -> int:
    """Returns the bytes, up to 16, that divide the address and every symbolic stride; a tensor without memory uses its offset.

    Args:
        is_symbol: for each dim, whether its stride is symbolic.
    """
    itemsize = tensor.element_size()
    bits = tensor.data_ptr() if has_memory(tensor) else int(tensor.storage_offset()) * itemsize
    for value, counts in zip(tensor.stride(), is_symbol, strict=True):
        if counts:
            bits |= value * itemsize
    return min(MAX_ALIGNMENT, bits & -bits) if bits else MAX_ALIGNMENT


def has_memory(tensor: torch.Tensor) -> bool:
    """Returns False for meta and fake tensors."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def span(tensor: torch.Tensor) -> int:
    """Returns the number of elements from the first to the last one in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0


# Cache keys: each argument contributes one part.


LEAST, GREATEST = -(2**63), 2**63 - 1
"""Range of run-time integers."""

Values: TypeAlias = Sequence[Any]
CallKey: TypeAlias = tuple[object, ...]
_NUMBERS = (int, float, np.float64)
_ODD = "odd"  # key part of a tensor that no kernel accepts
_TOO_WIDE = "too wide"  # key part of an integer beyond 64 bits, which the checks reject


def key_function(statics: Sequence[bool]) -> Callable[[Values], CallKey]:
    """Generates the function from the arguments of a call to its cache key, with ordinary tensors and floats handled inline.

    Args:
        statics: for each argument, whether a program is bound to its value.
    """
    names = [f"v{position}" for position in range(len(statics))]
    lines = [f"{', '.join(names)}, = values"] if names else []
    for position, (name, static) in enumerate(zip(names, statics, strict=True)):
        branches = (*_OF_A_TENSOR, *(() if static else _OF_A_NUMBER), *_OF_ANYTHING)
        lines += [line.format(v=name, k=f"k{position}", static=static) for line in branches]
    # The default dtype affects torch.ones(n) and int * 0.5; autocast converts operands.
    context = "default_dtype(), any_autocast() and autocast_dtypes()"
    lines.append(f"return ({''.join(f'k{position}, ' for position in range(len(names)))}{context})")
    scope: dict[str, Any] = {"Tensor": Tensor, "part": part}
    scope |= {"recording": torch.is_grad_enabled, "default_dtype": torch.get_default_dtype}
    scope |= {"any_autocast": is_any_autocast_enabled, "autocast_dtypes": _autocast_dtypes}
    exec(compile("\n    ".join(["def key(values):", *lines]), "<key>", "exec"), scope)
    function: Callable[[Values], CallKey] = scope["key"]
    return function


_OF_A_TENSOR = (
    "if type({v}) is Tensor and (a := {v}.data_ptr()) and not a & 15 and not {v}.is_neg():",
    "    {k} = ({v}.dtype, {v}.device, {v}.shape, {v}.stride(), 0, {v}.requires_grad and recording(), Tensor)",
)
_OF_A_NUMBER = ("elif type({v}) is float:", "    {k} = float")
_OF_ANYTHING = ("else:", "    {k} = part({v}, {static})")
"""Key parts as in `part`; the first two cover most tensors and floats without a call."""


def _autocast_dtypes() -> tuple[torch.dtype | None, ...]:
    return tuple(map(autocast_dtype, ("cpu", "cuda")))


def part(value: Any, is_static: bool) -> object:
    """Returns the key part of an argument."""
    if isinstance(value, Tensor):
        return tensor_part(value)
    if not is_static and is_scalar(value):
        return type(value) if not isinstance(value, int) or LEAST <= value <= GREATEST else _TOO_WIDE
    return static_part(value)


def tensor_part(value: Tensor) -> object:
    kind = type(value)
    grad = value.requires_grad and torch.is_grad_enabled()
    address = value.data_ptr() if kind is Tensor or has_memory(value) else 0
    low = address & 15
    is_odd = not address or value.is_neg()
    return (value.dtype, value.device, value.shape, value.stride(), _ODD if is_odd else low, grad, kind)


def static_part(value: object) -> object:
    """Returns the key part of a constant argument: its value, or the identity of an object, whose state is guarded."""
    return id(value) if not is_plain(value) and has_identity(value) else exact_key(value)


def is_scalar(value: object) -> bool:
    """Returns True for run-time numbers. A subclass, such as an enumeration, is a constant."""
    return type(value) in _NUMBERS


# Validation.


_OUTSIDE = "call the kernel outside of it; torch's own functions work inside"
_NO_MEMORY = "pass a tensor with data; to inspect a declared kernel without data, call its lower(...)"


def check(kernel: str, names: Sequence[str], values: Sequence[Any]) -> None:
    """Checks that all arguments are supported, and names the one that is not.

    Raises:
        ArgumentError: an argument has the wrong type or device, or a recorder of torch's operations is active.
        GradientError: an input requires a gradient.
    """
    first_tensor: tuple[str, Tensor] | None = None
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, Tensor):
            check_plain(kernel, name, value)
            continue
        check_values(kernel, name, value)
        first_tensor = first_tensor or (name, value)
        check_memory(kernel, name, value, first_tensor[1].device, repr(first_tensor[0]))
    if first_tensor is None:
        raise ArgumentError(f"{kernel}: no argument is a tensor", hint="pass at least one tensor")
    check_surroundings(kernel)


def check_surroundings(kernel: str) -> None:
    """Rejects a call under a mode or recorder that cannot see into a kernel."""
    recorder = next((type(m).__name__ for m in _get_current_dispatch_mode_stack() if m.is_infra_mode()), None)
    if recorder is None and torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        recorder = "torch.jit.trace"
    if recorder is not None:
        raise ArgumentError(f"{kernel} is called under {recorder}, which cannot record the work of a kernel", hint=_OUTSIDE)


def check_plain(kernel: str, name: str, value: object) -> None:
    """Rejects a non-tensor argument that is not hashable or does not fit a 64-bit number."""
    if is_scalar(value) and isinstance(value, int) and not LEAST <= value <= GREATEST:
        raise ArgumentError(f"{kernel}: {name!r} is {value}, which does not fit 64 bits", hint="pass a float")
    if isinstance(value, (tuple, list)) and any(isinstance(element, Tensor) for element in value):
        what = f"{kernel}: {name!r} is a {type(value).__name__} of tensors"
        raise ArgumentError(what, hint="pass tensors one by one: built kernels and commands name each parameter")
    try:
        hash(value)
    except TypeError:
        if contents(value) is None and has_identity(value):
            return
        raise ArgumentError(
            f"{kernel}: {name!r} is a {type(value).__name__}, which is neither a tensor nor hashable",
            hint="pass tensors one by one, and settings as numbers, strings or tuples",
        ) from None


def check_values(kernel: str, name: str, tensor: Tensor) -> None:
    """Rejects a tensor whose values differ from the numbers in its memory."""
    if reason := _unsupported_storage(tensor):
        what, hint = reason
        raise ArgumentError(f"{kernel}: {name!r} {what}", hint=hint.format(name=name))


def check_recorded(kernel: str, name: str, tensor: Tensor) -> None:
    """Raises `GradientError` for a tensor that requires a gradient where none is recorded."""
    if tensor.requires_grad and torch.is_grad_enabled():
        what = f"{kernel}: {name!r} requires a gradient, which is not recorded here"
        raise GradientError(what, hint="call the kernel itself, which records gradients, or use torch.no_grad()")
    check_tangent(kernel, name, tensor)


def check_tangent(kernel: str, name: str, tensor: Tensor) -> None:
    """Raises `GradientError` for a tensor with a tangent of forward mode."""
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
        what = f"{kernel}: {name!r} has a forward-mode tangent, but kernels support reverse mode only"
        raise GradientError(what, hint=f"pass torch.autograd.forward_ad.unpack_dual({name}).primal")


def _unsupported_storage(tensor: Tensor) -> tuple[str, str] | None:
    """Returns the problem and a hint if the values of a tensor differ from its memory; else None."""
    if is_lazy(tensor):
        return "is a parameter without a shape yet", "run the module once, so that it is initialised"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "belongs to a transform of torch.func (vmap, grad, jvp, functionalize), which kernels do not support yet", _OUTSIDE
    if not isinstance(tensor, FakeTensor) and (member := _overridden_operation(type(tensor))):
        what = f"is a {type(tensor).__name__}, whose class overrides operations ({member})"
        unwrap = "pass the plain tensors that it wraps, e.g. {name}.to_local() for a DTensor"
        return what, unwrap if member == "__torch_dispatch__" else "pass {name}.as_subclass(torch.Tensor)"
    if tensor.is_nested:
        return "is a nested tensor", "pass its components, or one padded tensor"
    if tensor.layout is not torch.strided:
        return f"is a {tensor.layout} tensor", "convert it: {name}.to_dense()"
    if torch._is_functional_tensor(tensor):
        return "is a tensor of torch's functionalization", _OUTSIDE
    if tensor._is_zerotensor():
        return "is a zero tensor without memory", "pass {name}.clone()"
    if tensor.is_neg():
        return "has the negative bit set, as after .conj().imag", "pass {name}.resolve_neg()"
    return None


def _overridden_operation(kind: type) -> str | None:
    """Returns a member of a tensor class that changes operations, invisibly to a trace; None if there is none.

    The ``__torch_function__`` of parameters only keeps results plain. Construction, printing and copying are not operations.
    """
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:  # type: ignore[attr-defined]
        return "__torch_dispatch__"
    function = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)  # type: ignore[attr-defined]
    if function not in (Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl):  # type: ignore[attr-defined]
        return "__torch_function__"
    members = (name for cls in kind.__mro__ if not _is_of_torch(cls) for name in vars(cls))
    return next((name for name in members if name not in _HARMLESS_MEMBERS and hasattr(Tensor, name)), None)


def _is_of_torch(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("torch", "builtins")


_HARMLESS_MEMBERS = frozenset(dir(object)) - {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"} | {
    "__module__", "__dict__", "__weakref__", "__slots__", "__annotations__", "__copy__", "__deepcopy__", "__setstate__",
    "__torch_function__", "__torch_dispatch__",
}  # fmt: skip
"""Members of a tensor class that do not change results; the last two are checked separately."""


def check_memory(kernel: str, name: str, tensor: Tensor, device: torch.device, other: str) -> None:
    """Rejects a tensor without memory, with a storage that is too small, or on another device.

    Args:
        tensor: has passed `check_values`.
        device: the required one.
        other: description of the argument that determines the device.
    """
    if tensor.device != device:
        raise ArgumentError(
            f"{kernel}: {name!r} is on {tensor.device}, but {other} is on {device}",
            hint=f"move it: {name}.to({str(device)!r}); pass a number instead of a scalar tensor",
        )
    if not has_memory(tensor):
        raise ArgumentError(f"{kernel}: {name!r} is a {'meta' if tensor.is_meta else 'fake'} tensor", hint=_NO_MEMORY)
    end, available = (tensor.storage_offset() + span(tensor)) * tensor.element_size(), tensor.untyped_storage().nbytes()
    if tensor.numel() and end > available:
        what = f"{kernel}: {name!r} ends at byte {end} of a storage of {available} bytes: it was freed or made smaller"
        raise ArgumentError(what, hint="resize the storage before the call, as the forward pass of its module does")


# In-place writes.


def check_writable(kernel: str, name: str, tensor: Tensor) -> None:
    """Rejects a tensor whose elements share memory, like torch."""
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        what = f"{kernel}: {name!r} is written to, but several of its elements share one memory location, as after expand()"
        raise ArgumentError(what, hint=f"pass {name}.clone()")


def refuse_gradients(kernel: str, names: Collection[str]) -> None:
    """Raises `GradientError` if inputs of a call that writes in place require a gradient."""
    if names:
        what = f"{kernel} writes in place, which records no gradient, but {', '.join(sorted(names))} requires one"
        raise GradientError(what, hint="return new values, and write them outside of the kernel; or call it under torch.no_grad()")


def check_no_aliasing(names: Sequence[str], tensors: Sequence[Tensor], written: Sequence[int]) -> None:
    """Rejects a written tensor that shares elements with another argument, since the order of reads and writes is undefined.

    Args:
        names: the tensors' names.
        written: positions of the written tensors.
    """
    for position in written:
        if tensors[position].is_inference() and not torch.is_inference_mode_enabled():
            what = f"{names[position]!r} is written to, but is a tensor of inference mode"
            raise ArgumentError(what, hint="call the kernel under torch.inference_mode(), or pass a clone")
        for index, tensor in enumerate(tensors):
            if index != position and overlap(tensors[position], tensor):
                what = f"{names[position]!r} is written to, but shares memory with {names[index]!r}"
                raise ArgumentError(what, hint=f"pass {names[index]}.clone(), or declare one parameter for both")


def count_writes(tensors: Sequence[Tensor]) -> None:
    """Increments autograd's version counters of written tensors, like torch's functions."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def overlap(first: Tensor, second: Tensor) -> bool:
    """Returns True if two tensors may share an element. Different columns of one matrix do not overlap."""
    if not (first.numel() and second.numel()) or not _share_storage(first, second):
        return False
    distance = _offset(second) - _offset(first)
    if distance >= span(first) * first.element_size() or -distance >= span(second) * second.element_size():
        return False
    pitches = [pitch for tensor in (first, second) for _, pitch in _dims(tensor) if pitch]  # a list: symbols are not hashable
    return not any(_are_disjoint_columns(first, second, distance % pitch, pitch) for pitch in pitches)


def _share_storage(first: Tensor, second: Tensor) -> bool:
    storages = first.untyped_storage(), second.untyped_storage()
    if storages[0]._cdata == storages[1]._cdata:
        return True
    has_no_address = any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in (first, second))
    return not has_no_address and storages[0].data_ptr() == storages[1].data_ptr()


def _offset(tensor: Tensor) -> int:
    """Returns the bytes from the start of the storage."""
    return cast(int, tensor.storage_offset()) * tensor.element_size()


def _are_disjoint_columns(first: Tensor, second: Tensor, distance: int, pitch: int) -> bool:
    """Returns True if two tensors with the same row pitch, in bytes, occupy different columns.

    Args:
        distance: bytes from the start of a row of the first tensor to the start of the next row of the second.
    """
    widths = [_width(tensor, pitch) for tensor in (first, second)]
    return None not in widths and (widths[0] or 0) <= distance and distance + (widths[1] or 0) <= pitch


def _width(tensor: Tensor, pitch: int) -> int | None:
    """Returns the bytes of a row, or None if the strides do not form rows of this pitch."""
    outer = [stride for _, stride in _dims(tensor) if stride >= pitch]
    if any(stride % pitch for stride in outer):
        return None
    return tensor.element_size() + sum((size - 1) * stride for size, stride in _dims(tensor) if stride < pitch)


def _dims(tensor: Tensor) -> list[tuple[int, int]]:
    """Returns sizes and strides in bytes of the dims with more than one element."""
    itemsize = tensor.element_size()
    return [(size, stride * itemsize) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
