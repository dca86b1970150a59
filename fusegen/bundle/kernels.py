"""Kernels of built programs, loaded once per device, the selection of a call's program, and kernels in place of compiled ones."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fusegen.bundle.manifest import (
    NAME,
    REBUILD_HINT,
    BuiltKernel,
    BuiltPasses,
    BuiltProgram,
    BuiltVariant,
    KernelBinary,
    StoredKernel,
    binary,
    check_program,
    mark_of,
    passes_mark_of,
    read_kernel,
    read_kernels,
    read_manifest,
)
from fusegen.dtypes import autocast_dtype
from fusegen.errors import BundleError, LaunchError
from fusegen.guards.values import same
from fusegen.program.call import KernelLaunch, LaunchPlan
from fusegen.program.formula import FormulaKind
from fusegen.program.names import stride_name
from fusegen.program.numbers import Numbers, python_condition
from fusegen.program.renaming import GraphNames, renamed
from fusegen.program.signature import ArgumentSpec, Constant, NumberArgument, Signature, TensorArgument
from fusegen.runtime import cuda, devices
from fusegen.runtime.arguments import WIDE, alignment, span
from fusegen.runtime.devices import LEVELS, host_kernel, level_here, runs_here
from fusegen.runtime.execute import CudaBackend, HostBackend, LaunchBackend
from fusegen.settings import require_trusted, settings
from fusegen.target import Target
from fusegen.threads import new_lock


class Kernels:
    """The kernels of a program.

    Args:
        folder: the folder of the binaries.
        mark: returns the mark of its binaries.
        machine: for a CPU, its level or a digest of its instruction set; else "".
    """

    def __init__(self, folder: Path, program: BuiltProgram, mark: Callable[[], bytes], machine: str) -> None:
        self.program, self.folder = program, folder
        self._mark, self._machine = mark, machine
        self._loaded: dict[int | None, tuple[LaunchBackend, list[Any]]] = {}
        self._lock = new_lock()

    def check(self) -> None:
        """Checks the digests of the binaries."""
        mark = self._mark()
        for code in self.program.code:
            binary(self.folder, code, mark)

    def serves(self, sizes: Mapping[str, int]) -> bool:
        """Returns True if the program is built for sizes of its graph."""
        signature = self.program.signature
        try:
            _check_sizes(signature, {name: sizes[name] for name in signature.sizes})
            return all(relation(sizes) for relation in (*signature.relations, *self.program.rows))
        except (Mismatch, KeyError):  # a size of a parameter that the graph does not use
            return False

    def loaded_on(self, device: torch.device) -> tuple[LaunchBackend, list[Any]]:
        """Returns the backend of a device, and the kernels loaded on it. Raises if a binary was changed."""
        index = devices.index_of(device) if device.type == "cuda" else None
        with self._lock:
            if index not in self._loaded:
                self._loaded[index] = self._load(index)
            return self._loaded[index]

    def _load(self, index: int | None) -> tuple[LaunchBackend, list[Any]]:
        check_program(self.program, str(self.folder))
        mark = self._mark()
        if index is None:
            return HostBackend(), [self._host_kernel(code, mark) for code in self.program.code]
        kernels = zip(self.program.code, self.program.call.launches, strict=True)
        return CudaBackend(index), [self._cuda_kernel(code, mark, launch, index) for code, launch in kernels]

    def _cuda_kernel(self, code: KernelBinary, mark: bytes, launch: KernelLaunch, index: int) -> Any:
        try:
            return cuda.load(binary(self.folder, code, mark), code.entry, launch, index)
        except LaunchError as error:
            raise BundleError(f"{self.folder / code.file}: {error.what}", hint="build it again") from error

    def _host_kernel(self, code: KernelBinary, mark: bytes) -> Any:
        path = self.folder / code.file
        if not runs_here(self._machine):
            raise _other_processor(path, self._machine)
        binary(self.folder, code, mark)
        try:
            return host_kernel(getattr(ctypes.CDLL(str(path.resolve())), code.entry))
        except OSError as error:
            raise BundleError(f"{path} cannot be loaded: {error}", hint="build it again") from error


def _other_processor(path: Path, machine: str) -> BundleError:
    built_for, here = machine if machine in LEVELS else "another kind of processor", level_here()
    what = f"{path} was built for {built_for}; this processor has {here or 'other instructions'}"
    option = f"; for this one: fusegen build … --arch cpu --cpu {here}" if here else ""
    return BundleError(what, hint=f"build it on a machine like this one{option}")


def kernels_of(folder: Path, kernel: BuiltKernel, variant: BuiltVariant) -> Kernels:
    return Kernels(folder, variant, partial(mark_of, kernel.parameters, variant), variant.machine)


def kernels_of_pass(
    folder: Path, kernel: BuiltKernel, variant: BuiltVariant, passes: BuiltPasses, programs: Iterable[BuiltProgram]
) -> tuple[Kernels, ...]:
    mark = cache(partial(passes_mark_of, kernel.parameters, variant.machine, passes))
    return tuple(Kernels(folder, program, mark, variant.machine) for program in programs)


# Kernels of built folders in place of compiled ones: those of ``FUSEGEN_BUNDLE_PATH``, and those of models in loaded folders.
# A digest of the graph selects them, never a name.

_LOADED: dict[Path, None] = {}  # the folders that `take_models` got, in order


def take_models(folder: Path) -> None:
    """Makes the kernels of models in a folder available to calls whose graphs have not been looked up yet."""
    _LOADED[folder] = None


def has_built_kernels() -> bool:
    """Returns True if calls may take kernels of built folders."""
    return bool(_LOADED or settings().bundle_path)


def kernels_for(graph: str, names: GraphNames, target: Target) -> list[tuple[Kernels, LaunchPlan]]:
    """Returns the kernels of all built programs of a graph that run on this machine, each with its launch plan, renamed.

    Args:
        graph: the digest of the graph (`SpecializationCache.graph_digest`).
        names: the names in the graph.

    Raises:
        SettingsError: others can write to a folder of ``FUSEGEN_BUNDLE_PATH``.
    """
    if settings().emulate:  # it runs the text
        return []
    named = ((folder, _kernels_or_warning(folder)) for folder in settings().bundle_path)
    loaded = ((folder, _models_or_warning(folder, graph.partition("-")[0])) for folder in _LOADED)
    folders = chain(named, loaded)
    return [
        (kernels, plan)
        for folder, stored in folders
        for kernel in stored
        for kernels in _kernels_in(folder, kernel, graph, target)
        if (plan := _renamed(kernels, names, kernel.where)) is not None
    ]


def _renamed(kernels: Kernels, names: GraphNames, where: str) -> LaunchPlan | None:
    """Returns the launch plan of a built program with the names of the call's graph; None, with a warning, if its own are damaged.

    Args:
        where: the file of the kernel, for messages.
    """
    program = kernels.program
    try:
        if not {*program.signature.sizes} <= {*program.names.sizes}:  # sizes of a parameter that the graph does not use, or damage
            kernels.check()
        return renamed(program.call, program.names, names)
    except (KeyError, ValueError):
        what = f"{where} is damaged: the names of a program are not those of its graph"
        _warn(BundleError(what, hint=REBUILD_HINT).one_line)
    except BundleError as error:
        _warn(error.one_line)
    return None


def _kernels_in(folder: Path, stored: StoredKernel, graph: str, target: Target) -> list[Kernels]:
    """Returns the kernels of a stored kernel's programs of a graph, which alone are decoded. Warns if one is damaged."""
    if graph not in stored.summary.graphs:
        return []
    try:
        found = [*_kernels_of_graph(folder, stored, graph, target)]
        for each in found:
            stored.check(each.program)
        return [each for each in found if _cluster(each.program) <= target.cluster]
    except BundleError as error:
        _warn(error.one_line)
        return []


