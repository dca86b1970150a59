"""A run that goes on where an earlier one ended: what is kept of its record, and what is left to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fusegen.bench.case import Case
from fusegen.bench.providers import Provider
from fusegen.bench.record import Environment, Record, Row, read
from fusegen.errors import ArgumentError

_SAME = ("device", "driver", "cuda", "torch", "fusegen", "commit", "timer")
"""What rows of one record have in common."""


def resumed(path: Path, here: Environment) -> Record:
    """What an earlier run of this benchmark left; nothing where there was none.

    Args:
        path: of its record.
        here: what this process measures on.

    Raises:
        ArgumentError: the file is no record, or one that was measured on something else.
    """
    if not path.exists():
        return Record(here, (), ())
    found = read(path)
    for field in (*_SAME, *(("threads",) if here.kind == "cpu" else ())):
        old, new = getattr(found.environment, field), getattr(here, field)
        if old != new:
            raise ArgumentError(f"{path} was measured with another {field}: {old}, not {new}", mend="another file with --out")
    return replace(found, environment=here)


def is_measured(case: Case, providers: Sequence[Provider], rows: Sequence[Row]) -> bool:
    """Whether rows have a case with a timing of each provider that knows it."""
    wanted = {each.name for each in providers if each.way(case) is not None}
    return any(row.key == case.key and wanted <= {timing.provider for timing in row.timings} for row in rows)


def with_row(rows: Sequence[Row], row: Row) -> tuple[Row, ...]:
    """The rows with one more, in place of an older one of the same case."""
    by_key = {each.key: each for each in rows} | {row.key: row}
    return tuple(by_key.values())
