"""Programs on tensors: memory, arguments, steps. A `BoundProgram` is good for one set of exact shapes and strides."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from fusegen.errors import ArgumentError
from fusegen.lang.run import Structure
from fusegen.runtime.compile import Compiled
from fusegen.runtime.emulated_maps import encode
from fusegen.runtime.emulator import EARLY, Buffer, EmulatedSource, Timing, emulate, load_emulated
from fusegen.runtime.library import multiply
from fusegen.schedule.program import (
    BufferSpec,
    Launch,
    LibraryProduct,
    MapArgument,
    PointerArgument,
    Role,
    ScalarArgument,
    SizeArgument,
    StridedOperand,
    TensorMapSpec,
)
from fusegen.schedule.workspace import arrange
from fusegen.source import Source

Buffers: TypeAlias = dict[int, Tensor]
Scalars: TypeAlias = Mapping[str, float]
Step: TypeAlias = Callable[[Buffers, Scalars], None]
Filler: TypeAlias = Callable[[Buffers, Scalars], list[Any]]
MapOf: TypeAlias = Callable[[Buffers], Any]

_STOOD_IN = "a kernel was given a tensor without memory: something around the call stands in for what torch allocates"
_OUTSIDE = "call the kernel outside of torch.func's transforms and of modes that make tensors"


class BoundProgram:
    """A program with all of its formulas evaluated.

    Args:
        compiled: what to run.
        sizes: values of all sizes and strides, by name.
        device: where.
        backend: makes steps of launches.
    """

    def __init__(self, compiled: Compiled, sizes: Mapping[str, int], device: torch.device, backend: Backend) -> None:
        program = compiled.program
        self.device = device
        self.inputs = [key for key, _ in program.inputs]
        self.outputs = [(s.key, self._allocation(s, sizes)) for s in program.buffers if s.role is Role.OUTPUT]
        slots, self.workspace_bytes = arrange(program, sizes)
        self.slots = [(slot, program.buffers[slot.key].dtype.torch) for slot in slots]
        self.results = [view.buffer for view in program.results]
        self.single = self.results[0] if compiled.structure.is_leaf() else None
        self.put_together = _builder(compiled.structure)
        launches = iter(backend.launch_steps(program.launches, compiled.sources, program.buffers, sizes))
        self.steps = [next(launches) if isinstance(step, Launch) else _library_step(step, sizes) for step in program.steps]

    def __call__(self, tensors: Sequence[Tensor], scalars: Scalars) -> Any:
        """Runs the program.

        Args:
            tensors: one an input, in the order of the graph's inputs.
            scalars: by name.

        Returns:
            What the user's function returns.
        """
        buffers: Buffers = dict(zip(self.inputs, tensors, strict=True))
        for key, allocate in self.outputs:
            buffers[key] = allocate()
        if self.slots:
            self._place_temporaries(buffers)
        for step in self.steps:
            step(buffers, scalars)
        if self.single is not None:
            return buffers[self.single]
        return self.put_together([buffers[key] for key in self.results])

    def _allocation(self, spec: BufferSpec, sizes: Mapping[str, int]) -> Callable[[], Tensor]:
        return partial(torch.empty, _shape(spec, sizes), dtype=spec.dtype.torch, device=self.device)

    def _place_temporaries(self, buffers: Buffers) -> None:
        workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=self.device)
        for slot, dtype in self.slots:
            part = workspace[slot.offset : slot.offset + slot.size]
            buffers[slot.key] = part.view(dtype).view(slot.shape)


def _builder(structure: Structure) -> Callable[[list[Tensor]], Any]:
    """What makes a function's results of its tensors; of the plain kinds the constructor itself."""
    if structure.type in (tuple, list) and all(child.is_leaf() for child in structure.children()):
        kind: type = structure.type
        return kind
    return lambda tensors: tree_unflatten(tensors, structure)


