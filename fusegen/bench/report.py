"""A record as one page of HTML that needs nothing else: no script, no font, no file beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from fusegen.bench.record import BenchRecord
from fusegen.bench.table import (
    LEVEL_MICROSECONDS,
    LEVEL_SHARE,
    JudgedCase,
    facts,
    full_table,
    group_timers,
    judge,
    latency_table,
    losses,
    losses_table,
    speedup_bars,
    trouble_table,
    words,
)
from fusegen.emit.environment import html_environment
from fusegen.files import write_for_user

_PARTS = re.compile(r"[^_.]*[_.]|[^_.]+")


def write_report(record: BenchRecord, path: Path) -> None:
    """Writes the page, whole or not at all.

    Raises:
        ArgumentError: the file cannot be written.
    """
    write_for_user(path, report(record), "choose another file with --report")


def report(record: BenchRecord) -> str:
    """The page's text."""
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
            rows=record.rows,
            groups=[(group, speedup_bars(of), full_table(of)) for group, of in _groups(verdicts).items()],
            timers=group_timers(record),
            latency=latency_table(record),
        )
    )


def _groups(verdicts: Sequence[JudgedCase]) -> dict[str, list[JudgedCase]]:
    """Cases by group, in the order of the record."""
    found: dict[str, list[JudgedCase]] = {}
    for verdict in verdicts:
        found.setdefault(verdict.row.group, []).append(verdict)
    return found


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    """The environment of pages with what the report's template calls."""
    made = html_environment()
    made.filters["breakable"] = _breakable
    return made


def _breakable(name: str) -> Markup:
    """A name that may go on in the next line behind each underscore and dot."""
    return Markup("<wbr>").join(escape(part) for part in _PARTS.findall(name))
