"""Devices: their targets, compilers and launchers."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from fusegen import target as targets
from fusegen.compiler.compile import BuiltSpecialization, CompiledGraph
from fusegen.compiler.emulator import EARLY, EmulatedTiming, EmulatorBackend, emulated_kernels
from fusegen.emit.environment import unit_text
from fusegen.errors import BundleError, FusegenError, IndexRangeError, LaunchError
from fusegen.extension.native import OPERATOR_FLAGS, LibrarySources, ensure_native, library_of
from fusegen.extension.unit import LIBRARY, OperatorUnit, SizeSources, unit_of
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph
from fusegen.jit import nvrtc
from fusegen.jit.host import ARITHMETIC, load_compiled, load_shared
from fusegen.program.call import KernelLaunch, LaunchPlan
from fusegen.program.names import ascii_name, stride_name
from fusegen.runtime import cuda, devices
from fusegen.runtime.devices import host_kernel, instruction_set
from fusegen.runtime.execute import CudaBackend, HostBackend, LaunchBackend, PackResults, bound_call
from fusegen.runtime.instructions import Runner, Scalars, integer
from fusegen.settings import Compiler, cache_folder, settings
from fusegen.source import Source
from fusegen.target import Backend, Target
from fusegen.threads import new_lock
from fusegen.trace.run import ResultTree

C = TypeVar("C", bound=CompiledGraph)

_EMULATED = targets.target("sm_90a")
"""The emulated target: Hopper, with tensor cores and TMA."""


_HOST = HostBackend()
_MOST_BOUND = 64  # exact sizes of one program


def target_of(device: torch.device) -> Target:
    """The target of a device; for the CPU under FUSEGEN_EMULATE, the emulated GPU.

    Raises:
        ArgumentError: the device is neither a CPU nor an NVIDIA GPU.
    """
    return _EMULATED if device.type == "cpu" and settings().emulate else devices.target_of(device)


def device_of(target: Target) -> torch.device | None:
    """A device of this machine with the architecture of a target; None if there is none."""
    gpus = [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else []
    for device in (*gpus, torch.device("cpu")):
        with suppress(FusegenError):  # the GPU of another vendor
            if target_of(device).name == target.name:
                return device
    return None


@dataclass(frozen=True)
class Machine:
    """A device with the compiler and the launcher of its kernels.

    Attributes:
        target: the target of emitted code.
        backend: launches kernels.
        kernels: compiles and loads the kernels of some launches.
        prepare: compiles several texts at once, before `kernels` loads them.
        compiler: "extension" if programs are C++ operators.
    """

    target: Target
    backend: LaunchBackend
    kernels: Callable[[Sequence[Source], Sequence[KernelLaunch]], Sequence[Any]]
    prepare: Callable[[Sequence[Source]], object] = lambda _: None
    compiler: Compiler = "nvrtc"

    def loadable(self, compiled: C, sizes: Mapping[str, int], device: torch.device) -> C:
        """The compiled graph; planned here instead of built if its built kernels do not load, or if an operator launches it."""
        built = compiled.specialization
        if not isinstance(built, BuiltSpecialization):
            return compiled
        if self.compiler == "nvrtc":
            try:
                built.kernels.loaded_on(device)
                return compiled
            except BundleError as error:
                warnings.warn(f"built kernels: {error.one_line}; the kernel is compiled", RuntimeWarning, stacklevel=2)
        return compiled.with_specialization(compiled.cache.at(sizes, may_be_built=False))

    def bound(self, compiled: CompiledGraph, sizes: Mapping[str, int], device: torch.device) -> Runner:
        """The compiled graph bound to exact sizes; shared by all functions with an equal trace."""
        key = (self.compiler, self.backend, device, str(compiled.structure), *sizes.items())
        calls = compiled.specialization.bound
        if key not in calls:
            if len(calls) >= _MOST_BOUND:
                calls.clear()
            calls[key] = self._bound(compiled, sizes, device)
        runner: Runner = calls[key]
        return runner

    def _bound(self, compiled: CompiledGraph, sizes: Mapping[str, int], device: torch.device) -> Runner:
        if isinstance(compiled.specialization, BuiltSpecialization):
            ensure_native()
            loaded = compiled.specialization.kernels.loaded_on(device)
            return bound_call(compiled.call, builder(compiled.structure), sizes, device, *loaded, compiled.traced.name)
        sources = compiled.sources
        compiled.cache.store_text(compiled.specialization, sources)
        if self.compiler == "extension":
            return bound_extension(compiled, builder(compiled.structure), sizes, self.target)
        ensure_native()
        call = compiled.call
        kernels = self.kernels(sources, call.launches)
        return bound_call(call, builder(compiled.structure), sizes, device, self.backend, kernels, compiled.traced.name)


def machine_of(device: torch.device, compiler: Compiler | None = None) -> Machine:
    """The machine of a device.

    Args:
        compiler: by default the one of the settings. The emulator has its own.
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
    """The loaded kernel of a source. A damaged cache entry is compiled again."""
    try:
        return cuda.load(binary.cubin, source.entry, launch, index)
    except LaunchError as error:
        if not binary.from_cache:
            raise LaunchError(error.what, where=str(binary.source_path)) from error
        nvrtc.forget(source, binary.architecture)
        return _loaded(source, nvrtc.compile_cubin(source, binary.architecture), launch, index)


def emulated_machine(target: Target, timing: EmulatedTiming = EARLY) -> Machine:
    return Machine(target, EmulatorBackend(timing), lambda sources, _: emulated_kernels(sources), emulated_kernels)


