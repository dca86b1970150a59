"""CUDA text as steps of a call on the CPU, through the emulator."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fusegen.compiler.emulator import EARLY, Buffer, EmulatedSource, Timing, emulate, load_emulated
from fusegen.errors import EmulationError, IndexRangeError
from fusegen.program import call
from fusegen.program.call import TensorMapSpec
from fusegen.runtime.execute import Backend, Binder, out_of_range
from fusegen.runtime.instructions import Do, Scalars, integer
from fusegen.source import Source


def emulated_kernels(sources: Sequence[Source]) -> list[EmulatedSource]:
    """The kernels of some sources, compiled as one unit."""
    kernels = [EmulatedSource(source.kernel_text, source.entry) for source in sources]
    load_emulated(kernels)
    return kernels


class EmulatorBackend(Backend):
    """Runs CUDA text on the CPU, with every access checked.

    Args:
        timing: when things happen whose time is not settled.
    """

    def __init__(self, timing: Timing = EARLY) -> None:
        self.timing = timing

    def add_launch(self, binder: Binder, launch: call.KernelLaunch, kernel: Any) -> None:
        """A call of the emulator, which is told of all memory that the kernel may touch."""
        grid = launch.grid(binder.sizes)
        if not grid:
            return
        shape = partial(emulate, grid=grid, block=launch.block, cluster=launch.cluster, shared_bytes=launch.shared_bytes)
        run = partial(shape, kernel, overlaps=launch.overlaps, timing=self.timing)
        names = {spec.key: spec.name for spec in binder.call.buffers}

        def step(tensors: Sequence[Tensor], scalars: Scalars) -> None:
            given = dict(zip(launch.touched, tensors, strict=True))
            maps = [encode(spec, given[spec.buffer], sizes=binder.sizes) for spec in launch.tensor_maps]
            arguments = [_value(argument, given, maps, binder.sizes, scalars) for argument in launch.arguments]
            buffers = [Buffer.of(names[key], given[key], writable=written) for key, written in launch.touched.items()]
            try:
                run(arguments=arguments, buffers=buffers)
            except IndexRangeError as error:
                raise out_of_range(error.what, binder.sizes) from None

        binder.add(Do(step, tuple(map(binder.tensor, launch.touched))))


def _value(
    argument: call.LaunchArgument,
    tensors: Mapping[int, Tensor],
    maps: Sequence[ctypes.Structure],
    sizes: Mapping[str, int],
    scalars: Scalars,
) -> float:
    if isinstance(argument, call.PointerArgument):
        return tensors[argument.buffer].data_ptr()
    if isinstance(argument, call.MapArgument):
        return ctypes.addressof(maps[argument.number])
    if isinstance(argument, call.SizeArgument):
        return argument.formula(sizes)
    return float(scalars[argument.name]) if argument.is_float else integer(scalars[argument.name])


# Tensor maps for the emulator: what the driver would make of a view, and what it would refuse.


_RANKS = 4
_ALIGNMENT, _FARTHEST = 16, 1 << 40  # bytes: of addresses and strides; what a stride stays below
_LONGEST_SIDE, _LINE_BYTES = 256, 128  # of a box, in elements; and of its lines


class EmulatedMap(ctypes.Structure):
    """Mirrors ``emulator::Map`` in ``templates/emulator/runtime/tensor.hpp``: sizes from the contiguous dimension outwards."""

    _fields_ = (
        ("base", ctypes.c_int64),
        ("itemsize", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("shape", ctypes.c_int64 * _RANKS),
        ("strides", ctypes.c_int64 * _RANKS),
        ("box", ctypes.c_int64 * _RANKS),
        ("padding", ctypes.c_int64),
    )


def encode(spec: TensorMapSpec, tensor: Tensor, sizes: Mapping[str, int]) -> EmulatedMap:
    """The map of a view of a tensor.

    Raises:
        EmulationError: the driver would refuse it.
    """
    itemsize = tensor.element_size()
    shape = [f(sizes) for f in spec.shape][::-1]
    strides = [f(sizes) * itemsize for f in spec.strides][::-1]
    box = spec.box[::-1]
    base = tensor.data_ptr() + spec.offset(sizes) * itemsize
    legal = (
        base % _ALIGNMENT == 0
        and strides[0] == itemsize
        and all(stride % _ALIGNMENT == 0 and 0 <= stride < _FARTHEST for stride in strides[1:])
        and all(0 < side <= _LONGEST_SIDE for side in box)
        and box[0] * itemsize <= _LINE_BYTES
        and all(size > 0 for size in shape)
    )
    if not legal:
        raise EmulationError(f"no tensor map: shape {shape}, strides of {strides} bytes, box {list(box)}, at {base:#x}")
    padding = [0] * (_RANKS - len(shape))
    arrays = ((ctypes.c_int64 * _RANKS)(*values, *padding) for values in (shape, strides, box))
    return EmulatedMap(base, itemsize, len(shape), *arrays, 0)
