"""What all tests share: a cache of their own, whatever the user's environment says, and the flag that accepts new goldens."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before fusegen reads its settings, which it does once. Kept between runs, since entries go by content.
os.environ["FUSEGEN_CACHE_DIR"] = str(Path(__file__).resolve().parents[1] / ".cache" / "tests")
os.environ.pop("FUSEGEN_EMULATE", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--accept``: what is compared with a stored text replaces it instead; look at the difference before you keep it."""
    parser.addoption("--accept", action="store_true", help="replace stored texts by what comes out now")


@pytest.fixture
def accept(request: pytest.FixtureRequest) -> bool:
    """Whether stored texts are to be replaced."""
    return bool(request.config.getoption("--accept"))
