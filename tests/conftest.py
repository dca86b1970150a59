"""What all tests share: a cache of their own, whatever the user's environment says, and the flags."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fusegen.compiler.passes import forget_programs
from fusegen.extension.native import wait
from fusegen.settings import settings

# Before fusegen reads its settings, which it does once. Entries go by content, so all checkouts share one cache, which is kept.
_SHARED = Path(os.environ.get("FUSEGEN_TEST_CACHE") or Path.home() / ".cache" / "fusegen-tests")
_COMPILED = ("cpu", "cubin", "cuda", "emitted", "emulator", "extension", "templates")
_SLOW = 5.0  # seconds of a test
os.environ["FUSEGEN_CACHE_DIR"] = str(_SHARED)
os.environ["FUSEGEN_PROGRESS"] = "0"  # stderr must not depend on how fast a machine compiles
os.environ.pop("FUSEGEN_EMULATE", None)
os.umask(0o022)  # a cache that a group can write to is refused
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # workers, and processes that tests start, compile each module once


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--accept``: what is compared with a stored text replaces it instead; look at the difference before you keep it.

    ``--programs``, ``--seed``, ``--device``: which random programs run, and where. ``--stress``: the part of the processes, kills,
    damaged files and hostile strings of `.ci/deep cache`, in percent.
    """
    parser.addoption("--accept", action="store_true", help="replace stored texts by what comes out now")
    parser.addoption("--programs", type=int, default=200, help="tests/fuzz: how many random programs")
    parser.addoption("--seed", type=int, default=0, help="tests/fuzz: another seed draws other programs")
    parser.addoption("--stress", type=int, default=10, help="tests/unit/test_stress.py: percent of the deep suite's counts")
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="tests/fuzz, test_stress.py: where kernels run")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Lists the tests that are too slow: to be split, or marked as `deep`."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    slow = sorted((report.duration, report.nodeid) for report in reports if report.duration > _SLOW)
    if slow and terminalreporter.config.getoption("markexpr") == "not deep":
        terminalreporter.section(f"tests over {_SLOW:.0f} s: split them, or mark them as deep")
        for seconds, name in reversed(slow):
            terminalreporter.line(f"{seconds:5.1f} s  {name}")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart() -> None:
    """All tests run with the native module: the first process builds it."""
    wait()
    _SHARED.mkdir(parents=True, exist_ok=True)
    _without_plans(_SHARED)


def _without_plans(cache: Path) -> None:
    """Has a cache keep no plan, which another test would find that plans by other rules: where the folder should be, a file is."""
    (cache / "plans").touch()


def pytest_collectstart() -> None:
    """What a module draws while it is imported depends on no module before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """A test draws the same numbers alone and among others."""
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Settings are read anew, also by fixtures of a module: an earlier test may have had another environment."""
    settings.cache_clear()


@pytest.fixture(autouse=True)
def _without_known_programs() -> None:
    """A test lays out its programs anew: earlier tests may have done so by other rules."""
    forget_programs()


@pytest.fixture
def accept(request: pytest.FixtureRequest) -> bool:
    """True if stored texts are to be replaced."""
    return bool(request.config.getoption("--accept"))


@pytest.fixture
def stress(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """The part of a count of the deep suite that runs here."""
    return lambda count: max(2, count * request.config.getoption("--stress") // 100)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, but for compiled code: what `fg.tune` measures in it decides no plan of another test."""
    folder = tmp_path / "cache"
    folder.mkdir()
    for name in _COMPILED:
        (_SHARED / name).mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(_SHARED / name)
    _without_plans(folder)
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(folder))
    settings.cache_clear()
    return folder


@pytest.fixture
def kept_plans(own_cache: Path) -> Path:
    """The folder of a cache of the test's own that keeps plans."""
    folder = own_cache / "plans"
    folder.unlink()
    return folder


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors go through the emulator."""
    monkeypatch.setenv("FUSEGEN_EMULATE", "1")
    settings.cache_clear()


@pytest.fixture(params=["cpu", "emulator"])
def either(request: pytest.FixtureRequest) -> None:
    """CPU tensors go through the CPU target, and in another run of the test through the emulator."""
    if request.param == "emulator":
        request.getfixturevalue("emulated")
