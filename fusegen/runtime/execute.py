"""Binds a launch plan to exact shapes and strides: its memory, arguments and steps become instructions.

This module knows neither graphs nor compilers.
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
    CounterArgument,
    KernelLaunch,
    LaunchArgument,
    LaunchPlan,
    LibraryCall,
    Loop,
    MapArgument,
    MatmulCall,
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
from fusegen.runtime.arguments import check_no_aliasing, count_writes
from fusegen.runtime.cuda import ADDRESS, INTEGER, MAP, REAL, LaunchSite, ParameterKind
from fusegen.runtime.instructions import (
    Address,
    Allocate,
    ArgumentValue,
    CallFunction,
    CallLibrary,
    ConstantValue,
    CounterValue,
    HostLaunch,
    Instruction,
    Instructions,
    LaunchKernel,
    MakeKey,
    Matmul,
    MultiStepMatmul,
    Release,
    RunCall,
    Runner,
    ScalarValue,
    TensorMap,
    View,
    contiguous,
)
from fusegen.runtime.library import BufferView, matmul_of, multiply_into, view_of
from fusegen.runtime.workspace import OnWorkspace

PackResults: TypeAlias = Callable[[list[Tensor]], Any]


def bound_call(
    call: LaunchPlan,
    pack_results: PackResults | None,
    sizes: Mapping[str, int],
    device: torch.device,
    backend: LaunchBackend,
    kernels: Sequence[Any],
    name: str = "this call",
) -> Runner:
    """Binds a launch plan; the runner takes one tensor per input of the plan, and scalars by name.

    Args:
        pack_results: builds the function's result from its tensors; None if the only tensor, or None, is the result.
        sizes: values of all sizes and strides, by name.
        backend: creates the instructions of launches.
        kernels: loaded, one per launch.
        name: the kernel's name, for messages.
    """

    def bound(memory: Tensor | None) -> Runner:
        instructions = Binder(call, sizes, device, backend, memory=memory).instructions(kernels, pack_results)
        return NativeChoice[RunCall](lambda module: module.Executor(instructions), lambda: instructions)

    standalone, needed = bound(None), bytes_of(call, sizes)
    return OnWorkspace(name, standalone, needed, device, bound) if needed else standalone


class Binder:
    """Creates the instructions of a call.

    Args:
        sizes: values of all sizes and strides, by name.
        backend: creates the instructions of launches.
        is_inside: whether another call contains it, and handles its writes.
        memory: buffer for the temporaries, which the instructions keep alive; None to allocate them in each call.
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
        self._allocated_by_steps = {slot.key for slot in temporaries if slot.key not in self._slots} | self._large_outputs()
        self._initial: list[Tensor | None] = []
        self._registers: dict[int, int] = {key: position for position, (key, _) in enumerate(call.inputs)}
        self._views: dict[tuple[Any, ...], int] = {}
        self._workspace: int | None = None
        self._body: list[Instruction] = []

    def instructions(self, kernels: Sequence[Any], pack_results: PackResults | None) -> Instructions:
        """Returns all instructions, given the loaded kernels, one per launch."""
        self._begin()
        loaded = iter(kernels)
        for number, (before, step) in enumerate(zip((None, *self.call.steps), self.call.steps, strict=False)):
            self._allocate_large(number)
            if isinstance(step, KernelLaunch):
                self._backend.add_launch(self, _without_false_overlap(before, step, self.sizes), next(loaded))
            elif isinstance(step, LibraryCall):
                self._add_library(step)
            elif isinstance(step, Loop):
                self._add_loop(step, [next(loaded) for _ in step.body.launches])
            else:
                self._add_matmul(step)
            self._release(number)
        inputs = len(self.call.inputs)
        results = tuple(self.tensor(key) for key in self.call.results)
        if self._written:
            self.add(CallFunction(_count_writes, tuple(self._written)))
        return Instructions(inputs, tuple(self._initial), tuple(self._body), results, pack_results, self._backend.gpu)

    def add(self, *instructions: Instruction) -> None:
        self._body += instructions

    def tensor(self, key: int) -> int:
        """Returns the register of a buffer as a tensor."""
        if key not in self._slots:
            return self._register(key)
        shape = self.shape(key)
        return self.view(BufferView(key, shape, contiguous(shape), 0))

    def view(self, buffer_view: BufferView) -> int:
        """Returns the register of a view of a buffer. It avoids torch operations, each of which costs microseconds."""
        spec, slot = self.spec(buffer_view.buffer), self._slots.get(buffer_view.buffer)
        shape, strides = buffer_view.shape, buffer_view.strides
        is_buffer = not buffer_view.offset and shape == self.shape(buffer_view.buffer) and strides == contiguous(shape)
        if is_buffer and slot is None and spec.role is not Role.INPUT:
            return self._register(buffer_view.buffer)
        key = buffer_view.buffer, shape, strides, buffer_view.offset
        if key not in self._views:
            offset = buffer_view.offset + (slot.offset // spec.dtype.itemsize if slot is not None else 0)
            self._views[key] = self._new_view(buffer_view.buffer, spec.dtype.torch, shape, strides, offset)
        return self._views[key]

    def _new_view(self, key: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> int:
        is_in_workspace = key in self._slots
        if is_in_workspace and self._memory is not None:
            with torch.inference_mode(mode=False):  # otherwise calls outside of inference mode could not write there
                flat = self._memory[: self._memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
                return self._new(flat.as_strided(shape, strides, flat.storage_offset() + offset))
        source = self._workspace_register() if is_in_workspace else self._register(key)
        view = self._new()
        self.add(View(view, source, dtype, shape, strides, offset))
        return view

    def _workspace_register(self) -> int:
        if self._workspace is None:
            self._workspace = self._new(self._memory)
        return self._workspace

    def _register(self, key: int) -> int:
        if key not in self._registers:
            self._registers[key] = self._new()
        return self._registers[key]

    def _new(self, tensor: Tensor | None = None) -> int:
        self._initial.append(tensor)
        return len(self.call.inputs) + len(self._initial) - 1

    def spec(self, key: int) -> Buffer:
        return self._specs[key]

    def shape(self, key: int) -> tuple[int, ...]:
        return tuple(extent(self.sizes) for extent in self._specs[key].shape)

    def address(self, key: int) -> Address:
        slot = self._slots.get(key)
        return Address(self._register(key)) if slot is None else Address(self._workspace_register(), slot.offset)

    def argument(self, argument: LaunchArgument, maps: Sequence[TensorMap] = ()) -> ArgumentValue:
        if isinstance(argument, PointerArgument):
            return self.address(argument.buffer)
        if isinstance(argument, MapArgument):
            return maps[argument.number]
        if isinstance(argument, SizeArgument):
            return ConstantValue(argument.formula(self.sizes))
        if isinstance(argument, CounterArgument):
            return CounterValue(self._backend.gpu or 0)
        return ScalarValue(argument.name, argument.is_float)

    def _begin(self) -> None:
        """Adds the checks of written tensors, allocations that live as long as the call, and random keys; keys without a source
        share one.
        """
        if self._written:
            names = [name for _, name in self.call.inputs]
            check = partial(_check_aliasing, names, self._written)
            self.add(CallFunction(check, tuple(range(len(names)))))
        for spec in self.call.buffers:
            if spec.role is Role.OUTPUT and spec.key not in self.call.library_allocated | self._allocated_by_steps:
                self.add(self._allocation(spec))
        if self._slots and self._memory is None:
            self.add(Allocate.row_major(self._workspace_register(), (self._workspace_bytes,), torch.uint8, self.device))
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

    def _large_outputs(self) -> set[int]:
        """Returns the large results, which are allocated right before the step that computes them."""
        results = [spec for spec in self.call.buffers if spec.role is Role.OUTPUT and spec.key not in self.call.library_allocated]
        used = [spec for spec in results if spec.key in self._first_of]
        return {spec.key for spec in used if spec.dtype.itemsize * math.prod(self.shape(spec.key)) >= SEPARATE_BYTES}

    def _allocate_large(self, number: int) -> None:
        """Allocates the large buffers that a step uses first."""
        self.add(*(self._allocation(self.spec(key)) for key in sorted(self._allocated_by_steps) if self._first_of[key] == number))

    def _release(self, number: int) -> None:
        """Releases buffers, and their views, after their last step."""
        needed = {*self.call.results, *(self.call.inputs[position][0] for position in self._written)}
        releasable = {key for key, _ in self.call.inputs} | self.call.library_allocated | self._allocated_by_steps
        dead = {key for key in releasable - needed if self._last_of.get(key) == number}
        views = [register for view, register in self._views.items() if view[0] in dead]
        if dead:
            self.add(Release((*sorted(map(self._register, dead)), *views)))

    def _add_library(self, call: LibraryCall) -> None:
        """Calls a library function, and permutes its results to the expected layout."""
        operands = [self.view(view_of(operand, self.sizes)) for operand in call.operands]
        result_types = tuple((result.number, self.spec(result.buffer).dtype.torch) for result in call.results)
        arguments = result_types, *call.settings, *(formula(self.sizes) for formula in call.sizes)
        results = tuple((self._register(result.buffer), result.order, self.shape(result.buffer)) for result in call.results)
        self.add(CallLibrary(call.function, arguments, tuple(operands), results))

    def _add_loop(self, loop: Loop, kernels: Sequence[Any]) -> None:
        """Zeroes the accumulators, and calls the body for each block."""
        self.add(*(CallFunction(_zero, (self.tensor(key),)) for key in loop.zeros))
        tensors = tuple(map(self.tensor, loop.operands))
        remaining_memory = None if self._memory is None else self._memory[self._workspace_bytes :]
        for sizes in loop.blocks(self.sizes):
            body = Binder(loop.body, sizes, self.device, self._backend, is_inside=True, memory=remaining_memory)
            self.add(CallFunction(body.instructions(kernels, None), tensors))

    def _add_matmul(self, matmul: MatmulCall) -> None:
        dtypes = [self.spec(operand.buffer).dtype for operand in (matmul.a, matmul.out)]
        function, *views = matmul_of(matmul, self.sizes, is_rounded_once=dtypes[0] is dtypes[1] or self.device.type == "cuda")
        a, b, out = map(self.view, views)
        if function in (torch.mm, torch.bmm):
            wider = None if dtypes[0] is dtypes[1] else dtypes[1].torch
            self.add(Matmul(a, b, out, function is torch.bmm, wider))
        else:
            self.add(MultiStepMatmul(a, b, out, function is multiply_into))


def _without_false_overlap(before: CallStep | None, launch: KernelLaunch, sizes: Mapping[str, int]) -> KernelLaunch:
    """Clears `overlaps` unless the previous step starts a kernel: else, other work precedes the launch in the stream."""
    if isinstance(before, KernelLaunch):
        follows = before.grid(sizes) > 0
    else:
        follows = isinstance(before, MatmulCall) and before.products(sizes) > 0
    return launch if follows or not launch.overlaps else replace(launch, overlaps=False)


def _check_aliasing(names: Sequence[str], written: Sequence[int], tensors: Sequence[Tensor], _: object) -> None:
    check_no_aliasing(names, tensors, written)


def _count_writes(tensors: Sequence[Tensor], _: object) -> None:
    count_writes(tensors)


def _zero(tensors: Sequence[Tensor], _: object) -> None:
    tensors[0].zero_()


# Backends: instructions of launches.


class LaunchBackend:
    """Creates the instructions of launches; ``gpu`` is the GPU that must be current in a call, or None."""

    gpu: int | None = None

    def add_launch(self, binder: Binder, launch: KernelLaunch, kernel: Any) -> None:
        """Adds the instruction of a launch of a loaded kernel."""
        raise NotImplementedError


class CudaBackend(LaunchBackend):
    """Launches on a GPU, which must be current, since the driver launches in the current context only."""

    def __init__(self, index: int) -> None:
        self.gpu: int = index

    def add_launch(self, binder: Binder, launch: KernelLaunch, kernel: Any) -> None:
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
        maps = cuda.TensorMaps(dtype, self.gpu, shape, strides, spec.offset(sizes), spec.box)
        return TensorMap(binder.address(spec.buffer), maps)


def _kind(argument: ArgumentValue) -> ParameterKind | int:
    """Returns the kind of an argument, or its value if that is constant."""
    if isinstance(argument, ConstantValue):
        return argument.number
    if isinstance(argument, ScalarValue):
        return REAL if argument.is_float else INTEGER
    if isinstance(argument, CounterValue):
        return INTEGER
    return MAP if isinstance(argument, TensorMap) else ADDRESS


class HostBackend(LaunchBackend):
    """Runs kernels of the CPU target."""

    def add_launch(self, binder: Binder, launch: KernelLaunch, kernel: Any) -> None:
        arguments = tuple(map(binder.argument, launch.arguments))
        kinds = ["d" if isinstance(a, ScalarValue) and a.is_float else "q" for a in arguments]
        pack = struct.Struct("".join([*kinds, "q"] if launch.checks else kinds)).pack
        refusal = partial(out_of_range, sizes=binder.sizes) if launch.checks else None
        binder.add(HostLaunch(kernel, arguments, pack, refusal))


def out_of_range(message: str, sizes: Mapping[str, int]) -> IndexRangeError:
    """Returns the error of an index out of range; sizes in the message's bounds are replaced by their values."""
    text, bracket, limits = message.rpartition("[")
    evaluated = re.sub(r"[A-Za-z_]\w*", lambda name: str(sizes.get(name[0], name[0])), limits)
    return IndexRangeError(text + bracket + evaluated, hint="check the values that are used as indices")
