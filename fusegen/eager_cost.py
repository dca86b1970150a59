"""Launches and bytes of a function in torch eager, counted on meta tensors without running it.

Each operation of torch's dispatcher that is not a view counts as one launch. It writes its results and reads its operands, each
element once: of a slice only its own, and those that several slices of one tensor share not again. A gather reads no more of its
table than it returns, and a copy into a tensor does not read it. This is a lower bound: some operations take several launches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

T = TypeVar("T")

Args: TypeAlias = Sequence[Any]
Kwargs: TypeAlias = Mapping[str, Any] | None

_FREE = (
    "prim::device",
    *(f"aten::{name}" for name in ("_unsafe_view", "detach", "empty", "empty_strided", "lift_fresh", "scalar_tensor")),
)
"""Operations that launch nothing, although their schemas do not mark them as views."""

_GATHERS = ("embedding", "gather", "index", "index_select", "take")
"""Operations that read their first operand only at given indices."""

_OVERWRITES = ("copy_", "fill_", "zero_")
"""Operations that write to their first operand without reading it."""

_MOST_CELLS = 1 << 20
"""Cells of a grid that counts the elements of overlapping views."""

_SINGLE_KERNEL: Mapping[Any, str] = {
    F.dropout: "dropout",
    F.rms_norm: "rms_norm",
    torch.rms_norm: "rms_norm",
    F.scaled_dot_product_attention: "scaled_dot_product_attention",
}
"""Functions that decompose on meta tensors, but run as one kernel on a GPU."""

SINGLE_KERNELS = frozenset(_SINGLE_KERNEL.values())
"""The operations in `EagerCost.operations` that stand for a whole function."""


@dataclass(frozen=True)
class OperationCost:
    """An operation that launches a kernel: its name, the bytes that it reads and writes, and the place that calls it."""

    name: str
    read: int
    written: int
    place: object = None


@dataclass(frozen=True)
class EagerCost:
    """The cost of one call in torch eager: the operations that launch kernels, in order."""

    costs: tuple[OperationCost, ...]

    @property
    def operations(self) -> tuple[str, ...]:
        return tuple(cost.name for cost in self.costs)

    @property
    def launches(self) -> int:
        return len(self.costs)

    @property
    def read(self) -> int:
        return sum(cost.read for cost in self.costs)

    @property
    def written(self) -> int:
        return sum(cost.written for cost in self.costs)

    @property
    def moved(self) -> int:
        return self.read + self.written


def eager_cost(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    lowered: tuple[str, torch.dtype] | None = None,
    place: Callable[[], object] = lambda: None,
) -> EagerCost | None:
    """Counts the launches and bytes of a torch function; returns None if it does not run on meta tensors.

    Args:
        arguments: arguments by parameter; only shapes and dtypes of tensors matter.
        lowered: device type and dtype of the active autocast. Autocast ignores meta tensors, so the function then runs on fake
            tensors.
        place: called during each operation; returns the place that calls it.
    """
    device = "meta" if lowered is None else lowered[0]
    counter = _Counter(device, place)
    modes: tuple[AbstractContextManager[Any], ...] = (nullcontext(), nullcontext())
    if lowered is not None:
        modes = (FakeTensorMode(), torch.autocast(*lowered))
    try:
        with modes[0], modes[1], torch.device(device), torch.no_grad(), counter, _SingleKernelMode(counter):
            function(**{name: counter.emptied(value) for name, value in arguments.items()})
    except Exception:  # the user's function may need real values
        return None
    return EagerCost(tuple(counter.costs))


def as_meta(values: T) -> T:
    """Returns nested values with meta tensors in place of tensors, so that no memory stays in use."""
    with torch.inference_mode(False):  # a function may write to them, outside of the mode too
        return tree_map_only(Tensor, _to_meta, values)  # type: ignore[no-any-return]


def _to_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class hook is untyped
    """Counts every operation that would launch a kernel."""

    def __init__(self, device: str, place: Callable[[], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.passed_through = device, "meta" if device == "meta" else None  # fake tensors may have any device
        self.place = place
        self.costs: list[OperationCost] = []

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Args = (), kwargs: Kwargs = None) -> Any:
        positional, named = self._map(args), {name: self._map(value) for name, value in (kwargs or {}).items()}
        result = func(*positional, **named)
        if not func.is_view and func._schema.name not in _FREE:
            self.note(func._schema.name.removeprefix("aten::"), (positional, tuple(named.values())), result)
        return result

    def emptied(self, value: Any) -> Any:
        if isinstance(value, Tensor) and not isinstance(value, FakeTensor) and value.device.type != self.passed_through:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self.device)
        return value

    def _map(self, value: Any) -> Any:
        """Applies `emptied` to all tensors among nested arguments; captured tensors occur here for the first time."""
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._map, value))
        return self.emptied(value)

    def note(self, name: str, operands: Any, results: Any) -> None:
        read = _footprint(_tensors((operands[0][1:], operands[1]) if name in _OVERWRITES else operands))
        written = _footprint(_tensors(results))
        if name in _GATHERS:
            table = _footprint([operands[0][0]])
            read -= max(table - written, 0)
        self.costs.append(OperationCost(name, read, written, self.place()))


class _SingleKernelMode(TorchFunctionMode):
    def __init__(self, counter: _Counter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(self, func: Any, types: Sequence[type], args: Args = (), kwargs: Kwargs = None) -> Any:
        named, costs = kwargs or {}, self.counter.costs
        before = len(costs)
        result = func(*args, **named)
        if func in _SINGLE_KERNEL and len(costs) > before:  # else it returns its operand, as dropout does outside of training
            del costs[before:]
            self.counter.note(_SINGLE_KERNEL[func], (tuple(args), tuple(named.values())), result)
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    tensors: dict[int, Tensor] = {}
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            tensors[id(item)] = item
        elif isinstance(item, (tuple, list)):
            stack += item
    return iter(tensors.values())


def _footprint(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the distinct elements of tensors, some of which may be views of one tensor."""
    views: dict[tuple[int, int], list[Tensor]] = {}
    for tensor in tensors:
        views.setdefault((tensor.untyped_storage()._cdata, tensor.element_size()), []).append(tensor)
    return sum(itemsize * _distinct(alike) for (_, itemsize), alike in views.items())


