"""Programs and passes as data, with the files of their kernels."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fusegen.autodiff.derive import differentiated_inputs, differentiated_results
from fusegen.bundle.kernels import trusted_kernels
from fusegen.bundle.manifest import (
    AnyProgram,
    BuiltParameter,
    BuiltPasses,
    BuiltProgram,
    KernelBinary,
    digest,
    passes_mark_of,
    read_manifest,
)
from fusegen.compiler.backends import host_flags
from fusegen.compiler.compile import GENERATOR_DIGITS, CompiledGraph, Variant, needs_index64
from fusegen.compiler.passes import ForwardBackward, GraphKernel, passes_of
from fusegen.compiler.signature import with_layout_of
from fusegen.compiler.specialize import RowRanges
from fusegen.emit.environment import generator, unit_text
from fusegen.errors import ArgumentError, BundleError, FusegenError, GradientError, UnsupportedError
from fusegen.families.gemm.heuristics import CLASSES
from fusegen.ir.formula import formula
from fusegen.ir.graph import InputSpec
from fusegen.jit import nvrtc
from fusegen.jit.host import compile_shared
from fusegen.options import Options
from fusegen.program.formula import Relation, formula_of
from fusegen.program.names import stride_name
from fusegen.program.numbers import Numbers
from fusegen.program.signature import ArgumentSpec, ExtentArgument, NumberArgument, Signature, TensorArgument
from fusegen.runtime.devices import instruction_set
from fusegen.settings import cache_folder
from fusegen.target import Backend, Target


@dataclass(frozen=True)
class File:
    path: str
    content: bytes


def built_program(
    target: Target, signature: Signature, rows: tuple[Relation, ...], compiled: CompiledGraph, subdir: str
) -> tuple[BuiltProgram, list[File]]:
    """Returns a program for a range of row counts with the files of its kernels, stored in `subdir`."""
    make = _host_files if target.backend is Backend.CPU else _cuda_files
    code, files = make(compiled, target, subdir)
    cache = compiled.cache
    return BuiltProgram(signature, rows, compiled.call, tuple(code), cache.graph_digest, cache.names), files


def machine_of(target: Target) -> str:
    """Returns the level of a CPU target, or a digest of this machine's instruction set; "" for a GPU."""
    return (target.level or instruction_set()) if target.backend is Backend.CPU else ""


def limits(rows: RowRanges) -> tuple[Relation, ...]:
    """Returns the range of row counts for which a specialization is selected. The last range is open."""
    relations = []
    for dim, numbers in rows.items():
        relations += [Relation(formula(dim), ">=", formula_of(numbers[0]))] if numbers[0] > 1 else []
        relations += [Relation(formula(dim), "<=", formula_of(numbers[-1]))] if numbers[-1] < CLASSES[-1] else []
    return tuple(relations)


def tensor_argument(spec: InputSpec) -> TensorArgument:
    return TensorArgument(spec.dtype, tuple(map(formula, spec.shape)), tuple(map(formula, spec.strides)), spec.alignment)


def with_mark(program: AnyProgram, files: Sequence[File], mark: bytes) -> tuple[AnyProgram, list[File]]:
    """Appends a mark to the program's binaries."""
    binaries = {code.file for code in program.code}
    marked = [replace(file, content=file.content + mark) if file.path in binaries else file for file in files]
    digests = {file.path: digest(file.content) for file in marked}
    return replace(program, code=tuple(replace(code, sha256=digests[code.file]) for code in program.code)), marked


def _cuda_files(compiled: CompiledGraph, target: Target, subdir: str) -> tuple[list[KernelBinary], list[File]]:
    code, files = [], []
    for source in compiled.sources:
        cubin = nvrtc.compile_cubin(source.shipped, target.name).cubin
        binary, text = (
            File(f"{subdir}/{source.entry}.cubin", cubin),
            File(f"{subdir}/{source.entry}.cu", source.text.encode()),
        )
        code.append(KernelBinary(binary.path, digest(cubin), source.entry, text.path))
        files += [binary, text]
    return code, files


def _host_files(compiled: CompiledGraph, target: Target, subdir: str) -> tuple[list[KernelBinary], list[File]]:
    """Compiles all kernels of a program to one library."""
    if not compiled.sources:
        return [], []
    text = unit_text(compiled.sources)
    library = compile_shared(text, host_flags(target.level), cache_folder("cpu")).read_bytes()
    name = f"{subdir}/kernels-{digest(library)[:16]}"  # unique: a process caches loaded libraries by path
    files = [File(f"{name}.so", library), File(f"{name}.cpp", text.encode())]
    return [KernelBinary(files[0].path, digest(library), source.entry, files[1].path) for source in compiled.sources], files


