"""The order of groups: each after those whose results it reads, with little in memory at once; and the writes that kernels make."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest

from fusegen.fusion.groups import Group, is_stored_elsewhere, strip_views
from fusegen.fusion.producers import Producers, computed_index, walk
from fusegen.fusion.space import producers_of, unrolled
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Position, address, are_apart, base, broadcast_index, gathers, identity_axes, owner
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import nominal, product, same
from fusegen.passes.writes import BEFORE, COMPUTED, NEVER, WriteTimes

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


# Writes to inputs: which of them a kernel can make as it computes their values, and what must come before them.
#
# `separate_writes` gave each written value two copies. The kernel that computes the last one stores it in the input's memory.
# Where that would change what the same kernel still reads, or what one reads that has to come later, the value lies in memory
# of its own, and the last copy is a kernel that does nothing else.


def written_by(graph: Graph, group: Group) -> tuple[int, ...]:
    """The writes that a group makes."""
    return tuple(put for put in graph.puts if strip_views(graph, put) in group.outputs)


def held(graph: Graph, apart: Collection[int]) -> frozenset[int]:
    """Values that lie in memory before something is stored of them, each with a kernel of its own, and what that is.

    Args:
        apart: writes that no other kernel can make.
    """
    if not graph.writes:
        return frozenset()
    before = {p for p, node in graph if node.op is Op.COPY and node.attr("role") == BEFORE}
    last = [strip_views(graph, put) for put in apart]
    return frozenset(before.union(last, (_complete(graph, p) for p in last)))


def _complete(graph: Graph, last: int) -> int:
    """The materialized form of a value that is written apart: itself, or, where nothing computes it, its first copy."""
    (first,) = graph.nodes[last].args
    (value,) = graph.nodes[first].args
    return value if graph.nodes[value].family in COMPUTED else first


def addressed(graph: Graph, group: Group) -> Group:
    """A group that stores element by element, which reads the indices as well by which it finds where to write."""
    if not group.kind.writes_in_place:
        return group
    producers = Producers()
    for put in written_by(graph, group):
        for gather in gathers(graph, put):
            chosen = graph.nodes[gather].args[1]
            computed = computed_index(graph, chosen)
            if computed is not None:
                producers.inputs[computed] = None
            else:
                axes = identity_axes(graph.nodes[chosen].shape)
                walk(graph, chosen, axes.symbols, axes, lambda position, at, _bounds: False, producers)
    return replace(group, inputs=tuple(sorted({*group.inputs, *producers.inputs}))) if producers.inputs else group


def is_torn(group: Group, times: WriteTimes) -> bool:
    """True if a group would read a version that a write which it depends on has changed."""
    latest = max(times.latest[p] for p in group.outputs)
    return any(times.deadline.get(p, NEVER) <= latest for p in group.inputs)


def hindered(graph: Graph, groups: Sequence[Group]) -> frozenset[int]:
    """Writes that the groups which they fell to cannot make."""
    return frozenset(put for group in groups for put in written_by(graph, group) if _is_hindered(graph, group, put))


def _is_hindered(graph: Graph, group: Group, put: int) -> bool:
    memory = owner(graph, put)
    if group.adds_in_place:
        return False
    if not group.kind.writes_in_place or (gathers(graph, put) and not _goes_over_elements(graph, group, put)):
        return True
    earlier = [other for other in written_by(graph, group) if other < put and owner(graph, other) == memory]
    if not all(are_apart(graph, put, other) for other in earlier):
        return True
    read = [p for p in group.inputs if graph.nodes[p].op in (Op.INPUT, Op.PUT) and owner(graph, p) == memory]
    if not read:
        return False
    return read != [base(graph, put)] or bool(gathers(graph, put)) or not _is_in_place(graph, group, put)


def _goes_over_elements(graph: Graph, group: Group, put: int) -> bool:
    """True if the value that is written has an element at each point of the group's domain: others are stored without a check."""
    return same(product(graph.nodes[graph.nodes[put].args[1]].shape), product(group.domain.shape))


def _is_in_place(graph: Graph, group: Group, put: int) -> bool:
    """True if a thread of the group, which reads before it writes, reads no other elements of the memory than it writes."""
    value = graph.nodes[put].args[1]
    if value not in group.outputs:
        return False  # but a view of it is, whose elements lie elsewhere
    space = unrolled(graph, group)
    shape = graph.nodes[value].shape
    own = [address(graph, put, broadcast_index(shape, point), space.axes) for point in space.points]
    several = [producers_of(graph, group, space.axes, point) for point in space.points]
    read = [at for producers in several for position, at in producers.elements if position == base(graph, put)]
    return all(any(_is_same(at, place) for place in own) for at in read)


def _is_same(one: Position, other: Position) -> bool:
    return all(map(same, one, other))


def is_early(graph: Graph, group: Group, waiting: Sequence[Group]) -> bool:
    """True if a group writes where others have to read, or to write, before.

    Args:
        waiting: groups that have not run, the group among them.
    """
    changed = {base(graph, put) for put in written_by(graph, group)}
    others = [other for other in waiting if other is not group]
    return any(not changed.isdisjoint((*other.inputs, *written_by(graph, other))) for other in others)


def first_of(graph: Graph, groups: Sequence[Group], apart: Collection[int]) -> frozenset[int]:
    """The first write of some groups that is not apart already."""
    found = [put for group in groups for put in written_by(graph, group) if put not in apart]
    return frozenset(sorted(found)[:1])
