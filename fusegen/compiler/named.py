"""Calls whose only container is ``**kwargs``: the next one like the last is told by names and types, in a tenth of the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fusegen.compiler.containers import KINDS, Layouts
from fusegen.runtime.keys import Values


@dataclass(frozen=True)
class Named:
    """Calls with the same names in ``**kwargs``, and leaves of the same types, none of which is a container: one layout.

    Attributes:
        names: in ``**kwargs``.
        types: of all leaves.
    """

    names: list[str]
    types: list[type]

    @classmethod
    def of(cls, layouts: Layouts, leaves: Sequence[Any]) -> Named | None:
        """Those like a call of a function whose last parameter is ``**kwargs``; None where it has other containers."""
        *others, (_, last) = layouts
        if last is None or any(layout is not None for _, layout in others) or any(isinstance(leaf, KINDS) for leaf in leaves):
            return None
        _, names, elements = last
        return cls([*names], [*map(type, leaves)]) if all(element is None for element in elements) else None

    def leaves(self, values: Values) -> list[Any] | None:
        """The leaves of a call that is one of these."""
        *others, named = values
        leaves = [*others, *named.values()]
        return leaves if [*named] == self.names and [*map(type, leaves)] == self.types else None
