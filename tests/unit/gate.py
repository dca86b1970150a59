"""Tables of cases: the gate runs some of them, the deep suite all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], gate: Collection[Any]) -> list[Any]:
    """The cases, of which those that the gate leaves out are marked as deep."""
    return [case if case in gate else pytest.param(case, marks=pytest.mark.deep) for case in cases]
