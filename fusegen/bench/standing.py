"""Whether a record reaches the bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from operator import itemgetter

from fusegen.bench.bars import BARS, Bar
from fusegen.bench.record import Key, Record
from fusegen.bench.verdict import Verdict, judge, name_of


class Standing(Enum):
    """How a record stands to a bar."""

    PASS = "pass"
    FAIL = "fail"
    PART = "not all measured"
    NONE = "not measured"


@dataclass(frozen=True)
class BarResult:
    """A bar, judged.

    Attributes:
        bar: its name.
        wants: what its cases are to reach, in words.
        standing: a fail where a measured case falls short; a pass where none does and all are measured.
        cases, measured: how many there are, and how many of them the record has all times for.
        short: the cases that fall short, worst first.
        least, furthest: the least ratio of all, and the case that has it, in words; empty where none is measured.
    """

    bar: str
    wants: str
    standing: Standing
    cases: int
    measured: int
    short: tuple[Key, ...]
    least: str
    furthest: str


def judge_bars(record: Record, bars: Sequence[Bar] = BARS) -> list[BarResult]:
    """How a record stands to each bar; bars are a GPU's, and that of a CPU has none of their cases."""
    rows = record.rows if record.environment.kind == "cuda" else ()
    verdicts = {row.key: judge(row) for row in rows}
    return [_judged(bar, [verdicts[key] for key in bar.cases if key in verdicts]) for bar in bars]


def _judged(bar: Bar, found: Sequence[Verdict]) -> BarResult:
    ratios = [(ratio, verdict) for verdict in found if (ratio := bar.wants.ratio_of(verdict)) is not None]
    measured = sorted(ratios, key=itemgetter(0))
    short = bar.wants.short(measured, len(bar.cases))
    return BarResult(
        bar=bar.name,
        wants=bar.wants.words,
        standing=_standing(len(short), len(measured), len(bar.cases)),
        cases=len(bar.cases),
        measured=len(measured),
        short=tuple(verdict.row.key for verdict in short),
        least=bar.wants.text(measured[0][0]) if measured else "",
        furthest=_case(measured[0][1]) if measured else "",
    )


def _standing(short: int, measured: int, cases: int) -> Standing:
    if short:
        return Standing.FAIL
    if not measured:
        return Standing.NONE
    return Standing.PASS if measured == cases else Standing.PART


def _case(verdict: Verdict) -> str:
    return f"{name_of(verdict.row)} {verdict.row.dtype}"