def _distinct(views: Sequence[Tensor]) -> int:
    """Returns the number of distinct elements of views of one memory; their sum if their strides do not fit together."""
    dims = [[(stride, size) for stride, size in zip(v.stride(), v.shape, strict=True) if stride and size != 1] for v in views]
    total = sum(math.prod(size for _, size in own) for own, view in zip(dims, views, strict=True) if view.numel())
    if len(views) == 1:
        return total
    strides = sorted({1, *(stride for own in dims for stride, _ in own)}, reverse=True)
    boxes = [_box(int(view.storage_offset()), dict(own), strides) for view, own in zip(views, dims, strict=True)]
    fits = all(box[n].stop * strides[n] <= strides[n - 1] for box in boxes for n in range(1, len(strides)))
    is_unambiguous = all(len({stride for stride, _ in own}) == len(own) for own in dims)
    return _union(boxes) if fits and is_unambiguous else total


def _box(offset: int, sizes: Mapping[int, int], strides: Sequence[int]) -> tuple[range, ...]:
    """Returns the elements of a view along the dims of some strides."""
    box = []
    for stride in strides:
        start, offset = divmod(offset, stride)
        box.append(range(start, start + sizes.get(stride, 1)))
    return tuple(box)


def _union(boxes: Sequence[tuple[range, ...]]) -> int:
    """Returns the number of elements in a union of boxes; their sum if these have too many different ends."""
    ends = [sorted({end for part in parts for end in (part.start, part.stop)}) for parts in zip(*boxes, strict=True)]
    cells = [len(each) - 1 for each in ends]
    if math.prod(cells) > _MOST_CELLS:
        return sum(math.prod(map(len, box)) for box in boxes)
    covered = np.zeros(cells, dtype=bool)
    for box in boxes:
        covered[tuple(slice(each.index(part.start), each.index(part.stop)) for each, part in zip(ends, box, strict=True))] = True
    sizes = functools.reduce(np.multiply.outer, [np.diff(each) for each in ends])
    return int(sizes[covered].sum())
