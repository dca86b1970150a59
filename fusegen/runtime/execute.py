"""Calls on tensors: memory, arguments, steps. A `BoundProgram` is good for one set of exact shapes and strides.

Nothing here knows what a call was made of, and nothing compiles.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fusegen.calls.call import (
    Buffer,
    Call,
    KernelLaunch,
    MapArgument,
    MatrixProduct,
    PointerArgument,
    RandomKey,
    Role,
    ScalarArgument,
    SizeArgument,
    StridedOperand,
    TensorMapSpec,
)
from fusegen.calls.workspace import arrange
from fusegen.errors import ArgumentError, IndexRangeError
from fusegen.runtime import cuda
from fusegen.runtime.host_memory import fresh
from fusegen.runtime.library import multiply
from fusegen.runtime.written import check_apart, count_writes

Buffers: TypeAlias = dict[int, Tensor]
Scalars: TypeAlias = Mapping[str, float]
Step: TypeAlias = Callable[[Buffers, Scalars], None]
Filler: TypeAlias = Callable[[Buffers, Scalars], list[Any]]
MapOf: TypeAlias = Callable[[Buffers], Any]
PutTogether: TypeAlias = Callable[[list[Tensor]], Any]

_STOOD_IN = "a kernel was given a tensor without memory: something around the call stands in for what torch allocates"
_BEYOND = 1 << 63
_OUTSIDE = "call the kernel outside of torch.func's transforms and of modes that make tensors"


class BoundProgram:
    """A call with all of its formulas evaluated.

    Args:
        call: what to run.
        put_together: makes the function's results of their tensors; None where the only tensor, or none, is the result.
        sizes: values of all sizes and strides, by name.
        device: where.
        backend: makes steps of launches.
        kernels: loaded, one a launch.
    """

    def __init__(
        self,
        call: Call,
        put_together: PutTogether | None,
        sizes: Mapping[str, int],
        device: torch.device,
        backend: Backend,
        kernels: Sequence[Any],
    ) -> None:
        self.device = device
        self.empty = fresh if device.type == "cpu" else partial(torch.empty, device=device)
        self.inputs = [key for key, _ in call.inputs]
        self.names = [name for _, name in call.inputs]
        self.written = call.written
        self.outputs = [(s.key, self._allocation(s, sizes)) for s in call.buffers if s.role is Role.OUTPUT]
        slots, self.workspace_bytes = arrange(call, sizes)
        dtypes = {spec.key: spec.dtype.torch for spec in call.buffers}
        self.slots = [(slot, dtypes[slot.key]) for slot in slots]
        self.keys = [(key.buffer, _key_maker(key, sizes, device)) for key in call.keys]
        self.results = call.results
        self.put_together = put_together
        loaded = iter(kernels)
        self.steps = [
            backend.launch_step(step, next(loaded), call.buffers, sizes)
            if isinstance(step, KernelLaunch)
            else _library_step(step, sizes)
            for step in call.steps
        ]

    def __call__(self, tensors: Sequence[Tensor], scalars: Scalars) -> Any:
        """Runs the program.

        Args:
            tensors: one an input, in the order of the graph's inputs.
            scalars: by name.

        Returns:
            What the user's function returns.
        """
        if self.written:
            check_apart(self.names, tensors, self.written)
        buffers: Buffers = dict(zip(self.inputs, tensors, strict=True))
        for key, allocate in self.outputs:
            buffers[key] = allocate()
        if self.slots:
            self._place_temporaries(buffers)
        if self.keys:
            self._make_keys(buffers, scalars)
        for step in self.steps:
            step(buffers, scalars)
        if self.written:
            count_writes([tensors[place] for place in self.written])
        if self.put_together is None:
            return buffers[self.results[0]] if self.results else None
        return self.put_together([buffers[key] for key in self.results])

    def _allocation(self, spec: Buffer, sizes: Mapping[str, int]) -> Callable[[], Tensor]:
        return partial(self.empty, _shape(spec, sizes), dtype=spec.dtype.torch)

    def _make_keys(self, buffers: Buffers, scalars: Scalars) -> None:
        """Gives kernels the keys of their random bits, one drawn for all that have none of their own."""
        drawn: Tensor | None = None
        for buffer, make in self.keys:
            if make is not None:
                buffers[buffer] = make(buffers, scalars)
            else:
                drawn = drawn_key(self.device) if drawn is None else drawn
                buffers[buffer] = drawn

    def _place_temporaries(self, buffers: Buffers) -> None:
        workspace = self.empty((self.workspace_bytes,), dtype=torch.uint8)
        for slot, dtype in self.slots:
            part = workspace[slot.offset : slot.offset + slot.size]
            buffers[slot.key] = part.view(dtype).view(slot.shape)


def drawn_key(device: torch.device) -> Tensor:
    """A key from torch's generator of a device, one int64. An operation of torch's draws it: in a CUDA graph, at each replay."""
    return torch.empty(1, dtype=torch.int64, device=device).random_()


def _key_maker(key: RandomKey, sizes: Mapping[str, int], device: torch.device) -> Callable[[Buffers, Scalars], Tensor] | None:
    """What gives a call the key of random bits; None of a key that is drawn."""
    source = key.source
    if isinstance(source, PointerArgument):
        given = source.buffer
        return lambda buffers, scalars: buffers[given]
    if isinstance(source, SizeArgument):
        number = source.formula(sizes)
        return lambda buffers, scalars: torch.full((1,), number, dtype=torch.int64, device=device)
    if isinstance(source, ScalarArgument):
        name = source.name
        return lambda buffers, scalars: torch.full((1,), int(scalars[name]), dtype=torch.int64, device=device)
    return None


def _shape(spec: Buffer, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(formula(sizes) for formula in spec.shape)


def _library_step(step: MatrixProduct, sizes: Mapping[str, int]) -> Step:
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

    def launch_step(self, launch: KernelLaunch, kernel: Any, buffers: Sequence[Buffer], sizes: Mapping[str, int]) -> Step:
        """The step of one launch: it launches its kernel with arguments from the buffers at hand.

        Args:
            launch: what is launched.
            kernel: its kernel, loaded.
            buffers: of the whole call.
            sizes: values of all sizes and strides.
        """
        raise NotImplementedError


def nothing(buffers: Buffers, scalars: Scalars) -> None:
    """The step of a launch without blocks: nothing is written."""


class CudaBackend(Backend):
    """Launches on a GPU.

    Args:
        index: of the GPU.
    """

    def __init__(self, index: int) -> None:
        self.index = index

    def launch_step(self, launch: KernelLaunch, kernel: Any, buffers: Sequence[Buffer], sizes: Mapping[str, int]) -> Step:
        if not launch.grid(sizes):
            return nothing
        config = cuda.launch_config(launch.grid(sizes), launch)
        run, stream_of = cuda.launcher(), cuda.stream_of
        raw_stream, current_device = cuda.queries()
        fill = argument_filler(launch, sizes, [self._map(m, buffers, sizes) for m in launch.tensor_maps])
        index = self.index

        def step(given: Buffers, scalars: Scalars) -> None:
            if current_device() != index:  # the driver launches in the current context only
                with torch.cuda.device(index):
                    step(given, scalars)
            else:
                run(stream_of(raw_stream(index)), config, kernel, *fill(given, scalars))

        return step

    def _map(self, spec: TensorMapSpec, buffers: Sequence[Buffer], sizes: Mapping[str, int]) -> MapOf:
        """How a tensor map is found at a call."""
        dtype = next(b.dtype for b in buffers if b.key == spec.buffer)
        shape, strides = [f(sizes) for f in spec.shape], [f(sizes) for f in spec.strides]
        promote = not spec.writable
        maps = cuda.TensorMaps(dtype, shape, strides, spec.offset(sizes), spec.box, promote=promote)
        return lambda given: maps.at(given[spec.buffer])


def argument_filler(launch: KernelLaunch, sizes: Mapping[str, int], maps: Sequence[MapOf] = ()) -> Filler:
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
            computed.append((place, _of_scalar(argument)))

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


def _of_scalar(argument: ScalarArgument) -> Callable[[Buffers, Scalars], Any]:
    name, convert = argument.name, float if argument.is_float else _integer
    return lambda given, scalars: convert(scalars[name])


def _integer(value: float) -> int:
    """A number without its fraction; what 64 bits cannot hold as a processor's conversion gives it."""
    return int(value) if isinstance(value, int) or -_BEYOND <= value < _BEYOND else -_BEYOND


class HostBackend(Backend):
    """Runs kernels of the CPU target."""

    def launch_step(self, launch: KernelLaunch, kernel: Any, buffers: Sequence[Buffer], sizes: Mapping[str, int]) -> Step:
        fill = argument_filler(launch, sizes)

        def step(given: Buffers, scalars: Scalars) -> None:
            kernel(fill(given, scalars))

        def checked(given: Buffers, scalars: Scalars) -> None:
            failed = ctypes.c_char_p()
            kernel([*fill(given, scalars), ctypes.addressof(failed)])
            if failed.value is not None:
                raise out_of_range(failed.value.decode(), sizes)

        return checked if launch.checks else step


def out_of_range(message: str, sizes: Mapping[str, int]) -> IndexRangeError:
    """The error of an index that names no element, with the sizes of this call in the range that it ends with."""
    words, bracket, limits = message.rpartition("[")
    known = re.sub(r"[A-Za-z_]\w*", lambda name: str(sizes.get(name[0], name[0])), limits)
    return IndexRangeError(words + bracket + known, mend="check the values that are used as indices")
