"""The values that lie in memory: decided before any kernel is."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import TypeAlias

from fusegen.fusion.accumulator import is_of_heads
from fusegen.fusion.groups import Materialized, is_as_large, is_stored_elsewhere, operand_base, products_of, strip_views
from fusegen.fusion.matcher import Claims, Decision, Matcher
from fusegen.fusion.order import held
from fusegen.ir.graph import Graph, Node
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Shape, nominal, product
from fusegen.target import Target
from fusegen.threads import cached_property


def decide(
    graph: Graph, target: Target, families: Sequence[Matcher], apart: Materialized = frozenset(), once: Materialized = frozenset()
) -> Decision:
    """Decides which values are materialized besides the results and the operands of matmuls.

    Args:
        graph: in primitives, after the passes.
        target: says which kernels can be used.
        families: of kernels, in the order in which they are asked.
        apart: writes that no other kernel can make.
        once: values that one kernel computes for all.
    """
    own = held(graph, apart)
    products = products_of(graph)
    claims = Claims(ends=set(own))
    for family in families:
        family.claim(graph, target, claims)
    calls = [position for position, node in graph if node.family is Family.LIBRARY]
    stored = _stored(graph, products, calls, claims) | _partials(graph, ends_in_epilogues(products, claims)) | once
    shared = once | shared_values(graph, stored, claims.ends.union(products, calls), claims.streamed)
    beside: dict[int, int] = {}
    for family in families:
        beside.update(family.beside(graph, target, claims, stored | shared))
    return Decision(frozenset(claims.ends), beside, stored | shared, shared.union(claims.ends), claims.refusals, own)


def ends_in_epilogues(products: Sequence[int], claims: Claims) -> list[int]:
    """Values in which products end, and products that end in themselves."""
    return sorted(claims.epilogues.union(p for p in products if p not in claims.inside))


def made_of(graph: Graph, value: int) -> set[int]:
    """Everything that is computed of a value point by point or head by head, alone or with others."""
    found: set[int] = set()
    stack = [value]
    while stack:
        near = (user for user in graph.users[stack.pop()] if is_near(graph, user))
        new = [user for user in near if user not in found]
        found.update(new)
        stack += new
    return found


def _partials(graph: Graph, ends: Collection[int]) -> Materialized:
    """Statistics of heads of what products end in that are combined in turn: of tiles, say, of which a row is made."""
    near = {p for end in ends for p in made_of(graph, end) if graph.nodes[p].family is Family.REDUCTION}
    return frozenset(p for p in near if _is_combined(graph, p))


def _is_combined(graph: Graph, statistic: int) -> bool:
    """True if a reduction takes a statistic, or what is made of as many of them."""
    stack, seen = [statistic], set[int]()
    while stack:
        for user in graph.users[stack.pop()]:
            node = graph.nodes[user]
            if node.family is Family.REDUCTION:
                return True
            if user not in seen and node.family in (Family.POINTWISE, Family.VIEW) and is_as_large(graph, user, statistic):
                seen.add(user)
                stack.append(user)
    return False


def is_near(graph: Graph, position: int) -> bool:
    """True if an epilogue may compute a node of a product."""
    return graph.nodes[position].family in (Family.POINTWISE, Family.VIEW) or is_of_heads(graph, position)


def _stored(graph: Graph, products: Sequence[int], calls: Sequence[int], claims: Claims) -> frozenset[int]:
    """Computed values that lie in memory in any case."""
    wanted = [*graph.outputs, *graph.puts, *claims.ends, *(p for p in products if p not in claims.inside), *calls]
    for step in (*products, *calls):
        wanted += claims.operands.get(step) or [operand_base(graph, a) for a in graph.nodes[step].args]
    return frozenset(p for p in (strip_views(graph, w) for w in wanted) if not is_stored_elsewhere(graph, p))


# Values that lie in memory though a kernel could compute them again: what a product ends in, and what several kernels need,
# where that moves fewer bytes.
#
# Symbolic sizes count as large. What is decided here costs or saves bytes, and changes no result.


_MOST_READERS = 4  # kernels from which on it does not matter how many more there are

KernelKey: TypeAlias = tuple[object, ...]
"""A kernel to come: values of one key will be computed together."""


def ends_of(graph: Graph, value: int) -> list[int]:
    """Values, the furthest first, that are computed point by point of a value, and through which alone it is used: each could be
    kept in its place.

    They have as many elements, arranged in other dims perhaps, and none takes more bytes than one before it, unless it is a result.
    """
    found: list[int] = []
    position, narrowest = value, graph.nodes[value].dtype.itemsize
    while (following := graph.post_dominators[position]) < len(graph.nodes):
        is_write = graph.nodes[following].family is Family.WRITE
        if is_write or not _only_pointwise(graph, position, following) or not is_as_large(graph, value, following):
            break
        position = following
        itemsize = graph.nodes[position].dtype.itemsize
        if strip_views(graph, position) == position and (itemsize <= narrowest or position in graph.outputs):
            found.append(position)
            narrowest = min(narrowest, itemsize)
    return found[::-1]


def _only_pointwise(graph: Graph, start: int, end: int) -> bool:
    """True if nothing but pointwise operations, views and reductions of heads lies between a value and where all its uses come
    together."""
    stack, seen = list(graph.users[start]), {end}
    while stack:
        position = stack.pop()
        if graph.nodes[position].family not in (Family.POINTWISE, Family.VIEW) and not is_of_heads(graph, position):
            return False
        if position not in seen:
            seen.add(position)
            stack += graph.users[position]
    return True


def shared_values(graph: Graph, stored: Collection[int], alone: Collection[int], streamed: Collection[int]) -> frozenset[int]:
    """Values that kernels read rather than compute them again: some that lie in memory anyway, and some that are kept for it.

    Args:
        stored: computed values that lie in memory anyway.
        alone: those of them whose kernel computes nothing else.
        streamed: products whose first operand is computed as it is needed, and never lies in memory.
    """
    sharing = _Sharing(graph, set(stored), frozenset(alone), frozenset(streamed))
    kept: set[int] = set()
    for position, node in graph:
        shareable = node.family in (Family.POINTWISE, Family.REDUCTION, Family.SCAN, Family.ORDER) and position not in sharing.alone
        if shareable and sharing.pays(position):
            sharing.stored.add(position)
            kept.add(position)
    return frozenset(kept)


class _Sharing:
    """The knowledge of the kernels to come.

    Attributes:
        stored: computed values that lie in memory; grows.
        alone: those of them whose kernel computes nothing else.
    """

    def __init__(self, graph: Graph, stored: set[int], alone: frozenset[int], streamed: frozenset[int]) -> None:
        self.graph, self.stored, self.alone, self._streamed = graph, stored, alone, streamed
        self._generation: list[int] = []  # how many kernels run one after the other before a value
        self._over: list[Shape] = []  # the iteration space in which a value is computed
        for _, node in graph:
            self._generation.append(max((self._generation[a] + (a in stored) for a in node.args), default=0))
            self._over.append(self._space(node))
        self._ends = self._ends_of_chains()

    def _ends_of_chains(self) -> list[int]:
        """For each value the last one of the chain of only users that no kernel stores: who needs the one needs the other."""
        ends = list(range(len(self.graph.nodes)))
        for position in reversed(ends):
            users = self.graph.users[position]
            if len(users) == 1 and users[0] not in self.stored and self._is_computed_with(position, users[0]):
                ends[position] = ends[users[0]]
        return ends

    def pays(self, value: int) -> bool:
        """True if reading a value moves fewer bytes than computing it in each kernel that needs it."""
        readers = self._readers(value)
        is_stored = value in self.stored  # its kernel writes it in any case
        if len(readers) + is_stored < 2:
            return False
        own = self._inputs([value])
        others = {key: self._inputs(roots, value) for key, roots in readers.items()}
        again = sum(self._bytes(reads | own) for reads in others.values())
        writer = others.pop(self._key(value), frozenset())  # which needs it too, or is a kernel of its own
        read = sum(self._bytes(reads | {value}) for reads in others.values())
        if is_stored:
            return read + self._bytes(writer | own) * bool(writer) < again
        return read + self._bytes(writer | own) + self._bytes({value}) < again

    def _readers(self, value: int) -> dict[KernelKey, list[int]]:
        """The kernels that need a value, as far as they matter, with what they compute of it."""
        found: dict[KernelKey, list[int]] = {}
        queue, seen = deque([self._ends[value]]), {self._ends[value]}
        while queue and len(found) < _MOST_READERS:
            position = queue.popleft()
            for user in self.graph.users[position]:
                node = self.graph.nodes[user]
                if user in self.stored and node.family not in (Family.CONTRACTION, Family.LIBRARY):
                    found.setdefault(self._key(user), []).append(user)
                elif self._is_computed_with(position, user) and (end := self._ends[user]) not in seen:
                    seen.add(end)
                    queue.append(end)
        return found

    def _is_computed_with(self, operand: int, user: int) -> bool:
        """True if what needs the user computes the operand: of a product only where it is streamed."""
        node = self.graph.nodes[user]
        if node.family is Family.CONTRACTION:
            return user in self._streamed and node.args[0] == operand
        return node.family not in (Family.WRITE, Family.LIBRARY)

    def _inputs(self, roots: Iterable[int], other: int | None = None) -> frozenset[int]:
        """The values that computing some others reads from memory, without another value and its producers. A gathered value
        stands for itself: of its table, no more is read."""
        found: set[int] = set()
        stack = [a for root in roots for a in self.graph.nodes[root].args]
        seen = set() if other is None else {other}
        while stack:
            position = stack.pop()
            if position not in seen:
                seen.add(position)
                node = self.graph.nodes[position]
                if node.op in (Op.INPUT, Op.PUT) or position in self.stored:
                    found.add(position)
                elif node.family is Family.INDEXING:
                    found.add(position)
                    stack.append(node.args[1])
                else:
                    stack += node.args
        return frozenset(found)

    def _bytes(self, positions: Iterable[int]) -> int:
        return sum(map(self._sizes.__getitem__, positions))

    @cached_property
    def _sizes(self) -> list[int]:
        """The bytes of each value, but for random bits, which take none."""
        nodes = self.graph.nodes
        return [0 if n.op is Op.RANDOM else nominal(product(n.shape)) * n.dtype.itemsize for n in nodes]

    def _key(self, value: int) -> KernelKey:
        """Values over one iteration space that no other kernel has to come between are computed together."""
        if value in self.alone:
            return (value,)
        return (self._generation[value], *map(str, self._over[value]))

    def _space(self, node: Node) -> Shape:
        """The iteration space of a value: that of its operand for a reduction, and for values that are computed of reductions
        alone."""
        if node.family is Family.REDUCTION:
            return self.graph.nodes[node.args[0]].shape
        if node.family is not Family.POINTWISE:
            return node.shape
        spaces = [self._over[a] for a in node.args if not self.graph.nodes[a].weak]
        return spaces[0] if spaces and all(s == spaces[0] for s in spaces) and len(spaces[0]) == len(node.shape) else node.shape
