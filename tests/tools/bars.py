"""The bars: performance targets for stored records of `fusegen bench`.

``python -m tests.tools.bars FILE.json`` prints the bars that a record reaches. It exits with 1 if a bar is not reached, or if some
of its cases are not measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import itemgetter
from pathlib import Path
from typing import TypeAlias

from fusegen.bench.case import BenchCase
from fusegen.bench.cases import GROUPS, TALL, moved_bytes
from fusegen.bench.record import BenchRecord, CaseKey, read
from fusegen.bench.table import COPY, NOTHING, JudgedCase, PeerResult, Table, heading, judge, name_of, times
from fusegen.cli.terminal import Terminal

Measured: TypeAlias = tuple[float, JudgedCase]
"""A case and its ratio."""


@dataclass(frozen=True)
class AtLeast:
    """Requires a least ratio in each case.

    Attributes:
        provider: the provider whose time is divided by fusegen's.
        ratio: the least ratio.
    """

    provider: str
    ratio: float

    @property
    def words(self) -> str:
        """The target, as text."""
        of = "of copy" if self.provider == COPY else f"as fast as {self.provider}"
        return f"at least {self.text(self.ratio)} {of}"

    def text(self, ratio: float) -> str:
        """Formats a ratio."""
        return f"{ratio:.1%}" if self.provider == COPY else f"{ratio:.2f}×"

    def ratio_of(self, verdict: JudgedCase) -> float | None:
        """Returns a case's ratio: 0 if fusegen has no correct result, None without a time to compare with."""
        if verdict.ours is None:
            return 0.0
        theirs = times(verdict.row).get(self.provider)
        return theirs / verdict.ours if theirs else None

    def short(self, measured: Sequence[Measured], total: int) -> list[JudgedCase]:
        """Returns the cases below the ratio."""
        return [verdict for ratio, verdict in measured if ratio < self.ratio]


@dataclass(frozen=True)
class Losses:
    """Limits the losses, as `judge` defines them. A wrong or failed case is a loss of unlimited size.

    Attributes:
        most: the fraction of all cases that may be losses.
        longest: the largest excess of a loss over the fastest peer's time, as a fraction of that time.
    """

    most: float
    longest: float

    @property
    def words(self) -> str:
        """The target, as text."""
        return f"at most {self.most:.0%} slower, none by more than {self.longest:.0%}" if self.most else "none slower"

    def text(self, ratio: float) -> str:
        """Formats a ratio."""
        return f"{ratio:.2f}×"

    def ratio_of(self, verdict: JudgedCase) -> float | None:
        """Returns the speed-up: 0 if fusegen has no correct result, None without a peer."""
        return 0.0 if verdict.ours is None else verdict.speedup

    def short(self, measured: Sequence[Measured], total: int) -> list[JudgedCase]:
        """Returns the losses that are too long; all losses if they exceed `most` of ``total`` cases."""
        lost = [v for _, v in measured if v.outcome in (PeerResult.LOSS, PeerResult.WRONG, PeerResult.FAILED)]
        return lost if len(lost) > self.most * total else [v for v in lost if self._is_far(v)]

    def _is_far(self, verdict: JudgedCase) -> bool:
        ours, theirs = verdict.ours, verdict.theirs
        return ours is None or theirs is None or ours > (1 + self.longest) * theirs


_CHOSEN = ("public", "peers", "limits", "bars")
"""Groups with hand-picked sizes."""

_LARGE = 128 * 10**6
"""The fewest bytes of a case that is compared with a copy: with fewer, the launch latency shows."""

_POINTWISE = ("gelu", "gelu_new", "bias_gelu_add", "swiglu")
_ROWS = ("layer_norm", "rms_norm", "softmax", "add_rms_norm", "layer_norm_gelu_add")
_GELU_DROPOUTS = ("gelu_dropout_add", "ln_gelu_dropout_add")
_BIAS_DROPOUT = ("bias_dropout_add",)
_BACKWARD = ((16384, 4096), (8192, 8192))


@dataclass(frozen=True)
class Bar:
    """A performance target for some cases.

    Attributes:
        name: the name in tables.
        wants: the target of its cases.
        cases: keys of the cases in a record of a GPU.
    """

    name: str
    wants: AtLeast | Losses
    cases: tuple[CaseKey, ...]


# Selection of cases.


def _keys(groups: Sequence[str], fits: Callable[[BenchCase], bool]) -> tuple[CaseKey, ...]:
    return tuple(case.key for group in groups for case in GROUPS[group] if fits(case))


def _large(names: Sequence[str], fits: Callable[[int], bool] = lambda _: True) -> tuple[CaseKey, ...]:
    """Returns the cases of these names that move many bytes and whose row length fits."""

    def is_of_them(case: BenchCase) -> bool:
        return case.name in names and moved_bytes(case.name, case.sizes, case.dtype) >= _LARGE and fits(case.sizes[-1])

    return _keys(_CHOSEN, is_of_them)


