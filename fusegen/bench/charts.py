"""The charts of a record: bytes a second, products under their roofs, speed-ups; each in the widths that a page wants it in."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from fusegen.bench.drawing import (
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
from fusegen.bench.record import Row
from fusegen.bench.table import COPY, FUSEGEN, Outcome, Verdict, name_of, providers, ratio_text, tally, times

_LAST = re.compile(r"(\d+)\D*$")
_LINE = 20.0


# Bytes a second: over the length of rows where a case has several, beside each other where it has one.


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
    """Cases of one length beside each other; stacked, a case's name stands above its line, else to the left of it."""
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


# What products reach, under the roofs that the run itself has shown: its best copy and its best product.


@dataclass(frozen=True)
class Roof:
    """What bounds a rate.

    Attributes:
        rate: bytes or operations a microsecond.
        provider, row: who reached it, and in which case.
    """

    rate: float
    provider: str
    row: Row


def memory_roof(rows: Sequence[Row]) -> Roof | None:
    """The best rate of a copy."""
    calls = [row for row in rows if not row.is_step]
    found = [Roof(row.bytes / times(row)[COPY], COPY, row) for row in calls if row.bytes and COPY in times(row)]
    return max(found, key=lambda roof: roof.rate, default=None)


def product_roof(rows: Sequence[Row]) -> Roof | None:
    """The best rate of anybody's products."""
    calls = [row for row in rows if not row.is_step]
    found = [Roof(row.flops / time, name, row) for row in calls if row.flops for name, time in times(row).items() if name != COPY]
    return max(found, key=lambda roof: roof.rate, default=None)


