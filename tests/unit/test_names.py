"""Names in emitted text."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusegen.schedule.names import Namer, identifier, plain

TEMPLATES = Path(__file__).resolve().parents[2] / "templates"
PRIMITIVES = sorted({p.name.partition(".")[0] for folder in ("cuda", "cpu") for p in (TEMPLATES / folder / "primitives").iterdir()})


@pytest.mark.parametrize("name", PRIMITIVES)
def test_names_of_primitives_are_not_given_to_users(name: str) -> None:
    assert identifier(name) != name, "add it to _PRIMITIVES in fusegen/schedule/names.py"


@pytest.mark.parametrize(("name", "safe"), [("größe", "groe"), ("x.y", "x_y"), ("1st", "n1st"), ("__a__b", "a_b"), ("λ", "value")])
def test_names_become_ascii_identifiers(name: str, safe: str) -> None:
    assert plain(name) == safe


def test_a_namer_gives_each_name_once() -> None:
    names = Namer()
    assert [names.take(name) for name in ("x", "x", "for", "for")] == ["x", "x_2", "for_", "for__2"]
