"""Orders groups by their dependencies with low peak memory, and assigns writes to kernels."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest

from fusegen.fusion.groups import Group, is_stored_elsewhere, strip_views
from fusegen.fusion.producers import Producers, computed_index, walk
from fusegen.fusion.space import producers_of, unrolled
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import (
    Position,
    address,
    are_disjoint,
    broadcast_index,
    first_version,
    identity_axes,
    previous_version,
    target_gathers,
)
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import nominal, product, same
from fusegen.passes.writes import BEFORE, COMPUTED, NEVER, WriteTimes

_BEAM = 8  # partial orders that the beam search keeps


def in_order(graph: Graph, groups: Sequence[Group]) -> tuple[tuple[Group, ...], list[Group]]:
    """Returns the groups in dependency order, and those in a cycle. A group runs before another that overwrites its inputs.

    The order is the given one or one with lower peak memory.
    """
    ordered, stuck = _topological(graph, groups)
    return (ordered, stuck) if stuck or graph.puts else (tuple(ordered[n] for n in _min_peak(graph, ordered).order), [])


def workspace_bytes(graph: Graph, groups: Sequence[Group]) -> int:
    """Returns the peak bytes of buffers in the order of a graph without writes; symbolic sizes count as large."""
    return _min_peak(graph, _topological(graph, groups)[0]).workspace


def depends_on(graph: Graph, groups: Sequence[Group], later: int, earlier: int) -> bool:
    """True if group `later` depends on group `earlier`, directly or not. It depends on itself if it is in a cycle."""
    writers = {output: n for n, group in enumerate(groups) for output in group.outputs}
    stack, seen = [later], {later}
    while stack:
        needed = {writers[p] for p in (strip_views(graph, i) for i in groups[stack.pop()].inputs) if p in writers}
        if earlier in needed:
            return True
        stack += needed - seen
        seen |= needed
    return False


def _topological(graph: Graph, groups: Sequence[Group]) -> tuple[tuple[Group, ...], list[Group]]:
    """Returns the groups in dependency order, and the remaining groups if there is a cycle."""
    ordered: list[Group] = []
    written: set[int] = set()
    waiting = list(reversed(groups))
    while waiting:
        served = (g for g in waiting if all(strip_views(graph, p) in written for p in _computed_inputs(graph, g)))
        ready = next((g for g in served if not overwrites_too_early(graph, g, waiting)), None)
        if ready is None:
            break
        waiting.remove(ready)
        ordered.append(ready)
        written |= set(ready.outputs)
    return tuple(ordered), waiting


def _computed_inputs(graph: Graph, group: Group) -> list[int]:
    """Returns the values that a group reads and other groups compute."""
    return [p for p in group.inputs if not is_stored_elsewhere(graph, p)]


# Peak memory.


@dataclass(frozen=True)
class _Partial:
    """The beginning of an order, as a list and as a bit set.

    Attributes:
        peak, workspace: the most bytes live at once, and those of buffers alone: without results and inputs.
        live, buffers: the bytes live after the last group, likewise.
    """

    peak: int
    workspace: int
    live: int
    buffers: int
    order: tuple[int, ...]
    done: int

    @property
    def peaks(self) -> tuple[int, int]:
        return self.peak, self.workspace

    @property
    def rank(self) -> tuple[tuple[int, int], int, tuple[int, ...]]:
        return self.peaks, self.live, self.order


def _min_peak(graph: Graph, groups: Sequence[Group]) -> _Partial:
    """Returns the order with the lowest peak that a beam search finds; `groups` must be in dependency order."""
    memory = _Memory(graph, groups)
    beam = [_Partial(memory.first, 0, memory.first, 0, (), 0)]
    as_found = beam[0]
    for number in range(len(groups)):
        as_found = memory.extended(as_found, number)
        extended: dict[int, _Partial] = {}
        for partial in beam:
            for ready in memory.ready(partial.done):
                longer = memory.extended(partial, ready)
                extended[longer.done] = min(longer, extended.get(longer.done, longer), key=lambda each: each.rank)
        beam = nsmallest(_BEAM, extended.values(), key=lambda each: each.rank)
    return min(as_found, beam[0], key=lambda each: each.peaks)


class _Memory:
    """Tracks live bytes: computed values until their last reader, results until the end, and inputs that may be freed.

    Groups are numbered in dependency order. ``first`` are the live bytes before the first group.
    """

    def __init__(self, graph: Graph, groups: Sequence[Group]) -> None:
        results = {strip_views(graph, p) for p in graph.outputs}
        writers = {p: number for number, group in reversed(list(enumerate(groups))) for p in group.outputs}  # the first writers
        donated = {p for p, node in graph if node.op is Op.INPUT and graph.input_spec(str(node.attr("name"))).donated}
        freed = (writers.keys() - results) | donated
        read = [{strip_views(graph, p) for p in group.inputs} for group in groups]
        self._sizes = {p: nominal(product(graph.nodes[p].shape)) * graph.nodes[p].dtype.itemsize for p in writers.keys() | donated}
        self._written = [sum(self._sizes[p] for p in group.outputs) for group in groups]
        self._buffered = [sum(self._sizes[p] for p in group.outputs if p not in results) for group in groups]
        self._needs = [_bits(writers[strip_views(graph, p)] for p in _computed_inputs(graph, group)) for group in groups]
        readers = {p: _bits(n for n, inputs in enumerate(read) if p in inputs) for p in freed}
        self._read = [[(readers[p], self._sizes[p], p in donated) for p in inputs & freed] for inputs in read]
        self.first = sum(self._sizes[p] for p in donated)

    def ready(self, done: int) -> list[int]:
        return [n for n, needs in enumerate(self._needs) if not done >> n & 1 and needs & ~done == 0]

    def extended(self, partial: _Partial, number: int) -> _Partial:
        done, held = partial.done | 1 << number, partial.live + self._written[number]
        buffers = partial.buffers + self._buffered[number]
        peaks = max(partial.peak, held), max(partial.workspace, buffers)
        for readers, size, is_input in self._read[number]:
            if readers & ~done == 0:
                held -= size
                buffers -= 0 if is_input else size
        return _Partial(*peaks, held, buffers, (*partial.order, number), done)


def _bits(numbers: Iterable[int]) -> int:
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return bits


# Writes to inputs: the kernel that computes a value also stores it in the input if it can.
#
# `separate_writes` gave each written value two copies; the kernel of the last copy stores to the input. If that would change
# data that this kernel or a later one still reads, the value gets its own buffer, and a separate kernel copies it.


def written_by(graph: Graph, group: Group) -> tuple[int, ...]:
    return tuple(put for put in graph.puts if strip_views(graph, put) in group.outputs)


def separate_copies(graph: Graph, separate: Collection[int]) -> frozenset[int]:
    """Returns the copies before and around writes, each with a kernel of its own, and the values that these copy.

    ``separate`` are writes that need a kernel of their own.
    """
    if not graph.writes:
        return frozenset()
    before = {p for p, node in graph if node.op is Op.COPY and node.attr("role") == BEFORE}
    last = [strip_views(graph, put) for put in separate]
    return frozenset(before.union(last, (_source_of_write(graph, p) for p in last)))


def _source_of_write(graph: Graph, last: int) -> int:
    """Returns the materialized source of a separate write: the value itself, or its first copy if no kernel computes it."""
    (first,) = graph.nodes[last].args
    (value,) = graph.nodes[first].args
    return value if graph.nodes[value].family in COMPUTED else first


def with_write_indices(graph: Graph, group: Group) -> Group:
    """Adds the indices that the group's writes need to its inputs."""
    if not group.kind.writes_in_place:
        return group
    producers = Producers()
    for put in written_by(graph, group):
        for gather in target_gathers(graph, put):
            chosen = graph.nodes[gather].args[1]
            computed = computed_index(graph, chosen)
            if computed is not None:
                producers.inputs[computed] = None
            else:
                axes = identity_axes(graph.nodes[chosen].shape)
                walk(graph, chosen, axes.symbols, axes, lambda position, at, _bounds: False, producers)
    return replace(group, inputs=tuple(sorted({*group.inputs, *producers.inputs}))) if producers.inputs else group


