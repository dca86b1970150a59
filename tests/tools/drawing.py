"""The style of charts: sizes in CSS pixels; colours are variables of the page, so they follow its light and dark scheme."""

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
"""The size of all text. A point is a pixel here, since figures have 72 dots per inch."""

_NAMES = ("paper", "ink", "muted", "grid", "fusegen", "loss", "copy", "p0", "p1", "p2", "p3", "p4", "p5", "p6")

# Colours that matplotlib draws with, as placeholders: `svg` replaces each by a variable of the page.
PLACEHOLDERS = {name: f"#0100{number:02x}" for number, name in enumerate(_NAMES)}
_PEERS = [name for name in _NAMES if name.startswith("p") and name[1:].isdigit()]
_MARKERS = "Ds^vPXp"
_SAMPLE = 56.0  # pixels of a legend entry besides its text: the line with its mark, and the gap to the next entry
_DASHES: Sequence[object] = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)))

PAPER, INK, MUTED, GRID, OURS, LOSS = (PLACEHOLDERS[name] for name in ("paper", "ink", "muted", "grid", "fusegen", "loss"))


@dataclass(frozen=True)
class Look:
    """The colour, marker and dashes that distinguish a series; never colour alone.

    Attributes:
        colour: a placeholder.
        marker, dash: values for matplotlib.
    """

    colour: str
    marker: str
    dash: object


def looks(providers: Sequence[str]) -> dict[str, Look]:
    """Returns a look for each provider; those of fusegen and the copy are fixed."""
    fixed = {FUSEGEN: Look(OURS, "o", "-"), COPY: Look(PLACEHOLDERS["copy"], "|", (0, (1.5, 2)))}
    peers = [provider for provider in providers if provider not in fixed]
    found = {provider: peer_look(number) for number, provider in enumerate(peers)}
    return {provider: (fixed | found)[provider] for provider in providers}


