"""A launch of hand-written text in the emulator, with tensors for pointers; all plans of a kernel, whatever they take."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import pytest
from torch import Tensor

from fusegen import target as targets
from fusegen import tuning
from fusegen.compiler import backends, specialize
from fusegen.compiler.emulator import EmulatedBuffer, EmulatedSource, emulate
from fusegen.families.rows import heuristics
from fusegen.schedule.kernel import Plan
from fusegen.timing import RoundTimes, TimedCall
from tests.candidates import measure_only

Launch = Callable[..., None]


@pytest.fixture
def launch() -> Launch:
    """Runs the first kernel of a text; tensors named ``out…`` are writable, all others are not; the previous launch writes the one
    named by ``pending``."""
    return _launch


def _launch(
    text: str, arguments: Mapping[str, Tensor | int | float], *, grid: int = 1, block: int = 32, pending: str = "", **shape: Any
) -> None:
    entry = re.findall(r"\bfg_\w+", text)[0]
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    emulate(
        EmulatedSource(text, entry),
        grid=grid,
        block=block,
        arguments=[value.data_ptr() if isinstance(value, Tensor) else value for value in arguments.values()],
        buffers=[
            EmulatedBuffer.of(name, tensor, writable=name.startswith("out"), is_pending=name == pending)
            for name, tensor in tensors.items()
        ],
        **shape,
    )


@pytest.fixture
def first_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are not split, and have the first of their plans, whatever is expected at a test's small sizes."""
    monkeypatch.setattr(specialize, "is_faster_split", lambda *_: False)
    monkeypatch.setattr(specialize, "preferred", lambda launch, *_: next(iter(launch.candidates), None))


@pytest.fixture
def made_up_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """All plans are equally fast, so that the first is kept; their results are compared all the same. One multiprocessor, and
    launches are not split."""
    monkeypatch.setattr(specialize, "is_faster_split", lambda *_: False)

    def interleaved(calls: Mapping[str, TimedCall], *_: Any, **__: Any) -> dict[str, RoundTimes]:
        return dict.fromkeys(calls, RoundTimes(1.0, 1.0, 1.0))

    monkeypatch.setattr(tuning, "interleaved", interleaved)
    monkeypatch.setattr(backends, "_EMULATED", replace(targets.target("sm_90a"), wgmma=False, sms=1))


@pytest.fixture(params=["forms", pytest.param("all", marks=pytest.mark.deep)])
def compared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside `made_up_times`: only plans of different forms are compared with the first one; in the deep suite all plans."""
    if request.param != "all":
        measure_only(monkeypatch, lambda choice: list({_form(p): p for p in choice.candidates[::-1]}.values())[::-1])


def _form(plan: Plan) -> tuple[object, ...]:
    """What a plan's text depends on beside its numbers: of most of these, whether they are 0, 1 or more."""
    given = {each.name: getattr(plan, each.name) for each in fields(plan)}
    numbers = [value if name == "vec" or type(value) is not int else min(value, 2) for name, value in given.items()]
    threads = given.get("threads", 32)
    return type(plan), *numbers, (threads > 32) - (threads < 32), getattr(plan, "finishes", False)


@pytest.fixture
def small_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of few processors, whose blocks share rows of a few thousand elements."""
    monkeypatch.setattr(heuristics, "_STAGING", ((2, 1), (4, 1), (1, 1)))
    monkeypatch.setattr(heuristics, "_STAGING_THREADS", range(32, 1025))
    monkeypatch.setattr(heuristics, "_STAGED_GROUPS", 32)
    monkeypatch.setattr(heuristics, "_STAGED_SHARE", 32)
    monkeypatch.setattr(backends, "_EMULATED", replace(targets.target("sm_90a"), wgmma=False, sms=16))
