"""What all tests share: a cache of their own, whatever the user's environment says, and the flags."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before fusegen reads its settings, which it does once. Kept between runs, since entries go by content.
os.environ["FUSEGEN_CACHE_DIR"] = str(Path(__file__).resolve().parents[1] / ".cache" / "tests")
os.environ.pop("FUSEGEN_EMULATE", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--accept``: what is compared with a stored text replaces it instead; look at the difference before you keep it.

    ``--programs``, ``--seed``, ``--device``: which random programs run, and where.
    """
    parser.addoption("--accept", action="store_true", help="replace stored texts by what comes out now")
    parser.addoption("--programs", type=int, default=200, help="tests/fuzz: how many random programs")
    parser.addoption("--seed", type=int, default=0, help="tests/fuzz: another seed draws other programs")
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="tests/fuzz: where the programs run")


@pytest.fixture
def accept(request: pytest.FixtureRequest) -> bool:
    """Whether stored texts are to be replaced."""
    return bool(request.config.getoption("--accept"))
