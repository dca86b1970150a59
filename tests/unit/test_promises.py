"""Every promise of docs/promises.md is held by a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMED = sorted(
    set(re.findall(r"`((?:unit|cpu|gpu|fuzz|emulator)/\w+\.py)::(\w+)`", (ROOT / "docs/promises.md").read_text(encoding="utf-8")))
)


def test_promises_are_found() -> None:
    assert len(NAMED) > 30


@pytest.mark.parametrize(("file", "function"), NAMED)
def test_the_test_of_a_promise_exists(file: str, function: str) -> None:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