def _kernels_of_graph(folder: Path, stored: StoredKernel, graph: str, target: Target) -> Iterator[Kernels]:
    kernel = stored.deferred
    for variant in kernel.variants:
        if variant.target != target.name or (variant.machine and not runs_here(variant.machine)):
            continue
        if variant.graph == graph:
            yield kernels_of(folder, kernel, variant)
        if (passes := variant.passes) is not None:
            yield from kernels_of_pass(folder, kernel, variant, passes, (p for p in passes.programs if p.graph == graph))


@lru_cache(maxsize=64)
def _kernels_or_warning(folder: Path) -> list[StoredKernel]:
    try:
        return trusted_kernels(folder)
    except BundleError as error:
        _warn(error.one_line)
        return []


@lru_cache(maxsize=64)
def _models_or_warning(folder: Path, generator: str) -> list[StoredKernel]:
    """Returns the kernels of models in a loaded folder; none, with a warning, if another generator made all of them."""
    try:
        kernels = [read_kernel(folder, file) for file in read_manifest(folder).kernels if file.model]
        if not any(graph.startswith(f"{generator}-") for kernel in kernels for graph in kernel.summary.graphs):
            what = f"the kernels of models in {folder} were built by another version of fusegen, Python, torch, sympy or Jinja"
            raise BundleError(what, hint="build them again with the versions that run them")
    except BundleError as error:
        _warn(error.one_line)
        return []
    return kernels


