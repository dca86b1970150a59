"""What the report's tables hold, as text: the template adds elements and no decision."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from fusegen.bench.record import Environment, Row, Timing
from fusegen.bench.table import has_memory, mebibytes, rate
from fusegen.bench.verdict import COPY, FUSEGEN, Outcome, Verdict, is_wrong, providers, ratio_text, tally, times

NOTHING = "–"


@dataclass(frozen=True)
class Cell:
    """Of a table.

    Attributes:
        text: what stands in it.
        note: what stands below, smaller.
        kind: ``number``, ``best`` (the fastest of a row), ``bad`` (a failure) or ``words``.
    """

    text: str
    note: str = ""
    kind: str = "number"


@dataclass(frozen=True)
class Line:
    """Of a table: a case.

    Attributes:
        case, about: what heads it, and what stands below.
        cells: the others.
    """

    case: str
    about: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Page:
    """A table.

    Attributes:
        columns: their titles, but for the first.
        lines: the cases.
        notes: how providers compute: a provider, its way, and the cases; all cases where there are none.
    """

    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    notes: tuple[tuple[str, str, tuple[str, ...]], ...] = ()


def facts(environment: Environment) -> list[tuple[str, str]]:
    """What a record was measured on; what there is none of is left out."""
    threads = str(environment.threads) if environment.kind == "cpu" else None
    found = (
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
    return [(name, value) for name, value in found if value]


def _date(text: str) -> str:
    """A moment as people write it; what is none stays as it is."""
    try:
        return f"{datetime.datetime.fromisoformat(text):%Y-%m-%d %H:%M %Z}".strip()
    except ValueError:
        return text


def words(verdicts: Sequence[Verdict]) -> str:
    """The counts as a sentence."""
    counts = tally(verdicts)
    cases = f"{len(verdicts)} case" + ("" if len(verdicts) == 1 else "s")
    won, lost, level = (counts[outcome] for outcome in (Outcome.WIN, Outcome.LOSS, Outcome.TIE))
    alone = f", without a peer in {counts[Outcome.ALONE]}" if counts[Outcome.ALONE] else ""
    timed = f"faster than the fastest peer in {won}, slower in {lost}, level in {level}{alone}"
    return f"{cases}: fusegen is {timed}; {counts[Outcome.WRONG]} wrong, {counts[Outcome.FAILED]} failed."


def losses_table(lost: Sequence[Verdict]) -> Page:
    """Both times of each loss, and whose the better one is."""
    return Page(("fusegen µs", "fastest µs", "longer by"), tuple(Line(v.row.case, _about(v.row), _loss(v)) for v in lost))


def _loss(verdict: Verdict) -> tuple[Cell, ...]:
    longer = 1 / verdict.speedup - 1 if verdict.speedup else 0.0
    return Cell(_microseconds(verdict.ours)), Cell(_microseconds(verdict.theirs), verdict.peer, "best"), Cell(f"{longer:.1%}")


def trouble_table(verdicts: Sequence[Verdict]) -> Page:
    """Cases in which fusegen is wrong, or has no time, and why."""
    found = [v for v in verdicts if v.outcome in (Outcome.WRONG, Outcome.FAILED)]
    return Page(("it is", "why"), tuple(Line(v.row.case, _about(v.row), _trouble(v)) for v in found))


def _trouble(verdict: Verdict) -> tuple[Cell, ...]:
    mine = verdict.row.timing(FUSEGEN)
    return Cell(verdict.outcome.value, kind="bad"), Cell("it was not run" if mine is None else _reason(mine), kind="words")


def _reason(timing: Timing) -> str:
    """Why there is no time; that it is wrong is said elsewhere."""
    return (timing.error or "it has no time").removeprefix("wrong: ")


def full_table(verdicts: Sequence[Verdict]) -> Page:
    """All that was measured in some cases."""
    rows = [v.row for v in verdicts]
    names = providers(rows)
    memory = [name for name in names if has_memory(rows, name)]
    columns = ("speed-up", *(f"{name} µs" for name in names), *(f"{name} MiB" for name in memory))
    cells = [(_speedup(v), *(_time(v, name) for name in names), *_memory(v.row, memory), *_derived(v)) for v in verdicts]
    lines = (Line(v.row.case, _about(v.row), of) for v, of in zip(verdicts, cells, strict=True))
    return Page((*columns, "rate", "of copy", "off by", "launches"), tuple(lines), _notes(rows, names))


def _memory(row: Row, names: Sequence[str]) -> tuple[Cell, ...]:
    return tuple(Cell(mebibytes(row.timing(name))) for name in names)


def _speedup(verdict: Verdict) -> Cell:
    return Cell(ratio_text(verdict.speedup) if verdict.speedup else NOTHING, verdict.outcome.value)


def _derived(verdict: Verdict) -> tuple[Cell, ...]:
    """What else follows from fusegen's time and result."""
    row, mine = verdict.row, verdict.row.timing(FUSEGEN)
    copied = times(row).get(COPY)
    share = Cell(f"{copied / verdict.ours:.0%}" if copied and verdict.ours else NOTHING)
    off = NOTHING if mine is None or mine.difference is None else f"{mine.difference:.1e}"
    return Cell(rate(row, verdict.ours)), share, Cell(off), Cell(row.launches or NOTHING)


def _time(verdict: Verdict, name: str) -> Cell:
    """A provider's time, or why it has none."""
    timing = verdict.row.timing(name)
    if timing is None:
        return Cell(NOTHING)
    if timing.error:
        return Cell("wrong" if is_wrong(timing) else "failed", _reason(timing), "bad")
    fastest = min((time for other, time in times(verdict.row).items() if other != COPY), default=None)
    best = name != COPY and timing.microseconds is not None and timing.microseconds == fastest
    return Cell(_microseconds(timing.microseconds), _spread(timing), "best" if best else "number")


def _spread(timing: Timing) -> str:
    if timing.low is None or timing.high is None:
        return ""
    return f"{_microseconds(timing.low)}–{_microseconds(timing.high)}"


def _notes(rows: Sequence[Row], names: Sequence[str]) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """How each provider computes, with the cases it does so in."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for name in names:
        for row in rows:
            timing = row.timing(name)
            if timing and timing.what:
                found.setdefault((name, timing.what), {})[row.case] = None
    everywhere = set(dict.fromkeys(row.case for row in rows))
    return tuple((name, what, () if set(cases) == everywhere else tuple(cases)) for (name, what), cases in found.items())


def _about(row: Row) -> str:
    return f"{row.shape} {row.dtype}"


def _microseconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
