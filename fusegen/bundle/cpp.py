"""Builds kernels that run without fusegen: a shared library with operators of torch, forward and backward, or CUDA files with C
functions that launch the kernels."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_structure

from fusegen.bundle.build import BuildRequest, TracedCall, signature_of, traced_calls
from fusegen.bundle.kernels import describe_calls
from fusegen.bundle.manifest import digest
from fusegen.bundle.programs import cache_writes, new_folder, passes_by_all, require_name, require_new, tensor_argument, write
from fusegen.bundle.programs import limits as rows_of
from fusegen.compiler.backends import host_flags
from fusegen.compiler.compile import CompiledGraph, compile_graph
from fusegen.dtypes import DType
from fusegen.emit.environment import unit_text
from fusegen.errors import ArgumentError, BundleError
from fusegen.extension.native import OPERATOR_FLAGS, LibrarySources, library_content
from fusegen.extension.operators_text import UnitText
from fusegen.extension.program_text import CallGuards
from fusegen.extension.sources_text import cmake_text, program_files
from fusegen.extension.unit import CallKind, CompiledProgram, OperatorParameter, OperatorPasses, OperatorSpec, TensorSpec, header
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph, InputSpec
from fusegen.ir.index_map import in_row_major_order
from fusegen.jit import nvrtc
from fusegen.program.formula import Relation, limits
from fusegen.program.names import ascii_name
from fusegen.program.numbers import Numbers
from fusegen.program.signature import ArgumentSpec, Constant, ExtentArgument, NumberArgument, TensorArgument
from fusegen.target import Backend, Target

MANIFEST = "extension.json"
COMMAND = "build.txt"
"""The file with the command that built a folder."""


@dataclass(frozen=True)
class BuiltExtension:
    """A folder with a built library: its file name, the operators' schemas, the processors of its CPU kernels ("" if there are
    none), and the required version of torch."""

    library: str
    schemas: tuple[str, ...]
    cpu: str
    requires: str


def build_extension(
    folder: Path,
    requests: Iterable[BuildRequest],
    library: str,
    version: str,
    *,
    level: str = "",
    command: str = "",
    is_unique: bool = False,
) -> BuiltExtension:
    """Compiles kernels into one shared library in a new folder, atomically.

    Args:
        folder: the folder to create; its parent must exist.
        requests: one per kind of call and target.
        library: the operators' namespace in torch, ``torch.ops.<library>``.
        version: version of fusegen.
        level: the level of x86-64 that CPU kernels are compiled for; "" for this machine's processor.
        command: the command of the build, if there is one.
        is_unique: whether a digest of the library's contents follows its name, so that a process can load several.

    Raises:
        ArgumentError: the library's name is invalid.
        BundleError: the folder exists, or a kernel cannot be an operator of torch.
        CompileError, ToolNotFoundError: a compiler fails or is missing.
    """
    require_name(library)
    require_new(folder)
    operators = _operators(requests)
    unit = UnitText(library, operators, level)
    if is_unique:
        contents = (level, torch.__version__, unit.text, _kernels(unit))
        library = f"{library}_{digest(repr(contents).encode())[:16]}"
        unit = UnitText(library, operators, level)
    kernels = _kernels(unit)
    name = ", ".join(op.name for op in operators)
    texts = LibrarySources(name, {"binding.cpp": unit.text}, OPERATOR_FLAGS, kernels, host_flags(level) if kernels else ())
    content = library_content(texts)
    cpu = (level or "native") if unit.kernels else ""
    shipped = BuiltExtension(f"{library}.so", tuple(unit.schemas), cpu, torch.__version__.partition("+")[0])
    with new_folder(folder) as unfinished, cache_writes(folder):
        write(unfinished / shipped.library, content)
        for name, text in {**texts.files, **{f"{name}.cpp": text for name, text in kernels.items()}}.items():
            write(unfinished / name, text.encode())
        if command:
            write(unfinished / COMMAND, f"{command}\n".encode())
        write(unfinished / MANIFEST, json.dumps(_manifest(shipped, operators, digest(content), version), indent=1).encode())
    return shipped


def _manifest(shipped: BuiltExtension, operators: Sequence[OperatorSpec], sha256: str, version: str) -> dict[str, Any]:
    return {
        "fusegen": version,
        "library": shipped.library,
        "sha256": sha256,
        "abi": "torch's C++ API, of one version: nodes of autograd and symbolic sizes are no part of torch's stable ABI",
        "torch": shipped.requires,
        "cpu": shipped.cpu,
        "operators": [
            {
                "schema": schema,
                "differentiable": all(kind.passes for kind in operator.kinds),
                "built_for": [kind.description for kind in operator.kinds],
            }
            for schema, operator in zip(shipped.schemas, operators, strict=True)
        ],
    }


def _kernels(unit: UnitText) -> dict[str, str]:
    """Returns the C++ texts of CPU kernels, with unique entry names."""
    return {names[0][1]: _renamed(program, names) for program, names in unit.kernels}


def _renamed(program: CompiledProgram, names: Sequence[tuple[str, str]]) -> str:
    defined = [f"#define {entry} {name}" for entry, name in names]
    return "\n".join([*defined, unit_text(program.sources)])


# Operators.


def _operators(requests: Iterable[BuildRequest]) -> list[OperatorSpec]:
    operators: dict[str, OperatorSpec] = {}
    kernel_names: dict[str, str] = {}
    for call in (call for each in requests for call in traced_calls(each)):
        each, traced = call.requested, TracedOperator(call)
        if (first := kernel_names.setdefault(traced.name, each.name)) != each.name:
            what = f"{first} and {each.name} would both be the operator {traced.name}"
            raise BundleError(
                what, hint="build them into two libraries, or rename one: operator names keep only ASCII letters, digits and _"
            )
        parameters, kind = traced.parameters(), traced.kind()
        known = operators.get(traced.name, OperatorSpec(traced.name, parameters, ()))
        if known.parameters != parameters or (known.kinds and len(known.kinds[0].results) != len(kind.results)):
            what = f"{each.name} has different parameters or results for {kind.description} than for earlier calls"
            raise BundleError(what, hint="build it into another library")
        operators[traced.name] = replace(known, kinds=_joined(known.kinds, kind))
    for name in operators:
        if clash := {f"{name}_forward", f"{name}_backward"} & operators.keys():
            what = f"{clash.pop()} is also the name of a pass of {name}"
            raise BundleError(what, hint="build them into two libraries")
    return list(operators.values())


def _joined(kinds: tuple[CallKind, ...], kind: CallKind) -> tuple[CallKind, ...]:
    """Adds a kind of call. The same kind on another GPU adds programs to the existing one."""
    for index, existing in enumerate(kinds):
        if _without_programs(existing) == _without_programs(kind):
            passes = (
                existing.passes
                and kind.passes
                and replace(
                    existing.passes,
                    forward=existing.passes.forward + kind.passes.forward,
                    backward=existing.passes.backward + kind.passes.backward,
                )
            )
            joined = replace(existing, programs=existing.programs + kind.programs, passes=passes)
            return (*kinds[:index], joined, *kinds[index + 1 :])
    return (*kinds, kind)


def _without_programs(kind: CallKind) -> CallKind:
    passes = kind.passes and replace(kind.passes, forward=(), backward=())
    return replace(kind, programs=(), passes=passes)


# CUDA files, with a CMake target.


_CMAKE_TARGETS = {
    "all", "ALL_BUILD", "clean", "depend", "edit_cache", "help", "install", "INSTALL", "list_install_components",
    "package", "PACKAGE", "package_source", "preinstall", "rebuild_cache", "RUN_TESTS", "test", "ZERO_CHECK",
}  # fmt: skip


def build_sources(folder: Path, requests: Iterable[BuildRequest], library: str, *, command: str = "") -> tuple[str, ...]:
    """Writes CUDA files, a header for launches and a CMake target into a new folder, atomically.

    Args:
        folder, requests, library, command: as in `build_extension`, for GPUs only.

    Returns:
        The names of the functions.

    Raises:
        ArgumentError, BundleError: as in `build_extension`, or torch runs a step of a kernel.
    """
    require_name(library)
    if library in _CMAKE_TARGETS:
        raise ArgumentError(
            f"CMake reserves the name {library!r}", hint=f"give another name, such as {library}_kernels, by --library"
        )
    require_new(folder)
    files = {"fusegen.h": "#pragma once\n" + header("sources.h")}
    functions: dict[str, list[str]] = {}
    for call in (call for each in requests for call in traced_calls(each)):
        target = call.requested.target
        if target.backend is Backend.CPU:
            raise BundleError(
                "--format sources supports GPUs only", hint="give GPUs: --arch sm_90a; --format extension also supports the CPU"
            )
        traced = TracedOperator(call, is_text=True)
        kind = traced.kind()
        name = _unique("_".join([traced.name, *_dtypes(kind.tensors), target.name]), files)
        files |= program_files(name, target.name, kind.programs, traced.defaults())
        functions.setdefault(target.name, []).append(name)
    files["CMakeLists.txt"] = cmake_text(library, functions)
    if command:
        files[COMMAND] = f"{command}\n"
    with new_folder(folder) as unfinished, cache_writes(folder):
        for file, text in files.items():
            write(unfinished / file, text.encode())
    return tuple(name for names in functions.values() for name in names)


def _unique(name: str, files: Container[str]) -> str:
    """Appends a number if the name is taken."""
    names = chain([name], (f"{name}_{number}" for number in count(2)))
    return next(each for each in names if f"{each}.cu" not in files)


def _dtypes(tensors: Sequence[TensorSpec]) -> Sequence[str]:
    """Returns dtype suffixes for a name: the floating-point dtypes, or all dtypes if there are none."""
    dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
    floats = [dtype.short for dtype in dtypes if dtype.is_float]
    return floats or [dtype.short for dtype in dtypes]


_NOTHING = Numbers()


class TracedOperator:
    """A traced kernel, as an operator.

    Args:
        is_text: whether only the text of its forward pass is used.

    Raises:
        BundleError: it takes no tensor, or depends on state that an operator cannot check.
    """

    def __init__(self, call: TracedCall, *, is_text: bool = False) -> None:
        self._is_text = is_text
        request, dispatcher, self._variant = call.requested, call.dispatcher, call.variant
        self.name, self._target = ascii_name(request.name), request.target
        self._is_cpu = self._target.backend is Backend.CPU
        names = dispatcher.parameters.emitted_names
        self._signature = signature_of(self._variant, names, call.values[: len(names)])
        self._arguments = dict(zip(names, self._signature.arguments, strict=True))
        self._graph, self._options = self._variant.traced, dispatcher.options
        self._parameters, self._mutates = dispatcher.parameters, dispatcher.parameters.mutates
        specs = {spec.name: spec for spec in self._graph.inputs}
        self._tensors = [n for n, a in self._arguments.items() if isinstance(a, TensorArgument)] + list(self._variant.state.names)
        if not self._tensors:
            raise BundleError(f"{request.name} takes no tensor, so its operator has no device", hint="call the kernel itself")
        self._specs = [specs[name] for name in self._tensors]
        self._extents = tuple(a.size for a in self._arguments.values() if isinstance(a, ExtentArgument))
        kinds = {
            n: DType.FLOAT64 if a.is_float else DType.INT64 for n, a in self._arguments.items() if isinstance(a, NumberArgument)
        }
        self._numbers = tuple(kinds.items())
        self._hints = dict(self._variant.request.sizes.hints)

    def parameters(self) -> tuple[OperatorParameter, ...]:
        """Returns the operator's parameters: the function's, and the captured tensors."""
        declared = [self._parameter(name, argument) for name, argument in self._arguments.items()]
        captured = [OperatorParameter(ascii_name(name), "tensor") for name in self._variant.state.names]
        return (*(parameter for parameter in declared if parameter is not None), *captured)

    def _parameter(self, name: str, argument: ArgumentSpec) -> OperatorParameter | None:
        """Returns a parameter, or None for a fixed value whose type no schema supports."""
        if isinstance(argument, TensorArgument):
            return OperatorParameter(name, "written" if name in self._mutates else "tensor")
        if isinstance(argument, NumberArgument):
            return OperatorParameter(name, "float" if argument.is_float else "int")
        if isinstance(argument, ExtentArgument):
            return OperatorParameter(name, "size")
        return OperatorParameter(name, "constant", argument.value) if _is_plain(argument.value) else None

    def defaults(self) -> dict[str, int | float]:
        """Returns the default values of numbers, by name."""
        known = self._parameters.defaults
        values = {name: known.get(given) for given, name in zip(self._parameters.user_names, self._arguments, strict=True)}
        return {name: value for name, _ in self._numbers if isinstance(value := values[name], int | float) and math.isfinite(value)}

    def kind(self) -> CallKind:
        """Returns the kind of call, with its programs."""
        constants = [(n, a.value) for n, a in self._arguments.items() if isinstance(a, Constant) and _is_plain(a.value)]
        fresh = [position for position in self._graph.outputs if position not in self._graph.puts]
        return CallKind(
            on_gpu=not self._is_cpu,
            tensors=tuple(TensorSpec(tuple(map(formula, spec.shape)), spec.dtype) for spec in self._specs),
            constants=tuple(constants),
            sizes=self._extents,
            programs=self._programs(self._variant, self._specs, self._signature.relations, self._signature.conditions),
            results=_shaped(self._graph, fresh),
            passes=None if self._is_text else self._passes(),
            description=self._description(),
        )

    def _description(self) -> str:
        captured = self._specs[len(self._specs) - len(self._variant.state.names) :]
        tensors = [f"{spec.name}: {tensor_argument(spec)}" for spec in captured]
        return ", ".join([*tensors, describe_calls(self._signature, [*self._arguments])])

    def _programs(
        self,
        compiled: CompiledGraph,
        specs: Sequence[InputSpec],
        relations: Sequence[Relation],
        conditions: Numbers = _NOTHING,
        *,
        sizes: tuple[str, ...] | None = None,
        numbers: tuple[tuple[str, DType], ...] | None = None,
    ) -> tuple[CompiledProgram, ...]:
        """Returns a program for each range of row counts. By default they take the function's sizes and numbers."""
        programs = []
        for rows, specialization in compiled.specializer.all(self._hints, is_general=True):
            specialized = compiled.with_specialization(specialization)
            assumed = CallGuards(
                tensors=tuple((spec.name, tensor_argument(spec)) for spec in specs),
                sizes=self._extents if sizes is None else sizes,
                numbers=self._numbers if numbers is None else numbers,
                relations=(*limits(self._graph.multiples, self._graph.bounds), *relations),
                rows=rows_of(rows),
                conditions=conditions,
                constants=self._variant.constants,
                index64=self._variant.request.index64,
                distinct=self._signature.distinct,
            )
            cubins = None
            if not self._is_cpu and not self._is_text:
                shipped = [source.shipped for source in specialized.sources]
                cubins = tuple(binary.cubin for binary in nvrtc.compile_cubins(shipped, self._target.name))
            programs.append(
                CompiledProgram(specialized.program.call, assumed, specialized.sources, cubins, _capability(self._target))
            )
        return tuple(programs)

    def _passes(self) -> OperatorPasses | None:
        """Returns the passes, or None if there is no derivative."""
        passes = passes_by_all(self._variant, self._options, self._hints)
        if passes is None:
            return None
        derivative, forward, backward = passes.derivative, passes.forward.graph, in_row_major_order(passes.backward.graph)
        further = passes.backward.further
        relations = self._signature.relations
        keys = [spec for spec in forward.inputs if spec.name == derivative.key]
        specs = [*self._specs, *keys]
        names = [spec.name for spec in specs]
        incoming = {spec.name: position for position, spec in enumerate(backward.inputs[len(derivative.saved) :])}
        sources = dict(zip(derivative.wrt, derivative.gradients, strict=True))
        gradients = [sources.get(name) for name in self._tensors]
        numbers = tuple(name for name, _ in backward.scalars)
        return OperatorPasses(
            forward=self._programs(self._compiled(forward), specs, relations, self._signature.conditions),
            backward=self._programs(self._compiled(backward), backward.inputs, (), sizes=further, numbers=backward.scalars),
            saved=tuple(names.index(k) if isinstance(k, str) else ~k for k in derivative.saved),
            sizes=further,
            numbers=numbers,
            gradients=tuple(~incoming[source] if isinstance(source, str) else source for source in gradients),
            results_with_gradients=tuple(
                n for n, p in enumerate(forward.outputs[: derivative.results]) if forward.nodes[p].dtype.is_float
            ),
            forward_outputs=_shaped(forward, forward.outputs),
            backward_outputs=_shaped(backward, backward.outputs),
            backward_shapes=tuple(tuple(map(formula, spec.shape)) for spec in backward.inputs),
            draws=bool(keys),
            saves_dependent=derivative.saves_dependent,
        )

    def _compiled(self, graph: Graph) -> CompiledGraph:
        structure = tree_structure((0,) * len(graph.outputs))
        return compile_graph(graph, structure, self._target, self._hints, index64=self._variant.request.index64)


def _is_plain(value: object) -> bool:
    """True if a value can be a default in a schema. Schemas support no infinities, NaNs or escapes."""
    if isinstance(value, str):
        return value.isascii() and value.isprintable() and not set(value) & set('"\\')
    return type(value) in (bool, int, float) and (not isinstance(value, float) or math.isfinite(value))


def _shaped(graph: Graph, positions: Sequence[int]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(tuple(map(formula, graph.nodes[p].shape)), graph.nodes[p].dtype) for p in positions)


def _capability(target: Target) -> int:
    return int("".join(c for c in target.name if c.isdigit()) or 0)