@lru_cache(maxsize=256)
def _warn(problem: str) -> None:
    """Warns once in a process."""
    warnings.warn(f"built kernels: {problem}; kernels are compiled", RuntimeWarning, stacklevel=3)


def trusted_kernels(folder: Path) -> list[StoredKernel]:
    """Reads the kernels of a folder of ``FUSEGEN_BUNDLE_PATH``.

    Raises:
        BundleError: the manifest or the file of a kernel is missing, was changed, or has another format.
        SettingsError: others can write to a file of the folder.
    """
    require_trusted(folder)
    require_trusted(folder / NAME)
    _, kernels = read_kernels(folder)
    files = {folder / file for kernel in kernels for file, digest in kernel.files.items() if digest}
    for path in sorted({*files, *(file.parent for file in files)}):
        require_trusted(path)
    return kernels


def _cluster(program: BuiltProgram) -> int:
    """Returns the blocks of the largest cluster."""
    return max((launch.cluster for launch in program.call.launches), default=1)


# Selection of a call's program.


Reasons: TypeAlias = list[tuple[BuiltProgram, str]]
"""Programs that do not fit a call, each with the reason."""


def choose(
    programs: Iterable[tuple[int, BuiltProgram]], sizes_of: Callable[[BuiltProgram], Mapping[str, int]], device: torch.device
) -> tuple[int, dict[str, int]] | Reasons:
    """Returns the first program that fits a call and the call's sizes, or the reasons if none does. `sizes_of` matches a program
    with the call."""
    room = devices.target_of(device).cluster
    reasons: Reasons = []
    for number, program in programs:
        try:
            sizes = dict(sizes_of(program))
        except OtherRowRange:
            continue
        except Mismatch as reason:
            reasons.append((program, str(reason)))
            continue
        except LookupError as error:
            raise BundleError(f"a program names {error}, which no call defines", hint=REBUILD_HINT) from None
        if (cluster := _cluster(program)) <= room:  # checked last, since it needs the launch plan, which is decoded for it
            return number, sizes
        reasons.append((program, f"{device} does not support clusters of {cluster} blocks"))
    return reasons


# Matching of a program and a call.


class Mismatch(Exception):
    """A program does not fit a call. The message is the reason."""


class OtherRowRange(Mismatch):
    """The program fits the call, but another one is selected for its number of rows."""


def match(program: BuiltProgram, names: Sequence[str], values: Sequence[Any]) -> dict[str, int]:
    """Returns the sizes and strides of a call.

    Args:
        names: parameters, as named in emitted text.
        values: one per parameter.

    Raises:
        Mismatch: the program does not fit; `OtherRowRange` if only the number of rows does not.
    """
    signature = program.signature
    if torch.get_default_dtype() is not signature.default_dtype.torch:
        raise Mismatch(f"torch's default dtype is {torch.get_default_dtype()}, built for {signature.default_dtype}")
    _check_autocast(signature, values)
    if signature.distinct:
        _check_distinct(names, values)
    return fit(program, names, values)


