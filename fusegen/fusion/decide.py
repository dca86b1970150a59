"""Decides which values are materialized, before any kernel is built."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import TypeAlias

from fusegen.fusion.accumulator import reduces_heads
from fusegen.fusion.groups import Materialized, is_as_large, is_stored_elsewhere, matmuls_of, operand_base, strip_views
from fusegen.fusion.matcher import Claims, Decision, Matcher
from fusegen.fusion.order import separate_copies
from fusegen.ir.graph import Graph, Node
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Shape, nominal, product
from fusegen.target import Target
from fusegen.threads import cached_property


def decide(
    graph: Graph,
    target: Target,
    families: Sequence[Matcher],
    separate: Materialized = frozenset(),
    once: Materialized = frozenset(),
) -> Decision:
    """Decides which values are materialized besides the results and the operands of matmuls.

    ``separate`` are writes that need a kernel of their own, ``once`` values that one kernel computes for all readers.
    """
    own = separate_copies(graph, separate)
    products = matmuls_of(graph)
    claims = Claims(ends=set(own))
    for family in families:
        family.claim(graph, target, claims)
    calls = [position for position, node in graph if node.family is Family.LIBRARY]
    stored = _stored(graph, products, calls, claims) | _combined_statistics(graph, matmul_ends(products, claims)) | once
    shared = once | shared_values(graph, stored, claims.ends.union(products, calls), claims.streamed)
    extra_outputs: dict[int, int] = {}
    for family in families:
        extra_outputs.update(family.extra_outputs(graph, target, claims, stored | shared))
    return Decision(frozenset(claims.ends), extra_outputs, stored | shared, shared.union(claims.ends), claims.refusals, own)


def matmul_ends(products: Sequence[int], claims: Claims) -> list[int]:
    """Returns the last value of each matmul with an epilogue, and the matmuls without one."""
    return sorted(claims.epilogues.union(p for p in products if p not in claims.fused_matmuls))


def derived_from(graph: Graph, value: int) -> set[int]:
    """Returns all values computed from a value elementwise or per head, possibly with other operands."""
    derived: set[int] = set()
    stack = [value]
    while stack:
        near = (user for user in graph.users[stack.pop()] if fits_epilogue(graph, user))
        new = [user for user in near if user not in derived]
        derived.update(new)
        stack += new
    return derived


def _combined_statistics(graph: Graph, ends: Collection[int]) -> Materialized:
    """Returns the per-head reductions of matmul results that another reduction reads, e.g. to combine the tiles of a row."""
    near = {p for end in ends for p in derived_from(graph, end) if graph.nodes[p].family is Family.REDUCTION}
    return frozenset(p for p in near if _is_combined(graph, p))


def _is_combined(graph: Graph, statistic: int) -> bool:
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


def fits_epilogue(graph: Graph, position: int) -> bool:
    """True if the epilogue of a matmul may compute a node."""
    return graph.nodes[position].family in (Family.POINTWISE, Family.VIEW) or reduces_heads(graph, position)


def _stored(graph: Graph, products: Sequence[int], calls: Sequence[int], claims: Claims) -> frozenset[int]:
    required = [*graph.outputs, *graph.puts, *claims.ends, *(p for p in products if p not in claims.fused_matmuls), *calls]
    for step in (*products, *calls):
        required += claims.operands.get(step) or [operand_base(graph, a) for a in graph.nodes[step].args]
    return frozenset(p for p in (strip_views(graph, w) for w in required) if not is_stored_elsewhere(graph, p))


# Values that are materialized although a kernel could recompute them: results of matmuls, and values of several readers if that
# moves fewer bytes. Symbolic sizes count as large. These decisions change the traffic, never a result.


_MOST_READERS = 4  # the count stops here: more readers do not change the decision

KernelKey: TypeAlias = tuple[object, ...]
"""A future kernel: values with equal keys will be computed together."""


def elementwise_ends(graph: Graph, value: int) -> list[int]:
    """Returns later values that could be materialized instead of a value, the furthest first.

    Each is an elementwise result with as many elements, through which all users of the value read it. Its elements take no more
    bytes than those of earlier ones, unless it is a result of the graph.
    """
    ends: list[int] = []
    position, narrowest = value, graph.nodes[value].dtype.itemsize
    while (following := graph.post_dominators[position]) < len(graph.nodes):
        is_write = graph.nodes[following].family is Family.WRITE
        if is_write or not _only_pointwise(graph, position, following) or not is_as_large(graph, value, following):
            break
        position = following
        itemsize = graph.nodes[position].dtype.itemsize
        if strip_views(graph, position) == position and (itemsize <= narrowest or position in graph.outputs):
            ends.append(position)
            narrowest = min(narrowest, itemsize)
    return ends[::-1]


def _only_pointwise(graph: Graph, start: int, end: int) -> bool:
    """True if only pointwise operations, views and per-head reductions are between a value and a post-dominator."""
    stack, seen = list(graph.users[start]), {end}
    while stack:
        position = stack.pop()
        if graph.nodes[position].family not in (Family.POINTWISE, Family.VIEW) and not reduces_heads(graph, position):
            return False
        if position not in seen:
            seen.add(position)
            stack += graph.users[position]
    return True


def shared_values(graph: Graph, stored: Collection[int], alone: Collection[int], streamed: Collection[int]) -> frozenset[int]:
    """Returns the values that kernels read instead of recomputing them.

    Args:
        stored: computed values that are materialized in any case.
        alone: values in `stored` whose kernel computes nothing else.
        streamed: matmuls whose first operand is computed on the fly and never materialized.
    """
    readers = _Readers(graph, set(stored), frozenset(alone), frozenset(streamed))
    shared: set[int] = set()
    for position, node in graph:
        shareable = node.family in (Family.POINTWISE, Family.REDUCTION, Family.SCAN, Family.ORDER) and position not in readers.alone
        if shareable and readers.saves_bytes(position):
            readers.stored.add(position)
            shared.add(position)
    return frozenset(shared)


class _Readers:
    """Estimates which kernels will read each value, and the bytes that they move.

    Attributes:
        stored: values known to be materialized; callers add to it.
        alone: values in `stored` whose kernel computes nothing else.
    """

    def __init__(self, graph: Graph, stored: set[int], alone: frozenset[int], streamed: frozenset[int]) -> None:
        self.graph, self.stored, self.alone, self._streamed = graph, stored, alone, streamed
        self._generation: list[int] = []  # kernels that run one after another before a value
        self._over: list[Shape] = []  # the iteration space of each value
        for _, node in graph:
            self._generation.append(max((self._generation[a] + (a in stored) for a in node.args), default=0))
            self._over.append(self._space(node))
        self._ends = self._ends_of_chains()

    def _ends_of_chains(self) -> list[int]:
        """Maps each value to the end of its chain of single, unmaterialized users: a kernel that needs one of the two needs
        both."""
        ends = list(range(len(self.graph.nodes)))
        for position in reversed(ends):
            users = self.graph.users[position]
            if len(users) == 1 and users[0] not in self.stored and self._is_computed_with(position, users[0]):
                ends[position] = ends[users[0]]
        return ends

    def saves_bytes(self, value: int) -> bool:
        """True if reading a value moves fewer bytes than recomputing it in each kernel that needs it."""
        readers = self._readers(value)
        is_stored = value in self.stored  # materialized in any case
        if len(readers) + is_stored < 2:
            return False
        own = self._inputs([value])
        inputs = {key: self._inputs(roots, value) for key, roots in readers.items()}
        again = sum(self._bytes(reads | own) for reads in inputs.values())
        writer = inputs.pop(self._key(value), frozenset())  # the kernel that computes the value: a reader, or a separate one
        read = sum(self._bytes(reads | {value}) for reads in inputs.values())
        if is_stored:
            return read + self._bytes(writer | own) * bool(writer) < again
        return read + self._bytes(writer | own) + self._bytes({value}) < again

    def _readers(self, value: int) -> dict[KernelKey, list[int]]:
        """Maps the first few kernels that need a value to the values that they compute from it."""
        readers: dict[KernelKey, list[int]] = {}
        queue, seen = deque([self._ends[value]]), {self._ends[value]}
        while queue and len(readers) < _MOST_READERS:
            position = queue.popleft()
            for user in self.graph.users[position]:
                node = self.graph.nodes[user]
                if user in self.stored and node.family not in (Family.CONTRACTION, Family.LIBRARY):
                    readers.setdefault(self._key(user), []).append(user)
                elif self._is_computed_with(position, user) and (end := self._ends[user]) not in seen:
                    seen.add(end)
                    queue.append(end)
        return readers

    def _is_computed_with(self, operand: int, user: int) -> bool:
        """True if the kernel of the user computes the operand, too; a matmul does so only if its operand is streamed."""
        node = self.graph.nodes[user]
        if node.family is Family.CONTRACTION:
            return user in self._streamed and node.args[0] == operand
        return node.family not in (Family.WRITE, Family.LIBRARY)

    def _inputs(self, roots: Iterable[int], other: int | None = None) -> frozenset[int]:
        """Returns the values in memory that the roots are computed from, except `other` and its producers.

        A gather replaces its table in the result, since only the gathered elements are read.
        """
        inputs: set[int] = set()
        stack = [a for root in roots for a in self.graph.nodes[root].args]
        seen = set() if other is None else {other}
        while stack:
            position = stack.pop()
            if position not in seen:
                seen.add(position)
                node = self.graph.nodes[position]
                if node.op in (Op.INPUT, Op.PUT) or position in self.stored:
                    inputs.add(position)
                elif node.family is Family.INDEXING:
                    inputs.add(position)
                    stack.append(node.args[1])
                else:
                    stack += node.args
        return frozenset(inputs)

    def _bytes(self, positions: Iterable[int]) -> int:
        return sum(map(self._sizes.__getitem__, positions))

    @cached_property
    def _sizes(self) -> list[int]:
        nodes = self.graph.nodes
        return [0 if n.op is Op.RANDOM else nominal(product(n.shape)) * n.dtype.itemsize for n in nodes]

    def _key(self, value: int) -> KernelKey:
        """Returns the key of the kernel that will compute a value.

        Values have equal keys if they share an iteration space and no kernel must run between them.
        """
        if value in self.alone:
            return (value,)
        return (self._generation[value], *map(str, self._over[value]))

    def _space(self, node: Node) -> Shape:
        """Returns the iteration space of a value: the operand's for a reduction and for values computed from reductions alone."""
        if node.family is Family.REDUCTION:
            return self.graph.nodes[node.args[0]].shape
        if node.family is not Family.POINTWISE:
            return node.shape
        spaces = [self._over[a] for a in node.args if not self.graph.nodes[a].weak]
        return spaces[0] if spaces and all(s == spaces[0] for s in spaces) and len(spaces[0]) == len(node.shape) else node.shape
