"""The table of planted bugs fits the repository as it stands; `python -m tests.mutants` plants them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.table import ROOT, Mutant, mutants

MUTANTS = mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_bug_can_be_planted(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert mutant.planted_in(text) != text
    assert mutant.why.endswith(".")


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_named_tests_exist(mutant: Mutant) -> None:
    for test in filter(None, (mutant.caught_by, mutant.gpu_test)):
        file, _, function = test.partition("::")
        assert function.partition("[")[0] in functions(ROOT / file), test
    assert "tests/gpu" not in mutant.caught_by
    assert bool(mutant.hardware) is bool(mutant.gpu_test)


def test_bugs_are_spread_over_all_rooms() -> None:
    files = [mutant.file for mutant in MUTANTS]
    rooms = ("templates/cuda/", "templates/cpu/", "templates/emulator/", "fusegen/ir/", "fusegen/passes/", "fusegen/schedule/",
             "fusegen/emit/", "fusegen/runtime/", "fusegen/jit/")  # fmt: skip
    for room in rooms:
        assert sum(file.startswith(room) for file in files) >= 3, room
    assert len(MUTANTS) >= 40 and sum(bool(m.hardware) for m in MUTANTS) <= len(MUTANTS) // 10
