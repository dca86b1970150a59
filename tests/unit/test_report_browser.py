"""The report in a browser: legible on a phone and on a desk, in light and in dark.

Skipped where there is no Chromium; ``.ci/deep browser`` installs it.
"""

from __future__ import annotations

from typing import Any

import pytest
from selenium import webdriver

from fusegen.bench.report import write_report
from tests.unit.bench_records import everything
from tests.unit.chromium import LACKING, browser, open_page, shown_texts

pytestmark = [pytest.mark.deep, pytest.mark.skipif(LACKING is not None, reason=LACKING or "")]

PHONE, DESK = 360, 1280
LEAST_CONTRAST, LEAST_PIXELS = 4.5, 12.0

__all__ = ["browser"]  # a fixture


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a report."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(everything(), path)
    return path.as_uri()


def _run(browser: webdriver.Chrome, script: str) -> Any:
    return browser.execute_script(script)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_the_page_is_legible(browser: webdriver.Chrome, page: str, width: int, scheme: str) -> None:
    open_page(browser, page, width, scheme)
    assert _run(browser, "return window.innerWidth") == width
    assert _run(browser, "return document.scrollingElement.scrollWidth <= window.innerWidth")
    texts = shown_texts(browser)
    assert any(text.table for text in texts)
    assert [text for text in texts if text.contrast < LEAST_CONTRAST or text.colour[3] < 255] == []
    assert [text for text in texts if text.size < LEAST_PIXELS] == []
    shown = {text.text for text in texts if text.ground != (253, 252, 250, 255)}
    assert bool(shown) is (scheme == "dark"), "the scheme is followed"
