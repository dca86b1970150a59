"""The documentation site in a browser, opened from a folder.

Skipped where there is no Chromium; ``.ci/deep browser`` installs it.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from selenium import webdriver

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


def test_the_search_finds_a_word(browser: webdriver.Chrome, site: Path) -> None:
    open_page(browser, (site / "search.html").as_uri() + "?q=checkpointing", DESK)
    end = time.monotonic() + _LONGEST_SEARCH
    found: list[str] = []
    while not found and time.monotonic() < end:
        found = browser.execute_script("return [...document.querySelectorAll('#search-results li a')].map(a => a.href)")
    assert any("/training.html" in link for link in found)
    assert browser.get_log("browser") == []