def reads_overwritten(group: Group, times: WriteTimes) -> bool:
    """True if a group would read an input's old contents after a write that it depends on has changed them."""
    latest = max(times.latest[p] for p in group.outputs)
    return any(times.deadline.get(p, NEVER) <= latest for p in group.inputs)


def blocked_writes(graph: Graph, groups: Sequence[Group]) -> frozenset[int]:
    return frozenset(put for group in groups for put in written_by(graph, group) if _is_blocked(graph, group, put))


def _is_blocked(graph: Graph, group: Group, put: int) -> bool:
    memory = first_version(graph, put)
    if group.adds_in_place:
        return False
    is_limited = group.kind.is_tiled or target_gathers(graph, put)
    if not group.kind.writes_in_place or (is_limited and not _covers_domain(graph, group, put)):
        return True
    earlier = [other for other in written_by(graph, group) if other < put and first_version(graph, other) == memory]
    if not all(are_disjoint(graph, put, other) for other in earlier):
        return True
    read = [p for p in group.inputs if graph.nodes[p].op in (Op.INPUT, Op.PUT) and first_version(graph, p) == memory]
    if not read:
        return False
    if group.kind.is_tiled:
        return True  # a block would overwrite operands of other tiles
    return read != [previous_version(graph, put)] or bool(target_gathers(graph, put)) or not _is_in_place(graph, group, put)


def _covers_domain(graph: Graph, group: Group, put: int) -> bool:
    """True if the written value has one element for each element of its domain: other stores have no bounds check."""
    value = strip_views(graph, put)
    domain = next((part.domain for part in group.parts if value in part.outputs), group.domain)
    return same(product(graph.nodes[value].shape), product(domain.shape))


def _is_in_place(graph: Graph, group: Group, put: int) -> bool:
    """True if a thread, which reads before it writes, reads only the elements of the memory that it writes itself."""
    value = graph.nodes[put].args[1]
    if value not in group.outputs:
        return False  # a view of it is written, at other addresses
    space = unrolled(graph, group)
    shape = graph.nodes[value].shape
    own = [address(graph, put, broadcast_index(shape, point), space.axes) for point in space.points]
    several = [producers_of(graph, group, space.axes, point) for point in space.points]
    read = [at for producers in several for position, at in producers.elements if position == previous_version(graph, put)]
    return all(any(_is_same(at, target) for target in own) for at in read)


def _is_same(first: Position, second: Position) -> bool:
    return all(map(same, first, second))


def overwrites_too_early(graph: Graph, group: Group, waiting: Sequence[Group]) -> bool:
    """True if a group would overwrite memory that another waiting group must read or write first."""
    changed = {previous_version(graph, put) for put in written_by(graph, group)}
    others = [other for other in waiting if other is not group]
    return any(not changed.isdisjoint((*other.inputs, *written_by(graph, other))) for other in others)


def first_write(graph: Graph, groups: Sequence[Group], separate: Collection[int]) -> frozenset[int]:
    puts = [put for group in groups for put in written_by(graph, group) if put not in separate]
    return frozenset(sorted(puts)[:1])
