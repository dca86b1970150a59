"""What values of a row are called: as the user's line calls them, else as what they are in the field's words."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from keyword import iskeyword

from fusegen.ir.graph import Graph, Location
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Index, same
from fusegen.schedule.terms import Fused, Leaf, Term, Terms
from fusegen.threads import cached_property

_STATEMENT = re.compile(r"(\w+)(?: *: [^=]+)? = [^;]*[^;,]")
"""Of two on a line the second would get the name of the first; what ends in a comma is an argument by name."""

_WORDS = {Op.SUM: "total", Op.AMAX: "largest", Op.AMIN: "smallest", Op.MAX: "greatest", Op.MIN: "least"}


def statistic_name(graph: Graph, node: int, *, over_rows: bool = False) -> str:
    """What a reduction is called; one that is of each column, and not of each row, where it is ``over_rows``."""
    reduced = graph.nodes[graph.nodes[node].args[0]]
    is_of_squares = reduced.op is Op.MUL and len(set(reduced.args)) == 1
    word = _WORDS.get(graph.nodes[node].op, graph.nodes[node].op.row.name)
    word = "squares" if word == "total" and is_of_squares else word
    location = graph.locations[node]
    assigned = _assigned(location) if location is not None and _ends(graph).get(location) == node else None
    return assigned or (f"column_{word}" if over_rows else word)


@dataclass(frozen=True)
class ValueNames:
    """Names of what a kernel computes.

    Attributes:
        graph: of the program.
        terms: the kernel's.
        totals: payloads of the statistics that are sums over the row.
        columns: elements of a row.
    """

    graph: Graph
    terms: Terms
    totals: Collection[object]
    columns: Index

    @cached_property
    def ends(self) -> dict[Location, int]:
        """For each line, the last value that is computed there."""
        return _ends(self.graph)

    def of_row(self, position: int) -> str:
        """Of a value that is computed of a row's statistics."""
        if self._is_mean(position):
            word = "mean"
        else:
            is_root = self.terms.items[position].op is Op.RSQRT
            word = "rstd" if is_root and any(map(self._has_mean, self.terms.below((position,)))) else "row_value"
        return self._assigned(position) or word

    def of_element(self, position: int) -> str:
        """Of a value of an element that later phases use."""
        op = self.terms.items[position].op
        return self._assigned(position) or (f"{op.row.name}_value" if isinstance(op, Op) else "held")

    def _assigned(self, position: int) -> str | None:
        """The name of the statement whose last value a term is."""
        location = self.terms.locations[position]
        if location is None or location not in self.ends:
            return None
        later = range(position + 1, len(self.terms.items))
        rest = [self.terms.items[t].op for t in later if self.terms.locations[t] == location]
        last = self.graph.nodes[self.ends[location]].op  # which another kernel may compute
        is_last = set(rest) <= {Op.CAST} and last is self.terms.items[position].op
        return _assigned(location) if is_last else None

    def _is_mean(self, position: int) -> bool:
        """Whether a term is a sum over the row, divided by the number of its elements."""
        return self.terms.items[position].op in (Op.MUL, Op.DIV) and self._has_mean(position)

    def _has_mean(self, position: int) -> bool:
        """The same of a term, or of the product in it."""
        term = self.terms.items[position]
        if term.op not in (Op.MUL, Op.DIV, Fused.MULTIPLY_ADD):
            return False
        total, count = (self.terms.items[a] for a in term.args[:2])
        return total.op is Leaf.STATISTIC and total.payload in self.totals and self._is_count(count, is_divided=term.op is Op.DIV)

    def _is_count(self, count: Term, *, is_divided: bool) -> bool:
        while count.op is Op.CAST:
            count = self.terms.items[count.args[0]]
        if count.op is Leaf.COORDINATE:
            return is_divided and same(count.payload, self.columns)
        if count.op is not Leaf.CONSTANT or not isinstance(self.columns, int):
            return False
        number = float(str(count.payload))
        return abs((number / self.columns if is_divided else number * self.columns) - 1) < 1e-6


def _ends(graph: Graph) -> dict[Location, int]:
    """For each line, the last value that is computed there; how it is rounded is no matter."""
    lines = enumerate(zip(graph.nodes, graph.locations, strict=True))
    return {location: position for position, (node, location) in lines if location is not None and node.op is not Op.CAST}


def _assigned(location: Location) -> str | None:
    """The name that a line gives which is one statement, or begins one."""
    found = _STATEMENT.fullmatch(location.text)
    is_argument = location.text.count(")") > location.text.count("(")  # by name, the last of a call
    return None if found is None or iskeyword(found[1]) or is_argument else found[1]
