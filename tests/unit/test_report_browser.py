"""The report in a browser: legible on a phone and on a desk, in light and in dark.

Skipped where there is no Chromium; ``.ci/deep browser`` installs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from selenium import webdriver

from fusegen.bench.report import write_report
from tests.unit.bench_records import everything
from tests.unit.chromium import LACKING, browser, open_page

pytestmark = [pytest.mark.deep, pytest.mark.skipif(LACKING is not None, reason=LACKING or "")]

PHONE, DESK = 360, 1280
LEAST_CONTRAST, LEAST_PIXELS = 4.5, 12.0

__all__ = ["browser"]  # a fixture

# Every text that is shown: its colour, what it lies on, and its size.
_TEXTS = """
const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
function rgba(colour) {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  return Array.from(canvas.getImageData(0, 0, 1, 1).data);
}
function ground(element) {
  for (let e = element; e; e = e.parentElement) {
    const colour = rgba(getComputedStyle(e).backgroundColor);
    if (colour[3] > 0) return colour;
  }
  return [255, 255, 255, 255];
}
const walker = document.createTreeWalker(document.documentElement, NodeFilter.SHOW_TEXT);
const found = [];
while (walker.nextNode()) {
  const text = walker.currentNode.textContent.trim(), element = walker.currentNode.parentElement;
  const box = element.getBoundingClientRect(), style = getComputedStyle(element);
  if (!text || !box.width || ['STYLE', 'TITLE'].includes(element.tagName)) continue;
  found.push({
    text, table: Boolean(element.closest('table')), size: parseFloat(style.fontSize),
    colour: rgba(style.color), ground: ground(element),
  });
}
return found;
"""


@dataclass(frozen=True)
class Text:
    """A text as the browser shows it.

    Attributes:
        text: what it says.
        table: whether it stands in one.
        size: of its letters, in CSS pixels.
        colour, ground: red, green, blue, and how opaque, to 255.
    """

    text: str
    table: bool
    size: float
    colour: tuple[float, ...]
    ground: tuple[float, ...]

    @property
    def contrast(self) -> float:
        """As WCAG defines it."""
        lighter, darker = sorted((_luminance(self.colour), _luminance(self.ground)), reverse=True)
        return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: tuple[float, ...]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (part / 255 for part in colour[:3])]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a report."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(everything(), path)
    return path.as_uri()


def _texts(browser: webdriver.Chrome) -> list[Text]:
    return [Text(**found | {"colour": tuple(found["colour"]), "ground": tuple(found["ground"])}) for found in _run(browser, _TEXTS)]


def _run(browser: webdriver.Chrome, script: str) -> Any:
    return browser.execute_script(script)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_the_page_is_legible(browser: webdriver.Chrome, page: str, width: int, scheme: str) -> None:
    open_page(browser, page, width, scheme)
    assert _run(browser, "return window.innerWidth") == width
    assert _run(browser, "return document.scrollingElement.scrollWidth <= window.innerWidth")
    texts = _texts(browser)
    assert any(text.table for text in texts)
    assert [text for text in texts if text.contrast < LEAST_CONTRAST or text.colour[3] < 255] == []
    assert [text for text in texts if text.size < LEAST_PIXELS] == []
    shown = {text.text for text in texts if text.ground != (253, 252, 250, 255)}
    assert bool(shown) is (scheme == "dark"), "the scheme is followed"
