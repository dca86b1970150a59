"""Compares records with what is emitted today."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from fusegen.dtypes import DType
from fusegen.specs.spec import Spec
from fusegen.target import Target
from fusegen.verify.emitted import Emitted, every_case
from fusegen.verify.record import LIST, CaseRecord, Entry, listed, path_of, read


def problems(spec: Spec, target: Target, folder: Path, dtypes: Collection[DType] = tuple(DType)) -> list[str]:
    """All that is wrong with a spec's record of some element types: a line for each case that is not as it is emitted today, for a
    type without a record that the list of unverified kernels does not name, and for one that it names in spite of a good record.

    Raises:
        ArgumentError: the file cannot be read, or holds something else.
    """
    record = read(path_of(folder, target.name, spec.name))
    named = listed(folder)
    found = []
    for dtype in (each for each in spec.dtypes if each in dtypes):
        entry, row = record.get(dtype.short), (target.name, spec.name, dtype.short)
        wrong = _problems(spec, dtype, target, entry, is_listed=row in named)
        found += [f"{' '.join(row)}: {problem}" for problem in wrong]
    return found


def _problems(spec: Spec, dtype: DType, target: Target, entry: Entry | None, *, is_listed: bool) -> list[str]:
    if entry is None:
        return [] if is_listed else ["no record"]
    found = [f"the case {name!r} {change}" for name, change in changes(spec, dtype, target, entry).items()]
    found += [f"there is no case {name!r} any more" for name in entry.cases.keys() - every_case(spec, dtype, target)]
    return found or ([f"verified, but {LIST} names it"] if is_listed else [])


def changes(spec: Spec, dtype: DType, target: Target, entry: Entry) -> dict[str, str]:
    """The cases that an entry does not say of what is emitted today that it was verified, with the reason."""
    found = {name: _change(now, entry.cases.get(name)) for name, now in every_case(spec, dtype, target).items()}
    return {name: change for name, change in found.items() if change}


def _change(now: Emitted, known: CaseRecord | None) -> str:
    if known is None:
        return "is missing"
    if known.arguments != now.arguments:
        return "has other arguments"
    if tuple(known.sources) != now.sources:
        return "launches other kernels"
    if known.launches and known.launches != now.launches:
        return "launches its kernels otherwise"
    return "" if known.verdict in ("passed", "eager overflows") else f"has the verdict {known.verdict!r}"
