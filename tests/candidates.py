"""A limit on the candidates that ``fg.tune`` measures: the emulator is slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fusegen import tuning
from fusegen.schedule.choices import Choice
from fusegen.schedule.kernel import Plan


def measure_only(monkeypatch: pytest.MonkeyPatch, chosen: Callable[[Choice], Sequence[Plan]]) -> None:
    """Lets ``fg.tune`` measure some candidates of each choice."""
    measured = tuning._Tuner._measured

    def of_chosen(self: Any, choice: Choice) -> Any:
        return measured(self, replace(choice, candidates=tuple(chosen(choice))))

    monkeypatch.setattr(tuning._Tuner, "_measured", of_chosen)
