"""Builds kernels into a shared library: operators of torch, forward and backward, that run where fusegen is not installed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_structure

from fusegen.autodiff.derive import Derivative, differentiated_inputs
from fusegen.bundle.build import Wanted, signature_of
from fusegen.bundle.files import limits as rows_of
from fusegen.bundle.files import tensor_argument
from fusegen.bundle.folder import new_folder, write, writing_to
from fusegen.bundle.manifest import digest
from fusegen.calls.formula import Relation
from fusegen.calls.numbers import Numbers
from fusegen.calls.signature import Argument, Constant, ExtentArgument, NumberArgument, TensorArgument
from fusegen.dtypes import DType
from fusegen.emit.unit import unit_text
from fusegen.errors import ArgumentError, BundleError, GradientError, UnsupportedError
from fusegen.extension.headers import header
from fusegen.extension.kinds import Built, Kind, Operator, Parameter, Passes, Shaped
from fusegen.extension.library import Texts, library_of
from fusegen.extension.operators_text import UnitText
from fusegen.extension.program_text import Assumed, limits
from fusegen.extension.sources_text import cmake_text, program_files
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph, InputSpec
from fusegen.ir.strided import in_row_major_order
from fusegen.jit import nvrtc
from fusegen.jit.files import unsealed
from fusegen.runtime.compile import Compiled, compile_graph
from fusegen.runtime.dispatch import Dispatcher
from fusegen.runtime.extension import flags_of
from fusegen.runtime.passes import named_passes, require_history
from fusegen.runtime.signature import ITSELF
from fusegen.schedule.names import plain
from fusegen.target import Backend, Target

MANIFEST = "extension.json"
_NOTHING = Numbers()
_CONSTANTS = (bool, int, float)


@dataclass(frozen=True)
class Shipped:
    """What was built.

    Attributes:
        library: the file's name.
        schemas: of the operators, as torch has them.
        requires: the version of torch that the library needs.
    """

    library: str
    schemas: tuple[str, ...]
    requires: str


def build_extension(folder: Path, wanted: Iterable[Wanted], library: str, version: str) -> Shipped:
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
    _check(folder, library)
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


def build_sources(folder: Path, wanted: Iterable[Wanted], library: str) -> tuple[str, ...]:
    """Writes CUDA files, a header for launches and a CMake target into a new folder: there whole or not at all.

    Args:
        folder, wanted, library: as of `build_extension`; for GPUs alone.

    Returns:
        The names of the functions.

    Raises:
        ArgumentError, BundleError: as of `build_extension`, or a kernel leaves a matrix product to torch.
    """
    _check(folder, library)
    files = {"fusegen.h": "#pragma once\n" + header("sources.h")}
    names: list[str] = []
    targets: dict[str, None] = {}
    for each in wanted:
        if each.target.backend is Backend.CPU:
            raise BundleError("sources are CUDA", mend="give GPUs: --arch sm_90a; --format extension has the CPU too")
        traced = _Traced(each)
        dtypes = "_".join(dict.fromkeys(tensor.dtype.short for tensor in traced.kind().tensors if tensor.dtype.is_float))
        names.append("_".join(part for part in (traced.name, dtypes, each.target.name) if part))
        targets[each.target.name] = None
        files |= program_files(names[-1], each.target.name, traced.kind().programs)
    files["CMakeLists.txt"] = cmake_text(library, [file for file in files if file.endswith(".cu")], list(targets))
    with new_folder(folder) as unfinished, writing_to(folder):
        for name, text in files.items():
            write(unfinished / name, text.encode())
    return tuple(names)


def _check(folder: Path, library: str) -> None:
    if not re.fullmatch(r"[A-Za-z_]\w*", library):
        raise ArgumentError(f"the library is {library!r}", mend="give a name such as mylib by --library")
    if folder.exists():
        raise BundleError(f"{folder} is there already", mend="remove it, or build into another folder")


def _manifest(shipped: Shipped, operators: Sequence[Operator], sha256: str, version: str) -> dict[str, Any]:
    return {
        "fusegen": version,
        "library": shipped.library,
        "sha256": sha256,
        "abi": "torch's C++ API, of one version: nodes of autograd are no part of torch's stable ABI",
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


def _operators(wanted: Iterable[Wanted]) -> list[Operator]:
    found: dict[str, Operator] = {}
    for each in wanted:
        traced = _Traced(each)
        parameters, kind = traced.parameters(), traced.kind()
        known = found.get(traced.name, Operator(traced.name, parameters, ()))
        if known.parameters != parameters or (known.kinds and len(known.kinds[0].results) != len(kind.results)):
            what = f"{each.name} has other parameters or results for {kind.description} than before"
            raise BundleError(what, mend="build it into another library")
        found[traced.name] = replace(known, kinds=_joined(known.kinds, kind))
    for name in found:
        if clash := {f"{name}_forward", f"{name}_backward"} & found.keys():
            what = f"{clash.pop()} is also the name of a pass of {name}"
            raise BundleError(what, mend="build them into two libraries")
    return list(found.values())


def _joined(kinds: tuple[Kind, ...], kind: Kind) -> tuple[Kind, ...]:
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


def _without_programs(kind: Kind) -> Kind:
    passes = kind.passes and replace(kind.passes, forward=(), backward=())
    return replace(kind, programs=(), passes=passes)


class _Traced:
    """A kernel for some kind of calls, traced.

    Args:
        wanted: what it is.

    Raises:
        BundleError: it depends on what an operator cannot look at.
    """

    def __init__(self, wanted: Wanted) -> None:
        self._wanted, self.name, self._target = wanted, plain(wanted.name), wanted.target
        dispatcher = Dispatcher(wanted.function, wanted.function.__name__, wanted.mutates)
        values = dispatcher.arguments((), wanted.arguments)
        self._is_cpu = self._target.backend is Backend.CPU
        device = torch.device("cpu" if self._is_cpu else "cuda")
        self._variant, _ = dispatcher.variants.of(values, self._target, device)
        if self._variant.state.asked:
            what = f"{wanted.name} asks for {', '.join(self._variant.state.asked)} while it is traced, which an operator does not"
            raise BundleError(what, mend="pass what it depends on as an argument")
        names = dispatcher.parameters.names
        self._signature = signature_of(self._variant, names, values)
        self._given = dict(zip(names, self._signature.arguments, strict=True))
        self._graph = self._variant.traced
        self._mutates = dispatcher.parameters.mutates
        specs = {spec.name: spec for spec in self._graph.inputs}
        self._tensors = [n for n, a in self._given.items() if isinstance(a, TensorArgument)] + list(self._variant.state.names)
        if not self._tensors:
            raise BundleError(f"{wanted.name} takes no tensor, which says where an operator runs", mend="call the kernel itself")
        self._specs = [specs[name] for name in self._tensors]
        self._extents = tuple(a.size for a in self._given.values() if isinstance(a, ExtentArgument))
        kinds = {n: DType.FLOAT64 if a.is_float else DType.INT64 for n, a in self._given.items() if isinstance(a, NumberArgument)}
        self._numbers = tuple(kinds.items())
        self._hints = dict(self._variant.request.sizes.hints)

    # Parameters.

    def parameters(self) -> tuple[Parameter, ...]:
        """What the operator takes: the function's parameters, and what it closes over."""
        found = [self._parameter(name, argument) for name, argument in self._given.items()]
        captured = [Parameter(plain(name), "tensor") for name in self._variant.state.names]
        return (*(parameter for parameter in found if parameter is not None), *captured)

    def _parameter(self, name: str, argument: Argument) -> Parameter | None:
        """A parameter; none for a value that no schema has, which is fixed."""
        if isinstance(argument, TensorArgument):
            return Parameter(name, "written" if name in self._mutates else "tensor")
        if isinstance(argument, NumberArgument):
            return Parameter(name, "float" if argument.is_float else "int")
        if isinstance(argument, ExtentArgument):
            return Parameter(name, "size")
        return Parameter(name, "constant", argument.value) if _is_plain(argument.value) else None

    # Calls.

    def kind(self) -> Kind:
        """The calls, with the programs that run them."""
        constants = [(n, a.value) for n, a in self._given.items() if isinstance(a, Constant) and _is_plain(a.value)]
        fresh = [position for position in self._graph.outputs if position not in self._graph.puts]
        return Kind(
            on_gpu=not self._is_cpu,
            tensors=tuple(Shaped(tuple(map(formula, spec.shape)), spec.dtype) for spec in self._specs),
            constants=tuple(constants),
            sizes=self._extents,
            programs=self._programs(self._variant, self._specs, self._signature.relations, self._signature.conditions),
            results=_shaped(self._graph, fresh),
            passes=self._passes(),
            description=", ".join(f"{spec.name}: {tensor_argument(spec)}" for spec in self._specs),
        )

    def _programs(
        self,
        compiled: Compiled,
        specs: Sequence[InputSpec],
        relations: Sequence[Relation],
        conditions: Numbers = _NOTHING,
        *,
        sizes: tuple[str, ...] | None = None,
        numbers: tuple[tuple[str, DType], ...] | None = None,
    ) -> tuple[Built, ...]:
        """A program for every number of rows.

        Args:
            compiled: the programs.
            specs: of their tensors.
            relations, conditions: of sizes and of numbers, that must hold.
            sizes, numbers: that they take; by default those of the function.
        """
        found = []
        for rows, form in compiled.forms.all(self._hints):
            made = compiled.in_form(form)
            assumed = Assumed(
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

    def _passes(self) -> Passes | None:
        """The passes; None where there is no derivative."""
        if self._graph.writes or self._variant.state.has_backward_hooks:
            return None
        try:
            require_history(self._variant)
            wrt = differentiated_inputs(self._graph, [spec.name for spec in self._specs if spec.dtype.is_float])
            sizes = tuple(s for s, (_, dim) in self._variant.request.sizes.sources if dim == ITSELF)
            parts = named_passes(self._graph, sizes, wrt, self._target, self._wanted.recompute) if wrt else None
        except (GradientError, UnsupportedError):
            return None
        return None if parts is None else self._bound(*parts)

    def _bound(self, derivative: Derivative, forward: Graph, backward: Graph, further: tuple[str, ...]) -> Passes:
        relations = self._signature.relations
        keys = [spec for spec in forward.inputs if spec.name == derivative.key]
        specs = [*self._specs, *keys]
        names = [spec.name for spec in specs]
        backward = in_row_major_order(backward)
        given = {spec.name: place for place, spec in enumerate(backward.inputs[len(derivative.kept) :])}
        sources = dict(zip(derivative.wrt, derivative.gradients, strict=True))
        gradients = [sources.get(name) for name in self._tensors]
        numbers = tuple(name for name, _ in backward.scalars)
        return Passes(
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

    def _compiled(self, graph: Graph) -> Compiled:
        structure = tree_structure((0,) * len(graph.outputs))
        return compile_graph(graph, structure, self._target, self._hints, wide=self._variant.request.wide)


def _is_plain(value: object) -> bool:
    """Tells if a value can be an argument of an operator, with a default: a schema has no infinite numbers and no escapes."""
    if isinstance(value, str):
        return value.isascii() and value.isprintable() and not set(value) & set('"\\')
    return type(value) in _CONSTANTS and (not isinstance(value, float) or math.isfinite(value))


def _shaped(graph: Graph, positions: Sequence[int]) -> tuple[Shaped, ...]:
    return tuple(Shaped(tuple(map(formula, graph.nodes[p].shape)), graph.nodes[p].dtype) for p in positions)


def _capability(target: Target) -> int:
    """The number of a GPU's capability, such as 90; 0 of the CPU."""
    return int("".join(c for c in target.name if c.isdigit()) or 0)
