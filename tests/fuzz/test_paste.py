"""A program's text is a test that runs by itself; a bug of the compiler shrinks to few nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.fuzz.batch import Judge, drawn, judge_all
from tests.fuzz.program import Program


def _run(text: str) -> None:
    space: dict[str, Any] = {}
    exec(compile(text, "<pasted>", "exec"), space)
    space["test_program"]()


def test_pasted_programs_run_and_pass() -> None:
    for program in drawn(77, 6):
        _run(program.paste_text())


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
