"""Devices: what code is made for them, what compiles it, and what launches it there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten

from fusegen import target as targets
from fusegen.compiler.compile import CompiledGraph
from fusegen.compiler.emulator import EARLY, EmulatedTiming, EmulatorBackend, emulated_kernels
from fusegen.compiler.extension import bound_extension, host_kernels
from fusegen.errors import LaunchError
from fusegen.extension.native import ensure_native
from fusegen.jit import nvrtc
from fusegen.program.call import KernelLaunch
from fusegen.runtime import cuda, devices
from fusegen.runtime.execute import CudaBackend, HostBackend, LaunchBackend, PutTogether, bound_call
from fusegen.runtime.instructions import Runner
from fusegen.settings import Compiler, settings
from fusegen.source import Source
from fusegen.target import Target
from fusegen.trace.run import Structure

_EMULATED = targets.target("sm_90a")
"""The target that the emulator plays: Hopper, with its tensor cores and its copy engine."""


_HOST = HostBackend()
_MOST_BOUND = 64  # exact sizes of one program


def target_of(device: torch.device) -> Target:
    """The target of a device; where CUDA is emulated, that of the CPU is the machine that the emulator plays.

    Raises:
        ArgumentError: for a device that is neither a CPU nor an NVIDIA GPU.
    """
    return _EMULATED if device.type == "cpu" and settings().emulate else devices.target_of(device)


@dataclass(frozen=True)
class Machine:
    """What runs code on a device.

    Attributes:
        target: what code is made for.
        backend: what launches.
        kernels: compiles and loads the kernels of some launches.
        prepare: compiles texts of which `kernels` will be asked for some at a time, side by side or as one unit.
        compiler: whether programs are C++ operators.
    """

    target: Target
    backend: LaunchBackend
    kernels: Callable[[Sequence[Source], Sequence[KernelLaunch]], Sequence[Any]]
    prepare: Callable[[Sequence[Source]], object] = lambda _: None
    compiler: Compiler = "nvrtc"

    def bound(self, compiled: CompiledGraph, sizes: Mapping[str, int], device: torch.device) -> Runner:
        """The program of a graph for exact sizes: the same for all functions that are traced to it."""
        key = (self.compiler, self.backend, device, str(compiled.structure), *sizes.items())
        known = compiled.form.bound
        if key not in known:
            if len(known) >= _MOST_BOUND:
                known.clear()
            known[key] = self._bound(compiled, sizes, device)
        found: Runner = known[key]
        return found

    def _bound(self, compiled: CompiledGraph, sizes: Mapping[str, int], device: torch.device) -> Runner:
        sources = compiled.sources
        compiled.programs.keep(compiled.form, sources)
        if self.compiler == "extension":
            return bound_extension(compiled, builder(compiled.structure), sizes, self.target)
        ensure_native()
        call = compiled.call
        kernels = self.kernels(sources, call.launches)
        return bound_call(call, builder(compiled.structure), sizes, device, self.backend, kernels, compiled.traced.name)


def machine_of(device: torch.device, compiler: Compiler | None = None) -> Machine:
    """What runs code on a device.

    Args:
        compiler: the way to compile; by default that of the settings. The emulator has a way of its own.
    """
    machine = _machine_of(device)
    return machine if settings().emulate and device.type == "cpu" else replace(machine, compiler=compiler or settings().compiler)


def _machine_of(device: torch.device) -> Machine:
    target = target_of(device)
    if device.type == "cuda":
        return _gpu(target, devices.index_of(device))
    if settings().emulate:
        return emulated_machine(target)
    return Machine(target, _HOST, lambda sources, _: host_kernels(sources))


@lru_cache(maxsize=64)
def _gpu(target: Target, index: int) -> Machine:
    prepare = partial(nvrtc.compile_cubins, architecture=target.name)

    def kernels(sources: Sequence[Source], launches: Sequence[KernelLaunch]) -> list[Any]:
        binaries = prepare(sources)
        return [_loaded(*each, index) for each in zip(sources, binaries, launches, strict=True)]

    return Machine(target, CudaBackend(index), kernels, prepare)


def _loaded(source: Source, binary: nvrtc.Binary, launch: KernelLaunch, index: int) -> Any:
    """The kernel of a source; a damaged cache entry is compiled again."""
    try:
        return cuda.load(binary.cubin, source.name, source.entry, launch, index)
    except LaunchError as error:
        if not binary.from_cache:
            raise LaunchError(error.what, where=str(binary.source_path)) from error
        nvrtc.forget(source, binary.architecture)
        return _loaded(source, nvrtc.compile_cubin(source, binary.architecture), launch, index)


def emulated_machine(target: Target, timing: EmulatedTiming = EARLY) -> Machine:
    """A machine that the emulator plays."""
    return Machine(target, EmulatorBackend(timing), lambda sources, _: emulated_kernels(sources), emulated_kernels)


def builder(structure: Structure) -> PutTogether | None:
    """The constructor of results of their tensors: None for a tensor alone, of the plain kinds the constructor itself."""
    if structure.is_leaf():
        return None
    if structure.type in (tuple, list) and all(child.is_leaf() for child in structure.children()):
        kind: type = structure.type
        return kind
    return lambda tensors: tree_unflatten(tensors, structure)
