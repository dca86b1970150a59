"""Calls on tensors: memory, arguments, steps. What is bound is good for one set of exact shapes and strides.

Nothing here knows what a call was made of, and nothing compiles.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fusegen.errors import IndexRangeError
from fusegen.program.call import (
    Call,
    CallStep,
    KernelLaunch,
    LaunchArgument,
    LibraryCall,
    Loop,
    MapArgument,
    ScalarArgument,
    SizeArgument,
    TensorMapSpec,
)
from fusegen.program.workspace import bytes_of
from fusegen.runtime import cuda
from fusegen.runtime.driver import ADDRESS, INTEGER, MAP, REAL, Kind, LaunchSite
from fusegen.runtime.library import FUNCTIONS
from fusegen.runtime.products import place_of, write_product
from fusegen.runtime.straight import Run, Writer
from fusegen.runtime.workspace import on_workspace

PutTogether: TypeAlias = Callable[[list[Tensor]], Any]


def bound_call(
    call: Call,
    put_together: PutTogether | None,
    sizes: Mapping[str, int],
    device: torch.device,
    backend: Backend,
    kernels: Sequence[Any],
    name: str = "this call",
) -> Run:
    """A call with all of its formulas evaluated: a function of its tensors, one an input in the order of the call's inputs, and its
    scalars by name, which gives what the user's function returns.

    Args:
        call: what to run.
        put_together: makes the function's results of their tensors; None where the only tensor, or none, is the result.
        sizes: values of all sizes and strides, by name.
        device: where.
        backend: makes steps of launches.
        kernels: loaded, one a launch.
        name: of the kernel, for messages.
    """

    def written(memory: Tensor | None) -> Run:
        return _write(Writer(call, sizes, device, memory=memory), backend, kernels).function(put_together)

    run, needed = written(None), bytes_of(call, sizes)
    return on_workspace(name, run, needed, device, written) if needed else run


def _write(writer: Writer, backend: Backend, kernels: Sequence[Any]) -> Writer:
    """Writes the steps of a call."""
    call, sizes, loaded = writer.call, writer.sizes, iter(kernels)
    for number, (before, step) in enumerate(zip((None, *call.steps), call.steps, strict=False)):
        writer.begin(number)
        if isinstance(step, KernelLaunch):
            backend.write_launch(writer, _behind(before, step, sizes), next(loaded))
        elif isinstance(step, LibraryCall):
            _write_call(writer, step)
        elif isinstance(step, Loop):
            _write_loop(writer, step, backend, [next(loaded) for _ in step.body.launches])
        else:
            write_product(writer, step)
        writer.end(number)
    return writer


def _behind(before: CallStep | None, launch: KernelLaunch, sizes: Mapping[str, int]) -> KernelLaunch:
    """A launch as it is at some sizes: it overlaps with the one before it where there is one. Where that has no block it is not
    launched, and what is in the stream instead may be anything."""
    follows = isinstance(before, KernelLaunch) and before.grid(sizes) > 0
    return launch if follows or not launch.overlaps else replace(launch, overlaps=False)


def _write_loop(writer: Writer, loop: Loop, backend: Backend, kernels: Sequence[Any]) -> None:
    """A call of the body for each block, behind zeros where all blocks add up."""
    writer.add(*(f"{writer.tensor(key)}.zero_()" for key in loop.zeros))
    tensors = ", ".join(map(writer.tensor, loop.operands))
    for sizes in loop.blocks(writer.sizes):
        inner = Writer(loop.body, sizes, writer.device, is_inside=True, memory=writer.further_memory)
        body = _write(inner, backend, kernels).function(None)
        writer.add(f"{writer.value(body, 'block')}(({tensors},), scalars)")


def _write_call(writer: Writer, call: LibraryCall) -> None:
    """The call, and its results as they are wanted in memory, where the function left them otherwise."""
    operands = [place_of(writer, operand).text(writer) for operand in call.operands]
    wanted = "".join(f"({result.number}, {writer.dtype(result.buffer)}), " for result in call.results)
    given = [f"({wanted})", *map(repr, call.settings), *(str(formula(writer.sizes)) for formula in call.sizes), *operands]
    writer.add(f"made = {writer.value(FUNCTIONS[call.function].run, call.function)}({', '.join(given)})")
    for place, result in enumerate(call.results):
        in_order = f".permute({result.order})" if result.order != tuple(range(len(result.order))) else ""
        writer.add(f"{writer.tensor(result.buffer)} = made[{place}]{in_order}.contiguous().view({writer.shape(result.buffer)})")
    writer.add("del made")


# Backends: how a launch becomes a step.


class Backend:
    """Makes steps of launches."""

    def write_launch(self, writer: Writer, launch: KernelLaunch, kernel: Any) -> None:
        """Adds the step of one launch, which launches its kernel with arguments from the buffers at hand.

        Args:
            writer: of the whole call.
            launch: what is launched.
            kernel: its kernel, loaded.
        """
        raise NotImplementedError


class CudaBackend(Backend):
    """Launches on a GPU.

    Args:
        index: of the GPU.
    """

    def __init__(self, index: int) -> None:
        self.index = index

    def write_launch(self, writer: Writer, launch: KernelLaunch, kernel: Any) -> None:
        """A call of the driver, with a frame of the launch for its arguments."""
        grid = launch.grid(writer.sizes)
        if not grid:
            return
        self._write_first(writer)
        maps = [self._map(writer, spec) for spec in launch.tensor_maps]
        kinds = [self._kind(argument, writer.sizes) for argument in launch.arguments]
        given = [text for text, kind in zip(writer.arguments(launch.arguments, maps), kinds, strict=True) if isinstance(kind, str)]
        site = LaunchSite(kernel, self.index, grid, launch.block, launch.shared_bytes, kinds, overlaps=launch.overlaps)
        names = ("frame", "frames", "fill", "launch", "kernel", "refused")
        frame, frames, fill, launched, loaded, refused = (writer.value(getattr(site, name), name) for name in names)
        writer.add(
            "try:",
            f"    memory, config, table = frame = {frames}.pop()",
            "except IndexError:",
            f"    memory, config, table = frame = {frame}()",
            f"{fill}({', '.join(['memory', str(site.start), 'stream', *map(str, site.attributes), *given])})",
            f"status = {launched}(config, {loaded}, table, None)",
            f"if status: {refused}(status, frame)",
            f"{frames}.append(frame)",
        )

    def _kind(self, argument: LaunchArgument, sizes: Mapping[str, int]) -> Kind | int:
        """An argument's kind; its value where shapes determine it."""
        if isinstance(argument, SizeArgument):
            return argument.formula(sizes)
        if isinstance(argument, ScalarArgument):
            return REAL if argument.is_float else INTEGER
        return MAP if isinstance(argument, MapArgument) else ADDRESS

    def _write_first(self, writer: Writer) -> None:
        """The driver launches in the current context only; and all steps use the stream that torch uses now."""
        raw_stream, current_device = cuda.queries()
        writer.on_current_device = True
        writer.known(raw_stream=raw_stream, current_device=current_device, on_device=torch.cuda.device)
        writer.first(
            f"if current_device() != {self.index}:",
            f"    with on_device({self.index}): return run(tensors, scalars)",
            f"stream = raw_stream({self.index})",
        )

    def _map(self, writer: Writer, spec: TensorMapSpec) -> str:
        """How a tensor map is found at a call."""
        sizes, dtype = writer.sizes, next(b.dtype for b in writer.call.buffers if b.key == spec.buffer)
        shape, strides = [f(sizes) for f in spec.shape], [f(sizes) for f in spec.strides]
        maps = cuda.TensorMaps(dtype, self.index, shape, strides, spec.offset(sizes), spec.box, promote=not spec.writable)
        at = writer.address(spec.buffer)
        return f"({writer.value(maps.known, 'map')}({at}) or {writer.value(maps.make, 'make')}({at}))"


