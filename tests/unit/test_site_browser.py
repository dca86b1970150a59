"""The documentation site in a browser, opened from a folder.

Skipped where there is no Chromium; ``.ci/deep browser`` installs it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from urllib.parse import quote_plus

import pytest
from selenium import webdriver
from selenium.webdriver.common.keys import Keys

from tests.unit.chromium import LACKING, browser, open_page

__all__ = ["browser"]  # a fixture

PHONE, DESK = 390, 1280
_LONGEST_SEARCH = 30.0  # seconds

pytestmark = [pytest.mark.deep, pytest.mark.skipif(LACKING is not None, reason=LACKING or "")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_pages_fit_and_report_no_error(browser: webdriver.Chrome, site: Path, width: int, scheme: str) -> None:
    grounds = set()
    for path in sorted(site.glob("*.html")):
        open_page(browser, path.as_uri(), width, scheme)
        assert browser.execute_script("return document.scrollingElement.scrollWidth <= window.innerWidth"), path.name
        loaded = browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
        assert not [address for address in loaded if not address.startswith(("file:", "data:"))], path.name
        grounds.add(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert browser.get_log("browser") == []
    assert len(grounds) == 1 and (grounds == {"rgb(255, 255, 255)"}) is (scheme == "light")


def test_speed_ups_and_pictures_can_be_read_on_a_phone(browser: webdriver.Chrome, site: Path) -> None:
    for name in ("measured", "fusions", "benchmarks"):
        open_page(browser, (site / f"{name}.html").as_uri(), PHONE)
        ends = browser.execute_script(_SPEEDUP_ENDS)
        assert ends and max(ends) <= PHONE, name
    for path in sorted(site.glob("*.html")):
        open_page(browser, path.as_uri(), PHONE)
        assert min(browser.execute_script(_PICTURE_SCALES), default=1.0) >= _LEAST_SCALE, path.name


_SPEEDUP_ENDS = """
const cells = [...document.querySelectorAll("article th")].filter(e => e.textContent.trim() === "speed-up");
return cells.map(e => e.getBoundingClientRect().right);
"""
_PICTURE_SCALES = """
const scale = e => e.getBoundingClientRect().width / e.naturalWidth;
const isScreen = e => e.src.endsWith("explain.svg");  // with text of 20 px
return [...document.querySelectorAll("article img")].map(e => scale(e) * (isScreen(e) ? 5 / 3 : 1));
"""
_LEAST_SCALE = 10 / 12  # pictures have text of 12 px


def test_plots_have_the_cases_that_the_filters_leave(browser: webdriver.Chrome, site: Path) -> None:
    rows = json.loads((site / "measured.json").read_text(encoding="utf-8"))
    open_page(browser, (site / "measured.html").as_uri(), DESK)

    def marks(selector: str) -> int:
        return int(browser.execute_script(f"return document.querySelectorAll('{selector}').length"))

    speedups = [row["speed-up"] for row in rows if row["speed-up"]]
    assert marks(".speedups .mark") == len(speedups)
    assert marks(".speedups .loss") == sum(speedup < 1 for speedup in speedups) > 0
    assert marks(".roofline .mark") == sum(row["TFLOP/s"] is not None for row in rows)
    browser.find_element("css selector", ".choices input").send_keys("swiglu")
    assert marks(".speedups .mark") == sum("swiglu" in row["case"] for row in rows if row["speed-up"])
    assert marks(".roofline .mark") == sum("swiglu" in row["case"] for row in rows if row["TFLOP/s"])


def test_the_table_sorts_by_key_and_filters_by_text_of_any_case(browser: webdriver.Chrome, site: Path) -> None:
    open_page(browser, (site / "measured.html").as_uri(), DESK)

    def column(number: int) -> list[str]:
        cells = f"[...document.querySelectorAll('.measured tbody tr')].map(row => row.cells[{number}].textContent)"
        return list(browser.execute_script(f"return {cells}"))

    titles = browser.find_elements("css selector", ".measured th button")
    shape, peer = (next(i for i, title in enumerate(titles) if title.text == name) for name in ("shape", "fastest peer"))
    titles[shape].send_keys(Keys.ENTER)
    rows = [int(each.partition("x")[0]) for each in column(shape)]
    assert rows == sorted(rows) and browser.switch_to.active_element == titles[shape]
    for key in (Keys.ENTER, Keys.SPACE):  # ascending, then descending
        titles[peer].send_keys(key)
        known = [each != "–" for each in column(peer)]
        assert known == sorted(known, reverse=True) and len(set(known)) == 2
    browser.find_element("css selector", ".choices input").send_keys("SwiGLU")
    assert column(0) and all("swiglu" in each for each in column(0))


@pytest.mark.parametrize("name", ["speedups", "roofline"])
def test_keys_read_the_marks_of_a_plot(browser: webdriver.Chrome, site: Path, name: str) -> None:
    open_page(browser, (site / "measured.html").as_uri(), PHONE)
    svg, tip = (browser.find_element("css selector", f".{name} {part}") for part in ("svg", "output"))
    assert not tip.is_displayed()
    told = []
    for key in (Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.HOME, Keys.END):
        svg.send_keys(key)
        told.append(tip.text)
    assert told[0] == told[2] and len(set(told)) == 3 and all("NVIDIA" in text for text in told)
    svg.send_keys(Keys.ESCAPE)
    assert not tip.is_displayed()


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("checkpointing", "training.html#checkpointing"),  # the title of a section
        ("attention", "attention.html"),  # the title of a page, and of a section in others
        ("layer norm", "normalization.html#layer-norm"),
        ("dynamic shapes", "patching.html"),  # in no title of a user's page, in some of contributors
    ],
)
def test_the_search_shows_pages_of_users_with_the_words_in_a_title_first(
    browser: webdriver.Chrome, site: Path, query: str, first: str
) -> None:
    open_page(browser, (site / "search.html").as_uri() + f"?q={quote_plus(query)}", DESK)
    end = time.monotonic() + _LONGEST_SEARCH
    found: list[str] = []
    while not found and time.monotonic() < end:
        found = browser.execute_script("return [...document.querySelectorAll('#search-results li a')].map(a => a.href)")
    assert found and Path(found[0]).name == first
    assert browser.get_log("browser") == []
