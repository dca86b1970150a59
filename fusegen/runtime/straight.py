"""Calls as straight-line Python: a function that is written once for exact shapes, and of which nothing is left to decide.

A loop over steps that asks each for its arguments takes longer than most launches.

Whatever is large is allocated by the step that makes it, and let go behind the last that reads it: values of the call's own,
results of torch's functions, and the caller's tensors where these are given away. So a backward pass keeps no more of what the
forward pass saved than it still needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C._functorch import peek_interpreter_stack

from fusegen.errors import ArgumentError
from fusegen.program.call import (
    Buffer,
    Call,
    LaunchArgument,
    MapArgument,
    PointerArgument,
    RandomKey,
    Role,
    ScalarArgument,
    SizeArgument,
)
from fusegen.program.workspace import APART, Slot, packed, slots_of, spans
from fusegen.runtime.given import GivenAway
from fusegen.runtime.host_memory import LARGE, in_large_pages
from fusegen.runtime.written import check_apart, count_writes

Scalars: TypeAlias = Mapping[str, float]
Run: TypeAlias = Callable[[Sequence[Tensor], Scalars], Any]

_STOOD_IN = "a kernel was given a tensor without memory: something around the call stands in for what torch allocates"
_OUTSIDE = "call the kernel outside of torch.func's transforms and of modes that make tensors"
_BEYOND = 1 << 63

_FRESH: dict[str, Any] = {kind: getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None) for kind in ("cpu", "cuda")}
"""Fresh tensors on the current device of a kind, past the dispatcher, as code that torch compiles has them: the dispatcher takes
longer than the allocation."""


class Writer:
    """A function of a call's tensors and scalars in the making. Steps add their lines, with names of buffers, addresses and values.

    Args:
        call: what the function does.
        sizes: values of all sizes and strides, by name.
        device: where.
        is_inside: whether another call makes it, so that what it writes to has been seen to.
        memory: bytes for its temporaries, which the function holds, with its views of them; None where it allocates them.
    """

    def __init__(
        self,
        call: Call,
        sizes: Mapping[str, int],
        device: torch.device,
        *,
        is_inside: bool = False,
        memory: Tensor | None = None,
    ) -> None:
        self.call, self.sizes, self.device, self._memory = call, sizes, device, memory
        self._specs = {spec.key: spec for spec in call.buffers}
        temporaries = slots_of(call, sizes)
        slots, self._workspace_bytes = packed(slot for slot in temporaries if memory is not None or slot.size < APART)
        self._made = call.made
        self._is_inside = is_inside
        self._written = () if is_inside else call.written
        self._slots: dict[int, Slot] = {slot.key: slot for slot in slots}
        self._first_of, self._last_of = spans(call)
        self._late = {slot.key for slot in temporaries if slot.key not in self._slots} | self._large_results()
        self._scope: dict[str, Any] = {"absent": _without_address, "unreachable": unreachable, "integer": integer}
        self._scope |= {"in_large_pages": in_large_pages, "seen": partial(_seen_by_modes, device), "fresh": _FRESH.get(device.type)}
        self._scope |= {"given_away": GivenAway}
        self._scope |= {"modes": dispatch_modes, "transforms": peek_interpreter_stack}
        self.on_current_device = device.type != "cuda"  # whether the function runs with the device as torch's current one
        self._parts: dict[str, str] = {}  # views of the workspace, by name
        self._addresses: dict[str, str] = {}  # of tensors, by name
        self._first: list[str] = []
        self._steps: list[str] = []

    # What steps name.

    @property
    def further_memory(self) -> Tensor | None:
        """Memory behind its own temporaries, where it is given, for those of a call that it makes."""
        return None if self._memory is None else self._memory[self._workspace_bytes :]

    def value(self, value: Any, stem: str) -> str:
        """The name of a value that the function holds."""
        name = f"{stem}_{len(self._scope)}"
        self._scope[name] = value
        return name

    def known(self, **values: Any) -> None:
        """Values that all steps know by these names."""
        self._scope |= values

    def tensor(self, key: int) -> str:
        """The name of a buffer as a tensor."""
        name = self._named(key)
        slot = self._slots.get(key)
        if slot is not None and name not in self._parts:
            return self._part(key, slot.shape, contiguous(slot.shape), slot.offset // self._specs[key].dtype.itemsize, name)
        return name

    def view(self, key: int, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> str:
        """A view of a buffer, as an expression: as few operations of torch's as it takes, each of which costs microseconds."""
        slot = self._slots.get(key)
        if slot is not None:
            return self._part(key, shape, strides, slot.offset // self._specs[key].dtype.itemsize + offset)
        name, is_own = self._named(key), self._specs[key].role is not Role.INPUT
        if is_own and not offset and shape == self.shape(key) and strides == contiguous(shape):
            return name
        place = f", {name}.storage_offset() + {offset}" if offset else ""
        return f"{name}.as_strided({shape}, {strides}{place})"

    def _part(self, key: int, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, name: str = "") -> str:
        """A view of the workspace as an expression; as a name of it where it has one, or where the memory is known now.

        Args:
            offset: in elements.
        """
        dtype = self._specs[key].dtype.torch
        if self._memory is not None:
            with torch.inference_mode(mode=False):  # or no call outside of it could write there
                whole = self._memory[: self._memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
                view = whole.as_strided(shape, strides, whole.storage_offset() + offset)
            return self.value(view, "part")
        text = f"{self._typed(dtype)}.as_strided({shape}, {strides}, {offset})"
        if name:
            self._parts[name] = text
        return name or text

    def _typed(self, dtype: torch.dtype) -> str:
        """The workspace as elements of a dtype."""
        name = f"workspace_{str(dtype).removeprefix('torch.')}"
        self._parts.setdefault(name, f"workspace.view({self.value(dtype, 'dtype')})")
        return name

    def spec(self, key: int) -> Buffer:
        """A buffer."""
        return self._specs[key]

    def shape(self, key: int) -> tuple[int, ...]:
        """A buffer's shape."""
        return tuple(extent(self.sizes) for extent in self._specs[key].shape)

    def dtype(self, key: int) -> str:
        """The name of a buffer's dtype."""
        return self.value(self._specs[key].dtype.torch, "dtype")

    def address(self, key: int) -> str:
        """A buffer's address, as an expression."""
        if key in self._made or key in self._late:  # which a step allocates
            return f"{self._named(key)}.data_ptr()"
        slot = self._slots.get(key)
        if slot is not None and self._memory is not None:
            return str(self._memory.data_ptr() + slot.offset)
        name = "workspace" if slot is not None else self._named(key)
        self._addresses.setdefault(name, f"at_{name}")
        return f"at_{name}" + (f" + {slot.offset}" if slot is not None and slot.offset else "")

    def arguments(self, arguments: Sequence[LaunchArgument], maps: Sequence[str] = ()) -> list[str]:
        """A launch's arguments, as expressions.

        Args:
            maps: its tensor maps, likewise.
        """
        return [self._argument(argument, maps) for argument in arguments]

    def _argument(self, argument: LaunchArgument, maps: Sequence[str]) -> str:
        if isinstance(argument, PointerArgument):
            return self.address(argument.buffer)
        if isinstance(argument, MapArgument):
            return maps[argument.number]
        if isinstance(argument, SizeArgument):
            return str(argument.formula(self.sizes))
        return f"{'float' if argument.is_float else 'integer'}(scalars[{argument.name!r}])"

    def _named(self, key: int) -> str:
        return f"b{key}".replace("-", "_")

    def _large_results(self) -> set[int]:
        """Results that a step makes."""
        results = [spec for spec in self.call.buffers if spec.role is Role.OUTPUT and spec.key not in self._made]
        touched = [spec for spec in results if spec.key in self._first_of]
        return {spec.key for spec in touched if spec.dtype.itemsize * math.prod(self.shape(spec.key)) >= APART}

    # Lines.

    def begin(self, number: int) -> None:
        """Allocates what is large and none of the steps before this one knows."""
        for key in sorted(self._late):
            if self._first_of[key] == number:
                spec = self._specs[key]
                self.add(f"{self._named(key)} = {self._allocation(self.shape(key), spec.dtype.torch)}")

    def end(self, number: int) -> None:
        """Lets go of what no later step knows."""
        held = {*self.call.results, *(self.call.inputs[place][0] for place in self._written)}
        own = {key for key, _ in self.call.inputs} | self._made | self._late
        done = [self._named(key) for key in sorted(own - held) if self._last_of.get(key) == number]
        if done:
            self.add(f"del {', '.join(done)}")

    def first(self, *lines: str) -> None:
        """Lines that come before everything else, once however many steps add them."""
        self._first += [line for line in lines if line not in self._first]

    def add(self, *lines: str) -> None:
        """Lines of a step."""
        self._steps += lines

    def function(self, put_together: Callable[[list[Tensor]], Any] | None) -> Run:
        """The function.

        Args:
            put_together: makes the results of their tensors; None where the only tensor, or none, is the result.
        """
        results = [self.tensor(key) for key in self.call.results]
        lines = [*self._inputs(), *self._allocations(), *self._keys(), *self._places(), *self._steps, *self._writes()]
        if put_together is None:
            lines.append(f"return {results[0]}" if results else "return None")
        else:
            lines.append(f"return {self.value(put_together, 'put_together')}([{', '.join(results)}])")
        text = "\n    ".join(["def run(tensors, scalars):", *self._first, *lines])
        exec(compile(text, f"<call on {self.device}>", "exec"), self._scope)
        run: Run = self._scope["run"]
        return run

    def _inputs(self) -> Iterator[str]:
        names = [self._named(key) for key, _ in self.call.inputs]
        written = self._written
        if written:
            check, known = self.value(check_apart, "check_apart"), self.value([name for _, name in self.call.inputs], "names")
            yield f"{check}({known}, tensors, {written})"
        if names:
            yield f"{', '.join(names)}, = tensors"
            if not self._is_inside:
                yield "if type(tensors) is given_away: tensors.clear()"

    def _allocations(self) -> Iterator[str]:
        outputs = [spec for spec in self.call.buffers if spec.role is Role.OUTPUT and spec.key not in self._made]
        if (self._slots and self._memory is None) or self._late or outputs:
            is_fresh = self._scope["fresh"] and self.on_current_device
            yield "empty = seen if modes() or transforms() else fresh" if is_fresh else "empty = seen"
        for spec in (spec for spec in outputs if spec.key not in self._late):
            yield f"{self._named(spec.key)} = {self._allocation(self.shape(spec.key), spec.dtype.torch)}"
        if self._slots and self._memory is None:
            yield f"workspace = {self._allocation((self._workspace_bytes,), torch.uint8)}"

    def _allocation(self, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        """A fresh tensor, as an expression."""
        made = f"empty({shape}, {contiguous(shape)}, {self.value(dtype, 'dtype')})"
        is_large = self.device.type == "cpu" and math.prod(shape) * dtype.itemsize >= LARGE
        return f"in_large_pages({made})" if is_large else made

    def _places(self) -> Iterator[str]:
        """Views of the workspace, and addresses."""
        yield from (f"{name} = {view}" for name, view in self._parts.items())
        if self._addresses:
            yield "try:"
            yield from (f"    {at} = {name}.data_ptr() or absent({name})" for name, at in self._addresses.items())
            yield "except RuntimeError as error:"  # torch.func hands out tensors of which torch tells no address
            yield "    raise unreachable() from error"

    def _keys(self) -> Iterator[str]:
        """Keys of random bits, one drawn for all that have none of their own."""
        drawn = ""
        for key in self.call.keys:
            name = self._named(key.buffer)
            if key.source is None and drawn:
                yield f"{name} = {drawn}"
            elif key.source is None:
                drawn = name
                yield f"{name} = {self.value(partial(drawn_key, self.device), 'drawn_key')}()"
            else:
                yield f"{name} = {self._given_key(key)}"

    def _given_key(self, key: RandomKey) -> str:
        source = key.source
        if isinstance(source, PointerArgument):
            return self.tensor(source.buffer)
        assert isinstance(source, (SizeArgument, ScalarArgument))
        full = self.value(partial(torch.full, (1,), dtype=torch.int64, device=self.device), "full")
        number = str(source.formula(self.sizes)) if isinstance(source, SizeArgument) else f"int(scalars[{source.name!r}])"
        return f"{full}(fill_value={number})"

    def _writes(self) -> Iterator[str]:
        written = self._written
        if written:
            names = ", ".join(self._named(self.call.inputs[place][0]) for place in written)
            yield f"{self.value(count_writes, 'count_writes')}([{names}])"


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, as torch has them."""
    return tuple(math.prod(max(extent, 1) for extent in shape[dim + 1 :]) for dim in range(len(shape)))


def _seen_by_modes(device: torch.device, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A fresh tensor by an operation of torch's, which modes and transforms may see, and replace."""
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def drawn_key(device: torch.device) -> Tensor:
    """A key from torch's generator of a device, one int64. An operation of torch's draws it: in a CUDA graph, at each replay."""
    return torch.empty(1, dtype=torch.int64, device=device).random_()


def unreachable() -> ArgumentError:
    """The error of a call on a tensor that has no address."""
    return ArgumentError(_STOOD_IN, mend=_OUTSIDE)


def _without_address(tensor: Tensor) -> int:
    """What stands for the address of an empty tensor; another one without memory ends no process."""
    if tensor.numel():
        raise unreachable()
    return 0


def integer(value: float) -> int:
    """A number without its fraction; what 64 bits cannot hold as a processor's conversion gives it."""
    return int(value) if isinstance(value, int) or -_BEYOND <= value < _BEYOND else -_BEYOND
