"""The speed-ups of a record as an SVG of its own, for a README: it has its own ground, so that it is legible on any."""

from __future__ import annotations

from pathlib import Path

from fusegen.bench.plots import require_plots
from fusegen.bench.record import Record
from fusegen.bench.verdict import judge
from fusegen.emit.environment import render
from fusegen.errors import ArgumentError
from fusegen.files import write_atomically

_WIDTH = 640.0
_FONT = "svg { font-family: system-ui, sans-serif; }\n"


def write_plot(record: Record, path: Path, *, group: str = "public") -> None:
    """Writes the SVG of a group, whole or not at all.

    Raises:
        ArgumentError: the file cannot be written, there is nothing to draw, or the library for charts is not installed.
    """
    text = plot(record, group=group)
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}", mend="choose another file") from None


def plot(record: Record, *, group: str = "public") -> str:
    """The SVG's text: the same in each run.

    Raises:
        ArgumentError: there is nothing to draw, or the library for charts is not installed.
    """
    require_plots()
    from fusegen.bench.charts.speedup import speedup_file

    verdicts = [judge(row) for row in record.rows if row.group == group]
    if not any(verdict.speedup for verdict in verdicts):
        raise ArgumentError(f"the record has no speed-up in the group {group!r}", mend="choose another group")
    title = f"Speed-up of fusegen against the fastest peer, {record.environment.device}"
    return speedup_file(verdicts, title, _WIDTH, style=render("bench/colours.css") + _FONT)
