"""Arguments of a call: how tensors lie in memory, what a program depends on of each, and the refusal, at the first call of its
kind, of what no kernel can work on.

A kernel reads addresses. A tensor whose values are not the numbers at its address (a wrapper's, one with the negative bit, one
that a transform of torch.func watches) would be read wrongly, and one without memory would end the process.
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
from fusegen.guards import contents, exact, has_identity, is_plain

# How a tensor lies in memory.


WIDE = (1 << 31) - (1 << 22)
"""Elements from which on indices need 64 bits; below it, a launch that is rounded up to whole blocks still fits 31."""

MOST_ALIGNED = 16
"""Bytes: no access is wider."""


def alignment(tensor: torch.Tensor, is_symbol: Sequence[bool]) -> int:
    """Bytes, up to 16, that divide the address and every stride that no literal gives.

    A tensor without memory lies where its view of a fresh allocation would.

    Args:
        is_symbol: for each dim, whether its stride is none of the literal ones.
    """
    itemsize = tensor.element_size()
    bits = tensor.data_ptr() if has_memory(tensor) else int(tensor.storage_offset()) * itemsize
    for value, counts in zip(tensor.stride(), is_symbol, strict=True):
        if counts:
            bits |= value * itemsize
    return min(MOST_ALIGNED, bits & -bits) if bits else MOST_ALIGNED


def has_memory(tensor: torch.Tensor) -> bool:
    """Tells if a tensor has elements: a meta or fake one stands for what an allocator would give."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def span(tensor: torch.Tensor) -> int:
    """Elements from a tensor's first to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0


# What the choice of a program depends on: the part that each argument contributes to a key.


LEAST, GREATEST = -(2**63), 2**63 - 1
"""Run-time integers have 64 bits."""

Values: TypeAlias = Sequence[Any]
CallKey: TypeAlias = tuple[object, ...]
_NUMBERS = (int, float, np.float64)
_ODD = "odd"  # a tensor that no kernel takes, likewise
_TOO_WIDE = "too wide"  # an integer that no kernel takes is bound to nothing: the first call's checks see it


def key_function(statics: Sequence[bool]) -> Callable[[Values], CallKey]:
    """From all arguments of a call to what the choice of a bound program depends on; written for a number of parameters, with what
    ordinary tensors and floats contribute in place.

    Args:
        statics: for each parameter, whether a program is bound to its value.
    """
    names = [f"v{place}" for place in range(len(statics))]
    lines = [f"{', '.join(names)}, = values"] if names else []
    for place, (name, static) in enumerate(zip(names, statics, strict=True)):
        pattern = (*_OF_A_TENSOR, *(() if static else _OF_A_NUMBER), *_OF_ANYTHING)
        lines += [line.format(v=name, k=f"k{place}", static=static) for line in pattern]
    # The default dtype decides what torch.ones(n) gives, and an integer times 0.5; autocast converts operands.
    last = "default_dtype(), any_autocast() and autocast_dtypes()"
    lines.append(f"return ({''.join(f'k{place}, ' for place in range(len(names)))}{last})")
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
"""The part of an argument, as `part` gives it: of most tensors, and of most numbers that select no code, without asking it."""


def _autocast_dtypes() -> tuple[torch.dtype | None, ...]:
    """The dtypes of autocast on each kind of device."""
    return tuple(map(autocast_dtype, ("cpu", "cuda")))


def part(value: Any, is_static: bool) -> object:
    """The part of a key that an argument contributes."""
    if isinstance(value, Tensor):
        return tensor_part(value)
    if not is_static and is_scalar(value):
        return type(value) if not isinstance(value, int) or LEAST <= value <= GREATEST else _TOO_WIDE
    return static_part(value)


def tensor_part(value: Tensor) -> object:
    """The part of a key that a tensor contributes."""
    kind = type(value)
    grad = value.requires_grad and torch.is_grad_enabled()
    address = value.data_ptr() if kind is Tensor or has_memory(value) else 0
    low = address & 15
    is_odd = not address or value.is_neg()
    return (value.dtype, value.device, value.shape, value.stride(), _ODD if is_odd else low, grad, kind)


def static_part(value: object) -> object:
    """The part of a key of an argument that selects code: its value, or for an object its identity, which `State` looks after."""
    return id(value) if not is_plain(value) and has_identity(value) else exact(value)


def is_scalar(value: object) -> bool:
    """Tells if a value is passed at run time: of a subclass of numbers, such as an enumeration, the value selects code."""
    return type(value) in _NUMBERS


# Refusals.


_OUTSIDE = "call the kernel outside of it; torch's own functions work inside"
_NO_MEMORY = "pass a tensor with data; lower(...) of a kernel that is declared here, not loaded, inspects without"


def check(kernel: str, names: Sequence[str], values: Sequence[Any]) -> None:
    """Refuses what no kernel can work on, naming the argument.

    Args:
        names: of the parameters.
        values: one a parameter.

    Raises:
        ArgumentError: an argument has the wrong type or device, or something records what torch does.
        GradientError: an input requires a gradient.
    """
    first: tuple[str, Tensor] | None = None
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, Tensor):
            check_plain(kernel, name, value)
            continue
        check_values(kernel, name, value)
        first = first or (name, value)
        check_memory(kernel, name, value, first[1].device, repr(first[0]))
    if first is None:
        raise ArgumentError(f"{kernel}: no argument is a tensor", hint="pass at least one tensor")
    check_surroundings(kernel)


def check_surroundings(kernel: str) -> None:
    """Refuses a call whose operations are recorded or replaced by something that cannot see into a kernel."""
    watching = next((type(m).__name__ for m in _get_current_dispatch_mode_stack() if m.is_infra_mode()), None)
    if watching is None and torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        watching = "torch.jit.trace"
    if watching is not None:
        raise ArgumentError(f"{kernel} is called under {watching}, which does not see what a kernel does", hint=_OUTSIDE)


def check_plain(kernel: str, name: str, value: object) -> None:
    """Refuses a value that is no tensor where it cannot select code, or does not fit a run-time number."""
    if is_scalar(value) and isinstance(value, int) and not LEAST <= value <= GREATEST:
        raise ArgumentError(f"{kernel}: {name!r} is {value}, which does not fit 64 bits", hint="pass a float")
    if isinstance(value, (tuple, list)) and any(isinstance(element, Tensor) for element in value):
        what = f"{kernel}: {name!r} is a {type(value).__name__} that holds tensors"
        raise ArgumentError(what, hint="pass the tensors one by one: a folder or a command names each parameter")
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
    """Refuses a tensor whose values are not the numbers in its memory."""
    if reason := _strange(tensor):
        what, hint = reason
        raise ArgumentError(f"{kernel}: {name!r} {what}", hint=hint.format(name=name))


def check_recorded(kernel: str, name: str, tensor: Tensor) -> None:
    """Refuses a tensor whose results would need a derivative, where none is recorded.

    Raises:
        GradientError: they would.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        what = f"{kernel}: {name!r} requires a gradient, which is not recorded here"
        raise GradientError(what, hint="call the kernel itself, which records it, or this under torch.no_grad()")
    check_tangent(kernel, name, tensor)


