"""Checks of the tensors that a call writes to, and the counts of writes that autograd reads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fusegen.errors import ArgumentError, GradientError
from fusegen.runtime.arguments import span


def check_writable(kernel: str, name: str, tensor: Tensor) -> None:
    """Refuses a tensor that cannot be written to, as torch does.

    Raises:
        ArgumentError: several of its elements are one in memory.
    """
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        what = f"{kernel}: {name!r} is written to, and several of its elements are one in memory, as expand() gives them"
        raise ArgumentError(what, mend=f"pass {name}.clone()")


def refuse_gradients(kernel: str, names: Collection[str]) -> None:
    """Refuses to record a call that writes in place.

    Args:
        kernel: its name.
        names: of the inputs that require a gradient.

    Raises:
        GradientError: there are some.
    """
    if names:
        what = f"{kernel} writes in place, of which no gradient is recorded, and {', '.join(sorted(names))} requires one"
        raise GradientError(what, mend="return new values, and write them outside of it; or call it under torch.no_grad()")


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
            raise ArgumentError(what, mend="call the kernel in inference mode, or pass a clone")
        for other, tensor in enumerate(tensors):
            if other != place and overlap(tensors[place], tensor):
                what = f"{names[place]!r} is written to, and shares memory with {names[other]!r}"
                raise ArgumentError(what, mend=f"pass {names[other]}.clone(), or one parameter for both")


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
