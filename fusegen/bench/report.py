"""A record as a self-contained HTML page, without scripts, fonts or other files."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from fusegen.bench.record import BenchRecord, Environment, ProviderTiming, TimedCase
from fusegen.bench.table import (
    COPY,
    FUSEGEN,
    LEVEL_MICROSECONDS,
    LEVEL_SHARE,
    NOTHING,
    JudgedCase,
    PeerResult,
    figures_table,
    group_timers,
    has_memory,
    is_wrong,
    judge,
    latency_table,
    losses,
    mebibytes,
    name_of,
    notes,
    precise,
    providers,
    rate,
    ratio_text,
    speedup_order,
    spread,
    tally,
    times,
)
from fusegen.emit.environment import html_environment
from fusegen.files import write_for_user

_PARTS = re.compile(r"[^_.]*[_.]|[^_.]+")


def write_report(record: BenchRecord, path: Path) -> None:
    """Writes the page atomically; raises `ArgumentError` if the file cannot be written."""
    write_for_user(path, report(record), "choose another file with --report")


def report(record: BenchRecord) -> str:
    verdicts = [judge(row) for row in record.rows]
    return (
        _environment()
        .get_template("bench/report.html.jinja")
        .render(
            device=record.environment.device,
            date=record.environment.date,
            facts=facts(record.environment),
            words=describe_verdicts(verdicts),
            margin=f"{LEVEL_SHARE:.0%} or {LEVEL_MICROSECONDS} µs",
            losses=losses_table(losses(verdicts)),
            trouble=failures_table(verdicts),
            rows=record.rows,
            groups=[_group(group, judged) for group, judged in _groups(verdicts).items()],
            notes=notes(record),
            timers=group_timers(record),
            latency=latency_table(record),
        )
    )


@dataclass(frozen=True)
class Group:
    """A group of cases.

    Attributes:
        bars: speed-ups; empty for a user's own kernels, which have plots.
        programs: for each case that can be repeated, its name and the program.
    """

    name: str
    bars: list[Bar]
    plots: list[Plot]
    page: Page
    programs: list[tuple[str, str]]


def _group(name: str, judged: Sequence[JudgedCase]) -> Group:
    rows = [verdict.row for verdict in judged]
    programs = [(name_of(row), row.reproducer) for row in rows if row.reproducer]
    if rows[0].is_own:
        return Group(name, [], [plot_of(row) for row in rows], own_page(rows), programs)
    return Group(name, speedup_bars(judged), [], full_table(judged), programs)


def _groups(verdicts: Sequence[JudgedCase]) -> dict[str, list[JudgedCase]]:
    groups: dict[str, list[JudgedCase]] = {}
    for verdict in verdicts:
        groups.setdefault(verdict.row.group, []).append(verdict)
    return groups


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    environment = html_environment()
    environment.filters["breakable"] = _breakable
    return environment


def _breakable(name: str) -> Markup:
    """The name as HTML that may wrap after each underscore and dot."""
    return Markup("<wbr>").join(escape(piece) for piece in _PARTS.findall(name))


# The contents of the page's tables, as text: the template only adds elements.


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        note: smaller text below the text.
        kind: ``number``, ``best`` (the fastest of a row), ``bad`` (a failure) or ``words``.
    """

    text: str
    note: str = ""
    kind: str = "number"


