"""The launches and bytes of torch eager for a function, counted on meta tensors: nothing is run.

An operation that torch's dispatcher sees and that is no view is one launch; it reads each of its operands once, of a table that it
gathers from no more than it returns, and writes its results. That is the least that eager can do: some of torch's operations take
several launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Args: TypeAlias = Sequence[Any]
Kwargs: TypeAlias = Mapping[str, Any] | None

_FREE = (
    "prim::device",
    *(f"aten::{name}" for name in ("_unsafe_view", "detach", "empty", "empty_strided", "lift_fresh", "scalar_tensor")),
)
"""Operations that launch nothing, though their signatures do not say that they are views."""

_GATHERS = ("embedding", "gather", "index", "index_select", "take")
"""Operations whose first operand is read at indices only."""

_WHOLE: Mapping[Any, str] = {
    F.rms_norm: "rms_norm",
    torch.rms_norm: "rms_norm",
    F.scaled_dot_product_attention: "scaled_dot_product_attention",
}
"""Functions that are several operations on meta tensors, and one kernel on a GPU."""


@dataclass(frozen=True)
class EagerCost:
    """The cost of one call in torch eager.

    Attributes:
        operations: names of the launched operations, in order.
    """

    operations: tuple[str, ...]
    read: int
    written: int

    @property
    def launches(self) -> int:
        """The number of launches."""
        return len(self.operations)

    @property
    def moved(self) -> int:
        """All bytes."""
        return self.read + self.written


def eager_cost(
    function: Callable[..., Any], arguments: Mapping[str, Any], lowered: tuple[str, torch.dtype] | None = None
) -> EagerCost | None:
    """The cost of a function of torch tensors; None when it does not run on meta tensors.

    Args:
        function: ordinary torch.
        arguments: by parameter; only shapes and dtypes of tensors are looked at.
        lowered: the kind of device, and the dtype, of the autocast that is on. Meta tensors are not cast, so it runs on fake ones.
    """
    device = "meta" if lowered is None else lowered[0]
    counter = _Counter(device)
    modes: tuple[AbstractContextManager[Any], ...] = (nullcontext(), nullcontext())
    if lowered is not None:
        modes = (FakeTensorMode(), torch.autocast(*lowered))
    try:
        with modes[0], modes[1], torch.device(device), torch.no_grad(), counter, _Whole(counter):
            function(**{name: counter.emptied(value) for name, value in arguments.items()})
    except Exception:  # a user's function may need anything at all of a real tensor: then there is nothing to count
        return None
    return EagerCost(tuple(counter.operations), counter.read, counter.written)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class hook has no types
    """Notes every operation that would launch something."""

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.kept = device, "meta" if device == "meta" else None  # none of fake tensors, which have any device
        self.operations: list[str] = []
        self.read = 0
        self.written = 0
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Args = (), kwargs: Kwargs = None) -> Any:
        given, named = self._map(args), {name: self._map(value) for name, value in (kwargs or {}).items()}
        result = func(*given, **named)
        if not func.is_view and func._schema.name not in _FREE:
            self.note(func._schema.name.removeprefix("aten::"), (given, tuple(named.values())), result)
        return result

    def emptied(self, value: Any) -> Any:
        """A tensor that holds nothing in the place of one that does."""
        if isinstance(value, Tensor) and not isinstance(value, FakeTensor) and value.device.type != self.kept:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self.device)
        return value

    def _map(self, value: Any) -> Any:
        """Arguments of an operation, with closed-over tensors emptied."""
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._map, value))
        return self.emptied(value)

    def note(self, name: str, operands: Any, results: Any) -> None:
        if self.paused:
            return
        read, written = (sum(map(_footprint, _tensors(each))) for each in (operands, results))
        if name in _GATHERS:
            table = _footprint(operands[0][0])
            read -= max(table - written, 0)
        self.operations.append(name)
        self.read += read
        self.written += written


class _Whole(TorchFunctionMode):
    """Notes what a GPU does in one launch as one."""

    def __init__(self, counter: _Counter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(self, func: Any, types: Sequence[type], args: Args = (), kwargs: Kwargs = None) -> Any:
        named = kwargs or {}
        if func not in _WHOLE:
            return func(*args, **named)
        self.counter.paused = True
        result = func(*args, **named)
        self.counter.paused = False
        self.counter.note(_WHOLE[func], (tuple(args), tuple(named.values())), result)
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    """All different tensors in nested tuples and lists."""
    found: dict[int, Tensor] = {}
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            found[id(item)] = item
        elif isinstance(item, (tuple, list)):
            stack += item
    return iter(found.values())


def _footprint(tensor: Tensor) -> int:
    """Bytes of a tensor's different elements: what is expanded is read once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count
