"""The bars of a record as a table, for a terminal and for the report."""

from __future__ import annotations

from collections.abc import Sequence

from fusegen.bench.cells import NOTHING, Cell, Line, Page
from fusegen.bench.standing import BarResult, Standing
from fusegen.bench.table import Table

_MEASURED, _SHORT, _LEAST = "measured", "fall short", "least"


def bars_table(results: Sequence[BarResult]) -> Table:
    """A line a bar, with the case that is furthest from it."""
    return ("bar", "wants", "it is", _MEASURED, _SHORT, _LEAST, "in"), [_line(each) for each in results]


def _line(result: BarResult) -> tuple[str, ...]:
    found = result.least or NOTHING, result.furthest or NOTHING
    return result.bar, result.wants, result.standing.value, _share(result), str(len(result.short)), *found


def bars_page(results: Sequence[BarResult]) -> Page:
    """The same for the report; no line where the record has no case of any bar, as that of a CPU."""
    shown = results if any(each.measured for each in results) else ()
    return Page(("it is", _MEASURED, _SHORT, _LEAST), tuple(Line(each.bar, each.wants, _cells(each)) for each in shown))


def _cells(result: BarResult) -> tuple[Cell, ...]:
    standing = Cell(result.standing.value, kind="bad" if result.standing is Standing.FAIL else "words")
    return standing, Cell(_share(result)), Cell(str(len(result.short))), Cell(result.least or NOTHING, result.furthest)


def _share(result: BarResult) -> str:
    return f"{result.measured} of {result.cases}"