def fit(program: BuiltProgram, names: Sequence[str], values: Sequence[Any]) -> dict[str, int]:
    """Like `match`, without the checks of torch's state and of tensors' identities."""
    signature = program.signature
    sizes: dict[str, int] = {}
    for name, argument, value in zip(names, signature.arguments, values, strict=True):
        _match_value(name, argument, value, sizes)
    _check_sizes(signature, sizes)
    for name, argument, value in zip(names, signature.arguments, values, strict=True):
        if isinstance(argument, TensorArgument):
            _check_computed(name, argument, value, sizes)
            sizes |= {stride_name(name, dim): stride for dim, stride in enumerate(value.stride())}
            _match_layout(name, argument, value, sizes)
    _check_relations(signature, sizes)
    _check_conditions(signature.conditions, names, values, sizes)
    if not all(relation(sizes) for relation in program.rows):
        raise OtherRowRange
    if not signature.index64:
        _check_narrow(program.call, names, values, sizes)
    return sizes


def describe_calls(signature: Signature, names: Sequence[str]) -> str:
    """Describes the calls that a program fits."""
    arguments = ", ".join(f"{name}: {argument}" for name, argument in zip(names, signature.arguments, strict=True))
    conditions = [
        *map(str, signature.relations),
        *(signature.conditions.text(line) for _, line in signature.conditions.results),
    ]
    conditions += [f"{size} a multiple of {multiple}" for size, multiple in signature.multiples if multiple > 1]
    conditions += [f"{size} at most {bound}" for size, bound in signature.bounds]
    return arguments + (f", where {', '.join(conditions)}" if conditions else "")


def _match_value(name: str, argument: ArgumentSpec, value: Any, sizes: dict[str, int]) -> None:
    if isinstance(argument, TensorArgument):
        _match_tensor(name, argument, value, sizes)
    elif isinstance(argument, Constant):
        if not same(value, argument.value):
            raise Mismatch(f"{name!r} is {_value_text(value)}, built for {argument}")
    elif isinstance(argument, NumberArgument):
        is_int = type(value) is int
        if not (isinstance(value, float) or (is_int and argument.takes_ints) if argument.is_float else is_int):
            raise Mismatch(f"{name!r} is {_value_text(value)}, built for a run-time {argument}")
    elif type(value) is not int:
        raise Mismatch(f"{name!r} is {_value_text(value)}, built for an int")
    elif value < 1:
        raise Mismatch(f"{name!r} is {value}, built for an int of 1 and more")
    else:
        _add_size(f"{name!r}", argument.size, value, sizes)


def _match_tensor(name: str, argument: TensorArgument, value: Any, sizes: dict[str, int]) -> None:
    if not isinstance(value, Tensor):
        raise Mismatch(f"{name!r} is {_value_text(value)}, built for {argument}")
    if value.dtype is not argument.dtype.torch or value.dim() != len(argument.shape):
        shape = ", ".join(map(str, value.shape))
        raise Mismatch(f"{name!r} is {str(value.dtype).removeprefix('torch.')}[{shape}], built for {argument}")
    for dim, (expected, extent) in enumerate(zip(argument.shape, value.shape, strict=True)):
        if expected.operator is FormulaKind.SIZE:
            _add_size(f"dim {dim} of {name!r}", str(expected.value), extent, sizes)
        elif not expected.operands and expected({}) != extent:
            raise Mismatch(f"dim {dim} of {name!r} is {extent}, built for {expected}")


def _check_computed(name: str, argument: TensorArgument, value: Tensor, sizes: Mapping[str, int]) -> None:
    """Rejects a dim that differs from its formula of other sizes, e.g. of a saved result with merged dims."""
    for dim, (expected, extent) in enumerate(zip(argument.shape, value.shape, strict=True)):
        if expected.operands and expected(sizes) != extent:
            raise Mismatch(f"dim {dim} of {name!r} is {extent}, built for {expected}")


