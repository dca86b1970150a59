"""A headless Chromium for tests of pages. ``.ci/deep browser`` installs it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

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
    browser.get(address)
