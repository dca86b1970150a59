"""Calls on tensors, bound to one set of exact shapes and strides: their memory, arguments and steps as instructions.

Nothing here knows what a call was made of, and nothing compiles.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fusegen.errors import IndexRangeError
from fusegen.native import NativeChoice
from fusegen.program.call import (
    SEPARATE_BYTES,
    Buffer,
    BufferSlot,
    CallStep,
    KernelLaunch,
    LaunchArgument,
    LaunchPlan,
    LibraryCall,
    Loop,
    MapArgument,
    MatrixProduct,
    PointerArgument,
    Role,
    SizeArgument,
    TensorMapSpec,
    bytes_of,
    live_ranges,
    pack_slots,
    slots_of,
)
from fusegen.runtime import cuda
from fusegen.runtime.arguments import check_apart, count_writes
from fusegen.runtime.cuda import ADDRESS, INTEGER, MAP, REAL, LaunchSite, ParameterKind
from fusegen.runtime.instructions import (
    Address,
    Allocate,
    ArgumentValue,
    ConstantValue,
    Do,
    HostLaunch,
    Instruction,
    Instructions,
    LaunchKernel,
    Library,
    MakeKey,
    Multiply,
    Product,
    Release,
    RunCall,
    Runner,
    ScalarValue,
    TensorMap,
    View,
    contiguous,
)
from fusegen.runtime.library import BufferView, multiply_into, place_of, product_of
from fusegen.runtime.workspace import OnWorkspace

PutTogether: TypeAlias = Callable[[list[Tensor]], Any]


def bound_call(
    call: LaunchPlan,
    put_together: PutTogether | None,
    sizes: Mapping[str, int],
    device: torch.device,
    backend: LaunchBackend,
    kernels: Sequence[Any],
    name: str = "this call",
) -> Runner:
    """A call with all of its formulas evaluated, of its tensors, one an input in the order of the call's inputs, and its scalars by
    name, which gives what the user's function returns.

    Args:
        call: what to run.
        put_together: makes the function's results of their tensors; None where the only tensor, or none, is the result.
        sizes: values of all sizes and strides, by name.
        device: where.
        backend: makes instructions of launches.
        kernels: loaded, one a launch.
        name: of the kernel, for messages.
    """

    def bound(memory: Tensor | None) -> Runner:
        instructions = Binder(call, sizes, device, backend, memory=memory).instructions(kernels, put_together)
        return NativeChoice[RunCall](lambda module: module.Executor(instructions), lambda: instructions)

    own, needed = bound(None), bytes_of(call, sizes)
    return OnWorkspace(name, own, needed, device, bound) if needed else own


class Binder:
    """Makes the instructions of a call.

    Args:
        call: what they do.
        sizes: values of all sizes and strides, by name.
        device: where.
        backend: makes instructions of launches.
        is_inside: whether another call makes it, so that what it writes to has been seen to.
        memory: bytes for its temporaries, which the instructions hold, with their views of them; None where they allocate them.
    """

    def __init__(
        self,
        call: LaunchPlan,
        sizes: Mapping[str, int],
        device: torch.device,
        backend: LaunchBackend,
        *,
        is_inside: bool = False,
        memory: Tensor | None = None,
    ) -> None:
        self.call, self.sizes, self.device, self._backend, self._memory = call, sizes, device, backend, memory
        self._specs = {spec.key: spec for spec in call.buffers}
        temporaries = slots_of(call, sizes)
        slots, self._workspace_bytes = pack_slots(slot for slot in temporaries if memory is not None or slot.size < SEPARATE_BYTES)
        self._written = () if is_inside else call.written
        self._slots: dict[int, BufferSlot] = {slot.key: slot for slot in slots}
        self._first_of, self._last_of = live_ranges(call)
        self._late = {slot.key for slot in temporaries if slot.key not in self._slots} | self._large_results()
        self._held: list[Tensor | None] = []
        self._registers: dict[int, int] = {key: place for place, (key, _) in enumerate(call.inputs)}
        self._views: dict[tuple[Any, ...], int] = {}
        self._workspace: int | None = None
        self._body: list[Instruction] = []

    def instructions(self, kernels: Sequence[Any], put_together: PutTogether | None) -> Instructions:
        """All of them.

        Args:
            kernels: loaded, one a launch.
            put_together: as of `bound_call`.
        """
        self._begin()
        loaded = iter(kernels)
        for number, (before, step) in enumerate(zip((None, *self.call.steps), self.call.steps, strict=False)):
            self._allocate_large(number)
            if isinstance(step, KernelLaunch):
                self._backend.add_launch(self, _behind(before, step, self.sizes), next(loaded))
            elif isinstance(step, LibraryCall):
                self._add_library(step)
            elif isinstance(step, Loop):
                self._add_loop(step, [next(loaded) for _ in step.body.launches])
            else:
                self._add_product(step)
            self._release(number)
        inputs = len(self.call.inputs)
        results = tuple(self.tensor(key) for key in self.call.results)
        if self._written:
            self.add(Do(_count_writes, tuple(self._written)))
        return Instructions(inputs, tuple(self._held), tuple(self._body), results, put_together, self._backend.gpu)

    # What steps name.

    def add(self, *instructions: Instruction) -> None:
        """Appends instructions."""
        self._body += instructions

    def tensor(self, key: int) -> int:
        """The register of a buffer as a tensor."""
        if key not in self._slots:
            return self._register(key)
        shape = self.shape(key)
        return self.view(BufferView(key, shape, contiguous(shape), 0))

    def view(self, place: BufferView) -> int:
        """The register of a view of a buffer: as few operations of torch's as it takes, each of which costs microseconds."""
        spec, slot = self.spec(place.buffer), self._slots.get(place.buffer)
        shape, strides = place.shape, place.strides
        is_whole = not place.offset and shape == self.shape(place.buffer) and strides == contiguous(shape)
        if is_whole and slot is None and spec.role is not Role.INPUT:
            return self._register(place.buffer)
        known = place.buffer, shape, strides, place.offset
        if known not in self._views:
            offset = place.offset + (slot.offset // spec.dtype.itemsize if slot is not None else 0)
            self._views[known] = self._viewed(place.buffer, spec.dtype.torch, shape, strides, offset)
        return self._views[known]

    def _viewed(self, key: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> int:
        is_part = key in self._slots
        if is_part and self._memory is not None:
            with torch.inference_mode(mode=False):  # or no call outside of it could write there
                whole = self._memory[: self._memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
                return self._new(whole.as_strided(shape, strides, whole.storage_offset() + offset))
        source = self._part() if is_part else self._register(key)
        view = self._new()
        self.add(View(view, source, dtype, shape, strides, offset))
        return view

    def _part(self) -> int:
        """The register of the workspace."""
        if self._workspace is None:
            self._workspace = self._new(self._memory)
        return self._workspace

    def _register(self, key: int) -> int:
        if key not in self._registers:
            self._registers[key] = self._new()
        return self._registers[key]

    def _new(self, held: Tensor | None = None) -> int:
        self._held.append(held)
        return len(self.call.inputs) + len(self._held) - 1

    def spec(self, key: int) -> Buffer:
        """A buffer."""
        return self._specs[key]

    def shape(self, key: int) -> tuple[int, ...]:
        """A buffer's shape."""
        return tuple(extent(self.sizes) for extent in self._specs[key].shape)

    def address(self, key: int) -> Address:
        """A buffer's address."""
        slot = self._slots.get(key)
        return Address(self._register(key)) if slot is None else Address(self._part(), slot.offset)

    def argument(self, argument: LaunchArgument, maps: Sequence[TensorMap] = ()) -> ArgumentValue:
        """An argument of a launch.

        Args:
            maps: the launch's tensor maps.
        """
        if isinstance(argument, PointerArgument):
            return self.address(argument.buffer)
        if isinstance(argument, MapArgument):
            return maps[argument.number]
        if isinstance(argument, SizeArgument):
            return ConstantValue(argument.formula(self.sizes))
        return ScalarValue(argument.name, argument.is_float)

    # Steps.

    def _begin(self) -> None:
        """Allocates what lives as long as the call, and makes the keys of random bits: one is drawn for all that have no other."""
        if self._written:
            names = [name for _, name in self.call.inputs]
            check = partial(_check_apart, names, self._written)
            self.add(Do(check, tuple(range(len(names)))))
        for spec in self.call.buffers:
            if spec.role is Role.OUTPUT and spec.key not in self.call.library_allocated | self._late:
                self.add(self._allocation(spec))
        if self._slots and self._memory is None:
            self.add(Allocate.row_major(self._part(), (self._workspace_bytes,), torch.uint8, self.device))
        drawn: int | None = None
        for key in self.call.keys:
            source = key.source
            if isinstance(source, PointerArgument):
                self._registers[key.buffer] = self.tensor(source.buffer)
            elif source is None and drawn is not None:
                self._registers[key.buffer] = drawn
            else:
                number = None if source is None else self.argument(source)
                assert number is None or isinstance(number, (ScalarValue, ConstantValue))
                self.add(MakeKey(self._register(key.buffer), self.device, number))
                drawn = self._register(key.buffer) if source is None else drawn

    def _allocation(self, spec: Buffer) -> Allocate:
        return Allocate.row_major(self._register(spec.key), self.shape(spec.key), spec.dtype.torch, self.device)

    def _large_results(self) -> set[int]:
        """Results that are allocated by the step that makes them."""
        results = [spec for spec in self.call.buffers if spec.role is Role.OUTPUT and spec.key not in self.call.library_allocated]
        touched = [spec for spec in results if spec.key in self._first_of]
        return {spec.key for spec in touched if spec.dtype.itemsize * math.prod(self.shape(spec.key)) >= SEPARATE_BYTES}

    def _allocate_large(self, number: int) -> None:
        """Allocates what is large and none of the steps before this one knows."""
        self.add(*(self._allocation(self.spec(key)) for key in sorted(self._late) if self._first_of[key] == number))

    def _release(self, number: int) -> None:
        """Lets go of what no later step knows, and of views of it."""
        held = {*self.call.results, *(self.call.inputs[place][0] for place in self._written)}
        own = {key for key, _ in self.call.inputs} | self.call.library_allocated | self._late
        done = {key for key in own - held if self._last_of.get(key) == number}
        views = [register for known, register in self._views.items() if known[0] in done]
        if done:
            self.add(Release((*sorted(map(self._register, done)), *views)))

    def _add_library(self, call: LibraryCall) -> None:
        """The call, and its results as they are wanted in memory, where the function left them otherwise."""
        operands = [self.view(place_of(operand, self.sizes)) for operand in call.operands]
        wanted = tuple((result.number, self.spec(result.buffer).dtype.torch) for result in call.results)
        given = wanted, *call.settings, *(formula(self.sizes) for formula in call.sizes)
        results = tuple((self._register(result.buffer), result.order, self.shape(result.buffer)) for result in call.results)
        self.add(Library(call.function, given, tuple(operands), results))

    def _add_loop(self, loop: Loop, kernels: Sequence[Any]) -> None:
        """A call of the body for each block, behind zeros where all blocks add up."""
        self.add(*(Do(_zero, (self.tensor(key),)) for key in loop.zeros))
        tensors = tuple(map(self.tensor, loop.operands))
        further = None if self._memory is None else self._memory[self._workspace_bytes :]
        for sizes in loop.blocks(self.sizes):
            inner = Binder(loop.body, sizes, self.device, self._backend, is_inside=True, memory=further)
            self.add(Do(inner.instructions(kernels, None), tensors))

    def _add_product(self, product: MatrixProduct) -> None:
        dtypes = [self.spec(operand.buffer).dtype for operand in (product.a, product.out)]
        function, *places = product_of(product, self.sizes, is_rounded_once=dtypes[0] is dtypes[1] or self.device.type == "cuda")
        a, b, out = map(self.view, places)
        if function in (torch.mm, torch.bmm):
            wider = None if dtypes[0] is dtypes[1] else dtypes[1].torch
            self.add(Product(a, b, out, function is torch.bmm, wider))
        else:
            self.add(Multiply(a, b, out, function is multiply_into))


def _behind(before: CallStep | None, launch: KernelLaunch, sizes: Mapping[str, int]) -> KernelLaunch:
    """A launch as it is at some sizes: it overlaps with the one before it where there is one. Where that has no block it is not
    launched, and what is in the stream instead may be anything."""
    follows = isinstance(before, KernelLaunch) and before.grid(sizes) > 0
    return launch if follows or not launch.overlaps else replace(launch, overlaps=False)


def _check_apart(names: Sequence[str], written: Sequence[int], tensors: Sequence[Tensor], _: object) -> None:
    check_apart(names, tensors, written)


def _count_writes(tensors: Sequence[Tensor], _: object) -> None:
    count_writes(tensors)


def _zero(tensors: Sequence[Tensor], _: object) -> None:
    tensors[0].zero_()


# Backends: how a launch becomes an instruction.


class LaunchBackend:
    """Makes instructions of launches.

    Attributes:
        gpu: the index of the GPU that must be current in a call; None for none.
    """

    gpu: int | None = None

    def add_launch(self, binder: Binder, launch: KernelLaunch, kernel: Any) -> None:
        """Adds the instruction of one launch, with arguments from the buffers at hand.

        Args:
            binder: of the whole call.
            launch: what is launched.
            kernel: its kernel, loaded.
        """
        raise NotImplementedError


class CudaBackend(LaunchBackend):
    """Launches on a GPU, which must be the current one: the driver launches in the current context only.

    Args:
        index: of the GPU.
    """

    def __init__(self, index: int) -> None:
        self.gpu: int = index

    def add_launch(self, binder: Binder, launch: KernelLaunch, kernel: Any) -> None:
        """A call of the driver."""
        grid = launch.grid(binder.sizes)
        if not grid:
            return
        maps = [self._map(binder, spec) for spec in launch.tensor_maps]
        arguments = tuple(binder.argument(argument, maps) for argument in launch.arguments)
        kinds = list(map(_kind, arguments))
        site = LaunchSite(kernel, self.gpu, grid, launch.block, launch.shared_bytes, kinds, overlaps=launch.overlaps)
        binder.add(LaunchKernel(site, arguments))

    def _map(self, binder: Binder, spec: TensorMapSpec) -> TensorMap:
        sizes, dtype = binder.sizes, binder.spec(spec.buffer).dtype
        shape, strides = [f(sizes) for f in spec.shape], [f(sizes) for f in spec.strides]
        maps = cuda.TensorMaps(dtype, self.gpu, shape, strides, spec.offset(sizes), spec.box, promote=not spec.writable)
        return TensorMap(binder.address(spec.buffer), maps)


def _kind(argument: ArgumentValue) -> ParameterKind | int:
    """An argument's kind; its value where shapes determine it."""
    if isinstance(argument, ConstantValue):
        return argument.number
    if isinstance(argument, ScalarValue):
        return REAL if argument.is_float else INTEGER
    return MAP if isinstance(argument, TensorMap) else ADDRESS


class HostBackend(LaunchBackend):
    """Runs kernels of the CPU target."""

    def add_launch(self, binder: Binder, launch: KernelLaunch, kernel: Any) -> None:
        """A call of the kernel's entry with its arguments packed."""
        arguments = tuple(map(binder.argument, launch.arguments))
        kinds = ["d" if isinstance(a, ScalarValue) and a.is_float else "q" for a in arguments]
        pack = struct.Struct("".join([*kinds, "q"] if launch.checks else kinds)).pack
        refusal = partial(out_of_range, sizes=binder.sizes) if launch.checks else None
        binder.add(HostLaunch(kernel, arguments, pack, refusal))


def out_of_range(message: str, sizes: Mapping[str, int]) -> IndexRangeError:
    """The error of an index that names no element, with the sizes of this call in the range that it ends with."""
    words, bracket, limits = message.rpartition("[")
    known = re.sub(r"[A-Za-z_]\w*", lambda name: str(sizes.get(name[0], name[0])), limits)
    return IndexRangeError(words + bracket + known, hint="check the values that are used as indices")
