"""Charts of a record of `fusegen bench`: bandwidth, the roofline of matmuls, speed-ups.

``python -m tests.tools.charts FILE.json FOLDER`` writes them as SVG.
"""

from __future__ import annotations

import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from fusegen.bench.record import BenchRecord, TimedCase, read
from fusegen.bench.table import (
    COPY,
    FUSEGEN,
    JudgedCase,
    PeerResult,
    judge,
    name_of,
    providers,
    ratio_text,
    speedup_order,
    tally,
    times,
)
from fusegen.emit.environment import render
from tests.tools.drawing import (
    GRID,
    INK,
    LOSS,
    MUTED,
    OURS,
    PAPER,
    Look,
    Unit,
    behind,
    canvas,
    case_label,
    decades,
    doublings,
    evenly,
    label_margin,
    legend,
    looks,
    peer_look,
    styled,
    svg,
    text_width,
    tip,
    unit_label,
    unit_of,
)

_LAST = re.compile(r"(\d+)\D*$")
_STEP = 24.0  # pixels per case


# Bandwidth: a curve over the row length for cases of several lengths, a dot plot for the others.


def row_length(row: TimedCase) -> int | None:
    """Returns the last number of the shape."""
    found = _LAST.search(row.shape)
    return int(found[1]) or None if found else None


def moving(rows: Sequence[TimedCase]) -> list[TimedCase]:
    """Returns the rows whose rate counts bytes and that have a time, without training steps."""
    return [row for row in rows if row.flops is None and row.bytes and not row.is_step and times(row)]


def sweeps(rows: Sequence[TimedCase]) -> dict[str, list[TimedCase]]:
    """Returns the cases with several row lengths, by name."""
    found: dict[str, list[TimedCase]] = defaultdict(list)
    for row in moving(rows):
        if row_length(row) is not None:
            found[row.case].append(row)
    return {case: of for case, of in found.items() if len({row_length(row) for row in of}) > 1}


def single(rows: Sequence[TimedCase]) -> list[TimedCase]:
    """Returns the rows that are in no sweep."""
    swept = sweeps(rows)
    return [row for row in moving(rows) if row.case not in swept or row_length(row) is None]


def rates(row: TimedCase) -> dict[str, float]:
    """Returns the bytes per microsecond, by provider."""
    return {name: row.bytes / time for name, time in times(row).items()}


def bandwidth_unit(rows: Sequence[TimedCase]) -> Unit:
    """Returns the common unit of all charts of a record."""
    return unit_of((rate for row in moving(rows) for rate in rates(row).values()), "B/s")


def sweep(rows: Sequence[TimedCase], looks: dict[str, Look], unit: Unit, top: float, width: float) -> Figure:
    """Draws one case over its row length.

    Args:
        rows: the rows of the case.
        looks: the looks of all providers; those with a time are drawn.
        unit: the unit of the rates.
        top: the greatest rate of all sweeps, so that their charts have one scale.
        width: width in pixels.
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
    """Returns the looks in drawing order: fusegen last, above the others."""
    return sorted(looks.items(), key=lambda item: (item[0] == FUSEGEN, item[0] != COPY))


def _series(axes: Axes, rows: Sequence[TimedCase], provider: str, look: Look, unit: Unit) -> None:
    """Draws all points of a provider, and a line through the best of each length."""
    timed = [row for row in rows if provider in times(row)]
    points = [(length, rates(row)[provider] / unit.scale, row) for row in timed if (length := row_length(row))]
    best: dict[int, float] = {}
    for length, rate, _ in points:
        best[length] = max(rate, best.get(length, 0.0))
    axes.plot(*zip(*sorted(best.items()), strict=True), color=look.colour, linestyle=look.dash, linewidth=1.6)
    for length, rate, row in points:
        _dot(axes, length, rate, look, _tip(row, provider, rate, unit))


def singles(rows: Sequence[TimedCase], looks: dict[str, Look], unit: Unit, width: float) -> Figure:
    """Draws the cases of one length, one line each."""
    names = [name_of(row) for row in rows]
    left = label_margin(names, width)
    figure, axes = canvas(width, _STEP * len(rows) + 56, left=left, right=16, top=8, bottom=48)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.06 * max(rate for row in rows for rate in rates(row).values()) / unit.scale)
    evenly(axes.xaxis, int(width // 80))
    axes.set_xlabel(unit.name)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(visible=True, axis="x")
    for place, (row, name) in enumerate(zip(rows, names, strict=True)):
        case_label(axes, place, name, left - 10)
        axes.axhline(place, color=GRID, linewidth=1)
        for provider, look in _behind_first(looks):
            if provider in rates(row):
                rate = rates(row)[provider] / unit.scale
                _dot(axes, rate, place, look, _tip(row, provider, rate, unit))
    return figure


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


def _tip(row: TimedCase, provider: str, rate: float, unit: Unit) -> str:
    return f"{name_of(row)} {row.dtype}, {provider}: {rate:.3g} {unit.name}"


# The roofline of matmuls. The roofs are the best rates in the record: of a copy and of a matmul.


@dataclass(frozen=True)
class Roof:
    """The bound of a rate.

    Attributes:
        rate: bytes or operations per microsecond.
        provider, row: the provider that reached it, and the case.
    """

    rate: float
    provider: str
    row: TimedCase


def memory_roof(rows: Sequence[TimedCase]) -> Roof | None:
    """Returns the best rate of a copy."""
    calls = [row for row in rows if not row.is_step]
    found = [Roof(row.bytes / times(row)[COPY], COPY, row) for row in calls if row.bytes and COPY in times(row)]
    return max(found, key=lambda roof: roof.rate, default=None)


def product_roof(rows: Sequence[TimedCase]) -> Roof | None:
    """Returns the best rate of any provider's matmuls."""
    calls = [row for row in rows if not row.is_step]
    found = [Roof(row.flops / time, name, row) for row in calls if row.flops for name, time in times(row).items() if name != COPY]
    return max(found, key=lambda roof: roof.rate, default=None)