class HostBackend(Backend):
    """Runs kernels of the CPU target."""

    def write_launch(self, writer: Writer, launch: KernelLaunch, kernel: Any) -> None:
        """A call of the kernel's entry with its arguments packed."""
        arguments = writer.arguments(launch.arguments)
        kinds = ["d" if isinstance(a, ScalarArgument) and a.is_float else "q" for a in launch.arguments]
        called = writer.value(kernel, "kernel")
        if not launch.checks:
            writer.add(f"{called}({_packed(writer, kinds, arguments)})")
            return
        writer.known(char_pointer=ctypes.c_char_p, addressof=ctypes.addressof, out_of_range=out_of_range)
        sizes = writer.value(writer.sizes, "sizes")
        writer.add(
            "failed = char_pointer()",
            f"{called}({_packed(writer, [*kinds, 'q'], [*arguments, 'addressof(failed)'])})",
            f"if failed.value is not None: raise out_of_range(failed.value.decode(), {sizes})",
        )


def _packed(writer: Writer, kinds: Sequence[str], arguments: Sequence[str]) -> str:
    return f"{writer.value(struct.Struct(''.join(kinds)).pack, 'pack')}({', '.join(arguments)})"


def out_of_range(message: str, sizes: Mapping[str, int]) -> IndexRangeError:
    """The error of an index that names no element, with the sizes of this call in the range that it ends with."""
    words, bracket, limits = message.rpartition("[")
    known = re.sub(r"[A-Za-z_]\w*", lambda name: str(sizes.get(name[0], name[0])), limits)
    return IndexRangeError(words + bracket + known, mend="check the values that are used as indices")