def _add_size(what: str, size: str, value: int, sizes: dict[str, int]) -> None:
    if sizes.setdefault(size, value) != value:
        raise Mismatch(f"{what} is {value}, but {size} is {sizes[size]} already")


def _check_autocast(signature: Signature, values: Sequence[Any]) -> None:
    kind = next(value.device.type for value in values if isinstance(value, Tensor))
    current, built = autocast_dtype(kind), None if signature.autocast is None else signature.autocast.torch
    if current is not built:
        states = ("off" if dtype is None else f"on with {dtype}" for dtype in (current, built))
        raise Mismatch("torch.autocast is {}, but was {} at the build".format(*states))


def _check_distinct(names: Sequence[str], values: Sequence[Any]) -> None:
    names_by_id: dict[int, str] = {}
    for name, value in zip(names, values, strict=True):
        if isinstance(value, Tensor) and names_by_id.setdefault(id(value), name) != name:
            what = f"{names_by_id[id(value)]!r} and {name!r} are one tensor, but were two at the build: the function compares them"
            raise Mismatch(what)


def _check_sizes(signature: Signature, sizes: Mapping[str, int]) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise Mismatch(f"{name} is {value}, built for 1 and more: no kernel runs for an empty tensor")
    for name, multiple in signature.multiples:
        if sizes[name] % multiple:
            raise Mismatch(f"{name} is {sizes[name]}, built for multiples of {multiple}")
    for name, bound in signature.bounds:
        if sizes[name] > bound:
            raise Mismatch(f"{name} is {sizes[name]}, built for at most {bound}")


def _match_layout(name: str, argument: TensorArgument, tensor: Tensor, sizes: Mapping[str, int]) -> None:
    """Rejects other strides (except of dims of size 1) and weaker alignment."""
    for dim, expected in enumerate(argument.strides):
        if tensor.shape[dim] != 1 and tensor.stride(dim) != expected(sizes):
            built = (
                f"{expected} = {expected(sizes)}" if expected.operands or expected.operator is FormulaKind.SIZE else f"{expected}"
            )
            raise Mismatch(f"the stride of dim {dim} of {name!r} is {tensor.stride(dim)}, built for {built}")
    divisor = alignment(tensor, argument.own_strides)
    if divisor % argument.alignment:
        raise Mismatch(f"{name!r} is aligned to {divisor} bytes, built for {argument.alignment}")


def _check_relations(signature: Signature, sizes: Mapping[str, int]) -> None:
    for relation in signature.relations:
        if not relation(sizes):
            sizes_text = ", ".join(f"{name} = {sizes[name]}" for name in sorted(relation.sizes))
            raise Mismatch(f"built for {relation}, which does not hold for {sizes_text}")


def _check_conditions(program: Numbers, names: Sequence[str], values: Sequence[Any], sizes: Mapping[str, int]) -> None:
    positions = {name: position for position, name in enumerate(names)}
    for result in program.results:
        if not python_condition(Numbers(program.lines, (result,)), positions, sizes)(values):
            scalars_text = ", ".join(f"{name} = {values[positions[name]]!r}" for name in program.names)
            raise Mismatch(f"built for {program.text(result[1])}, which does not hold for {scalars_text}")


def _check_narrow(call: LaunchPlan, names: Sequence[str], values: Sequence[Any], sizes: Mapping[str, int]) -> None:
    """Rejects tensors that need 64-bit indexing."""
    spans = {name: span(value) for name, value in zip(names, values, strict=True) if isinstance(value, Tensor)}
    spans["index space"] = call.largest(sizes)
    for name, count in spans.items():
        if count >= WIDE:
            raise Mismatch(f"{name!r} has {count} elements, built for less than {WIDE}")


def _value_text(value: object) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    return repr(value)[:60] if isinstance(value, (bool, int, float, str, torch.dtype, type(None))) else f"a {type(value).__name__}"
