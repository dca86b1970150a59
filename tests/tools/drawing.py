"""How charts look: sizes in CSS pixels, and colours that the page decides, so that they follow its light and dark scheme."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from xml.etree import ElementTree

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from fusegen.bench.table import COPY, FUSEGEN

TEXT = 12.5
"""The size of all text. A point is a pixel here, since figures have 72 dots an inch."""

_NAMES = ("paper", "ink", "muted", "grid", "fusegen", "loss", "copy", "p0", "p1", "p2", "p3", "p4", "p5", "p6")

# What matplotlib draws with stands for a variable of the page: `svg` replaces one by the other.
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


def label_margin(names: Sequence[str], width: float) -> float:
    """The pixels to the left of the axes that names take; no more than half of all."""
    return min(14 + max(map(text_width, names)), width / 2)


def case_label(axes: Axes, place: float, text: str, room: float) -> None:
    """A case's name at its line, within so many pixels."""
    across = axes.get_yaxis_transform()
    axes.annotate(fitted(text, room), (0, place), (-8, 0), xycoords=across, textcoords="offset points", ha="right", va="center")


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
        Line2D([], [], color=look.colour, marker=look.marker, linestyle=look.dash, markersize=7, markeredgewidth=1.5)
        for _, look in entries
    ]
    figure.legend(handles, names, loc="upper left", bbox_to_anchor=(0, 1), ncols=columns, borderpad=0, borderaxespad=0.2)
    return figure


# Figures as SVG for a page: colours and fonts are the page's, names can be read aloud, nothing is asked of anywhere else.

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_TIP = "tip:"
_VARIABLES = {colour: f"var(--{name})" for name, colour in PLACEHOLDERS.items()}
_PLACEHOLDER = re.compile("|".join(PLACEHOLDERS.values()))
_FONT = re.compile(r"font-family:[^;]*;?\s*")


def tip(text: str) -> str:
    """The ``gid`` of an artist that says something when it is pointed at."""
    return _TIP + text


def svg(figure: Figure, *, key: str, title: str, description: str, style: str = "") -> str:
    """The text of a figure, to be called within `styled`.

    Args:
        figure: drawn with `styled`'s placeholders for colours.
        key: differs from that of any other chart on the page.
        title, description: what a reader is told who sees no chart.
        style: CSS for a file that stands alone.
    """
    root = ElementTree.fromstring(_drawn(figure))
    _clean(root)
    _size(root)
    _name(root, key, title, description)
    if style:
        ElementTree.SubElement(root, f"{{{_SVG}}}style").text = style
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    return _PLACEHOLDER.sub(lambda found: _VARIABLES[found[0]], ElementTree.tostring(root, encoding="unicode"))


def _drawn(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return buffer.getvalue()


def _clean(root: ElementTree.Element) -> None:
    """Takes away what would meddle with a page: rules for all elements, fonts, names that other charts have too."""
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}style", f"{{{_SVG}}}metadata"):
                parent.remove(child)
    for element in root.iter():
        if "style" in element.attrib:
            element.set("style", _FONT.sub("", element.attrib["style"]))
        if element.tag == f"{{{_SVG}}}g":
            _tell(element, element.attrib.pop("id", ""))


def _tell(group: ElementTree.Element, name: str) -> None:
    """Turns a tip into what browsers show."""
    if name.startswith(_TIP):
        title = ElementTree.Element(f"{{{_SVG}}}title")
        title.text = name.removeprefix(_TIP)
        group.insert(0, title)


def _size(root: ElementTree.Element) -> None:
    """Gives the size in pixels; as matplotlib has it, it is in points."""
    _, _, root.attrib["width"], root.attrib["height"] = root.attrib["viewBox"].split()
    root.set("style", "stroke-linejoin: round; stroke-linecap: butt")


def _name(root: ElementTree.Element, key: str, title: str, description: str) -> None:
    for number, (kind, text) in enumerate((("title", title), ("desc", description))):
        element = ElementTree.Element(f"{{{_SVG}}}{kind}", {"id": f"{key}-{kind}"})
        element.text = text
        root.insert(number, element)
    root.set("role", "img")
    root.set("aria-labelledby", f"{key}-title {key}-desc")


# Axes that a reader knows: rates in a unit that fits, powers as 1, 10, 1k or 4k, never as small raised digits.

_UNITS = ((1e6, "T"), (1e3, "G"), (1.0, "M"))


@dataclass(frozen=True)
class Unit:
    """Of rates.

    Attributes:
        scale: how many of what passes in a microsecond are one.
        name: as it stands beside an axis.
    """

    scale: float
    name: str


def unit_of(rates: Iterable[float], what: str) -> Unit:
    """The greatest unit in which the greatest rate is no small fraction.

    Args:
        rates: bytes, or operations, a microsecond.
        what: ``B/s`` or ``FLOP/s``.
    """
    greatest = max(rates, default=0.0)
    scale, letter = next((unit for unit in _UNITS if greatest >= unit[0] / 10), _UNITS[-1])
    return Unit(scale, letter + what)


def shortened(value: float, thousand: int = 1000) -> str:
    """A number for an axis: 0.1, 20, 5k, 1M."""
    for power, letter in ((2, "M"), (1, "k")):
        if value >= thousand**power:
            return f"{value / thousand**power:.3g}{letter}"
    return f"{value:.3g}"


def decades(axis: Axis, low: float, high: float, most: int) -> None:
    """Ticks at 1, 2, 5 of each power of ten, or fewer where there would be more than ``most``."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10.0**power for power in powers for digit in digits if low <= digit * 10.0**power <= high]
        if len(ticks) <= most:
            break
    _set(axis, ticks[:: -(-len(ticks) // most) or 1], 1000)


def doublings(axis: Axis, low: float, high: float, most: int) -> None:
    """Ticks at powers of two, evenly thinned to at most ``most``."""
    powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    step = max(1, -(-len(powers) // most))
    _set(axis, [2.0**power for power in powers[::step]], 1024)


def evenly(axis: Axis, most: int) -> None:
    """Ticks at round distances from zero."""
    axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: shortened(value)))


def _set(axis: Axis, ticks: Sequence[float], thousand: int) -> None:
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: shortened(value, thousand)))
