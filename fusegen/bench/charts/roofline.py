"""What products reach, under the roofs that the run itself has shown: its best copy and its best product."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fusegen.bench.charts.scales import Unit, decades, unit_of
from fusegen.bench.charts.style import GRID, INK, PAPER, Look, behind, canvas, peer_look, unit_label
from fusegen.bench.charts.svg import tip
from fusegen.bench.record import Row
from fusegen.bench.verdict import COPY, FUSEGEN, Verdict, name_of, times


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
    """The chart.

    Args:
        verdicts: all cases of the record.
        roof: of products.
        memory: of copies, if any was measured.
        width: in pixels.
    """
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
    reached = [(name, (row.flops or 0) / time / unit.scale) for name, time in _timed(verdict)]
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


def _timed(verdict: Verdict) -> list[tuple[str, float]]:
    pairs = ((FUSEGEN, verdict.ours), (verdict.peer, verdict.theirs))
    return [(name, time) for name, time in pairs if time]
