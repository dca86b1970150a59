"""Kernels see the Python state that their functions read: each kind on a tour, random scenarios of all kinds and places.

``pytest tests/fuzz/test_state.py --programs 3000 --seed 7`` runs more scenarios, or others. A kind is an
entry of a table in `state_kinds` or `state_refusable`, a place one in `state_places`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from fusegen.compiler import backends
from tests.fuzz.batch import QUICK
from tests.fuzz.scenario import World, declared_nothing, replay, settings_kept
from tests.fuzz.state_draw import KINDS, Scenario, drawn, tour
from tests.fuzz.state_places import PLACES

PER_SCENARIOS = 10


@pytest.fixture(autouse=True)
def quick_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed is tested elsewhere."""
    monkeypatch.setattr(backends, "host_flags", lambda: QUICK)


def right(scenario: Scenario) -> None:
    """Fails where a scenario is wrong; the message holds its smallest wrong part, as a test."""
    wrong = scenario.wrong()
    if wrong is not None:
        pytest.fail(wrong, pytrace=False)


@pytest.mark.parametrize("kind", KINDS)
def test_kind(kind: str) -> None:
    right(tour(kind))


@pytest.mark.parametrize("kind", ["attribute", pytest.param("tensor", marks=pytest.mark.deep)])
@pytest.mark.parametrize("place", [place for place in PLACES if place != "function"])
def test_place(place: str, kind: str) -> None:
    right(tour(kind, place))


def stale(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that never looks again: for arguments of a kind that it has seen, it gives what it gave."""
    found: dict[Any, Any] = {}

    def call(*args: Any) -> Any:
        key = tuple((a.shape, a.dtype) if isinstance(a, Tensor) else type(a) for a in args)
        result = found.get(key)
        found[key] = function(*args) if result is None else result
        return found[key].clone()

    return call


def test_every_kind_changes_what_is_computed() -> None:
    """A kernel that never looks again is seen to be wrong on each tour."""
    changing = [kind for kind in KINDS if KINDS[kind].changes]
    assert [kind for kind in changing if replay(tour(kind).statements, kernel=stale) is None] == []


def test_every_kind_runs_without_kernels() -> None:
    plain = World(declared_nothing)
    with settings_kept():
        broken = {kind: str(e) for kind in KINDS for s in tour(kind).statements[:5] if (e := plain.run(s)) is not None}
    assert broken == {}


def test_what_is_reported_runs_by_itself() -> None:
    for seed in range(3):
        space: dict[str, Any] = {}
        exec(drawn(seed).paste_text, space)
        assert space["STATEMENTS"] == list(drawn(seed).statements)


def test_scenarios(scenarios: int, first_seed: int) -> None:
    for number in range(PER_SCENARIOS):
        right(drawn(first_seed + scenarios * PER_SCENARIOS + number))
