"""``fusegen list``: the prebuilt fusions, what they become where, and whether hardware has verified that."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from fusegen import target as targets
from fusegen.cli.document import print_document
from fusegen.cli.terminal import Terminal
from fusegen.dtypes import DType
from fusegen.errors import FusegenError
from fusegen.passes.fuse import GroupKind
from fusegen.specs import SPECS, Spec
from fusegen.target import Target
from fusegen.verify.emitted import canonical_case
from fusegen.verify.record import COMMAND, TARGETS, own_folder
from fusegen.verify.status import Status, status

_SHOWN = "sm_90a"  # the target whose kernels the table shows
_COLUMNS = ("name", f"kernels at {_SHOWN}", "dtypes", "without library steps", *(f"at {name}" for name in TARGETS), "formula")

Kinds = Sequence[str]
"""Of a program's steps, in order, in words."""


@dataclass(frozen=True)
class Line:
    """What there is to say of a spec.

    Attributes:
        kinds: for each target, of the canonical example in 16 bits; what went wrong where it cannot be lowered.
        verified: for each target that ships, for each element type.
    """

    spec: Spec
    kinds: Mapping[str, Kinds | str]
    verified: Mapping[str, Mapping[DType, Status]]

    @classmethod
    def of(cls, spec: Spec, folder: Path) -> Line:
        """The facts of a spec, with records from a folder."""
        kinds = {target.name: _kinds(spec, target) for target in targets.cuda_targets()}
        return cls(spec, kinds, {name: status(spec, targets.target(name), folder) for name in TARGETS})

    @property
    def own(self) -> tuple[str, ...]:
        """Targets on which every step is generated."""
        library = {GroupKind.LIBRARY.value, GroupKind.CALL.value}
        return tuple(n for n, kinds in self.kinds.items() if not isinstance(kinds, str) and library.isdisjoint(kinds))

    @property
    def is_verified(self) -> bool:
        """Whether every kernel of it was verified as it is emitted now."""
        return all(each is Status.VERIFIED for found in self.verified.values() for each in found.values())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    """Prints a row a spec, and how to verify what is not."""
    lines = [Line.of(spec, own_folder()) for spec in SPECS.values()]
    if options.json:
        print_document(terminal, "list", specs=[_plain(line) for line in lines])
        return 0
    terminal.table(_COLUMNS, [_row(line) for line in lines])
    open_ = [line.spec.name for line in lines if not line.is_verified]
    if open_:
        names = "" if len(open_) == len(lines) else f" {' '.join(open_)}"
        terminal.line(f"not verified on hardware as they are emitted now: {COMMAND}{names}, on a machine with a GPU", "yellow")
    return 0


def _kinds(spec: Spec, target: Target) -> Kinds | str:
    """The kinds of a spec's steps in bf16; the list must be there even where one declaration cannot be lowered."""
    try:
        return canonical_case(spec, spec.dtypes[-1], target).kinds
    except FusegenError as error:
        return f"failed: {error.what}"


# What is printed.


def _row(line: Line) -> tuple[str, ...]:
    dtypes = " ".join(dtype.short for dtype in line.spec.dtypes)
    verified = (_verified(line.verified[name]) for name in TARGETS)
    return line.spec.name, _counted(line.kinds[_SHOWN]), dtypes, _range(line.own), *verified, line.spec.formula


def _counted(kinds: Kinds | str) -> str:
    """Kinds in order, equal neighbours counted."""
    if isinstance(kinds, str):
        return kinds
    runs = [(kind, len([*run])) for kind, run in groupby(kinds)]
    return ", ".join(kind if count == 1 else f"{count} × {kind}" for kind, count in runs)


def _range(names: Sequence[str]) -> str:
    """Targets in order; all of them by the first and the last."""
    every = [target.name for target in targets.cuda_targets()]
    return f"{every[0]} … {every[-1]}" if list(names) == every else " ".join(names) or "–"


def _verified(found: Mapping[DType, Status]) -> str:
    """One word where all element types have it in common."""
    if len(set(found.values())) == 1:
        return next(iter(found.values())).value
    return ", ".join(f"{dtype.short} {each.value}" for dtype, each in found.items())


def _plain(line: Line) -> dict[str, object]:
    spec = line.spec
    head: dict[str, object] = {
        "name": spec.name,
        "family": spec.family,
        "formula": spec.formula,
        "dtypes": spec.dtypes,
        "sizes": spec.sizes,
    }
    verified = {name: {dtype.short: each for dtype, each in found.items()} for name, found in line.verified.items()}
    return head | {"dtypes": spec.dtypes, "sizes": spec.sizes, "kinds": line.kinds, "verified": verified}