def products(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The cases that have a place in the chart; no training steps."""
    return [v for v in verdicts if v.row.flops and v.row.bytes and not v.row.is_step and (v.ours or v.theirs)]


def case_looks(verdicts: Sequence[Verdict]) -> dict[str, Look]:
    """A look for each case name."""
    names = dict.fromkeys(v.row.case for v in products(verdicts))
    return {name: peer_look(number) for number, name in enumerate(names)}


def roofline(verdicts: Sequence[Verdict], roof: Roof, memory: Roof | None, width: float) -> Figure:
    """The chart of all cases of a record, so many pixels wide."""
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


def _intensity(row: Row) -> float:
    return (row.flops or 0) / row.bytes


def _limits(axes: Axes, shown: Sequence[Verdict], roof: Roof, memory: Roof | None, unit: Unit, most: int) -> None:
    """Room for every point and for the ridge, where the roofs meet."""
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
    """A roof's rate above it, where no point lies."""
    axes.annotate(text, (x, y), offset, textcoords="offset points", ha="right", color=INK, bbox=behind())


def _point(axes: Axes, verdict: Verdict, look: Look, unit: Unit) -> None:
    """Fusegen's rate, filled, and the fastest peer's, hollow, with a line between the two."""
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


# How many times as fast as the fastest peer: a bar a case, worst first.

_ALL = slice(None)
_NEAR, _FAR = (0.6, 0.8, 1, 1.25, 1.5, 2), (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
_BOLD = 1.15  # how much wider than others bold letters are


def described(verdicts: Sequence[Verdict]) -> str:
    """The chart in words: its ends, and how many cases are lost."""
    shown = compared(verdicts)
    (worst, least), (best, most) = shown[0], shown[-1]
    lost = tally(verdicts)[Outcome.LOSS]
    ends = f"from {ratio_text(least)} ({name_of(worst.row)}) to {ratio_text(most)} ({name_of(best.row)})"
    return f"{len(shown)} cases, {ends}; {lost} slower."


def compared(verdicts: Sequence[Verdict]) -> list[tuple[Verdict, float]]:
    """The cases that have a speed-up, and it; worst first."""
    pairs = ((v, v.speedup) for v in verdicts)
    return sorted(((v, speedup) for v, speedup in pairs if speedup), key=lambda pair: pair[1])


def speedups(verdicts: Sequence[Verdict], width: float, *, stacked: bool, part: slice = _ALL, head: float = 0.0) -> Figure:
    """The chart; the axis is logarithmic, so that twice as fast is as long as half as fast.

    Args:
        verdicts: at least one of them with a speed-up.
        width: in pixels.
        stacked: a case's name stands above its bar; else to the left of it.
        part: which bars are drawn; all parts have one scale.
        head: pixels that are left free at the top.
    """
    every = compared(verdicts)
    shown = every[part]
    left = label_margin([name_of(v.row) for v, _ in every], width, stacked=stacked)
    step = 2.1 * _LINE if stacked else 1.2 * _LINE
    room = 12 + _BOLD * max(text_width(_label(verdict, speedup)) for verdict, speedup in every)
    figure, axes = canvas(width, step * len(shown) + 54 + head, left=left, right=10, top=26 + head, bottom=28)
    axes.set_xscale("log")
    axes.set_ylim(len(shown) - 0.5, -0.5)
    _scale(axes, [speedup for _, speedup in every], room=room / (width - left - 10))
    for place, (verdict, speedup) in enumerate(shown):
        case_label(axes, place, name_of(verdict.row), (width - 20 if stacked else left - 10), stacked=stacked)
        _bar(axes, place + (0.22 if stacked else 0.0), 0.4 if stacked else 0.66, verdict, speedup)
    axes.axvline(1, color=INK, linewidth=1, zorder=1.5)
    return figure


def _scale(axes: Axes, found: Sequence[float], room: float) -> None:
    """Limits that leave a share of the width for what stands to the right of the longest bar."""
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


def _bar(axes: Axes, place: float, height: float, verdict: Verdict, speedup: float) -> None:
    """From 1 to the speed-up; a loss is hatched, and has a sign beside it."""
    lost = verdict.outcome is Outcome.LOSS
    colour = LOSS if lost else MUTED if verdict.outcome is Outcome.TIE else OURS
    (bar,) = axes.barh([place], [speedup - 1], left=1, height=height, color=PAPER if lost else colour, edgecolor=colour)
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


def _label(verdict: Verdict, speedup: float) -> str:
    mark = "▼ " if verdict.outcome is Outcome.LOSS else ""
    return f"{mark}{ratio_text(speedup)} {verdict.peer}"


# The charts with what is said below them.

NARROW, WIDE = 328.0, 720.0
"""What a phone of 360 pixels has room for, and a column of text on a desk."""

_BARS = 36
"""How many a chart holds, so that it fits a printed page."""


@dataclass(frozen=True)
class Block:
    """A chart on the page.

    Attributes:
        title: what stands above it; empty where the section says it.
        narrow, wide: SVG for a phone and for a desk; the same text where one size serves both.
        caption: what a reader has to know.
    """

    title: str
    narrow: str
    wide: str
    caption: str


def _block(key: str, title: str, said: str, caption: str, draw: Callable[[float], Figure]) -> Block:
    """A block in both widths."""
    narrow, wide = (_written(f"{key}-{int(width)}", title, said, draw, width) for width in (NARROW, WIDE))
    return Block(title, narrow, wide, caption)


def _written(key: str, title: str, said: str, draw: Callable[[float], Figure], width: float) -> str:
    with styled(key):
        return svg(draw(width), key=key, title=title, description=said)


def _legend(key: str, found: Mapping[str, Look]) -> Block:
    return _block(key, "Legend", ", ".join(found), "", lambda width: legend(list(found.items()), width))


# Products.


def roofline_block(verdicts: Sequence[Verdict]) -> Block | None:
    """Products under their roofs; None where no case has any."""
    rows = [v.row for v in verdicts]
    roof, memory = product_roof(rows), memory_roof(rows)
    if roof is None or not products(verdicts):
        return None
    caption = f"{_product_words(roof)} {_memory_words(memory)} Filled: fusegen; hollow: the fastest peer."
    said = f"{len(products(verdicts))} cases with products: operations a byte, and the rate that was reached. {caption}"
    return _block("roofline", "Roofline", said, caption, lambda width: roofline(verdicts, roof, memory, width))


def roofline_legend(verdicts: Sequence[Verdict]) -> Block:
    """The legend of marks, one a case of the roofline."""
    return _legend("roofline-legend", {name: replace(look, dash="none") for name, look in case_looks(verdicts).items()})


def _product_words(roof: Roof) -> str:
    unit = unit_of([roof.rate], "FLOP/s")
    reached = f"{roof.rate / unit.scale:.3g} {unit.name}"
    return f"The flat roof is the best product of this run: {reached}, by {roof.provider} in {name_of(roof.row)}."


def _memory_words(roof: Roof | None) -> str:
    if roof is None:
        return "No copy was measured, so there is no roof of memory."
    unit = unit_of([roof.rate], "B/s")
    return f"The slope is its best copy: {roof.rate / unit.scale:.3g} {unit.name}, of as many bytes as {name_of(roof.row)} moves."


# Bytes.


def provider_legend(rows: Sequence[Row]) -> Block | None:
    """The legend of providers, in all charts of bytes."""
    found = looks(providers(moving(rows)))
    return _legend("legend", found) if found else None


def sweep_blocks(rows: Sequence[Row]) -> list[Block]:
    """One small chart a case of several lengths, all to the same scale."""
    found, unit = sweeps(rows), bandwidth_unit(rows)
    top = max((rate for of in found.values() for row in of for rate in rates(row).values()), default=0.0)
    marks = looks(providers(moving(rows)))
    blocks = []
    for number, (case, of) in enumerate(found.items()):
        said = f"{unit.name} of {', '.join(providers(of))} at {len(of)} sizes: {', '.join(row.shape for row in of)}."
        key = f"sweep-{number}"
        with styled(key):
            drawn = svg(sweep(of, marks, unit, top, NARROW), key=key, title=f"Bandwidth of {case}", description=said)
        blocks.append(Block(case, drawn, drawn, ""))
    return blocks


def singles_block(rows: Sequence[Row]) -> Block | None:
    """The cases of one length."""
    shown, unit, marks = single(rows), bandwidth_unit(rows), looks(providers(moving(rows)))
    if not shown:
        return None
    said = f"{unit.name} by provider in {len(shown)} cases: {', '.join(map(name_of, shown))}."
    title = "Cases of one row length" if sweeps(rows) else "Bandwidth by case"
    return _block("singles", title, said, "", lambda width: singles(shown, marks, unit, width, stacked=width == NARROW))


# Speed-ups.


def speedup_blocks(verdicts: Sequence[Verdict]) -> list[Block]:
    """The charts of all groups, in the order of the record; a group of many cases has several."""
    groups = dict.fromkeys(v.row.group for v in verdicts if v.speedup)
    return [block for n, group in enumerate(groups) for block in _of_group(n, group, [v for v in verdicts if v.row.group == group])]


def _of_group(number: int, group: str, verdicts: Sequence[Verdict]) -> list[Block]:
    def drawn(width: float, start: int) -> Figure:
        return speedups(verdicts, width, stacked=width == NARROW, part=slice(start, start + _BARS))

    titles = {start: f"{group}, continued" if start else group for start in range(0, len(compared(verdicts)), _BARS)}
    said = described(verdicts)
    return [_block(f"speedup-{number}-{start}", title, said, "", partial(drawn, start=start)) for start, title in titles.items()]
