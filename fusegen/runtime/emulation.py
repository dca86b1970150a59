"""CUDA text as steps of a call on the CPU, through the emulator."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from fusegen.calls import call
from fusegen.errors import IndexRangeError
from fusegen.runtime.emulated_maps import encode
from fusegen.runtime.emulator import EARLY, Buffer, EmulatedSource, Timing, emulate, load_emulated
from fusegen.runtime.execute import Backend, Buffers, MapOf, Scalars, Step, argument_filler, nothing, out_of_range
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

    def launch_step(self, launch: call.KernelLaunch, kernel: Any, buffers: Sequence[call.Buffer], sizes: Mapping[str, int]) -> Step:
        grid = launch.grid(sizes)
        if not grid:
            return nothing
        names = {spec.key: spec.name for spec in buffers}

        def step(given: Buffers, scalars: Scalars) -> None:
            maps = [encode(spec, given[spec.buffer], sizes) for spec in launch.tensor_maps]
            fill = argument_filler(launch, sizes, [_found_at(ctypes.addressof(encoded)) for encoded in maps])
            try:
                emulate(
                    kernel,
                    grid=grid,
                    block=launch.block,
                    shared_bytes=launch.shared_bytes,
                    arguments=fill(given, scalars),
                    buffers=[Buffer.of(names[key], given[key], writable=written) for key, written in launch.touched.items()],
                    timing=self.timing,
                )
            except IndexRangeError as error:
                raise out_of_range(error.what, sizes) from None

        return step


def _found_at(address: int) -> MapOf:
    return lambda given: address