# Passes are built for all differentiable inputs. A call computes the requested gradients.


_Programs: TypeAlias = list[tuple[BuiltProgram, list[File]]]


@dataclass(frozen=True)
class Example:
    """An example call for which passes are built.

    Attributes:
        values: arguments and captured tensors, by name; tensors may be on the meta device.
        sizes: values of all sizes and strides.
        signature: the kernel's signature for the call.
    """

    values: Mapping[str, Any]
    sizes: Mapping[str, int]
    signature: Signature


def passes_by_all(variant: Variant, options: Options, sizes: Mapping[str, int]) -> ForwardBackward | None:
    """Returns a variant's passes for all differentiable inputs, for example sizes, or None if there are none."""
    floats = [spec.name for spec in variant.traced.inputs if spec.dtype.is_float]
    try:
        return passes_of(variant, differentiated_inputs(variant.traced, floats), options, sizes)
    except (GradientError, UnsupportedError):
        return None


def built_passes(
    passes: ForwardBackward, variant: Variant, call: Example, parameters: Sequence[BuiltParameter], prefix: str
) -> tuple[BuiltPasses, list[File]]:
    """Returns passes as data, with the files of their kernels. The folders' names begin with `prefix`."""
    forward, backward = programs_of_passes(passes, call, prefix)
    programs = [[program for program, _ in each] for each in (forward, backward)]
    built = BuiltPasses(passes.wiring, _derivatives(passes, variant), *map(tuple, programs))
    mark = passes_mark_of(parameters, machine_of(passes.forward.target), built)
    (forward, backward) = ([with_mark(*each, mark) for each in some] for some in (forward, backward))
    files = [file for _, some in (*forward, *backward) for file in some]
    return replace(built, forward=tuple(p for p, _ in forward), backward=tuple(p for p, _ in backward)), files


def programs_of_passes(passes: ForwardBackward, call: Example, prefix: str) -> tuple[_Programs, _Programs]:
    """Compiles the programs of a forward and a backward pass."""
    specs = passes.forward.graph.inputs  # the random key is not among the call's values
    inputs = [call.values[spec.name] if spec.name in call.values else _row_major(spec, call.sizes) for spec in specs]
    forward = _programs(passes.forward, inputs, call, f"{prefix}-forward")
    return forward, _programs(passes.backward, _saved(passes, inputs, call), call, f"{prefix}-backward")


def _derivatives(passes: ForwardBackward, variant: Variant) -> tuple[tuple[str, ...], ...]:
    """For each result, the inputs with respect to which it has a derivative."""
    results_by_input = {name: differentiated_results(variant.traced, (name,)) for name in passes.derivative.wrt}
    return tuple(tuple(name for name, has in results_by_input.items() if has[n]) for n in range(passes.derivative.results))


def _saved(passes: ForwardBackward, inputs: Sequence[Tensor], call: Example) -> list[Tensor]:
    """Returns examples of the backward pass's tensors: saved values, and row-major gradients."""
    named = dict(zip((spec.name for spec in passes.forward.graph.inputs), inputs, strict=True))
    specs, sources = passes.backward.graph.inputs, passes.derivative.saved
    saved = [named[s] if isinstance(s, str) else _row_major(spec, call.sizes) for s, spec in zip(sources, specs, strict=False)]
    return [*saved, *(_row_major(spec, call.sizes) for spec in specs[len(sources) :])]


def _row_major(spec: InputSpec, sizes: Mapping[str, int]) -> Tensor:
    """Returns a row-major meta tensor."""
    return torch.empty([formula(dim)(sizes) for dim in spec.shape], dtype=spec.dtype.torch, device="meta")


def _programs(kernel: GraphKernel, tensors: Sequence[Tensor], call: Example, prefix: str) -> _Programs:
    """Compiles the programs of a pass for all ranges of row counts."""
    specs = [with_layout_of(spec, tensor) for spec, tensor in zip(kernel.graph.inputs, tensors, strict=True)]
    sizes = {**call.sizes, **kernel.sizes(tensors)}
    for spec, tensor in zip(specs, tensors, strict=True):
        sizes |= {stride_name(spec.name, dim): stride for dim, stride in enumerate(tensor.stride())}
    compiled = kernel.compiled(specs, sizes, index64=call.signature.index64)
    signature = _signature(kernel, specs, call.signature, index64=call.signature.index64 or needs_index64(compiled, sizes))
    return [
        built_program(kernel.target, signature, limits(rows), compiled.with_specialization(form), f"{prefix}-{number}")
        for number, (rows, form) in enumerate(compiled.specializer.all(sizes, is_general=True))
    ]


