"""The page of a kernel in a browser: it fits, reports no error, and lights up lines by mouse, touch and keyboard.

Skipped where there is no Chromium; ``.ci/deep browser`` installs it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from torch import Tensor, nn

import fusegen as fg
from tests.unit.chromium import LACKING, browser, open_page, shown_texts
from tests.unit.lowering import lowered, meta

__all__ = ["browser"]  # a fixture

PHONE, DESK = 390, 1280
LEAST_CONTRAST, LEAST_PIXELS = 4.5, 12.0

pytestmark = [pytest.mark.deep, pytest.mark.skipif(LACKING is not None, reason=LACKING or "")]


def block(x: Tensor, gain: Tensor, up: Tensor, down: Tensor, name: str) -> Tensor:
    normed = F.rms_norm(x, (x.shape[-1],), gain)
    hidden = F.gelu(normed @ up, approximate="tanh")
    return x + hidden @ down + len(name)


@pytest.fixture(scope="module", params=["sm_90a", "cpu"])
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    arguments = meta(4096, 512), meta(512), meta(512, 2048), meta(2048, 512), "</script><img src=x onerror=alert(1)>"
    path: Path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(lowered(block, *arguments, target=request.param).html(), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def machine_address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page with machine code."""
    path: Path = tmp_path_factory.mktemp("machine") / "page.html"
    arguments = meta(4096, 512), meta(512), meta(512, 2048), meta(2048, 512), ""
    path.write_text(lowered(block, *arguments).html(sass=True), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def model_address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a patched model with a name that does not fit a phone."""
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(2)))
    model.__class__ = type("Model" * 20, (nn.Sequential,), {})
    report = fg.patch(model)
    model(torch.randn(8, 64))
    path: Path = tmp_path_factory.mktemp("model") / "page.html"
    path.write_text(report.html(), encoding="utf-8")
    return path.as_uri()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_the_pages_are_legible(browser: webdriver.Chrome, address: str, model_address: str, width: int, scheme: str) -> None:
    for page in (address, model_address):
        open_page(browser, page, width, scheme)
        browser.execute_script("for (const part of document.querySelectorAll('details')) part.open = true;")
        browser.execute_script("document.querySelector('.lines [data-l]')?.click();")
        assert browser.execute_script("return document.scrollingElement.scrollWidth <= window.innerWidth")
        faint = [text for text in shown_texts(browser) if text.contrast < LEAST_CONTRAST or text.size < LEAST_PIXELS]
        assert faint == []
        # a font that no style defines would be the browser's own, with serifs
        assert "sans-serif" in browser.execute_script("return getComputedStyle(document.body).fontFamily")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_the_page_fits_and_reports_no_error(browser: webdriver.Chrome, address: str, width: int, scheme: str) -> None:
    open_page(browser, address, width, scheme)
    assert browser.execute_script("return document.scrollingElement.scrollWidth <= window.innerWidth")
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert [name for name in loaded if not name.startswith("data:")] == []
    ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(253, 252, 250)") is (scheme == "light")
    assert browser.get_log("browser") == []


def _lines(browser: webdriver.Chrome) -> list[WebElement]:
    return browser.find_elements(By.CSS_SELECTOR, ".lines [data-l]")


def _lit(browser: webdriver.Chrome) -> list[str]:
    """The parts of the page with lit elements that are in view within their panes."""
    script = """
    const seen = (e) => {
      const pane = e.closest(".pane")?.getBoundingClientRect(), box = e.getBoundingClientRect();
      return !pane || (box.bottom > pane.top && box.top < pane.bottom);
    };
    const name = (e) => (e.closest(".pane") ?? e.closest("svg")).getAttribute("class");
    return [...new Set([...document.querySelectorAll(".on")].filter(seen).map(name))].sort();
    """
    return list(browser.execute_script(script))


ALL = ["graph", "pane emitted", "pane yours"]


def test_the_mouse_lights_up_each_line(browser: webdriver.Chrome, address: str) -> None:
    open_page(browser, address, DESK)
    lines = _lines(browser)
    assert len(lines) == len(("normed", "hidden", "return"))
    for line in lines:
        ActionChains(browser).move_to_element(line).perform()
        assert _lit(browser) == ALL
    ActionChains(browser).move_to_element(browser.find_element(By.TAG_NAME, "h1")).perform()
    assert _lit(browser) == []


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_machine_code_lights_up_with_each_line(browser: webdriver.Chrome, machine_address: str, width: int) -> None:
    open_page(browser, machine_address, width)
    assert browser.execute_script("return document.scrollingElement.scrollWidth <= window.innerWidth")
    for line in _lines(browser):
        line.click()
        assert _lit(browser) == ["graph", "pane emitted", "pane emitted machine", "pane yours"]


def test_a_click_keeps_a_line_lit_until_escape(browser: webdriver.Chrome, address: str) -> None:
    open_page(browser, address, DESK)
    line = _lines(browser)[1]
    line.click()
    ActionChains(browser).move_to_element(browser.find_element(By.TAG_NAME, "h1")).perform()
    assert _lit(browser) == ALL and line.get_attribute("aria-pressed") == "true"
    ActionChains(browser).send_keys(Keys.ESCAPE).perform()
    assert _lit(browser) == [] and line.get_attribute("aria-pressed") == "false"


def test_a_tap_lights_up_a_line(browser: webdriver.Chrome, address: str) -> None:
    open_page(browser, address, PHONE)
    line = _lines(browser)[1]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", line)
    box = browser.execute_script("const b = arguments[0].getBoundingClientRect(); return [b.left + 60, b.top + 8]", line)
    browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [{"x": box[0], "y": box[1]}]})
    browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    assert _lit(browser) == ALL


def test_the_keyboard_lights_up_and_keeps_a_line(browser: webdriver.Chrome, address: str) -> None:
    open_page(browser, address, DESK)
    browser.execute_script("document.querySelector('.scroll').focus()")
    ActionChains(browser).send_keys(*[Keys.TAB] * browser.execute_script(_TABS)).perform()
    assert browser.switch_to.active_element == _lines(browser)[0] and _lit(browser) == ALL
    ActionChains(browser).send_keys(Keys.ENTER, Keys.TAB).perform()
    assert _lines(browser)[0].get_attribute("aria-pressed") == "true"


_TABS = """
const stops = [...document.querySelectorAll('a[href], summary, [tabindex="0"]')], at = document.activeElement;
return stops.indexOf(document.querySelector('.lines [data-l]')) - stops.indexOf(at);
"""
"""The number of stops from the focused element to the first line."""