def peer_look(number: int) -> Look:
    """Returns the look of a series by its number; the first 49 differ in colour or marker."""
    return Look(
        PLACEHOLDERS[_PEERS[number % len(_PEERS)]],
        _MARKERS[(number + number // len(_MARKERS)) % len(_MARKERS)],
        _DASHES[number % len(_DASHES)],
    )


@lru_cache(maxsize=4096)
def text_width(text: str) -> float:
    """Returns the most pixels that a text takes: matplotlib's font is wider than those of browsers."""
    return 1.03 * float(text_to_path.get_text_width_height_descent(text, FontProperties(size=TEXT), False)[0])


def fitted(text: str, width: float) -> str:
    """Shortens a text to a width by cutting its middle, where names differ least."""
    cut, kept = text, len(text) - 1
    while text_width(cut) > width and kept > 2:
        cut, kept = f"{text[: kept // 2]}…{text[-(kept - kept // 2) :]}", kept - 1
    return cut


def behind(pad: float = 1.0) -> dict[str, object]:
    """Returns the box of a text that covers grid lines."""
    return {"facecolor": PAPER, "edgecolor": "none", "pad": pad}


def unit_label(axes: Axes, text: str, height: float) -> None:
    """Writes the unit of the vertical axis above it, at the figure's left edge."""
    axes.annotate(text, (0, height), xycoords=("figure points", "figure points"), va="top", color=MUTED, annotation_clip=False)


def label_margin(names: Sequence[str], width: float) -> float:
    """Returns the pixels for names to the left of the axes; at most half of the width."""
    return min(14 + max(map(text_width, names)), width / 2)


def case_label(axes: Axes, place: float, text: str, room: float) -> None:
    """Writes a case's name at its line, within ``room`` pixels."""
    across = axes.get_yaxis_transform()
    axes.annotate(fitted(text, room), (0, place), (-8, 0), xycoords=across, textcoords="offset points", ha="right", va="center")


@contextmanager
def styled(salt: str) -> Iterator[None]:
    """Sets matplotlib's style for charts, regardless of the user's settings.

    Args:
        salt: makes identifiers in the SVG differ from those of other charts on a page, but equal in each run.
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
    """Returns a figure with one pair of axes; all sizes are in pixels."""
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    box = (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
    return figure, figure.add_axes(box)


def legend(entries: Sequence[tuple[str, Look]], width: float) -> Figure:
    """Draws a legend of the looks, in as many columns as fit."""
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


# Figures as SVG for a page, with the page's colours and fonts. Screen readers can read names, and nothing is loaded from elsewhere.

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_TIP = "tip:"
_VARIABLES = {colour: f"var(--{name})" for name, colour in PLACEHOLDERS.items()}
_PLACEHOLDER = re.compile("|".join(PLACEHOLDERS.values()))
_FONT = re.compile(r"font-family:[^;]*;?\s*")


def tip(text: str) -> str:
    """Returns the ``gid`` of an artist with a tooltip."""
    return _TIP + text


def svg(figure: Figure, *, key: str, title: str, description: str, style: str = "") -> str:
    """Returns a figure as SVG text; call it within `styled`.

    Args:
        figure: a figure drawn with the placeholders for colours.
        key: differs from that of any other chart on the page.
        title, description: text for readers who cannot see the chart.
        style: CSS for a standalone file.
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
    """Removes everything that would affect a page: global CSS rules, fonts, and names that other charts also have."""
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
    """Converts a tip to a title, which browsers show as a tooltip."""
    if name.startswith(_TIP):
        title = ElementTree.Element(f"{{{_SVG}}}title")
        title.text = name.removeprefix(_TIP)
        group.insert(0, title)


def _size(root: ElementTree.Element) -> None:
    """Sets the size in pixels; matplotlib writes points."""
    _, _, root.attrib["width"], root.attrib["height"] = root.attrib["viewBox"].split()
    root.set("style", "stroke-linejoin: round; stroke-linecap: butt")


def _name(root: ElementTree.Element, key: str, title: str, description: str) -> None:
    for number, (kind, text) in enumerate((("title", title), ("desc", description))):
        element = ElementTree.Element(f"{{{_SVG}}}{kind}", {"id": f"{key}-{kind}"})
        element.text = text
        root.insert(number, element)
    root.set("role", "img")
    root.set("aria-labelledby", f"{key}-title {key}-desc")


# Readable axes: rates in a suitable unit, powers as 1, 10, 1k or 4k, not as exponents.

_UNITS = ((1e6, "T"), (1e3, "G"), (1.0, "M"))


@dataclass(frozen=True)
class Unit:
    """A unit of rates.

    Attributes:
        scale: bytes or operations per microsecond that are one unit.
        name: the label at an axis.
    """

    scale: float
    name: str


def unit_of(rates: Iterable[float], what: str) -> Unit:
    """Returns the largest unit in which the greatest rate is at least 0.1.

    Args:
        rates: bytes or operations per microsecond.
        what: ``B/s`` or ``FLOP/s``.
    """
    greatest = max(rates, default=0.0)
    scale, letter = next((unit for unit in _UNITS if greatest >= unit[0] / 10), _UNITS[-1])
    return Unit(scale, letter + what)


def shortened(value: float, thousand: int = 1000) -> str:
    """Formats a number for an axis: 0.1, 20, 5k, 1M."""
    for power, letter in ((2, "M"), (1, "k")):
        if value >= thousand**power:
            return f"{value / thousand**power:.3g}{letter}"
    return f"{value:.3g}"


def decades(axis: Axis, low: float, high: float, most: int) -> None:
    """Sets ticks at 1, 2 and 5 times each power of ten, or fewer if these are more than ``most``."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10.0**power for power in powers for digit in digits if low <= digit * 10.0**power <= high]
        if len(ticks) <= most:
            break
    _set(axis, ticks[:: -(-len(ticks) // most) or 1], 1000)


def doublings(axis: Axis, low: float, high: float, most: int) -> None:
    """Sets ticks at powers of two, evenly thinned to at most ``most``."""
    powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    step = max(1, -(-len(powers) // most))
    _set(axis, [2.0**power for power in powers[::step]], 1024)


def evenly(axis: Axis, most: int) -> None:
    """Sets ticks at round distances from zero."""
    axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: shortened(value)))


def _set(axis: Axis, ticks: Sequence[float], thousand: int) -> None:
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: shortened(value, thousand)))
