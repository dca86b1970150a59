"""Prepares functionalized writes for fusion: copies written values, and values that a write would overwrite.

A `PUT` replaces the contents of an input's memory. Kernels recompute values where they need them. So a value that depends on the
previous version, and that is read together with the result of the write, is copied before the write. With these copies, the nodes
have a valid order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fusegen.ir.graph import Graph, GraphBuilder
from fusegen.ir.index_map import previous_version, target_gathers
from fusegen.ir.ops import Family, Op
from fusegen.passes.rewrite import rebuilt

NEVER = 1 << 60
"""Number of a write that does not occur."""

COMPUTED = (Family.POINTWISE, Family.REDUCTION, Family.ORDER, Family.SCAN, Family.CONTRACTION, Family.LIBRARY)
"""Families that a kernel computes; other values are already in memory."""

FIRST, LAST, BEFORE = "first", "last", "before"
"""Roles of copies: the first and second copy of a written value, and the copy of a value that is needed from before a write."""


@dataclass(frozen=True)
class WriteTimes:
    """The earliest and latest times of values, as numbers of writes, counted from 1 in program order.

    Attributes:
        latest: for each node, the last write that it depends on; 0 for none.
        deadline: for each overwritten version, the write that replaces it.
    """

    latest: tuple[int, ...]
    deadline: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph) -> WriteTimes:
        latest: list[int] = []
        deadline: dict[int, int] = {}
        for position, node in graph:
            before = max((latest[a] for a in node.args), default=0)
            if node.op is Op.PUT:
                before = len(deadline) + 1
                deadline[previous_version(graph, position)] = before
            latest.append(before)
        return cls(tuple(latest), deadline)


def separate_writes(graph: Graph) -> Graph:
    """Adds two copies after each written value, and copies of values that a write would overwrite too early.

    The second copy is the store. Fusion may materialize the first one, if the value must be complete before the store.
    """
    if not graph.writes:
        return graph
    return rebuilt(graph, _Copies(graph).replaced)


class _Copies:
    def __init__(self, graph: Graph) -> None:
        self._graph, self._times = graph, WriteTimes.of(graph)
        self._deadlines: list[int] = []  # for each node, the first write after which it cannot be recomputed
        self._gather_times = {
            g: self._times.latest[put] - 1 for put, node in graph if node.op is Op.PUT for g in target_gathers(graph, put)
        }

    def replaced(self, builder: GraphBuilder, index: Sequence[int], position: int) -> int:
        self._builder, self._indices, node = builder, index, self._graph.nodes[position]
        args = tuple(self._argument(position, number) for number in range(len(node.args)))
        self._deadlines.append(self._deadline(position))
        return builder.add_node(replace(node, args=args), self._graph.locations[position])

    def _argument(self, position: int, number: int) -> int:
        """An operand: a copy if a write comes between it and its user, a copy of a copy if it is the written value."""
        node = self._graph.nodes[position]
        operand = node.args[number]
        index = self._indices[operand]
        if node.op is Op.PUT:
            return index if number == 0 else self._copied(index, position)
        return self._copy(index, position, BEFORE) if self._is_late(operand, position) else index

    def _copied(self, value: int, put: int) -> int:
        """A written value, copied twice below reshapes and permutations, which the store can invert."""
        nodes, views = self._builder.nodes, [value]
        while nodes[views[-1]].op in (Op.RESHAPE, Op.PERMUTE):
            views.append(nodes[views[-1]].args[0])
        if nodes[views[-1]].family not in COMPUTED:
            views = [value]
        copied = self._copy(self._copy(views.pop(), put, FIRST), put, LAST)
        for view in reversed(views):
            copied = self._builder.add_node(replace(nodes[view], args=(copied,)), self._builder.locations[view])
        return copied

    def _is_late(self, operand: int, user: int) -> bool:
        """True if an operand is overwritten before its user is computed; the index of a write is used at the write."""
        moment = max(self._times.latest[user], self._gather_times.get(user, 0))
        return self._times.latest[operand] < self._deadlines[operand] <= moment

    def _deadline(self, position: int) -> int:
        node = self._graph.nodes[position]
        if node.op is Op.PUT or node.op is Op.INPUT:
            return self._times.deadline.get(position, NEVER)
        return min((self._deadlines[a] for a in node.args if not self._is_late(a, position)), default=NEVER)

    def _copy(self, index: int, position: int, role: str) -> int:
        number = 0 if role == BEFORE else self._times.latest[position]  # distinguishes values written to different targets
        return self._builder.add(Op.COPY, [index], location=self._graph.locations[position], role=role, write=number)