@dataclass(frozen=True)
class Line:
    case: str
    about: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Page:
    """A table.

    Attributes:
        columns: titles, without the first column's.
        notes: for each provider, its implementation and the cases that have it (empty for all).
    """

    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    notes: tuple[tuple[str, str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True)
class Bar:
    """The bar of a case's speed-up.

    Attributes:
        text: the speed-up and the name of the fastest peer.
        left, width: position and length in percent of the group's logarithmic scale.
    """

    case: str
    text: str
    outcome: str
    left: float
    width: float


def speedup_bars(verdicts: Sequence[JudgedCase]) -> list[Bar]:
    speedups = speedup_order(verdicts)
    low, high = min([0.9, *(s for _, s in speedups)]), max([1.1, *(s for _, s in speedups)])
    origin, *ends = (100 * math.log(value / low) / math.log(high / low) for value in (1.0, *(speedup for _, speedup in speedups)))
    return [
        Bar(name_of(v.row), f"{ratio_text(speedup)} {v.peer}", v.outcome.value, min(origin, end), abs(end - origin))
        for (v, speedup), end in zip(speedups, ends, strict=True)
    ]


@dataclass(frozen=True)
class TimeBar:
    """The bar of a provider's time, in the units of a `Plot`.

    Attributes:
        text: the time, or the reason why there is none.
        top: the distance from the plot's top.
        width: the length; 0 without a time.
        low, high: the ends of the line from the fastest to the slowest round.
    """

    provider: str
    text: str
    top: int
    width: float
    low: float
    high: float


@dataclass(frozen=True)
class Plot:
    """The times of a case's providers, as bars from zero to the slowest round of all."""

    title: str
    height: int
    bars: tuple[TimeBar, ...]


_BAR_STEP, _BAR_ROOM = 26, 400.0  # units of a plot, which is 640 wide: 80 for names before the bars, 160 for times after them


def plot_of(row: TimedCase) -> Plot:
    slowest = max((t.high or t.microseconds or 0.0 for t in row.timings), default=0.0)
    bars = tuple(_time_bar(timing, number * _BAR_STEP, _BAR_ROOM / (slowest or 1.0)) for number, timing in enumerate(row.timings))
    return Plot(f"{name_of(row)} {row.dtype}", len(bars) * _BAR_STEP, bars)


def _time_bar(timing: ProviderTiming, top: int, scale: float) -> TimeBar:
    if timing.microseconds is None or timing.error:
        return TimeBar(timing.provider, "wrong" if is_wrong(timing) else "failed", top, 0.0, 0.0, 0.0)
    low, high = timing.low or timing.microseconds, timing.high or timing.microseconds
    text = f"{precise(timing.microseconds)} µs"
    return TimeBar(timing.provider, text, top, scale * timing.microseconds, scale * low, scale * high)


def own_page(rows: Sequence[TimedCase]) -> Page:
    """The figures of a user's own kernels, a line for each provider."""
    titles = (*figures_table(rows[0])[0][1:], "why")
    lines = [
        Line(row.case, f"{_about(row)}: {timing.provider}", (*map(Cell, figures[1:]), _why(timing)))
        for row in rows
        for timing, figures in zip(row.timings, figures_table(row)[1], strict=True)
    ]
    if not any(timing.error for row in rows for timing in row.timings):
        titles, lines = titles[:-1], [replace(line, cells=line.cells[:-1]) for line in lines]
    return Page(titles, tuple(lines), _notes(rows, providers(rows)))


def _why(timing: ProviderTiming) -> Cell:
    return Cell(_reason(timing) if timing.error else "", kind="words")


def facts(environment: Environment) -> list[tuple[str, str]]:
    """The facts of a record's environment, without unknown ones."""
    threads = str(environment.threads) if environment.kind == "cpu" else None
    pairs = (
        ("driver", environment.driver),
        ("CUDA", environment.cuda),
        ("threads", threads),
        ("torch", environment.torch),
        ("fusegen", environment.fusegen),
        ("Python", environment.python),
        ("timer", environment.timer),
        ("date", _date(environment.date)),
        ("commit", environment.short_commit),
    )
    return [(name, value) for name, value in pairs if value]


def _date(text: str) -> str:
    """Formats an ISO date for readers; returns other text unchanged."""
    try:
        return f"{datetime.datetime.fromisoformat(text):%Y-%m-%d %H:%M %Z}".strip()
    except ValueError:
        return text


def describe_verdicts(verdicts: Sequence[JudgedCase]) -> str:
    counts = tally(verdicts)
    cases = f"{len(verdicts)} case" + ("" if len(verdicts) == 1 else "s")
    wins, slower, ties = (counts[outcome] for outcome in (PeerResult.WIN, PeerResult.LOSS, PeerResult.TIE))
    alone = f", without a peer in {counts[PeerResult.ALONE]}" if counts[PeerResult.ALONE] else ""
    timed = f"faster than the fastest peer in {wins}, slower in {slower}, level in {ties}{alone}"
    return f"{cases}: fusegen is {timed}; {counts[PeerResult.WRONG]} wrong, {counts[PeerResult.FAILED]} failed."


def losses_table(lost: Sequence[JudgedCase]) -> Page:
    return Page(("fusegen µs", "fastest µs", "longer by"), tuple(Line(v.row.case, _about(v.row), _loss(v)) for v in lost))


def _loss(verdict: JudgedCase) -> tuple[Cell, ...]:
    longer = 1 / verdict.speedup - 1 if verdict.speedup else 0.0
    return Cell(precise(verdict.ours)), Cell(precise(verdict.theirs), verdict.peer, "best"), Cell(f"{longer:.1%}")


def failures_table(verdicts: Sequence[JudgedCase]) -> Page:
    """The cases in which fusegen is wrong or has no time, with the reason."""
    failures = [v for v in verdicts if v.outcome in (PeerResult.WRONG, PeerResult.FAILED)]
    return Page(("it is", "why"), tuple(Line(v.row.case, _about(v.row), _trouble(v)) for v in failures))


def _trouble(verdict: JudgedCase) -> tuple[Cell, ...]:
    timing = verdict.row.timing(FUSEGEN)
    return Cell(verdict.outcome.value, kind="bad"), Cell("it was not run" if timing is None else _reason(timing), kind="words")


def _reason(timing: ProviderTiming) -> str:
    return (timing.error or "it has no time").removeprefix("wrong: ")


def full_table(verdicts: Sequence[JudgedCase]) -> Page:
    rows = [v.row for v in verdicts]
    names = providers(rows)
    memory = [name for name in names if has_memory(rows, name)]
    columns = ("speed-up", *(f"{name} µs" for name in names), *(f"{name} MiB" for name in memory))
    cells = [
        (
            Cell(ratio_text(v.speedup) if v.speedup else NOTHING, v.outcome.value),
            *(_time_cell(v, name) for name in names),
            *(Cell(mebibytes(v.row.timing(name))) for name in memory),
            *_derived(v),
        )
        for v in verdicts
    ]
    lines = (Line(v.row.case, _about(v.row), line_cells) for v, line_cells in zip(verdicts, cells, strict=True))
    return Page((*columns, "rate", "of copy", "off by", "launches"), tuple(lines), _notes(rows, names))


def _derived(verdict: JudgedCase) -> tuple[Cell, ...]:
    row, timing = verdict.row, verdict.row.timing(FUSEGEN)
    copied = times(row).get(COPY)
    share = Cell(f"{copied / verdict.ours:.0%}" if copied and verdict.ours else NOTHING)
    error = NOTHING if timing is None or timing.difference is None else f"{timing.difference:.1e}"
    return Cell(rate(row, verdict.ours)), share, Cell(error), Cell(row.launches or NOTHING)


def _time_cell(verdict: JudgedCase, name: str) -> Cell:
    timing = verdict.row.timing(name)
    if timing is None:
        return Cell(NOTHING)
    if timing.error:
        return Cell("wrong" if is_wrong(timing) else "failed", _reason(timing), "bad")
    fastest = min((time for provider, time in times(verdict.row).items() if provider != COPY), default=None)
    best = name != COPY and timing.microseconds is not None and timing.microseconds == fastest
    return Cell(precise(timing.microseconds), spread(timing), "best" if best else "number")


def _notes(rows: Sequence[TimedCase], names: Sequence[str]) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    notes: dict[tuple[str, str], dict[str, None]] = {}
    for name in names:
        for row in rows:
            timing = row.timing(name)
            if timing and timing.what:
                notes.setdefault((name, timing.what), {})[row.case] = None
    all_cases = set(dict.fromkeys(row.case for row in rows))
    return tuple((name, what, () if set(cases) == all_cases else tuple(cases)) for (name, what), cases in notes.items())


def _about(row: TimedCase) -> str:
    return f"{row.shape} {row.dtype}"
