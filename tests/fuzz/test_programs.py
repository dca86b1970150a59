"""Random programs come out right: on the CPU target, in the emulator, on a GPU.

``pytest tests/fuzz --programs 3000 --seed 7`` runs more of them, or others; ``--device cuda`` runs them on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusegen.compiler import backends, specialize
from fusegen.settings import settings
from tests.fuzz.batch import QUICK, Judge, judge_all


def test_programs(batch: tuple[int, int], first_seed: int, on_device: str) -> None:
    """Programs of all sizes, on the CPU target or on a GPU."""
    number, count = batch
    judge = Judge(on_device, QUICK if number % 10 else None)
    judge_all(judge, first_seed + number, count)
    assert len(judge.refused) <= 5 + count // 10, f"many programs are refused: {sorted({e.what for e in judge.refused})}"


def test_tiny_programs_in_the_emulator(
    emulated: tuple[int, int], first_seed: int, on_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text for a GPU, run on the CPU with every access checked; kernels of rows and columns, which are too small to be fastest
    as one kernel, stay one in every other batch."""
    if on_device != "cpu":
        pytest.skip("hardware runs the programs")
    monkeypatch.setattr(backends, "settings", lambda: replace(settings(), emulate=True))
    number, count = emulated
    if number % 2:
        monkeypatch.setattr(specialize, "is_faster_split", lambda *_: False)
    judge_all(Judge(emulated=True), first_seed + 500_000 + number, count, tiny=True)