def _at(name: str, *sizes: tuple[int, ...]) -> tuple[CaseKey, ...]:
    return _keys(_CHOSEN, lambda case: case.name == name and case.sizes in sizes)


def _whole(group: str) -> tuple[CaseKey, ...]:
    return _keys((group,), lambda _: True)


_SWEPT = Losses(0.03, longest=0.10)

BARS: tuple[Bar, ...] = (
    Bar("pointwise, 128 MB and more", AtLeast(COPY, 0.96), _large(_POINTWISE)),
    Bar("rows of 1024 to 20480, even", AtLeast(COPY, 0.92), _large(_ROWS, lambda n: 1024 <= n <= 20480 and n % 2 == 0)),
    Bar("rows of 65536 and 262144", AtLeast(COPY, 0.88), _large(_ROWS, lambda n: n in (65536, 262144))),
    Bar("rows of odd lengths", AtLeast(COPY, 0.85), _large(_ROWS, lambda n: n % 2 == 1)),
    Bar("rows of 1048576", AtLeast(COPY, 0.70), _large(_ROWS, lambda n: n == 1048576)),
    Bar("dropout", AtLeast(COPY, 0.92), _large(_GELU_DROPOUTS + _BIAS_DROPOUT)),
    Bar("dropout of a gelu", AtLeast("compile", 2.3), _large(_GELU_DROPOUTS)),
    Bar("dropout of a sum", AtLeast("compile", 2.0), _large(_BIAS_DROPOUT)),
    Bar("layer norm backward", AtLeast(COPY, 94 / 125), _at("layer_norm_backward", *_BACKWARD)),
    Bar("transposed copies", AtLeast(COPY, 0.85), _at("transposed_copy", *TALL)),
    Bar("sums over rows", AtLeast(COPY, 0.85), _at("column_sum", *TALL)),
    Bar("sweep pointwise", _SWEPT, _whole("pointwise")),
    Bar("sweep rows", _SWEPT, _whole("rows")),
    Bar("sweep columns", _SWEPT, _whole("columns")),
    Bar("limits", Losses(0.0, longest=0.0), _whole("limits")),
)
"""All bars. Layer norm backward must take at most 125 µs if a copy takes 94 µs."""


# The bars of a record as a table.


_MEASURED, _SHORT, _LEAST = "measured", "fall short", "least"


def bars_table(results: Sequence[BarResult]) -> Table:
    """Returns a table with one line per bar and the case furthest from it."""
    return ("bar", "wants", "it is", _MEASURED, _SHORT, _LEAST, "in"), [_line(each) for each in results]


def _line(result: BarResult) -> tuple[str, ...]:
    found = result.least or NOTHING, result.furthest or NOTHING
    return result.bar, result.wants, result.standing.value, _share(result), str(len(result.short)), *found


def _share(result: BarResult) -> str:
    return f"{result.measured} of {result.cases}"


class Standing(Enum):
    """The result of a bar."""

    PASS = "pass"
    FAIL = "fail"
    PART = "not all measured"
    NONE = "not measured"


@dataclass(frozen=True)
class BarResult:
    """The result of a bar for a record.

    Attributes:
        bar: its name.
        wants: the target of its cases, as text.
        standing: a fail if a measured case falls short; a pass if none does and all are measured.
        cases, measured: the number of cases, and of those for which the record has all times.
        short: the cases that fall short, worst first.
        least, furthest: the least ratio and its case, as text; empty if none is measured.
    """

    bar: str
    wants: str
    standing: Standing
    cases: int
    measured: int
    short: tuple[CaseKey, ...]
    least: str
    furthest: str


def judge_bars(record: BenchRecord, bars: Sequence[Bar] = BARS) -> list[BarResult]:
    """Returns the results of all bars for a record. Bars apply to GPUs: a CPU's record has none of their cases."""
    rows = record.rows if record.environment.kind == "cuda" else ()
    verdicts = {row.key: judge(row) for row in rows}
    return [_judged(bar, [verdicts[key] for key in bar.cases if key in verdicts]) for bar in bars]


def _judged(bar: Bar, found: Sequence[JudgedCase]) -> BarResult:
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


def _case(verdict: JudgedCase) -> str:
    return f"{name_of(verdict.row)} {verdict.row.dtype}"


def main(path: str) -> int:
    """Prints the result of each bar for a stored record."""
    record = read(Path(path))
    results, terminal = judge_bars(record), Terminal(sys.stdout)
    terminal.line(heading(record.environment))
    terminal.table(*bars_table(results), right=(_MEASURED, _SHORT, _LEAST))
    return 0 if all(each.standing is Standing.PASS for each in results) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
