"""Builds kernels that run where fusegen is not installed: into a shared library with operators of torch, forward and backward, or
as CUDA files with C functions that launch them."""

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
from fusegen.bundle.manifest import digest
from fusegen.bundle.programs import limits as rows_of
from fusegen.bundle.programs import new_folder, passes_by_all, require_name, require_new, tensor_argument, write, writing_to
from fusegen.compiler.backends import flags_of
from fusegen.compiler.compile import CompiledGraph, compile_graph
from fusegen.dtypes import DType
from fusegen.emit.environment import unit_text
from fusegen.errors import BundleError
from fusegen.extension.native import Texts, library_of
from fusegen.extension.operators_text import UnitText
from fusegen.extension.program_text import CallGuards
from fusegen.extension.sources_text import cmake_text, program_files
from fusegen.extension.unit import Built, CallKind, OperatorParameter, OperatorPasses, OperatorSpec, TensorSpec, header
from fusegen.files import unsealed
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph, InputSpec
from fusegen.ir.index_map import in_row_major_order
from fusegen.jit import nvrtc
from fusegen.program.formula import Relation, limits
from fusegen.program.numbers import Numbers
from fusegen.program.signature import ArgumentSpec, Constant, ExtentArgument, NumberArgument, TensorArgument
from fusegen.schedule.names import plain
from fusegen.target import Backend, Target

MANIFEST = "extension.json"


@dataclass(frozen=True)
class Shipped:
    """A folder with a built library.

    Attributes:
        library: the file's name.
        schemas: of the operators, as torch has them.
        requires: the version of torch that the library needs.
    """

    library: str
    schemas: tuple[str, ...]
    requires: str


def build_extension(folder: Path, wanted: Iterable[BuildRequest], library: str, version: str) -> Shipped:
    """Compiles kernels into a new folder with one shared library: there whole or not at all.

    Args:
        folder: what is made; its parent exists.
        wanted: one a kind of calls and target.
        library: of torch's, ``torch.ops.<library>``, in which the operators are.
        version: of fusegen.

    Raises:
        ArgumentError: the library cannot have its name.
        BundleError: the folder is there, or a kernel cannot be such an operator.
        CompileError, ToolNotFoundError: a compiler refuses a text, or is not there.
    """
    require_name(library)
    require_new(folder)
    operators = _operators(wanted)
    unit = UnitText(library, operators)
    files = {"binding.cpp": unit.text} | {f"{names[0][1]}.cpp": _kernels(each, names) for each, names in unit.kernels}
    texts = Texts(", ".join(op.name for op in operators), files, flags_of(is_cpu=bool(unit.kernels)))
    content = unsealed(library_of(texts).read_bytes()) or b""
    shipped = Shipped(f"{library}.so", tuple(unit.schemas), torch.__version__.partition("+")[0])
    with new_folder(folder) as unfinished, writing_to(folder):
        write(unfinished / shipped.library, content)
        for name, text in files.items():
            write(unfinished / name, text.encode())
        write(unfinished / MANIFEST, json.dumps(_manifest(shipped, operators, digest(content), version), indent=1).encode())
    return shipped


def _manifest(shipped: Shipped, operators: Sequence[OperatorSpec], sha256: str, version: str) -> dict[str, Any]:
    return {
        "fusegen": version,
        "library": shipped.library,
        "sha256": sha256,
        "abi": "torch's C++ API, of one version: nodes of autograd and symbolic sizes are no part of torch's stable ABI",
        "torch": shipped.requires,
        "operators": [
            {
                "schema": schema,
                "differentiable": all(kind.passes for kind in operator.kinds),
                "built_for": [kind.description for kind in operator.kinds],
            }
            for schema, operator in zip(shipped.schemas, operators, strict=True)
        ],
    }


def _kernels(program: Built, names: Sequence[tuple[str, str]]) -> str:
    """The C++ of a program's kernels, whose entries have names of their own."""
    renamed = [f"#define {entry} {name}" for entry, name in names]
    return "\n".join([*renamed, unit_text(program.sources)])


# Operators.


def _operators(wanted: Iterable[BuildRequest]) -> list[OperatorSpec]:
    found: dict[str, OperatorSpec] = {}
    named: dict[str, str] = {}
    for call in (call for each in wanted for call in traced_calls(each)):
        each, traced = call.wanted, Traced(call)
        if (first := named.setdefault(traced.name, each.name)) != each.name:
            what = f"{first} and {each.name} would both be the operator {traced.name}"
            raise BundleError(what, hint="build them into two libraries, or give one a name of other Latin letters")
        parameters, kind = traced.parameters(), traced.kind()
        known = found.get(traced.name, OperatorSpec(traced.name, parameters, ()))
        if known.parameters != parameters or (known.kinds and len(known.kinds[0].results) != len(kind.results)):
            what = f"{each.name} has other parameters or results for {kind.description} than before"
            raise BundleError(what, hint="build it into another library")
        found[traced.name] = replace(known, kinds=_joined(known.kinds, kind))
    for name in found:
        if clash := {f"{name}_forward", f"{name}_backward"} & found.keys():
            what = f"{clash.pop()} is also the name of a pass of {name}"
            raise BundleError(what, hint="build them into two libraries")
    return list(found.values())


