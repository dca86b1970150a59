"""How many times as fast as the fastest peer: a bar a case, worst first."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from fusegen.bench.charts.bandwidth import case_label, label_margin
from fusegen.bench.charts.style import INK, LOSS, MUTED, OURS, PAPER, behind, canvas, styled, text_width
from fusegen.bench.charts.svg import svg, tip
from fusegen.bench.verdict import Outcome, Verdict, name_of, ratio_text, tally

_LINE = 20.0
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


def speedup_file(verdicts: Sequence[Verdict], title: str, width: float, style: str) -> str:
    """The chart as a file that stands alone, on a ground of its own.

    Args:
        verdicts: at least one of them with a speed-up.
        title: what stands above it.
        width: in pixels.
        style: CSS with the colours.
    """
    with styled("plot"):
        figure = speedups(verdicts, width, stacked=False, head=22.0)
        figure.set_facecolor(PAPER)
        figure.text(0.5, 1 - 6 / (72 * figure.get_figheight()), title, ha="center", va="top", fontweight="bold")
        return svg(figure, key="plot", title=title, description=described(verdicts), style=style) + "\n"


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
    figure, axes = canvas(width, step * len(shown) + 54 + head, left=left, right=10, top=26 + head, bottom=28)
    axes.set_xscale("log")
    axes.set_ylim(len(shown) - 0.5, -0.5)
    _scale(axes, [speedup for _, speedup in every], room=_label_room(every) / (width - left - 10))
    for place, (verdict, speedup) in enumerate(shown):
        case_label(axes, place, name_of(verdict.row), (width - 20 if stacked else left - 10), stacked=stacked)
        _bar(axes, place + (0.22 if stacked else 0.0), 0.4 if stacked else 0.66, verdict, speedup)
    axes.axvline(1, color=INK, linewidth=1, zorder=1.5)
    return figure


def _label_room(shown: Sequence[tuple[Verdict, float]]) -> float:
    return 12 + _BOLD * max(text_width(_said(v, speedup)) for v, speedup in shown)


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
        _said(verdict, speedup),
        (max(speedup, 1), place),
        (6, 0),
        textcoords="offset points",
        va="center",
        color=LOSS if lost else INK,
        bbox=behind(),
    )
    label.set_fontweight("bold" if lost else "normal")


def _said(verdict: Verdict, speedup: float) -> str:
    mark = "▼ " if verdict.outcome is Outcome.LOSS else ""
    return f"{mark}{ratio_text(speedup)} {verdict.peer}"