def check_tangent(kernel: str, name: str, tensor: Tensor) -> None:
    """Refuses a tensor whose results would need a derivative of forward mode.

    Raises:
        GradientError: they would.
    """
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
        what = f"{kernel}: {name!r} has a tangent of forward-mode differentiation, which kernels do not compute yet"
        raise GradientError(what, hint=f"pass torch.autograd.forward_ad.unpack_dual({name}).primal")


def _strange(tensor: Tensor) -> tuple[str, str] | None:
    """Why a tensor's values are not the numbers in its memory, and what to do; None where they are."""
    if is_lazy(tensor):
        return "is a parameter without a shape yet", "run the module once, so that it is initialised"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "belongs to a transform of torch.func (vmap, grad, jvp, functionalize), which kernels do not support yet", _OUTSIDE
    if not isinstance(tensor, FakeTensor) and (member := _own_operation(type(tensor))):
        what = f"is a {type(tensor).__name__}, whose class says itself what operations do ({member})"
        of_parts = "pass the plain tensors that it is made of, as {name}.to_local() gives them of a DTensor"
        return what, of_parts if member == "__torch_dispatch__" else "pass {name}.as_subclass(torch.Tensor)"
    if tensor.is_nested:
        return "is a nested tensor", "pass its components, or one padded tensor"
    if tensor.layout is not torch.strided:
        return f"is a {tensor.layout} tensor", "convert it: {name}.to_dense()"
    if torch._is_functional_tensor(tensor):
        return "is a tensor of torch's functionalization", _OUTSIDE
    if tensor._is_zerotensor():
        return "is a tensor of zeros without memory", "pass {name}.clone()"
    if tensor.is_neg():
        return "has the negative bit, as .conj().imag gives it", "pass {name}.resolve_neg()"
    return None


def _own_operation(kind: type) -> str | None:
    """A member by which a class says itself what operations on its tensors do, which no trace sees; None where there is none.

    That of parameters only keeps results plain, as ours are. How an object is made, shown and copied is no operation.
    """
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:  # type: ignore[attr-defined]
        return "__torch_dispatch__"
    asked = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)  # type: ignore[attr-defined]
    if asked not in (Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl):  # type: ignore[attr-defined]
        return "__torch_function__"
    own = (name for cls in kind.__mro__ if not _is_of_torch(cls) for name in vars(cls))
    return next((name for name in own if name not in _NO_OPERATION and hasattr(Tensor, name)), None)