def _signature(kernel: GraphKernel, specs: Sequence[InputSpec], signature: Signature, *, index64: bool) -> Signature:
    """Returns the assumptions of a pass. The kernel's own program has checked relations and conditions."""
    arguments: list[ArgumentSpec] = [*map(tensor_argument, specs), *map(ExtentArgument, kernel.further)]
    arguments += [NumberArgument(dtype.is_float, takes_ints=dtype.is_float) for _, dtype in kernel.graph.scalars]
    return replace(
        signature,
        arguments=tuple(arguments),
        multiples=kernel.graph.multiples,
        bounds=kernel.graph.bounds,
        relations=(),
        conditions=Numbers(),
        index64=index64,
        distinct=False,
    )


def state_of(folder: str) -> tuple[bool, str]:
    """Returns whether calls take all programs of a folder of ``FUSEGEN_BUNDLE_PATH``, and a description with the reason if not."""
    try:
        programs = [program for stored in trusted_kernels(Path(folder)) for program in stored.kernel.programs]
        version = read_manifest(Path(folder)).fusegen
    except FusegenError as error:
        return False, error.what
    others = sum(not program.graph.startswith(generator()[:GENERATOR_DIGITS]) for program in programs)
    if others:
        what = f"{others} of {len(programs)} programs in {folder} are not used: another version of fusegen ({version}), "
        return False, f"{what}Python, torch, sympy or Jinja built them"
    return True, f"{len(programs)} programs in {folder}"


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder next to the requested one, renamed to it on success."""
    with temporary_folder(folder) as unfinished:
        yield unfinished
        with cache_writes(folder):
            try:
                unfinished.rename(folder)
            except OSError:
                if not folder.exists():
                    raise
                what = f"{folder} was created by another process during this build"
                raise BundleError(what, hint="build again: that adds to a bundle") from None


@contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """Yields a new folder next to another one, and removes it at the end. Removes those of processes that were killed."""
    place = folder.resolve()  # the current folder has a name
    _remove_abandoned(place)
    unfinished = place.parent / f".{place.name}-{secrets.token_hex(4)}{_UNFINISHED}"
    try:
        unfinished.mkdir()
    except OSError as error:
        raise BundleError(
            f"{folder} cannot be created: {error.strerror}", hint="give a folder whose parent exists and is yours"
        ) from None
    try:
        with locked(unfinished):
            yield unfinished
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


_UNFINISHED = ".fusegen-build"
_GRACE_SECONDS = 1  # between the creation of a folder and its lock


def _remove_abandoned(folder: Path) -> None:
    for other in folder.parent.glob(f".{escape(folder.name)}-{'[0-9a-f]' * 8}{_UNFINISHED}"):
        with suppress(BundleError, OSError):
            if time.time() - other.stat().st_mtime > _GRACE_SECONDS:
                with locked(other):
                    shutil.rmtree(other, ignore_errors=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks a folder until the end of the block or of the process; raises `BundleError` if another process has locked it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BundleError(f"another process builds into {folder}", hint="wait for its end, or give another folder") from None
        except OSError:  # the file system has no locks
            pass
        yield
    finally:
        os.close(descriptor)


@contextmanager
def cache_writes(folder: Path) -> Iterator[None]:
    """Converts errors of the file system to `BundleError`."""
    try:
        yield
    except OSError as error:
        raise BundleError(
            f"{folder} cannot be written: {error.strerror}", hint="free disk space, or give another folder"
        ) from error


def write(path: Path, content: bytes) -> None:
    with cache_writes(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def require_new(folder: Path) -> None:
    if folder.exists():
        raise BundleError(f"{folder} exists already", hint="remove it, or build into another folder")


def require_name(library: str) -> None:
    """Rejects names that are not identifiers in torch and C++."""
    if not re.fullmatch(r"[A-Za-z_]\w*", library, re.ASCII):
        raise ArgumentError(f"the library name {library!r} is not an identifier", hint="give a name such as mylib by --library")
