"""Writes as fusion takes them: each with a value of its own, and with what was read before it out of its way.

A `PUT` makes a new version of an input in the input's own memory, and the old one is gone. Kernels compute values where they need
them; so a value that is made of an old version, and that something needs which also depends on the write, is copied before the
write. What is left can be computed in some order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fusegen.ir.graph import Graph, GraphBuilder
from fusegen.ir.index_map import base, gathers
from fusegen.ir.ops import Family, Op
from fusegen.passes.rewrite import rebuilt

NEVER = 1 << 60
"""The number of a write that does not come."""

COMPUTED = (Family.POINTWISE, Family.REDUCTION, Family.ORDER, Family.SCAN, Family.CONTRACTION, Family.LIBRARY)
"""Families of what a kernel computes; other values lie somewhere already."""

FIRST, LAST, BEFORE = "first", "last", "before"
"""The roles of copies: a value on its way to a write; and a value that is needed after a write that it must come before."""


@dataclass(frozen=True)
class WriteTimes:
    """The earliest and latest times of a graph's values, by the numbers of its writes, from 1 on in the order of the function.

    Attributes:
        latest: for each node, the last write that it depends on; 0 for none.
        deadline: for each version, the write that makes the next one; versions without one are left out.
    """

    latest: tuple[int, ...]
    deadline: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph) -> WriteTimes:
        """The times of a graph."""
        latest: list[int] = []
        deadline: dict[int, int] = {}
        for position, node in graph:
            before = max((latest[a] for a in node.args), default=0)
            if node.op is Op.PUT:
                before = len(deadline) + 1
                deadline[base(graph, position)] = before
            latest.append(before)
        return cls(tuple(latest), deadline)


def separate_writes(graph: Graph) -> Graph:
    """The graph with two copies behind each value that is written, and with copies of what a write would change too early.

    Of the two, the second one is what is stored; the first one can lie in memory, where fusion finds that the value must be
    complete before anything of it is stored.
    """
    if not graph.writes:
        return graph
    return rebuilt(graph, _Copies(graph).replaced)


class _Copies:
    """Rebuilds a graph with copies."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._times = graph, WriteTimes.of(graph)
        self._until: list[int] = []  # for each node, the first write after which it cannot be computed any more
        self._placing = {g: self._times.latest[put] - 1 for put, node in graph if node.op is Op.PUT for g in gathers(graph, put)}

    def replaced(self, builder: GraphBuilder, moved: Sequence[int], position: int) -> int:
        """A node on its operands, of which some are copied."""
        self._builder, self._moved, node = builder, moved, self._graph.nodes[position]
        args = tuple(self._argument(position, number) for number in range(len(node.args)))
        self._until.append(self._last_moment(position))
        return builder.put(replace(node, args=args), self._graph.locations[position])

    def _argument(self, position: int, number: int) -> int:
        """An operand of a node: copied if a write that the node depends on comes between, twice if it is written."""
        node = self._graph.nodes[position]
        operand = node.args[number]
        moved = self._moved[operand]
        if node.op is Op.PUT:
            return moved if number == 0 else self._copied(moved, position)
        return self._copy(moved, position, BEFORE) if self._is_late(operand, position) else moved

    def _copied(self, value: int, put: int) -> int:
        """A value that is written, copied twice: of what is computed, below reshapes and permutations, which a store can undo."""
        nodes, views = self._builder.nodes, [value]
        while nodes[views[-1]].op in (Op.RESHAPE, Op.PERMUTE):
            views.append(nodes[views[-1]].args[0])
        if nodes[views[-1]].family not in COMPUTED:
            views = [value]
        copied = self._copy(self._copy(views.pop(), put, FIRST), put, LAST)
        for view in reversed(views):
            copied = self._builder.put(replace(nodes[view], args=(copied,)), self._builder.locations[view])
        return copied

    def _is_late(self, operand: int, user: int) -> bool:
        """True if an operand cannot be computed any more when its user is: of a place, when something is written there."""
        moment = max(self._times.latest[user], self._placing.get(user, 0))
        return self._times.latest[operand] < self._until[operand] <= moment

    def _last_moment(self, position: int) -> int:
        """The first write after which a value cannot be computed: it changes what the value is made of."""
        node = self._graph.nodes[position]
        if node.op is Op.PUT or node.op is Op.INPUT:
            return self._times.deadline.get(position, NEVER)
        return min((self._until[a] for a in node.args if not self._is_late(a, position)), default=NEVER)

    def _copy(self, moved: int, position: int, role: str) -> int:
        number = 0 if role == BEFORE else self._times.latest[position]  # values that are written are told apart by where they go
        return self._builder.add(Op.COPY, [moved], location=self._graph.locations[position], role=role, write=number)