def _joined(kinds: tuple[CallKind, ...], kind: CallKind) -> tuple[CallKind, ...]:
    """Kinds with one more: one for another GPU is the same kind with further programs."""
    for place, other in enumerate(kinds):
        if _without_programs(other) == _without_programs(kind):
            passes = (
                other.passes
                and kind.passes
                and replace(
                    other.passes,
                    forward=other.passes.forward + kind.passes.forward,
                    backward=other.passes.backward + kind.passes.backward,
                )
            )
            joined = replace(other, programs=other.programs + kind.programs, passes=passes)
            return (*kinds[:place], joined, *kinds[place + 1 :])
    return (*kinds, kind)


def _without_programs(kind: CallKind) -> CallKind:
    passes = kind.passes and replace(kind.passes, forward=(), backward=())
    return replace(kind, programs=(), passes=passes)


# CUDA files, with a CMake target.


def build_sources(folder: Path, wanted: Iterable[BuildRequest], library: str) -> tuple[str, ...]:
    """Writes CUDA files, a header for launches and a CMake target into a new folder: there whole or not at all.

    Args:
        folder, wanted, library: as of `build_extension`; for GPUs alone.

    Returns:
        The names of the functions.

    Raises:
        ArgumentError, BundleError: as there, or a kernel leaves a step to torch.
    """
    require_name(library)
    require_new(folder)
    files = {"fusegen.h": "#pragma once\n" + header("sources.h")}
    made: dict[str, list[str]] = {}
    for call in (call for each in wanted for call in traced_calls(each)):
        target = call.wanted.target
        if target.backend is Backend.CPU:
            raise BundleError("sources are CUDA", hint="give GPUs: --arch sm_90a; --format extension has the CPU too")
        traced = Traced(call)
        kind = traced.kind()
        name = _unique("_".join([traced.name, *_dtypes(kind.tensors), target.name]), files)
        files |= program_files(name, target.name, kind.programs)
        made.setdefault(target.name, []).append(name)
    files["CMakeLists.txt"] = cmake_text(library, made)
    with new_folder(folder) as unfinished, writing_to(folder):
        for file, text in files.items():
            write(unfinished / file, text.encode())
    return tuple(name for names in made.values() for name in names)


def _unique(name: str, files: Container[str]) -> str:
    """The name of a further kind of calls: with a number, where a function has it already."""
    names = chain([name], (f"{name}_{number}" for number in count(2)))
    return next(each for each in names if f"{each}.cu" not in files)


def _dtypes(tensors: Sequence[TensorSpec]) -> Sequence[str]:
    """Dtypes as part of a name: those of floats, which ints beside them seldom change; of all where none is a float."""
    dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
    floats = [dtype.short for dtype in dtypes if dtype.is_float]
    return floats or [dtype.short for dtype in dtypes]


# Traced kernels.


_NOTHING = Numbers()


