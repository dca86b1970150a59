"""Figures as SVG for a page: colours and fonts are the page's, names can be read aloud, nothing is asked of anywhere else."""

from __future__ import annotations

import io
import re
from xml.etree import ElementTree

from matplotlib.figure import Figure

from fusegen.bench.charts.style import PLACEHOLDERS

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
