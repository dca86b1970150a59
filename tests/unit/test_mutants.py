"""The table of planted bugs fits the repository as it stands; `python -m tests.mutants` plants them."""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.mutants.table import ROOT, Mutant, mutants
from tests.naming import case

ROOMS = ("templates/cuda/", "templates/cpu/", "templates/emulator/", "fusegen/lang/", "fusegen/autodiff/", "fusegen/ir/",
         "fusegen/passes/", "fusegen/schedule/", "fusegen/emit/", "fusegen/jit/", "fusegen/runtime/", "fusegen/state/",
         "fusegen/bundle/", "fusegen/verify/", "fusegen/bench/")  # fmt: skip
BUG = Mutant("a bug", "kernel.py", old="a < b", new="a <= b", why="", caught_by="", inside="Kernel.run")
PYTHON = "def run(a, b):\n    return a < b\n\nclass Kernel:\n    def run(self, a, b):\n        return (a\n                <  b)\n"
TEMPLATE = "{% macro run() %}a<b{% endmacro %}\nvoid use() { go(a < b); }\nvoid go(int a) {\n  if (a) { use(); }\n  a  < b;\n}\n"


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


def test_white_space_makes_no_difference_and_the_function_does() -> None:
    assert BUG.planted_in(PYTHON) == PYTHON.replace("a\n                <  b", "a <= b")
    assert replace(BUG, inside="run").planted_in(PYTHON) == PYTHON.replace("return a < b", "return a <= b")
    in_cuda = replace(BUG, file="kernel.cu.jinja", inside="go")
    assert in_cuda.planted_in(TEMPLATE) == TEMPLATE.replace("a  < b", "a <= b")
    assert replace(in_cuda, inside="run").planted_in(TEMPLATE) == TEMPLATE.replace("a<b", "a <= b")


def test_a_bug_that_cannot_be_planted_is_named() -> None:
    for wrong, why in (
        (replace(BUG, inside="Kernel.walk"), "a bug: kernel.py has no function or macro Kernel.walk"),
        (replace(BUG, old="a > b"), "a bug: 'a > b' occurs 0 times in Kernel.run of kernel.py"),
        (replace(BUG, inside=""), "a bug: 'a < b' occurs 2 times in kernel.py"),
    ):
        with pytest.raises(ValueError, match=f"^{why}$"):
            wrong.planted_in(PYTHON)
