"""Programs as data, with the files of their kernels: compiled, and marked with a digest of their call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusegen.bundle.binaries import Program
from fusegen.bundle.manifest import BuiltProgram, Code, digest
from fusegen.bundle.validate import check_call
from fusegen.compiler.compile import Compiled
from fusegen.compiler.forms import Rows
from fusegen.compiler.host_launch import host_flags
from fusegen.emit.environment import unit_text
from fusegen.ir.formula import formula
from fusegen.ir.graph import InputSpec
from fusegen.jit import nvrtc
from fusegen.jit.host import compile_shared
from fusegen.program.formula import Relation, formula_of
from fusegen.program.signature import Signature, TensorArgument
from fusegen.runtime.host_kernel import instruction_set
from fusegen.schedule.heuristics.contraction import CLASSES
from fusegen.settings import cache_folder
from fusegen.target import Backend, Target


@dataclass(frozen=True)
class File:
    """A file of the folder."""

    path: str
    content: bytes


def built_program(
    target: Target, names: Sequence[str], signature: Signature, compiled: Compiled, place: str
) -> tuple[BuiltProgram, list[File]]:
    """A program, with the files of its kernels.

    Args:
        target: the machine.
        names: of the values of a call, as texts call them.
        signature: what the program assumes of them.
        compiled: its texts.
        place: the folder of the files.
    """
    make = _host_files if target.backend is Backend.CPU else _cuda_files
    code, files = make(compiled, target, place)
    check_call(names, signature, compiled.call, place)
    return BuiltProgram(signature, compiled.call, tuple(code)), files


def machine_of(target: Target) -> str:
    """A digest of this machine's instruction set, where the target is a CPU; else empty."""
    return instruction_set() if target.backend is Backend.CPU else ""


def limits(rows: Rows) -> tuple[Relation, ...]:
    """Between which numbers of rows a form is taken; the last one has no end."""
    found = []
    for dim, numbers in rows.items():
        found += [Relation(formula(dim), ">=", formula_of(numbers[0]))] if numbers[0] > 1 else []
        found += [Relation(formula(dim), "<=", formula_of(numbers[-1]))] if numbers[-1] < CLASSES[-1] else []
    return tuple(found)


def tensor_argument(spec: InputSpec) -> TensorArgument:
    """An input of a graph, as data."""
    return TensorArgument(spec.dtype, tuple(map(formula, spec.shape)), tuple(map(formula, spec.strides)), spec.alignment)


def with_mark(program: Program, files: Sequence[File], mark: bytes) -> tuple[Program, list[File]]:
    """A program whose binaries end with a mark."""
    binaries = {code.file for code in program.code}
    marked = [replace(file, content=file.content + mark) if file.path in binaries else file for file in files]
    digests = {file.path: digest(file.content) for file in marked}
    return replace(program, code=tuple(replace(code, sha256=digests[code.file]) for code in program.code)), marked


def _cuda_files(compiled: Compiled, target: Target, place: str) -> tuple[list[Code], list[File]]:
    code, files = [], []
    for source in compiled.sources:
        cubin = nvrtc.compile_cubin(source, target.name).cubin
        binary, text = File(f"{place}/{source.entry}.cubin", cubin), File(f"{place}/{source.entry}.cu", source.text.encode())
        code.append(Code(binary.path, digest(cubin), source.entry, text.path))
        files += [binary, text]
    return code, files


def _host_files(compiled: Compiled, _: Target, place: str) -> tuple[list[Code], list[File]]:
    """One library for all kernels of a program."""
    if not compiled.sources:
        return [], []
    text = unit_text(compiled.sources)
    library = compile_shared(text, host_flags(), cache_folder("cpu")).read_bytes()
    name = f"{place}/kernels-{digest(library)[:16]}"  # a process that has loaded a path knows it as what it was then
    files = [File(f"{name}.so", library), File(f"{name}.cpp", text.encode())]
    return [Code(files[0].path, digest(library), source.entry, files[1].path) for source in compiled.sources], files
