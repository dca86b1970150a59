"""Lanes that do not mix: for each term of the first lane the one that the second lane has in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusegen.ir.index_map import Bounds
from fusegen.ir.symbolic import same, simplify_dim
from fusegen.schedule.lower.leaves import Leaves, bound_index
from fusegen.schedule.terms import Terms


class Partners:
    """Finds for each term of the first lane the term that the second lane has in its place."""

    def __init__(self, terms: Terms, lanes: Mapping[int, tuple[str, int]], leaves: Leaves) -> None:
        self.terms, self.lanes, self.leaves = terms, lanes, leaves
        self.found: dict[int, int] = {}

    def of(self, first: Sequence[int], second: Sequence[int]) -> Mapping[int, int] | None:
        """The partners, or None when the lanes are not the same function of their own operands."""
        pairs = list(zip(first, second, strict=True))
        while pairs:
            a, b = pairs.pop()
            if a not in self.found:
                if not self._match(a, b):
                    return None
                self.found[a] = b
                pairs += zip(self.terms.items[a].args, self.terms.items[b].args, strict=True)
            elif self.found[a] != b:
                return None
        return self.found

    def _match(self, a: int, b: int) -> bool:
        """Whether two terms are of one kind, whatever their operands."""
        left, right = self.terms.items[a], self.terms.items[b]
        if left.op is not right.op or left.dtype is not right.dtype or len(left.args) != len(right.args):
            return False
        return left.payload == right.payload if left.args else self._match_leaves(a, b)

    def _match_leaves(self, a: int, b: int) -> bool:
        if a in self.lanes or b in self.lanes:
            name, lane = self.lanes.get(a, ("", -1))
            return lane == 0 and self.lanes.get(b) == (name, 1)
        return a == b or self._is_step(a, b)

    def _is_step(self, a: int, b: int) -> bool:
        """Whether two coordinates, or indices of two conditions, are neighbours."""
        first, second = self.leaves.coordinates.get(a), self.leaves.coordinates.get(b)
        if first is None or second is None:
            return False
        if isinstance(first, Bounds) and isinstance(second, Bounds) and (first.lower, first.upper) != (second.lower, second.upper):
            return False
        return same(simplify_dim(bound_index(first) + 1), bound_index(second))
