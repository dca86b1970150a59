"""The order of groups: after those whose results they read, and such that little lies in memory at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from fusegen.ir.graph import Graph
from fusegen.ir.symbolic import nominal, product
from fusegen.passes.fuse.groups import Group, is_stored_elsewhere, strip_views
from fusegen.passes.fuse.writes import is_early


def in_order(graph: Graph, groups: Sequence[Group]) -> tuple[tuple[Group, ...], list[Group]]:
    """Groups after those whose outputs they read, and after those that read what they write over; and those that wait for each
    other.

    They come as they were found, from the inputs to the results; or, where that keeps fewer bytes in memory at once, always that
    one next which leaves the fewest.
    """
    memory = _Memory(graph, groups)
    found, stuck = _listed(graph, groups, lambda ready, _done: ready[0])
    if stuck:
        return found, stuck
    frugal, _ = _listed(graph, groups, lambda ready, done: min(ready, key=lambda group: memory.growth(group, done)))
    return min((found, frugal), key=memory.peak), []


def waits(graph: Graph, groups: Sequence[Group], later: int, earlier: int) -> bool:
    """Tells if a group needs what another one, or itself, computes, or what is made of that."""
    writers = {output: n for n, group in enumerate(groups) for output in group.outputs}
    stack, seen = [later], {later}
    while stack:
        needed = {writers[p] for p in (strip_views(graph, i) for i in groups[stack.pop()].inputs) if p in writers}
        if earlier in needed:
            return True
        stack += needed - seen
        seen |= needed
    return False


def _listed(
    graph: Graph, groups: Sequence[Group], chosen: Callable[[Sequence[Group], Sequence[Group]], Group]
) -> tuple[tuple[Group, ...], list[Group]]:
    """Groups in an order, and those that wait for each other.

    Args:
        chosen: the next one, of all that could be and those that come before.
    """
    ordered: list[Group] = []
    written: set[int] = set()
    waiting = list(reversed(groups))
    while waiting:
        served = (g for g in waiting if all(strip_views(graph, p) in written for p in _made(graph, g)))
        ready = [g for g in served if not is_early(graph, g, waiting)]
        if not ready:
            break
        group = chosen(ready, ordered)
        waiting.remove(group)
        ordered.append(group)
        written |= set(group.outputs)
    return tuple(ordered), waiting


def _made(graph: Graph, group: Group) -> list[int]:
    """What a group reads that other groups compute."""
    return [p for p in group.inputs if not is_stored_elsewhere(graph, p)]


class _Memory:
    """The bytes that values take which only the program knows, from their group to the last that reads them.

    Args:
        graph: in primitives.
        groups: of it.
    """

    def __init__(self, graph: Graph, groups: Sequence[Group]) -> None:
        results = {strip_views(graph, p) for p in (*graph.outputs, *graph.puts)}
        values = {p for group in groups for p in group.outputs} - results
        self._bytes = {p: nominal(product(graph.nodes[p].shape)) * graph.nodes[p].dtype.itemsize for p in values}
        self._read = {id(group): {strip_views(graph, p) for p in group.inputs} & values for group in groups}
        self._readers = Counter(p for read in self._read.values() for p in read)

    def growth(self, group: Group, done: Sequence[Group]) -> int:
        """Bytes that there are more behind a group than before it.

        Args:
            done: groups before it.
        """
        read = Counter(p for other in (*done, group) for p in self._read[id(other)])
        freed = sum(self._bytes[p] for p in self._read[id(group)] if read[p] == self._readers[p])
        return sum(self._bytes.get(p, 0) for p in group.outputs) - freed

    def peak(self, groups: Sequence[Group]) -> int:
        """The most bytes at once, in an order."""
        live = most = 0
        for number, group in enumerate(groups):
            made = sum(self._bytes.get(p, 0) for p in group.outputs)
            most = max(most, live + made)
            live += self.growth(group, groups[:number])
        return most