def _is_of_torch(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("torch", "builtins")


_NO_OPERATION = frozenset(dir(object)) - {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"} | {
    "__module__", "__dict__", "__weakref__", "__slots__", "__annotations__", "__copy__", "__deepcopy__", "__setstate__",
    "__torch_function__", "__torch_dispatch__",
}  # fmt: skip
"""Members of a class of tensors that change no operation's result; the last two are looked at before."""


def check_memory(kernel: str, name: str, tensor: Tensor, device: torch.device, other: str) -> None:
    """Refuses a tensor without memory, with less than its view spans, or on another device.

    Args:
        name: of the tensor.
        tensor: one that passed `check_values`.
        device: where it must be.
        other: what is there, in words.
    """
    if tensor.device != device:
        raise ArgumentError(
            f"{kernel}: {name!r} is on {tensor.device}, but {other} is on {device}",
            hint=f"move it: {name}.to({str(device)!r}); pass a number instead of a scalar tensor",
        )
    if not has_memory(tensor):
        raise ArgumentError(f"{kernel}: {name!r} is a {'meta' if tensor.is_meta else 'fake'} tensor", hint=_NO_MEMORY)
    end, there = (tensor.storage_offset() + span(tensor)) * tensor.element_size(), tensor.untyped_storage().nbytes()
    if tensor.numel() and end > there:
        what = f"{kernel}: {name!r} ends at byte {end} of a storage of {there} bytes: it was freed or made smaller"
        raise ArgumentError(what, hint="bring the storage back to its size before the call, as the module's own forward does")


# Tensors that a call writes to, and the counts of writes that autograd reads.


def check_writable(kernel: str, name: str, tensor: Tensor) -> None:
    """Refuses a tensor that cannot be written to, as torch does.

    Raises:
        ArgumentError: several of its elements are one in memory.
    """
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        what = f"{kernel}: {name!r} is written to, and several of its elements are one in memory, as expand() gives them"
        raise ArgumentError(what, hint=f"pass {name}.clone()")


def refuse_gradients(kernel: str, names: Collection[str]) -> None:
    """Refuses to record a call that writes in place.

    Args:
        names: of the inputs that require a gradient.

    Raises:
        GradientError: there are some.
    """
    if names:
        what = f"{kernel} writes in place, of which no gradient is recorded, and {', '.join(sorted(names))} requires one"
        raise GradientError(what, hint="return new values, and write them outside of it; or call it under torch.no_grad()")


def check_apart(names: Sequence[str], tensors: Sequence[Tensor], written: Sequence[int]) -> None:
    """Refuses tensors in memory that a call writes to under another name: what would be read there depends on when.

    Args:
        names: of the tensors.
        tensors: of the call.
        written: which of them are written to.

    Raises:
        ArgumentError: two share elements, or one cannot be written to outside of inference mode.
    """
    for place in written:
        if tensors[place].is_inference() and not torch.is_inference_mode_enabled():
            what = f"{names[place]!r} is written to, and is a tensor of inference mode"
            raise ArgumentError(what, hint="call the kernel in inference mode, or pass a clone")
        for other, tensor in enumerate(tensors):
            if other != place and overlap(tensors[place], tensor):
                what = f"{names[place]!r} is written to, and shares memory with {names[other]!r}"
                raise ArgumentError(what, hint=f"pass {names[other]}.clone(), or one parameter for both")


def count_writes(tensors: Sequence[Tensor]) -> None:
    """Lets autograd know that tensors were written to, as torch's own functions do."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def overlap(one: Tensor, other: Tensor) -> bool:
    """Tells if two tensors may share an element: they do not where they lie apart, or side by side in rows of one pitch."""
    if not (one.numel() and other.numel()) or not _have_one_storage(one, other):
        return False
    distance = _offset(other) - _offset(one)
    if distance >= span(one) * one.element_size() or -distance >= span(other) * other.element_size():
        return False
    pitches = [pitch for tensor in (one, other) for _, pitch in _dims(tensor) if pitch]  # symbols perhaps, of which there is no set
    return not any(_are_beside(one, other, distance % pitch, pitch) for pitch in pitches)


def _have_one_storage(one: Tensor, other: Tensor) -> bool:
    storages = one.untyped_storage(), other.untyped_storage()
    if storages[0]._cdata == storages[1]._cdata:
        return True
    has_no_address = any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in (one, other))
    return not has_no_address and storages[0].data_ptr() == storages[1].data_ptr()


def _offset(tensor: Tensor) -> int:
    """Bytes from the begin of the storage."""
    return cast(int, tensor.storage_offset()) * tensor.element_size()


def _are_beside(one: Tensor, other: Tensor, distance: int, pitch: int) -> bool:
    """Tells if two tensors are rows of a pitch, in bytes, the parts of which do not meet.

    Args:
        distance: from a row of the first to the next one of the other.
    """
    widths = [_width(tensor, pitch) for tensor in (one, other)]
    return None not in widths and (widths[0] or 0) <= distance and distance + (widths[1] or 0) <= pitch


def _width(tensor: Tensor, pitch: int) -> int | None:
    """The bytes of a row; None where the dims are not made of rows of this pitch."""
    outer = [stride for _, stride in _dims(tensor) if stride >= pitch]
    if any(stride % pitch for stride in outer):
        return None
    return tensor.element_size() + sum((size - 1) * stride for size, stride in _dims(tensor) if stride < pitch)


def _dims(tensor: Tensor) -> list[tuple[int, int]]:
    """Sizes and strides in bytes, where there is more than one element."""
    itemsize = tensor.element_size()
    return [(size, stride * itemsize) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
