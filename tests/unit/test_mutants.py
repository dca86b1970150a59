"""The table of planted bugs fits the repository as it stands; `python -m tests.mutants` plants them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.mutants.table import ROOT, mutants
from tests.naming import case

ROOMS = ("templates/cuda/", "templates/cpu/", "templates/emulator/", "fusegen/trace/", "fusegen/autodiff/", "fusegen/ir/",
         "fusegen/passes/", "fusegen/schedule/", "fusegen/emit/", "fusegen/jit/", "fusegen/runtime/", "fusegen/compiler/",
         "fusegen/guards/", "fusegen/bundle/", "fusegen/verify/", "fusegen/bench/")  # fmt: skip


def test_all_bugs_can_be_planted() -> None:
    for mutant in mutants():
        with case(mutant.name):
            text = (ROOT / mutant.file).read_text(encoding="utf-8")
            planted = mutant.planted_in(text)
            assert planted != text
            assert mutant.why.endswith(".")
            if mutant.file.endswith(".py"):  # a text that is no Python fails whatever the test
                ast.parse(planted)


def test_bugs_are_spread_over_all_rooms() -> None:
    known = mutants()
    for room in ROOMS:
        assert sum(mutant.file.startswith(room) for mutant in known) >= 3, room
    assert sum(bool(mutant.hardware) for mutant in known) <= len(known) // 10


@cache
def functions(file: Path) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_named_tests_exist() -> None:
    for mutant in mutants():
        with case(mutant.name):
            assert "tests/gpu" not in mutant.caught_by
            assert bool(mutant.hardware) is bool(mutant.gpu_test)
            for test in filter(None, (mutant.caught_by, mutant.gpu_test)):
                file, _, rest = test.partition("::")
                name, _, parameters = rest.partition("[")
                function = functions(ROOT / file).get(name)
                assert function is not None, test
                assert not parameters or function.decorator_list or function.args.args, test
