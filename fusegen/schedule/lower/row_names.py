"""What values of a row are called: as the user's line calls them, else as what they are in the field's words."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fusegen.ir.graph import Graph, Location
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Index, same
from fusegen.schedule.terms import Leaf, Term, Terms

_ASSIGNED = re.compile(r"(\w+)(?: *: [^=]+)? = ")
"""A statement that gives a name; an argument by name has no spaces."""

_WORDS = {Op.SUM: "total", Op.AMAX: "largest", Op.AMIN: "smallest", Op.MAX: "greatest", Op.MIN: "least"}


def statistic_name(graph: Graph, node: int, *, over_rows: bool = False) -> str:
    """What a reduction is called; one that is of each column, and not of each row, where it is ``over_rows``."""
    reduced = graph.nodes[graph.nodes[node].args[0]]
    is_of_squares = reduced.op is Op.MUL and len(set(reduced.args)) == 1
    word = _WORDS.get(graph.nodes[node].op, graph.nodes[node].op.row.name)
    word = "squares" if word == "total" and is_of_squares else word
    return _assigned(node, graph.locations) or (f"column_{word}" if over_rows else word)


@dataclass(frozen=True)
class ValueNames:
    """Names of what a kernel computes.

    Attributes:
        terms: the kernel's.
        totals: payloads of the statistics that are sums over the row.
        columns: elements of a row.
    """

    terms: Terms
    totals: Collection[object]
    columns: Index

    def of_row(self, position: int) -> str:
        """Of a value that is computed of a row's statistics."""
        if self._is_mean(position):
            word = "mean"
        else:
            is_root = self.terms.items[position].op is Op.RSQRT
            word = "rstd" if is_root and any(map(self._is_mean, self.terms.below((position,)))) else "row_value"
        return _assigned(position, self.terms.locations) or word

    def of_element(self, position: int) -> str:
        """Of a value of an element that later phases use."""
        op = self.terms.items[position].op
        return _assigned(position, self.terms.locations) or (f"{op.row.name}_value" if isinstance(op, Op) else "held")

    def _is_mean(self, position: int) -> bool:
        """Whether a term is a sum over the row, divided by the number of its elements."""
        term = self.terms.items[position]
        if term.op not in (Op.MUL, Op.DIV):
            return False
        total, count = (self.terms.items[a] for a in term.args)
        return total.op is Leaf.STATISTIC and total.payload in self.totals and self._is_count(count, term.op)

    def _is_count(self, count: Term, op: Op | Leaf) -> bool:
        while count.op is Op.CAST:
            count = self.terms.items[count.args[0]]
        if count.op is Leaf.COORDINATE:
            return op is Op.DIV and same(count.payload, self.columns)
        if count.op is not Leaf.CONSTANT or not isinstance(self.columns, int):
            return False
        number = float(str(count.payload))
        return abs((number / self.columns if op is Op.DIV else number * self.columns) - 1) < 1e-6


def _assigned(position: int, locations: Sequence[Location | None]) -> str | None:
    """The name that a statement gives to the last of the values that it computes."""
    location = locations[position]
    if location is None or location in locations[position + 1 :]:
        return None
    statement = _ASSIGNED.match(location.text)
    return statement[1] if statement else None
