"""Whether what is emitted today is what was verified."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path

from fusegen.dtypes import DType
from fusegen.errors import FusegenError
from fusegen.specs.spec import Spec
from fusegen.target import Target
from fusegen.verify.cases import Case, cases
from fusegen.verify.lowering import prepare
from fusegen.verify.record import CaseRecord, Entry, path_of, read


class Status(Enum):
    """What a record says of an element type."""

    VERIFIED = "verified"
    STALE = "stale"  # of another text than today's
    UNVERIFIED = "unverified"


def status(spec: Spec, target: Target, folder: Path) -> dict[DType, Status]:
    """The status of each element type, by the spec's canonical case alone: quick, and it sees most changes.

    Args:
        folder: of the records.
    """
    try:
        record = read(path_of(folder, target.name, spec.name))
    except FusegenError:
        return dict.fromkeys(spec.dtypes, Status.STALE)
    return {dtype: _status(spec, dtype, target, record.get(dtype.short)) for dtype in spec.dtypes}


def _status(spec: Spec, dtype: DType, target: Target, entry: Entry | None) -> Status:
    if entry is None:
        return Status.UNVERIFIED
    changed = next(_changes(spec, entry, target, cases(spec, dtype)[:1]), None)
    return Status.VERIFIED if changed is None else Status.STALE


def problems(spec: Spec, target: Target, folder: Path) -> list[str]:
    """All that keeps a spec's record from saying that today's kernels were verified, in every case; a line each.

    Raises:
        ArgumentError: the file cannot be read, or holds something else.
    """
    record = read(path_of(folder, target.name, spec.name))
    found = []
    for dtype in spec.dtypes:
        head = f"{target.name} {spec.name} {dtype.short}"
        entry = record.get(dtype.short)
        if entry is None:
            found.append(f"{head}: no record")
            continue
        wanted = cases(spec, dtype)
        found += [f"{head}: {change}" for change in _changes(spec, entry, target, wanted)]
        found += [f"{head}: there is no case {name!r} any more" for name in entry.cases.keys() - {c.name for c in wanted}]
    return found


def _changes(spec: Spec, entry: Entry, target: Target, wanted: tuple[Case, ...]) -> Iterator[str]:
    for case in wanted:
        known = entry.cases.get(case.name)
        if known is None:
            yield f"the case {case.name!r} is missing"
        elif change := _change(spec, case, known, target):
            yield f"the case {case.name!r} {change}"


def _change(spec: Spec, case: Case, known: CaseRecord, target: Target) -> str:
    if known.arguments != str(case):
        return "has other arguments"
    if tuple(known.sources) != prepare(spec, case, target).digests:
        return "launches other kernels"
    return "" if known.verdict in ("passed", "eager overflows") else f"has the verdict {known.verdict!r}"