class Traced:
    """A kernel for some kind of calls, traced.

    Args:
        call: as its dispatcher traced it.

    Attributes:
        name: of the operator.

    Raises:
        BundleError: it takes no tensor, or depends on what an operator cannot look at.
    """

    def __init__(self, call: TracedCall) -> None:
        wanted, dispatcher, self._variant = call.wanted, call.dispatcher, call.variant
        self.name, self._target = plain(wanted.name), wanted.target
        self._is_cpu = self._target.backend is Backend.CPU
        names = dispatcher.parameters.names
        self._signature = signature_of(self._variant, names, call.values[: len(names)])
        self._given = dict(zip(names, self._signature.arguments, strict=True))
        self._graph, self._options = self._variant.traced, dispatcher.options
        self._mutates = dispatcher.parameters.mutates
        specs = {spec.name: spec for spec in self._graph.inputs}
        self._tensors = [n for n, a in self._given.items() if isinstance(a, TensorArgument)] + list(self._variant.state.names)
        if not self._tensors:
            raise BundleError(f"{wanted.name} takes no tensor, which says where an operator runs", hint="call the kernel itself")
        self._specs = [specs[name] for name in self._tensors]
        self._extents = tuple(a.size for a in self._given.values() if isinstance(a, ExtentArgument))
        kinds = {n: DType.FLOAT64 if a.is_float else DType.INT64 for n, a in self._given.items() if isinstance(a, NumberArgument)}
        self._numbers = tuple(kinds.items())
        self._hints = dict(self._variant.request.sizes.hints)

    # Parameters.

    def parameters(self) -> tuple[OperatorParameter, ...]:
        """Parameters of the operator: those of the function, and the tensors that it closes over."""
        found = [self._parameter(name, argument) for name, argument in self._given.items()]
        captured = [OperatorParameter(plain(name), "tensor") for name in self._variant.state.names]
        return (*(parameter for parameter in found if parameter is not None), *captured)

    def _parameter(self, name: str, argument: ArgumentSpec) -> OperatorParameter | None:
        """A parameter; none for a value that no schema has, which is fixed."""
        if isinstance(argument, TensorArgument):
            return OperatorParameter(name, "written" if name in self._mutates else "tensor")
        if isinstance(argument, NumberArgument):
            return OperatorParameter(name, "float" if argument.is_float else "int")
        if isinstance(argument, ExtentArgument):
            return OperatorParameter(name, "size")
        return OperatorParameter(name, "constant", argument.value) if _is_plain(argument.value) else None

    # Calls.

    def kind(self) -> CallKind:
        """The calls, with the programs that run them."""
        constants = [(n, a.value) for n, a in self._given.items() if isinstance(a, Constant) and _is_plain(a.value)]
        fresh = [position for position in self._graph.outputs if position not in self._graph.puts]
        return CallKind(
            on_gpu=not self._is_cpu,
            tensors=tuple(TensorSpec(tuple(map(formula, spec.shape)), spec.dtype) for spec in self._specs),
            constants=tuple(constants),
            sizes=self._extents,
            programs=self._programs(self._variant, self._specs, self._signature.relations, self._signature.conditions),
            results=_shaped(self._graph, fresh),
            passes=self._passes(),
            description=", ".join(f"{spec.name}: {tensor_argument(spec)}" for spec in self._specs),
        )

    def _programs(
        self,
        compiled: CompiledGraph,
        specs: Sequence[InputSpec],
        relations: Sequence[Relation],
        conditions: Numbers = _NOTHING,
        *,
        sizes: tuple[str, ...] | None = None,
        numbers: tuple[tuple[str, DType], ...] | None = None,
    ) -> tuple[Built, ...]:
        """A program for every number of rows.

        Args:
            specs: of their tensors.
            relations, conditions: of sizes and of numbers, that must hold.
            sizes, numbers: that they take; by default those of the function.
        """
        found = []
        for rows, form in compiled.alternatives.general(self._hints).all(self._hints):
            made = compiled.in_form(form)
            assumed = CallGuards(
                tensors=tuple((spec.name, tensor_argument(spec)) for spec in specs),
                sizes=self._extents if sizes is None else sizes,
                numbers=self._numbers if numbers is None else numbers,
                relations=(*limits(self._graph.multiples, self._graph.bounds), *relations),
                rows=rows_of(rows),
                conditions=conditions,
                constants=self._variant.constants,
                wide=self._variant.request.wide,
                distinct=self._signature.distinct,
            )
            cubins = None
            if not self._is_cpu:
                cubins = tuple(binary.cubin for binary in nvrtc.compile_cubins(made.sources, self._target.name))
            found.append(Built(made.program.call, assumed, made.sources, cubins, _capability(self._target)))
        return tuple(found)

    # Gradients.

    def _passes(self) -> OperatorPasses | None:
        """The passes; None where there is no derivative."""
        found = passes_by_all(self._variant, self._options)
        if found is None:
            return None
        derivative, forward, backward = found.derivative, found.forward.graph, in_row_major_order(found.backward.graph)
        further = found.backward.further
        relations = self._signature.relations
        keys = [spec for spec in forward.inputs if spec.name == derivative.key]
        specs = [*self._specs, *keys]
        names = [spec.name for spec in specs]
        given = {spec.name: place for place, spec in enumerate(backward.inputs[len(derivative.kept) :])}
        sources = dict(zip(derivative.wrt, derivative.gradients, strict=True))
        gradients = [sources.get(name) for name in self._tensors]
        numbers = tuple(name for name, _ in backward.scalars)
        return OperatorPasses(
            forward=self._programs(self._compiled(forward), specs, relations, self._signature.conditions),
            backward=self._programs(self._compiled(backward), backward.inputs, (), sizes=further, numbers=backward.scalars),
            kept=tuple(names.index(k) if isinstance(k, str) else ~k for k in derivative.kept),
            sizes=further,
            numbers=numbers,
            gradients=tuple(~given[source] if isinstance(source, str) else source for source in gradients),
            given=tuple(n for n, p in enumerate(forward.outputs[: derivative.results]) if forward.nodes[p].dtype.is_float),
            outputs=_shaped(forward, forward.outputs),
            wanted=_shaped(backward, backward.outputs),
            dims=tuple(tuple(map(formula, spec.shape)) for spec in backward.inputs),
            draws=bool(keys),
        )

    def _compiled(self, graph: Graph) -> CompiledGraph:
        structure = tree_structure((0,) * len(graph.outputs))
        return compile_graph(graph, structure, self._target, self._hints, wide=self._variant.request.wide)


def _is_plain(value: object) -> bool:
    """Tells if a value can be an argument of an operator, with a default: a schema has no infinite numbers and no escapes."""
    if isinstance(value, str):
        return value.isascii() and value.isprintable() and not set(value) & set('"\\')
    return type(value) in (bool, int, float) and (not isinstance(value, float) or math.isfinite(value))


def _shaped(graph: Graph, positions: Sequence[int]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(tuple(map(formula, graph.nodes[p].shape)), graph.nodes[p].dtype) for p in positions)


def _capability(target: Target) -> int:
    """The number of a GPU's capability, such as 90; 0 of the CPU."""
    return int("".join(c for c in target.name if c.isdigit()) or 0)
