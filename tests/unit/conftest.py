"""Fixtures of tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import fusegen as fg
from fusegen.cli.main import main
from fusegen.compiler.passes import forget_programs
from fusegen.emit import environment
from fusegen.graphs import graphed, recording
from fusegen.settings import settings
from tests.unit.commands import Result, Run
from tests.unit.tapes import Tapes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process."""

    def call(*words: str) -> Result:
        code = main(words)
        return Result(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation site, built strictly; in half a minute."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run([sys.executable, "-m", "docs.make", folder], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records and replays calls on the CPU."""
    monkeypatch.setattr(recording, "GraphPool", Tapes)
    monkeypatch.setattr(graphed, "DEVICE", "cpu")


@pytest.fixture
def lowers_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Emits a kernel as a process does that has rendered no template yet, with a cache of the test's own."""

    def forget() -> None:
        for known in (environment.environment, environment.body, environment._environment):
            known.cache_clear()

    def lower() -> str:
        forget_programs()
        forget()
        kernel = fg.kernel(lambda x, w: torch.nn.functional.gelu(x @ w))
        tensors = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((64, 128), (128, 256))]
        return kernel.lower(*tensors, target="sm_90a").asm["cuda"]

    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    yield lower
    forget()  # a test may have changed templates