def _shape(spec: BufferSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(formula(sizes) for formula in spec.shape)


def _library_step(step: LibraryProduct, sizes: Mapping[str, int]) -> Step:
    views = [_strided(operand, sizes) for operand in (step.a, step.b, step.out)]

    def run(buffers: Buffers, _scalars: Scalars) -> None:
        multiply(*(view(buffers) for view in views))

    return run


def _strided(operand: StridedOperand, sizes: Mapping[str, int]) -> Callable[[Buffers], Tensor]:
    shape = [f(sizes) for f in operand.shape]
    strides = [f(sizes) for f in operand.strides]
    offset = operand.offset(sizes)

    def view(buffers: Buffers) -> Tensor:
        base = buffers[operand.buffer]
        return base.as_strided(shape, strides, base.storage_offset() + offset)

    return view


# Backends: how a launch becomes a step.


class Backend:
    """Makes steps of launches."""

    def launch_steps(
        self, launches: Sequence[Launch], sources: Sequence[Source], buffers: Sequence[BufferSpec], sizes: Mapping[str, int]
    ) -> list[Step]:
        """For each launch of a program a step that launches its kernel with arguments from the buffers at hand."""
        return [self.launch_step(launch, source, buffers, sizes) for launch, source in zip(launches, sources, strict=True)]

    def launch_step(self, launch: Launch, source: Source, buffers: Sequence[BufferSpec], sizes: Mapping[str, int]) -> Step:
        """The step of one launch."""
        raise NotImplementedError


def _nothing(buffers: Buffers, scalars: Scalars) -> None:
    """The step of a launch without blocks: nothing is written."""


class CudaBackend(Backend):
    """Launches on a GPU.

    Args:
        architecture: such as ``sm_90a``.
        device: the GPU.
    """

    def __init__(self, architecture: str, device: torch.device) -> None:
        self.architecture = architecture
        self.index = torch.cuda.current_device() if device.index is None else device.index

    def launch_step(self, launch: Launch, source: Source, buffers: Sequence[BufferSpec], sizes: Mapping[str, int]) -> Step:
        from fusegen.runtime import cuda

        kernel = cuda.CudaKernel(source, launch, self.architecture, self.index).kernel
        if not launch.grid(sizes):
            return _nothing
        config = cuda.launch_config(launch.grid(sizes), launch)
        run, stream_of = cuda.launcher(), cuda.stream_of
        raw_stream, current_device = cuda.queries()
        fill = argument_filler(launch, sizes, [self._map(m, launch, buffers, sizes) for m in launch.tensor_maps])
        index = self.index

        def step(given: Buffers, scalars: Scalars) -> None:
            if current_device() != index:  # the driver launches in the current context only
                with torch.cuda.device(index):
                    step(given, scalars)
            else:
                run(stream_of(raw_stream(index)), config, kernel, *fill(given, scalars))

        return step

    def _map(self, spec: TensorMapSpec, launch: Launch, buffers: Sequence[BufferSpec], sizes: Mapping[str, int]) -> MapOf:
        """How a tensor map is found at a call."""
        from fusegen.runtime import cuda

        dtype = next(b.dtype for b in buffers if b.key == spec.buffer)
        shape, strides = [f(sizes) for f in spec.shape], [f(sizes) for f in spec.strides]
        promote = not spec.writable
        maps = cuda.TensorMaps(dtype, shape, strides, spec.offset(sizes), spec.box, promote=promote)
        return lambda given: maps.at(given[spec.buffer])


def argument_filler(launch: Launch, sizes: Mapping[str, int], maps: Sequence[MapOf] = ()) -> Filler:
    """A function that gives a launch's arguments at a call. Most are known already; only the rest is filled in.

    Args:
        maps: how each tensor map is found.
    """
    template: list[Any] = []
    pointers: list[tuple[int, int]] = []
    computed: list[tuple[int, Callable[[Buffers, Scalars], Any]]] = []
    for place, argument in enumerate(launch.arguments):
        template.append(argument.formula(sizes) if isinstance(argument, SizeArgument) else 0)
        if isinstance(argument, PointerArgument):
            pointers.append((place, argument.buffer))
        elif isinstance(argument, MapArgument):
            computed.append((place, _of_map(maps[argument.number])))
        elif isinstance(argument, ScalarArgument):
            computed.append((place, _of_scalar(argument.name, launch)))

    def fill(given: Buffers, scalars: Scalars) -> list[Any]:
        arguments = template.copy()
        try:
            for place, buffer in pointers:
                arguments[place] = given[buffer].data_ptr() or _without_address(given[buffer])
        except RuntimeError as error:  # torch.func hands out tensors of which torch tells no address
            raise ArgumentError(_STOOD_IN, mend=_OUTSIDE) from error
        for place, value in computed:
            arguments[place] = value(given, scalars)
        return arguments

    return fill


def _without_address(tensor: Tensor) -> int:
    """What stands for the address of an empty tensor; another one without memory ends no process."""
    if tensor.numel():
        raise ArgumentError(_STOOD_IN, mend=_OUTSIDE)
    return 0


def _of_map(find: MapOf) -> Callable[[Buffers, Scalars], Any]:
    return lambda given, scalars: find(given)


def _of_scalar(name: str, launch: Launch) -> Callable[[Buffers, Scalars], Any]:
    convert = float if dict(launch.kernel.scalars)[name].is_float else int
    return lambda given, scalars: convert(scalars[name])


class EmulatorBackend(Backend):
    """Runs CUDA text on the CPU, with every access checked.

    Args:
        timing: when things happen whose time is not settled.
    """

    def __init__(self, timing: Timing = EARLY) -> None:
        self.timing = timing

    def launch_steps(
        self, launches: Sequence[Launch], sources: Sequence[Source], buffers: Sequence[BufferSpec], sizes: Mapping[str, int]
    ) -> list[Step]:
        """The steps of a program; its kernels are compiled as one unit."""
        load_emulated([EmulatedSource(source.kernel_text, source.entry) for source in sources])
        return super().launch_steps(launches, sources, buffers, sizes)

    def launch_step(self, launch: Launch, source: Source, buffers: Sequence[BufferSpec], sizes: Mapping[str, int]) -> Step:
        grid = launch.grid(sizes)
        if not grid:
            return _nothing
        emulated = EmulatedSource(source.kernel_text, source.entry)
        names = {spec.key: spec.name for spec in buffers}
        touched = dict.fromkeys([*(p.buffer for p in launch.kernel.pointers), *(m.buffer for m in launch.tensor_maps)])
        written = {p.buffer for p in launch.kernel.pointers if p.writable}
        written |= {m.buffer for m in launch.tensor_maps if m.writable}

        def step(given: Buffers, scalars: Scalars) -> None:
            maps = [encode(spec, given[spec.buffer], sizes) for spec in launch.tensor_maps]
            fill = argument_filler(launch, sizes, [_found_at(ctypes.addressof(encoded)) for encoded in maps])
            emulate(
                emulated,
                grid=grid,
                block=launch.block,
                shared_bytes=launch.shared_bytes,
                arguments=fill(given, scalars),
                buffers=[Buffer.of(names[key], given[key], writable=key in written) for key in touched],
                timing=self.timing,
            )

        return step


def _found_at(address: int) -> MapOf:
    return lambda given: address


class HostBackend(Backend):
    """Runs C++ on the CPU."""

    def launch_steps(
        self, launches: Sequence[Launch], sources: Sequence[Source], buffers: Sequence[BufferSpec], sizes: Mapping[str, int]
    ) -> list[Step]:
        """The steps of a program; its kernels are compiled as one unit."""
        from fusegen.runtime.host_launch import host_kernels

        host_kernels(sources)
        return super().launch_steps(launches, sources, buffers, sizes)

    def launch_step(self, launch: Launch, source: Source, buffers: Sequence[BufferSpec], sizes: Mapping[str, int]) -> Step:
        from fusegen.runtime.host_launch import host_kernels

        (kernel,) = host_kernels([source])
        fill = argument_filler(launch, sizes)

        def step(given: Buffers, scalars: Scalars) -> None:
            kernel(fill(given, scalars))

        return step
