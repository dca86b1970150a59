"""What tests of the command line share."""

from __future__ import annotations

import pytest

from fusegen.cli.main import main
from tests.unit.commands import Result, Run


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process."""

    def call(*words: str) -> Result:
        code = main(words)
        return Result(code, *capsys.readouterr())

    return call
