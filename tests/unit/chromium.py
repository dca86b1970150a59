"""A headless Chromium for tests of pages. ``.ci/deep browser`` installs it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
LACKING = None if CHROMIUM and DRIVER else "no chromium or no chromedriver: apt-get install chromium chromium-driver"
"""The reason why there is no browser; None if there is one."""

_WIDEST_PHONE = 500

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """A browser with a profile of its own."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(DRIVER))
    yield driver
    driver.quit()


def open_page(browser: webdriver.Chrome, address: str, width: int, scheme: str = "light") -> None:
    """Opens a page at a width, in a light or dark scheme."""
    size = {"width": width, "height": 800, "deviceScaleFactor": 2, "mobile": width < _WIDEST_PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    wish = {"media": "screen", "features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", wish)
    browser.get("about:blank")  # opening the page that is open would be a reload, which keeps what is typed into its fields
    browser.get(address)


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


def shown_texts(browser: webdriver.Chrome) -> list[Text]:
    """Returns every text that the open page shows."""
    found = browser.execute_script(_TEXTS)
    return [Text(**text | {"colour": tuple(text["colour"]), "ground": tuple(text["ground"])}) for text in found]
