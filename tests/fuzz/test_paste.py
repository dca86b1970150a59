"""A program's text is a test that runs by itself; a bug of the compiler shrinks to few nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from fusegen.ir.graph import Node
from fusegen.ir.ops import Op
from fusegen.passes import expand
from fusegen.passes.algebra import Value
from tests.fuzz.batch import QUICK, Judge, drawn, judge_all
from tests.fuzz.program import Program


def _run(text: str) -> None:
    space: dict[str, Any] = {}
    exec(compile(text, "<pasted>", "exec"), space)
    space["test_program"]()


def test_pasted_programs_run_and_pass() -> None:
    for program in drawn(77, 6):
        _run(program.paste_text())


def test_the_text_makes_the_same_program() -> None:
    """What is pasted computes what was drawn: the same inputs, the same graph."""
    for program in drawn(78, 12):
        space: dict[str, Any] = {}
        exec(program.paste_text(), space)
        _, args = program.build()
        pasted = [space[name] for name in program.parameters]
        assert [str(a) for a in pasted] == [str(a) for a in args]


class OfGreatest(Judge):
    """Finds programs wrong that take the greatest of some elements."""

    def batch(self, found: Sequence[Program]) -> list[Program]:
        self.verdicts.update({each: text if ".amax(" in (text := each.paste_text()) else None for each in found})
        return [each for each in found if self.verdicts[each]]


def test_a_wrong_program_shrinks_to_a_small_one() -> None:
    with pytest.raises(AssertionError) as caught:
        for number in range(20):
            judge_all(OfGreatest(), 4000 + number, 20)
    assert ".amax(" in str(caught.value) and _steps(str(caught.value)) == 1


def _steps(text: str) -> int:
    return sum(line.startswith("    v") for line in text.splitlines())


@pytest.mark.deep
def test_a_broken_rule_shrinks_to_a_small_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler whose mean is too large: what is reported has a step or two, and fails where it is pasted."""

    def broken(args: Sequence[Value], node: Node) -> Value:
        return args[0].mean(cast(tuple[int, ...], node.attr("dims"))) + 0.01

    monkeypatch.setitem(expand.EXPANSIONS, Op.MEAN, broken)
    with pytest.raises(AssertionError) as caught:
        for number in range(20):
            judge_all(Judge(flags=QUICK), 4000 + number, 50)
    text = str(caught.value)
    assert ".mean(" in text and _steps(text) <= 2, text
    with pytest.raises(AssertionError, match="allowed"):
        _run(text[text.index("import torch") :])
