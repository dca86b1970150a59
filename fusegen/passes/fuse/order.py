"""The order of groups: after those whose results they read, and such that little lies in memory at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import nsmallest

from fusegen.ir.graph import Graph
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import nominal, product
from fusegen.passes.fuse.groups import Group, is_stored_elsewhere, strip_views
from fusegen.passes.fuse.writes import is_early

_BEAM = 8  # beginnings of orders that the search goes on with


def in_order(graph: Graph, groups: Sequence[Group]) -> tuple[tuple[Group, ...], list[Group]]:
    """Groups after those whose outputs they read, and after those that read what they write over; and those that wait for each
    other.

    They come as they were found, from the inputs to the results, or in an order that keeps fewer bytes in memory at once.
    """
    found, stuck = _listed(graph, groups)
    return (found, stuck) if stuck or graph.puts else (_frugal(graph, found), [])


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


def _listed(graph: Graph, groups: Sequence[Group]) -> tuple[tuple[Group, ...], list[Group]]:
    """Groups in the order in which they are found, as far as none waits for another, and those that do."""
    ordered: list[Group] = []
    written: set[int] = set()
    waiting = list(reversed(groups))
    while waiting:
        served = (g for g in waiting if all(strip_views(graph, p) in written for p in _made(graph, g)))
        ready = next((g for g in served if not is_early(graph, g, waiting)), None)
        if ready is None:
            break
        waiting.remove(ready)
        ordered.append(ready)
        written |= set(ready.outputs)
    return tuple(ordered), waiting


def _made(graph: Graph, group: Group) -> list[int]:
    """The values that a group reads and other groups compute."""
    return [p for p in group.inputs if not is_stored_elsewhere(graph, p)]


# Memory.


@dataclass(frozen=True)
class _Begun:
    """Some groups in an order, and what they take of memory.

    Attributes:
        peak, live: the most bytes at once, and those behind the last group.
        order: numbers of the groups.
        done: the same as a set of bits.
    """

    peak: int
    live: int
    order: tuple[int, ...]
    done: int

    @property
    def rank(self) -> tuple[int, int, tuple[int, ...]]:
        """The less, the better."""
        return self.peak, self.live, self.order


def _frugal(graph: Graph, groups: Sequence[Group]) -> tuple[Group, ...]:
    """Groups in the best order that a beam search finds, from an order in which none waits."""
    memory = _Memory(graph, groups)
    begun = [_Begun(memory.first, memory.first, (), 0)]
    as_found = begun[0]
    for number in range(len(groups)):
        as_found = memory.followed(as_found, number)
        further: dict[int, _Begun] = {}
        for one in begun:
            for ready in memory.ready(one.done):
                other = memory.followed(one, ready)
                further[other.done] = min(other, further.get(other.done, other), key=lambda each: each.rank)
        begun = nsmallest(_BEAM, further.values(), key=lambda each: each.rank)
    best = min(as_found, begun[0], key=lambda each: each.peak)
    return tuple(groups[number] for number in best.order)


class _Memory:
    """The bytes of values that groups make, until the last group has read them or, of results, for good, and of inputs that may be
    let go.

    Args:
        graph: in primitives.
        groups: of it, numbered in an order in which none waits.

    Attributes:
        first: bytes before the first group.
    """

    def __init__(self, graph: Graph, groups: Sequence[Group]) -> None:
        results = {strip_views(graph, p) for p in graph.outputs}
        writers = {p: number for number, group in reversed(list(enumerate(groups))) for p in group.outputs}  # the first ones
        given = {p for p, node in graph if node.op is Op.INPUT and graph.input_spec(str(node.attr("name"))).given_away}
        freed = (writers.keys() - results) | given
        read = [{strip_views(graph, p) for p in group.inputs} for group in groups]
        self._sizes = {p: nominal(product(graph.nodes[p].shape)) * graph.nodes[p].dtype.itemsize for p in writers.keys() | given}
        self._made = [sum(self._sizes[p] for p in group.outputs) for group in groups]
        self._needs = [_bits(writers[strip_views(graph, p)] for p in _made(graph, group)) for group in groups]
        readers = {p: _bits(n for n, found in enumerate(read) if p in found) for p in freed}
        self._read = [[(readers[p], self._sizes[p]) for p in found & freed] for found in read]
        self.first = sum(self._sizes[p] for p in given)

    def ready(self, done: int) -> list[int]:
        """The groups that can come next."""
        return [n for n, needs in enumerate(self._needs) if not done >> n & 1 and needs & ~done == 0]

    def followed(self, begun: _Begun, number: int) -> _Begun:
        """Groups with another one behind them."""
        done, held = begun.done | 1 << number, begun.live + self._made[number]
        freed = sum(size for readers, size in self._read[number] if readers & ~done == 0)
        return _Begun(max(begun.peak, held), held - freed, (*begun.order, number), done)


def _bits(numbers: Iterable[int]) -> int:
    found = 0
    for number in numbers:
        found |= 1 << number
    return found
