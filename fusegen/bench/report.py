"""A record as one page of HTML that needs nothing else: no script, no font, no file beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from fusegen.bench.record import Record
from fusegen.bench.table import (
    LEVEL_MICROSECONDS,
    LEVEL_SHARE,
    Verdict,
    facts,
    full_table,
    group_timers,
    judge,
    latency_table,
    losses,
    losses_table,
    trouble_table,
    words,
)
from fusegen.emit.environment import html_environment, render
from fusegen.errors import ArgumentError
from fusegen.files import write_atomically

_PARTS = re.compile(r"[^_.]*[_.]|[^_.]+")


def write_report(record: Record, path: Path) -> None:
    """Writes the page, whole or not at all.

    Raises:
        ArgumentError: the file cannot be written, or the library for charts is not installed.
    """
    text = report(record)
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}", mend="choose another file with --report") from None


def report(record: Record) -> str:
    """The page's text.

    Raises:
        ArgumentError: the library for charts is not installed.
    """
    require_plots()
    from fusegen.bench import charts

    verdicts = [judge(row) for row in record.rows]
    return (
        _environment()
        .get_template("bench/report.html.jinja")
        .render(
            device=record.environment.device,
            date=record.environment.date,
            facts=facts(record.environment),
            words=words(verdicts),
            margin=f"{LEVEL_SHARE:.0%} or {LEVEL_MICROSECONDS} µs",
            losses=losses_table(losses(verdicts)),
            trouble=trouble_table(verdicts),
            blocks=charts,
            rows=record.rows,
            verdicts=verdicts,
            groups=[(group, full_table(of)) for group, of in _groups(verdicts).items()],
            timers=group_timers(record),
            latency=latency_table(record),
        )
    )


def _groups(verdicts: Sequence[Verdict]) -> dict[str, list[Verdict]]:
    """Cases by group, in the order of the record."""
    found: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        found.setdefault(verdict.row.group, []).append(verdict)
    return found


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    """The environment of pages with what the report's template calls."""
    made = html_environment()
    made.filters["breakable"] = _breakable
    made.filters["svg"] = Markup  # of `drawing.py`, which a library for XML has written
    return made


def _breakable(name: str) -> Markup:
    """A name that may go on in the next line behind each underscore and dot."""
    return Markup("<wbr>").join(escape(part) for part in _PARTS.findall(name))


# The speed-ups as an SVG of its own, for a README: it has its own ground, so that it is legible on any.

_PLOT_WIDTH = 640.0
_PLOT_FONT = "svg { font-family: system-ui, sans-serif; }\n"


def plot(record: Record, *, group: str = "public") -> str:
    """The SVG's text: the same in each run.

    Raises:
        ArgumentError: there is nothing to draw, or the library for charts is not installed.
    """
    require_plots()
    from fusegen.bench.charts import described, speedups
    from fusegen.bench.drawing import PAPER, styled, svg

    verdicts = [judge(row) for row in record.rows if row.group == group]
    if not any(verdict.speedup for verdict in verdicts):
        raise ArgumentError(f"the record has no speed-up in the group {group!r}", mend="choose another group")
    title = f"Speed-up of fusegen against the fastest peer, {record.environment.device}"
    with styled("plot"):
        figure = speedups(verdicts, _PLOT_WIDTH, stacked=False, head=22.0)
        figure.set_facecolor(PAPER)
        figure.text(0.5, 1 - 6 / (72 * figure.get_figheight()), title, ha="center", va="top", fontweight="bold")
        style = render("bench/colours.css") + _PLOT_FONT
        return svg(figure, key="plot", title=title, description=described(verdicts), style=style) + "\n"


def require_plots() -> None:
    """Refuses what needs charts where the library for them is not installed.

    Raises:
        ArgumentError: saying what to install.
    """
    if find_spec("matplotlib") is None:
        raise ArgumentError("a report has charts, and matplotlib is not installed", mend="pip install 'fusegen[bench]'")