def products(verdicts: Sequence[JudgedCase]) -> list[JudgedCase]:
    """Returns the cases of the roofline chart, without training steps."""
    return [v for v in verdicts if v.row.flops and v.row.bytes and not v.row.is_step and (v.ours or v.theirs)]


def case_looks(verdicts: Sequence[JudgedCase]) -> dict[str, Look]:
    """Returns a look for each case name."""
    names = dict.fromkeys(v.row.case for v in products(verdicts))
    return {name: peer_look(number) for number, name in enumerate(names)}


def roofline(verdicts: Sequence[JudgedCase], roof: Roof, memory: Roof | None, width: float) -> Figure:
    """Draws the roofline of all cases of a record; the width is in pixels."""
    unit = unit_of([roof.rate], "FLOP/s")
    figure, axes = canvas(width, min(420.0, 0.9 * width), left=44, right=12, top=24, bottom=46)
    shown = products(verdicts)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _limits(axes, shown, roof, memory, unit, most=int(width // 60))
    _roofs(axes, roof, memory, unit)
    for verdict, look in ((v, case_looks(verdicts)[v.row.case]) for v in shown):
        _point(axes, verdict, look, unit)
    axes.set_xlabel("operations a byte")
    unit_label(axes, unit.name, min(420.0, 0.9 * width) - 2)
    axes.grid(visible=True)
    return figure


def _intensity(row: TimedCase) -> float:
    return (row.flops or 0) / row.bytes


def _limits(axes: Axes, shown: Sequence[JudgedCase], roof: Roof, memory: Roof | None, unit: Unit, most: int) -> None:
    """Sets limits that include every point and the ridge, where the roofs meet."""
    across = [_intensity(v.row) for v in shown] + ([roof.rate / memory.rate] if memory else [])
    rates = [(v.row.flops or 0) / time / unit.scale for v in shown for time in (v.ours, v.theirs) if time]
    left, right = min(across) / 3, max(across) * 2
    left = min(left, roof.rate / memory.rate / 8) if memory else left
    top = roof.rate / unit.scale * 1.5
    bottom = min(min(rates) / 1.6, top / 8)
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    decades(axes.xaxis, left, right, most)
    decades(axes.yaxis, bottom, top, 8)


def _roofs(axes: Axes, roof: Roof, memory: Roof | None, unit: Unit) -> None:
    left, right = axes.get_xlim()
    flat = roof.rate / unit.scale
    ridge = roof.rate / memory.rate if memory else left
    axes.plot([ridge, right], [flat, flat], color=INK, linewidth=1.5)
    _said(axes, f"{flat:.3g} {unit.name}", right, flat, (-4, 7))
    if memory:
        copied, slope = unit_of([memory.rate], "B/s"), memory.rate / unit.scale
        axes.plot([left, ridge], [slope * left, flat], color=INK, linewidth=1.5)
        middle = math.sqrt(max(axes.get_ylim()[0], slope * left) * flat)
        _said(axes, f"{memory.rate / copied.scale:.3g} {copied.name}", middle / slope, middle, (-9, 3))


def _said(axes: Axes, text: str, x: float, y: float, offset: tuple[float, float]) -> None:
    """Writes a roof's rate above it, where no point lies."""
    axes.annotate(text, (x, y), offset, textcoords="offset points", ha="right", color=INK, bbox=behind())


def _point(axes: Axes, verdict: JudgedCase, look: Look, unit: Unit) -> None:
    """Draws fusegen's rate (filled) and the fastest peer's (hollow), connected by a line."""
    row = verdict.row
    timed = ((FUSEGEN, verdict.ours), (verdict.peer, verdict.theirs))
    reached = [(name, (row.flops or 0) / time / unit.scale) for name, time in timed if time]
    axes.plot([_intensity(row)] * len(reached), [rate for _, rate in reached], color=GRID, linewidth=2, zorder=2)
    for name, rate in reached:
        axes.plot(
            [_intensity(row)],
            [rate],
            linestyle="none",
            marker=look.marker,
            markersize=8,
            markerfacecolor=PAPER if name == verdict.peer else look.colour,
            markeredgecolor=look.colour,
            markeredgewidth=1.6,
            zorder=3 if name == verdict.peer else 4,
            gid=tip(f"{name_of(row)} {row.dtype}, {name}: {rate:.3g} {unit.name}"),
        )


# Speed-ups over the fastest peer: one bar per case, worst first.

_NEAR, _FAR = (0.6, 0.8, 1, 1.25, 1.5, 2), (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
_BOLD = 1.15  # width of bold letters relative to normal ones


def described(verdicts: Sequence[JudgedCase]) -> str:
    """Describes the chart: its extremes, and the number of losses."""
    shown = speedup_order(verdicts)
    (worst, least), (best, most) = shown[0], shown[-1]
    lost = tally(verdicts)[PeerResult.LOSS]
    ends = f"from {ratio_text(least)} ({name_of(worst.row)}) to {ratio_text(most)} ({name_of(best.row)})"
    return f"{len(shown)} cases, {ends}; {lost} slower."


def speedups(verdicts: Sequence[JudgedCase], width: float, *, head: float = 0.0) -> Figure:
    """Draws the speed-ups on a logarithmic axis: a bar of 2× is as long as one of 0.5×.

    Args:
        verdicts: results, of which at least one has a speed-up.
        width: width in pixels.
        head: pixels left free at the top.
    """
    shown = speedup_order(verdicts)
    left = label_margin([name_of(v.row) for v, _ in shown], width)
    room = 12 + _BOLD * max(text_width(_label(verdict, speedup)) for verdict, speedup in shown)
    figure, axes = canvas(width, _STEP * len(shown) + 54 + head, left=left, right=10, top=26 + head, bottom=28)
    axes.set_xscale("log")
    axes.set_ylim(len(shown) - 0.5, -0.5)
    _scale(axes, [speedup for _, speedup in shown], room=room / (width - left - 10))
    for place, (verdict, speedup) in enumerate(shown):
        case_label(axes, place, name_of(verdict.row), left - 10)
        _bar(axes, place, verdict, speedup)
    axes.axvline(1, color=INK, linewidth=1, zorder=1.5)
    return figure


def _scale(axes: Axes, found: Sequence[float], room: float) -> None:
    """Sets limits that leave a fraction of the width for the label to the right of the longest bar."""
    low, high = min(0.9, *found) / 1.05, max(1.1, *found)
    room = min(room, 0.7)
    axes.set_xlim(low, low * (high / low) ** (1 / (1 - room)))
    marks = _NEAR if high < 2.5 * low else _FAR if high < 100 * low else (1,)
    axes.xaxis.set_major_locator(FixedLocator([mark for mark in marks if low <= mark <= high]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="x", top=True, labeltop=True, length=0)
    axes.grid(visible=True, axis="x")


def _bar(axes: Axes, place: float, verdict: JudgedCase, speedup: float) -> None:
    """Draws a bar from 1 to the speed-up. A loss is hatched and has a sign in its label."""
    lost = verdict.outcome is PeerResult.LOSS
    colour = LOSS if lost else MUTED if verdict.outcome is PeerResult.TIE else OURS
    (bar,) = axes.barh([place], [speedup - 1], left=1, height=0.66, color=PAPER if lost else colour, edgecolor=colour)
    bar.set_gid(tip(f"{name_of(verdict.row)} {verdict.row.dtype}: {verdict.ours:.4g} µs, {verdict.peer} {verdict.theirs:.4g} µs"))
    bar.set_hatch("////" if lost else None)
    label = axes.annotate(
        _label(verdict, speedup),
        (max(speedup, 1), place),
        (6, 0),
        textcoords="offset points",
        va="center",
        color=LOSS if lost else INK,
        bbox=behind(),
    )
    label.set_fontweight("bold" if lost else "normal")


def _label(verdict: JudgedCase, speedup: float) -> str:
    mark = "▼ " if verdict.outcome is PeerResult.LOSS else ""
    return f"{mark}{ratio_text(speedup)} {verdict.peer}"


# Charts as files. Each has its own background, so that it is legible on any page.

_WIDTH, _PLOT_WIDTH = 720.0, 640.0
_FONT = "svg { font-family: system-ui, sans-serif; }\n"


def plot(record: BenchRecord, *, group: str = "public") -> str:
    """Returns the speed-ups of a group as SVG text for a README; the text is the same in each run."""
    verdicts = [judge(row) for row in record.rows if row.group == group]
    title = f"Speed-up of fusegen against the fastest peer, {record.environment.device}"
    with styled("plot"):
        figure = speedups(verdicts, _PLOT_WIDTH, head=22.0)
        figure.text(0.5, 1 - 6 / (72 * figure.get_figheight()), title, ha="center", va="top", fontweight="bold")
        return file_of("plot", title, described(verdicts), figure)


def file_of(key: str, title: str, said: str, figure: Figure) -> str:
    """Returns a figure as the text of a standalone SVG file; call it within `styled`."""
    figure.set_facecolor(PAPER)
    return svg(figure, key=key, title=title, description=said, style=render("bench/colours.css") + _FONT) + "\n"


def charts(record: BenchRecord) -> Iterator[tuple[str, str]]:
    """Yields the charts for which a record has cases: file name and text."""
    verdicts = [judge(row) for row in record.rows]
    yield from _product_charts(verdicts)
    yield from _byte_charts(record.rows)
    for group in dict.fromkeys(v.row.group for v in verdicts if v.speedup):
        yield f"speedups-{group}", plot(record, group=group)


def _product_charts(verdicts: Sequence[JudgedCase]) -> Iterator[tuple[str, str]]:
    rows = [v.row for v in verdicts]
    roof, memory = product_roof(rows), memory_roof(rows)
    if roof is None or not products(verdicts):
        return
    said = f"{len(products(verdicts))} cases with products: operations a byte, and the rate that was reached."
    marks = [(name, replace(look, dash="none")) for name, look in case_looks(verdicts).items()]
    with styled("roofline"):
        yield "roofline", file_of("roofline", "Roofline", said, roofline(verdicts, roof, memory, _WIDTH))
        yield "roofline-legend", file_of("roofline-legend", "Legend", "A mark a case.", legend(marks, _WIDTH))


def _byte_charts(rows: Sequence[TimedCase]) -> Iterator[tuple[str, str]]:
    """Yields a chart for each case of several lengths, all with the same scale, and one chart of the others."""
    found, unit, marks = sweeps(rows), bandwidth_unit(rows), looks(providers(moving(rows)))
    top = max((rate for of in found.values() for row in of for rate in rates(row).values()), default=0.0)
    with styled("bandwidth"):
        for case, of in found.items():
            said = f"{unit.name} of {', '.join(providers(of))} at {len(of)} sizes: {', '.join(row.shape for row in of)}."
            yield f"bandwidth-{case}", file_of(case, f"Bandwidth of {case}", said, sweep(of, marks, unit, top, _WIDTH / 2))
        if shown := single(rows):
            said = f"{unit.name} by provider in {len(shown)} cases: {', '.join(map(name_of, shown))}."
            yield "bandwidth", file_of("bandwidth", "Bandwidth by case", said, singles(shown, marks, unit, _WIDTH))
        if marks:
            yield "legend", file_of("legend", "Legend", ", ".join(marks), legend(list(marks.items()), _WIDTH))


def main(file: str, folder: str) -> None:
    """Writes the charts of a record."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, text in charts(read(Path(file))):
        (Path(folder) / f"{name}.svg").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
