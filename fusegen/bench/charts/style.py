"""How charts look: sizes in CSS pixels, and colours that the page decides, so that they follow its light and dark scheme."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.textpath import text_to_path

from fusegen.bench.verdict import COPY, FUSEGEN

TEXT = 12.5
"""The size of all text. A point is a pixel here, since figures have 72 dots an inch."""

_NAMES = ("paper", "ink", "muted", "grid", "fusegen", "loss", "copy", "p0", "p1", "p2", "p3", "p4", "p5", "p6")

# What matplotlib draws with stands for a variable of the page: `svg.py` replaces one by the other.
PLACEHOLDERS = {name: f"#0100{number:02x}" for number, name in enumerate(_NAMES)}
_PEERS = [name for name in _NAMES if name.startswith("p") and name[1:].isdigit()]
_MARKERS = "Ds^vPXp"
_SAMPLE = 56.0  # pixels of a line with its mark in a legend, and what parts it from the next
_DASHES: Sequence[object] = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)))

PAPER, INK, MUTED, GRID, OURS, LOSS = (PLACEHOLDERS[name] for name in ("paper", "ink", "muted", "grid", "fusegen", "loss"))


@dataclass(frozen=True)
class Look:
    """How a series is told from others: never by colour alone.

    Attributes:
        colour: a placeholder.
        marker, dash: in matplotlib's words.
    """

    colour: str
    marker: str
    dash: object


def looks(providers: Sequence[str]) -> dict[str, Look]:
    """A look for each provider; fusegen and the copy have theirs in every record."""
    fixed = {FUSEGEN: Look(OURS, "o", "-"), COPY: Look(PLACEHOLDERS["copy"], "|", (0, (1.5, 2)))}
    peers = [provider for provider in providers if provider not in fixed]
    found = {provider: peer_look(number) for number, provider in enumerate(peers)}
    return {provider: (fixed | found)[provider] for provider in providers}


def peer_look(number: int) -> Look:
    """The look of a series by its number; the first 49 differ in colour or marker."""
    return Look(
        PLACEHOLDERS[_PEERS[number % len(_PEERS)]],
        _MARKERS[(number + number // len(_MARKERS)) % len(_MARKERS)],
        _DASHES[number % len(_DASHES)],
    )


@lru_cache(maxsize=4096)
def text_width(text: str) -> float:
    """The pixels that a text takes at most: matplotlib's own letters are wider than those that browsers choose."""
    return 1.03 * float(text_to_path.get_text_width_height_descent(text, FontProperties(size=TEXT), False)[0])


def fitted(text: str, width: float) -> str:
    """A text that takes no more than a width: its middle gives way, where names differ least."""
    cut, kept = text, len(text) - 1
    while text_width(cut) > width and kept > 2:
        cut, kept = f"{text[: kept // 2]}…{text[-(kept - kept // 2) :]}", kept - 1
    return cut


def behind(pad: float = 1.0) -> dict[str, object]:
    """The box of a text that lies on lines of a grid."""
    return {"facecolor": PAPER, "edgecolor": "none", "pad": pad}


def unit_label(axes: Axes, text: str, height: float) -> None:
    """The unit of the upward axis, above it, from the figure's left edge on."""
    axes.annotate(text, (0, height), xycoords=("figure points", "figure points"), va="top", color=MUTED, annotation_clip=False)


@contextmanager
def styled(salt: str) -> Iterator[None]:
    """Matplotlib as charts want it, whatever the user's own settings are.

    Args:
        salt: makes identifiers within the SVG differ from those of other charts on a page, and the same in each run.
    """
    ours = {
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "text.parse_math": False,
        "font.size": TEXT,
        "text.color": INK,
        "axes.labelcolor": MUTED,
        "xtick.labelcolor": MUTED,
        "ytick.labelcolor": MUTED,
        "xtick.color": GRID,
        "ytick.color": GRID,
        "axes.edgecolor": GRID,
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "grid.color": GRID,
        "grid.linewidth": 1.0,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "hatch.linewidth": 1.5,
        "legend.frameon": False,
    }
    with matplotlib.style.context(["default", ours]):
        yield


def canvas(width: float, height: float, *, left: float, right: float, top: float, bottom: float) -> tuple[Figure, Axes]:
    """A figure with one pair of axes, all in pixels."""
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    box = (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
    return figure, figure.add_axes(box)


def legend(entries: Sequence[tuple[str, Look]], width: float) -> Figure:
    """What the looks stand for, in as many columns as fit."""
    names = [fitted(name, width - _SAMPLE) for name, _ in entries]
    columns = max(1, int(width // (max(map(text_width, names), default=0) + _SAMPLE)))
    height = 22 * -(-len(entries) // columns) + 6
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    handles = [
        Line2D([], [], color=look.colour, marker=look.marker, linestyle=look.dash, markersize=7, markeredgewidth=1.5)  # type: ignore[arg-type]
        for _, look in entries
    ]
    figure.legend(handles, names, loc="upper left", bbox_to_anchor=(0, 1), ncols=columns, borderpad=0, borderaxespad=0.2)
    return figure