def builder(structure: ResultTree) -> PackResults | None:
    """Returns the function that assembles results from their tensors: None for a single tensor, the type itself for a flat list
    or tuple."""
    if structure.is_leaf():
        return None
    if structure.type in (tuple, list) and all(child.is_leaf() for child in structure.children()):
        kind: type = structure.type
        return kind
    return lambda tensors: tree_unflatten(tensors, structure)


# Kernels of the CPU target.


_HOST_FLAGS = (
    "-std=c++17", "-O3", *ARITHMETIC, "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions",
    "-fvisibility=default",
)  # fmt: skip


_LOADED: dict[Source, Any] = {}


def host_kernels(sources: Sequence[Source], flags: tuple[str, ...] | None = None) -> list[Any]:
    """The kernels of some sources. Those that this process has not loaded are compiled as one unit, or read from the cache.

    Args:
        sources: emitted C++, with distinct entries.
        flags: compiler flags; by default `host_flags`.

    Raises:
        ToolNotFoundError: there is no compiler.
        CompileError: the compiler rejects the text.
    """
    new = [source for source in dict.fromkeys(sources) if source not in _LOADED]
    if new:
        library, _ = load_compiled(unit_text(new), flags or host_flags(), cache_folder("cpu"))
        _LOADED.update((source, host_kernel(getattr(library, source.entry))) for source in new)
    return [_LOADED[source] for source in sources]


@lru_cache(maxsize=8)
def host_flags(level: str = "") -> tuple[str, ...]:
    """The compiler flags for a level of x86-64, by default for this machine, whose instruction set a definition adds to the cache
    key."""
    vectors = ("-mprefer-vector-width=512",) if platform.machine() in devices.X86 else ()
    machine = (f"-march={level}",) if level else ("-march=native", f"-DFG_MACHINE={instruction_set()}")
    return (*_HOST_FLAGS, machine[0], *vectors, *machine[1:])


# Operators.


_operators: dict[tuple[LaunchPlan, tuple[str, ...], str], tuple[OperatorUnit, Callable[..., Any]]] = {}
_lock = new_lock()


def bound_extension(compiled: CompiledGraph, pack_results: PackResults | None, sizes: Mapping[str, int], target: Target) -> Runner:
    """A compiled graph bound to exact sizes, as a call of its C++ operator.

    Args:
        pack_results: assembles the results from their tensors; None for a single tensor or none.
        sizes: values of all sizes and strides, by name.

    Raises:
        ToolNotFoundError, CompileError: it cannot be built.
    """
    unit, operator = _operator(compiled, target)
    return _Call(unit, operator, [sizes[name] for name in unit.sizes], pack_results)


@dataclass(frozen=True)
class _Call:
    """A call of an operator.

    Attributes:
        sizes: the operator's size arguments.
    """

    unit: OperatorUnit
    operator: Callable[..., Any]
    sizes: Sequence[int]
    pack_results: PackResults | None

    def native_call(self, _: ModuleType) -> None:
        pass

    def call(self, tensors: Sequence[Tensor], scalars: Scalars) -> Any:
        numbers = [float(scalars[name]) if is_float else integer(scalars[name]) for name, is_float in self.unit.numbers]
        try:
            results = self.operator(*tensors, *self.sizes, *numbers)
        except IndexError as error:
            what, _, hint = str(error).partition("\n  try: ")
            raise IndexRangeError(what, hint=hint or None) from None
        if self.pack_results is None:
            return results
        return self.pack_results([results] if isinstance(results, Tensor) else list(results or ()))


def _operator(compiled: CompiledGraph, target: Target) -> tuple[OperatorUnit, Callable[..., Any]]:
    """The operator of a compiled graph, built and loaded once."""
    call = compiled.call
    key = call, tuple(source.digest for source in compiled.sources), target.name
    with _lock:
        if key not in _operators:
            _operators[key] = _loaded_operator(compiled, call, target)
        return _operators[key]


def _loaded_operator(compiled: CompiledGraph, call: LaunchPlan, target: Target) -> tuple[OperatorUnit, Callable[..., Any]]:
    size_places = size_places_of(compiled.traced, call)
    is_cpu = target.backend is Backend.CPU
    cubins = None if is_cpu else [binary.cubin for binary in nvrtc.compile_cubins(compiled.sources, target.name)]
    unit = unit_of(ascii_name(compiled.traced.name), call, size_places, compiled.sources, cubins)
    kernels = {"kernels": unit_text(compiled.sources)} if is_cpu and compiled.sources else {}
    texts = LibrarySources(
        compiled.traced.name, {"binding.cpp": unit.text}, OPERATOR_FLAGS, kernels, host_flags() if kernels else ()
    )
    load_shared(library_of(texts))
    operator: Callable[..., Any] = getattr(getattr(torch.ops, LIBRARY), unit.name).default
    return unit, operator


def size_places_of(graph: Graph, call: LaunchPlan) -> SizeSources:
    """Maps each size of a call to a tensor and the dim that has this size."""
    names = tuple(name for _, name in call.inputs)
    specs = {spec.name: spec for spec in graph.inputs}
    dims = [
        (str(formula(extent).value), n, f"size({d})") for n, name in enumerate(names) for d, extent in enumerate(specs[name].shape)
    ]
    strides = [(stride_name(name, d), n, f"stride({d})") for n, name in enumerate(names) for d in range(len(specs[name].shape))]
    return SizeSources(names, tuple(dims + strides))
