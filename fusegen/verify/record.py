"""Verification records: ``<folder>/<target>/<spec>/verified.json``, one per spec and target, with an entry per element type.

An entry states the machine, software and time of the run, and for every case the arguments, the launches and the errors. Each case
is one line, so that records can be diffed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from fusegen.bench.record import environment
from fusegen.compiler.backends import target_of
from fusegen.dtypes import DType
from fusegen.emit.environment import templates
from fusegen.errors import ArgumentError
from fusegen.files import read_json, write_atomically, write_for_user
from fusegen.jit.nvrtc import compiler_version
from fusegen.specs import SPECS
from fusegen.verify.check import Outcome
from fusegen.verify.lowering import LoweredCase

FORMAT = 1
"""Incremented if a field changes its meaning."""

TARGETS = ("sm_90a",)
"""Targets whose text is stored and verified for every prebuilt fusion."""

FILE, LIST = "verified.json", "unverified.txt"
COMMAND = "fusegen verify"

_HEADING = f"# What no GPU has verified yet, as target, spec, dtype. Written by `{COMMAND}`; a test compares.\n"


@dataclass(frozen=True)
class Environment:
    """The machine and software of an entry: the GPU, its target, versions, and the time in UTC."""

    gpu: str
    target: str
    driver: str | None
    cuda: str | None
    nvrtc: str
    torch: str
    fusegen: str
    time: str


@dataclass(frozen=True)
class CaseRecord:
    """A case that passed; its arguments, plan and verdict are text.

    Attributes:
        sources: digests of the launched texts and compiler flags.
        results: errors of each result, and eager's.
        launches: digest of the launch parameters and library calls; empty in older records.
    """

    arguments: str
    plan: Sequence[str]
    sources: Sequence[str]
    results: Sequence[Mapping[str, float]]
    verdict: str
    launches: str = ""

    @classmethod
    def of(cls, prepared: LoweredCase, outcome: Outcome) -> CaseRecord:
        errors = [{name: _rounded(value) for name, value in asdict(v.errors).items()} for v in outcome.verdicts]
        return cls(str(prepared.case), list(prepared.plan), list(prepared.digests), errors, outcome.word, prepared.launches)


@dataclass(frozen=True)
class DtypeRecord:
    environment: Environment
    cases: Mapping[str, CaseRecord]


SpecRecord = dict[str, DtypeRecord]
"""Entries by the short name of the element type."""


def _rounded(value: float) -> float:
    return float(f"{value:.3g}") if isinstance(value, float) else value


def environment_of(device: torch.device) -> Environment:
    current = environment(device, "")
    versions = (current.driver, current.cuda, compiler_version(), current.torch, current.fusegen)
    return Environment(current.device, target_of(device).name, *versions, current.date)


# Files.


def path_of(folder: Path, target: str, spec: str) -> Path:
    return folder / target / spec / FILE


def read(path: Path) -> SpecRecord:
    """Reads a record; empty if there is none. Raises `ArgumentError` for an unreadable file."""
    if not path.is_file():
        return {}
    return read_json(path, "verification record", FORMAT, _entries, f"delete it, and run {COMMAND}")


def _entries(data: Mapping[str, Any]) -> SpecRecord:
    return {dtype: _entry(entry) for dtype, entry in data["dtypes"].items()}


def _entry(data: Mapping[str, Any]) -> DtypeRecord:
    cases = {name: CaseRecord(**case) for name, case in data["cases"].items()}
    return DtypeRecord(Environment(**data["environment"]), cases)


def merge(path: Path, target: str, spec: str, entries: SpecRecord) -> None:
    """Writes entries into a record atomically; entries of other element types stay. Raises `ArgumentError`."""
    known = read(path) | entries
    order = [dtype.short for dtype in DType if dtype.short in known]
    text = render(target, spec, {dtype: known[dtype] for dtype in order})
    write_for_user(path, text, "--record DIR")


def render(target: str, spec: str, record: SpecRecord) -> str:
    head = json.dumps({"format": FORMAT, "target": target, "spec": spec}, indent=1)[:-2]
    return f'{head},\n "dtypes": {_object([(name, _entry_text(entry)) for name, entry in record.items()], 1)}\n}}\n'


def _entry_text(entry: DtypeRecord) -> str:
    environment = _object([(name, json.dumps(value)) for name, value in asdict(entry.environment).items()], 3)
    cases = _object([(name, json.dumps(asdict(case))) for name, case in entry.cases.items()], 3)
    return _object([("environment", environment), ("cases", cases)], 2)


def _object(fields: Sequence[tuple[str, str]], depth: int) -> str:
    """A JSON object with preformatted values, one per line."""
    lines = ",\n".join(f"{' ' * (depth + 1)}{json.dumps(name)}: {value}" for name, value in fields)
    return f"{{\n{lines}\n{' ' * depth}}}"


# Folders.


@lru_cache(maxsize=1)
def own_folder() -> Path:
    """The folder of this installation's records: inside the package of a wheel, ``generated/`` of a checkout."""
    return _package() / "records" if is_installed() else templates().parent / "generated"


def is_installed() -> bool:
    """True for a wheel's package, False for a checkout."""
    return templates().parent == _package()


def _package() -> Path:
    return Path(__file__).resolve().parents[1]


def folder_to_write(requested: Path | None) -> Path | None:
    """Returns the folder for records: the user's, else the checkout's; None for a wheel. Raises `ArgumentError` if unusable."""
    if requested is None:
        return None if is_installed() else own_folder()
    folder = requested.expanduser().resolve()
    is_package = folder.is_relative_to(_package())
    if is_package or {"site-packages", "dist-packages"} & set(folder.parts):
        raise ArgumentError(f"{requested} belongs to the installed package", hint="give --record another folder")
    if folder.exists() and not folder.is_dir():
        raise ArgumentError(f"{requested} is not a folder", hint="give --record a folder")
    return folder


# The list of unverified kernels.


def unverified(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yields the target, spec and element type of each shipped kernel without a verification entry."""
    for target in TARGETS:
        for spec in SPECS.values():
            record = read(path_of(folder, target, spec.name))
            yield from ((target, spec.name, dtype.short) for dtype in spec.dtypes if dtype.short not in record)


def listed(folder: Path) -> frozenset[tuple[str, ...]]:
    """Reads the list of unverified kernels: target, spec and element type of each; empty if there is no list."""
    try:
        lines = (folder / LIST).read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(tuple(line.split()) for line in lines if not line.startswith("#"))


def unverified_text(folder: Path) -> str:
    return _HEADING + "".join(f"{' '.join(row)}\n" for row in unverified(folder))


def write_unverified(folder: Path) -> None:
    write_atomically(folder / LIST, unverified_text(folder).encode())
