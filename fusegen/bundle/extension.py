"""Builds kernels into a shared library: operators of torch, forward and backward, that run where fusegen is not installed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fusegen.bundle.build import Wanted, traced_calls
from fusegen.bundle.folder import new_folder, require_name, require_new, write, writing_to
from fusegen.bundle.manifest import digest
from fusegen.bundle.traced import Traced
from fusegen.compiler.extension import flags_of
from fusegen.emit.environment import unit_text
from fusegen.errors import BundleError
from fusegen.extension.kinds import Built, Kind, Operator
from fusegen.extension.library import Texts, library_of
from fusegen.extension.operators_text import UnitText
from fusegen.files import unsealed

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


def _manifest(shipped: Shipped, operators: Sequence[Operator], sha256: str, version: str) -> dict[str, Any]:
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


def _operators(wanted: Iterable[Wanted]) -> list[Operator]:
    found: dict[str, Operator] = {}
    named: dict[str, str] = {}
    for call in (call for each in wanted for call in traced_calls(each)):
        each, traced = call.wanted, Traced(call)
        if (first := named.setdefault(traced.name, each.name)) != each.name:
            what = f"{first} and {each.name} would both be the operator {traced.name}"
            raise BundleError(what, mend="build them into two libraries, or give one a name of other Latin letters")
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
