"""CUDA text as steps of a call on the CPU, through the emulator."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fusegen.compiler.emulated_maps import encode
from fusegen.compiler.emulator import EARLY, Buffer, EmulatedSource, Timing, emulate, load_emulated
from fusegen.errors import IndexRangeError
from fusegen.program import call
from fusegen.runtime.execute import Backend, out_of_range
from fusegen.runtime.straight import Writer
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

    def write_launch(self, writer: Writer, launch: call.KernelLaunch, kernel: Any) -> None:
        """A call of the emulator, which is told of all memory that the kernel may touch."""
        grid = launch.grid(writer.sizes)
        if not grid:
            return
        shape = partial(emulate, grid=grid, block=launch.block, cluster=launch.cluster, shared_bytes=launch.shared_bytes)
        run = partial(shape, kernel, overlaps=launch.overlaps, timing=self.timing)
        names = {spec.key: spec.name for spec in writer.call.buffers}

        def step(arguments: Sequence[Any], *given: Tensor) -> None:
            touched = zip(given, launch.touched.items(), strict=True)
            try:
                run(arguments=arguments, buffers=[Buffer.of(names[key], t, writable=written) for t, (key, written) in touched])
            except IndexRangeError as error:
                raise out_of_range(error.what, writer.sizes) from None

        maps = [self._map(writer, spec) for spec in launch.tensor_maps]
        arguments, given = writer.arguments(launch.arguments, maps), [writer.tensor(key) for key in launch.touched]
        writer.add(f"{writer.value(step, 'step')}([{', '.join(arguments)}], {', '.join(given)})")

    def _map(self, writer: Writer, spec: call.TensorMapSpec) -> str:
        """The address of a tensor map, which is made anew in each call."""
        writer.known(addressof=ctypes.addressof)
        make = writer.value(partial(encode, spec, sizes=writer.sizes), "encode")
        writer.add(f"map_of_{make} = {make}({writer.tensor(spec.buffer)})")
        return f"addressof(map_of_{make})"
