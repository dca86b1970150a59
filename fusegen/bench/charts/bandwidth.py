"""Bytes a second: over the length of rows where a case has several, beside each other where it has one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fusegen.bench.charts.scales import Unit, doublings, evenly, unit_of
from fusegen.bench.charts.style import GRID, PAPER, Look, behind, canvas, fitted, text_width, unit_label
from fusegen.bench.charts.svg import tip
from fusegen.bench.record import Row
from fusegen.bench.verdict import COPY, FUSEGEN, name_of, times

_LAST = re.compile(r"(\d+)\D*$")
_LINE = 20.0


def row_length(row: Row) -> int | None:
    """The last number of the shape."""
    found = _LAST.search(row.shape)
    return int(found[1]) or None if found else None


def moving(rows: Sequence[Row]) -> list[Row]:
    """The rows whose rate counts bytes, where anybody has a time; no training steps."""
    return [row for row in rows if row.flops is None and row.bytes and not row.is_step and times(row)]


def sweeps(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The cases of several lengths of rows, by name."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in moving(rows):
        if row_length(row) is not None:
            found[row.case].append(row)
    return {case: of for case, of in found.items() if len({row_length(row) for row in of}) > 1}


def single(rows: Sequence[Row]) -> list[Row]:
    """The rows that are in no sweep."""
    swept = sweeps(rows)
    return [row for row in moving(rows) if row.case not in swept or row_length(row) is None]


def rates(row: Row) -> dict[str, float]:
    """Bytes a microsecond, by provider."""
    return {name: row.bytes / time for name, time in times(row).items()}


def bandwidth_unit(rows: Sequence[Row]) -> Unit:
    """One unit for all charts of a record."""
    return unit_of((rate for row in moving(rows) for rate in rates(row).values()), "B/s")


def sweep(rows: Sequence[Row], looks: dict[str, Look], unit: Unit, top: float, width: float) -> Figure:
    """One case over the length of its rows.

    Args:
        rows: of the case.
        looks: of all providers; those that take part are drawn.
        unit: of the rates.
        top: the greatest rate of all sweeps, so that they can be compared.
        width: in pixels.
    """
    figure, axes = canvas(width, 232, left=36, right=12, top=24, bottom=44)
    lengths = [length for row in rows if (length := row_length(row))]
    left, right = min(lengths) / 1.3, max(lengths) * 1.3
    axes.set_xscale("log", base=2)
    axes.set_xlim(left, right)
    axes.set_ylim(0, 1.06 * top / unit.scale)
    evenly(axes.yaxis, 5)
    doublings(axes.xaxis, left, right, 6)
    axes.set_xlabel("length of rows")
    unit_label(axes, unit.name, 230)
    axes.grid(visible=True, axis="y")
    for provider, look in _behind_first({name: look for name, look in looks.items() if any(name in times(row) for row in rows)}):
        _series(axes, rows, provider, look, unit)
    return figure


def _behind_first(looks: dict[str, Look]) -> list[tuple[str, Look]]:
    """Fusegen is drawn last, above the others."""
    return sorted(looks.items(), key=lambda item: (item[0] == FUSEGEN, item[0] != COPY))


def _series(axes: Axes, rows: Sequence[Row], provider: str, look: Look, unit: Unit) -> None:
    """All points of a provider, and a line along the best of each length."""
    timed = [row for row in rows if provider in times(row)]
    points = [(length, rates(row)[provider] / unit.scale, row) for row in timed if (length := row_length(row))]
    best: dict[int, float] = {}
    for length, rate, _ in points:
        best[length] = max(rate, best.get(length, 0.0))
    axes.plot(*zip(*sorted(best.items()), strict=True), color=look.colour, linestyle=look.dash, linewidth=1.6)
    for length, rate, row in points:
        _dot(axes, length, rate, look, _tip(row, provider, rate, unit))


def singles(rows: Sequence[Row], looks: dict[str, Look], unit: Unit, width: float, *, stacked: bool) -> Figure:
    """Cases of one length beside each other.

    Args:
        rows: of these cases.
        looks, unit, width: as for `sweep`.
        stacked: a case's name stands above its line; else to the left of it.
    """
    step = 2 * _LINE if stacked else 1.2 * _LINE
    names = [name_of(row) for row in rows]
    left = label_margin(names, width, stacked=stacked)
    figure, axes = canvas(width, step * len(rows) + 56, left=left, right=16, top=8, bottom=48)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.06 * max(rate for row in rows for rate in rates(row).values()) / unit.scale)
    evenly(axes.xaxis, int(width // 80))
    axes.set_xlabel(unit.name)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(visible=True, axis="x")
    for place, (row, name) in enumerate(zip(rows, names, strict=True)):
        line = place + (0.2 if stacked else 0.0)
        case_label(axes, place, name, (width - 26 if stacked else left - 10), stacked=stacked)
        axes.axhline(line, color=GRID, linewidth=1)
        for provider, look in _behind_first(looks):
            if provider in rates(row):
                rate = rates(row)[provider] / unit.scale
                _dot(axes, rate, line, look, _tip(row, provider, rate, unit))
    return figure


def label_margin(names: Sequence[str], width: float, *, stacked: bool) -> float:
    """The pixels to the left of the axes that names take; no more than half of all."""
    return 10.0 if stacked else min(14 + max(map(text_width, names)), width / 2)


def case_label(axes: Axes, place: float, text: str, room: float, *, stacked: bool) -> None:
    """A case's name at its line, within so many pixels."""
    across, text = axes.get_yaxis_transform(), fitted(text, room)
    if stacked:
        axes.text(0, place - 0.05, text, transform=across, va="bottom", clip_on=False, bbox=behind(0))
    else:
        axes.annotate(text, (0, place), (-8, 0), xycoords=across, textcoords="offset points", ha="right", va="center")


def _dot(axes: Axes, x: float, y: float, look: Look, said: str) -> None:
    axes.plot(
        [x],
        [y],
        linestyle="none",
        marker=look.marker,
        markersize=7 if look.marker != "|" else 10,
        markerfacecolor=look.colour,
        markeredgecolor=PAPER if look.marker != "|" else look.colour,
        markeredgewidth=0.8 if look.marker != "|" else 2,
        zorder=4,
        clip_on=False,
        gid=tip(said),
    )


def _tip(row: Row, provider: str, rate: float, unit: Unit) -> str:
    return f"{name_of(row)} {row.dtype}, {provider}: {rate:.3g} {unit.name}"
