"""The graphs that compute one thing: which a call runs is known when its sizes are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from threading import RLock
from typing import TypeAlias, cast

from fusegen.compiler.forms import Forms
from fusegen.compiler.pipeline import Rules, Stage, run
from fusegen.ir.blocks import Blocks
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Dim, literal, product, same
from fusegen.passes.blocks import InBlocks, in_blocks
from fusegen.passes.fuse.decide import products_of_attention
from fusegen.passes.whole import Cuts, by_rows, cuts_of
from fusegen.program.call import ROOM, Role, rows_of_block
from fusegen.program.formula import Formula
from fusegen.schedule.attention_cost import attentions_of, takes_library
from fusegen.schedule.lower import Bodies
from fusegen.schedule.plan import RowPlan
from fusegen.schedule.program import Program, row_bytes, sum_bytes
from fusegen.schedule.ranking import program_time
from fusegen.target import Target
from fusegen.threads import new_lock

Sizes: TypeAlias = Mapping[str, int]
Facts: TypeAlias = tuple[tuple[str, int, int], ...]
"""Sizes, or what is computed of them, each with a bound and a divisor."""

_WHOLE = 64 << 20  # bytes up to which a value may lie in memory whole, though a loop could compute it in blocks
_TRIED = 1024  # rows of a block for which a loop is laid out before it is known how many there is room for
_DIVISORS = (16, 8, 4, 2, 1)


class Alternatives:
    """A graph, the same with torch's attention in place of ours, and with loops in place of values that are too large to lie in
    memory whole; each also for sizes of which a bound and a divisor are known. Kernels of equal graphs share it: one thread at a
    time makes a form.

    Args:
        graph: in primitives, ready for fusion.
        target: the machine.
        wide: whether indices need 64 bits.
        depth: how many loops it is the body of.
        library: the graph with attention by torch.
        lock: of the alternatives that these are a part of.

    Attributes:
        whole: the forms of the graph as it is, for all sizes.
    """

    def __init__(
        self,
        graph: Graph,
        target: Target,
        *,
        wide: bool,
        depth: int = 0,
        library: Graph | None = None,
        lock: RLock | None = None,
    ) -> None:
        self._lock = lock or new_lock()
        self._target, self._wide, self._depth = target, wide, depth
        self._lengths = _lengths(graph)
        self._looped = in_blocks(graph, products_of_attention(graph, target), depth)
        self._known: dict[tuple[bool, Facts | None, Cuts], Forms] = {}
        self._bodies: dict[Blocks, Alternatives] = {}
        self._graph = graph
        self._attentions = () if library is None else attentions_of(library)
        self._library = None
        if library is not None and self._attentions:
            self._library = Alternatives(library, target, wide=wide, lock=self._lock)
        self.whole = self._forms(None, (), is_looped=False)

    def of(self, sizes: Sizes) -> Forms:
        """The forms for some sizes, and for others with the same bounds and divisors."""
        with self._lock:
            return self._chosen(sizes, is_general=False)

    def general(self, sizes: Sizes) -> Forms:
        """Forms for all sizes, with loops if these sizes need them."""
        with self._lock:
            return self._chosen(sizes, is_general=True)

    def _chosen(self, sizes: Sizes, *, is_general: bool) -> Forms:
        if self._library is not None and takes_library([size(sizes) for size in self._attentions], self._target.processors):
            return self._library._chosen(sizes, is_general=is_general)
        whole = self._in_rows(sizes, is_general=is_general, is_looped=False)
        is_looped = self._looped is not None and self._is_stored(self._looped, whole.at(sizes).program, sizes)
        return self._in_rows(sizes, is_general=is_general, is_looped=True) if is_looped else whole

    def _is_stored(self, looped: InBlocks, program: Program, sizes: Sizes) -> bool:
        """True if a program keeps a value, of those that loops would compute in blocks, that is too large."""
        large, most = {formula(elements)(sizes) for elements in looped.large}, ROOM if self._depth else _WHOLE
        kept = ((program.graph.nodes[b.node], b) for b in program.buffers if b.role is Role.TEMPORARY and b.node is not None)
        values = ((formula(product(node.shape))(sizes), b.dtype) for node, b in kept)
        return any(count in large and count * dtype.itemsize > most for count, dtype in values)

    def _in_rows(self, sizes: Sizes, *, is_general: bool, is_looped: bool) -> Forms:
        """The forms, in which reductions go by rows that would leave most of the machine idle otherwise."""
        graph = self._graph_of(is_looped)
        cuts = cuts_of(graph, sizes, self._target.processors)

        def forms(cuts: Cuts) -> Forms:
            lengths = dict.fromkeys((*self._lengths, *(extent for _, cut in cuts for extent in cut.extents)))
            facts = None if is_general else tuple(_fact(extent, sizes) for extent in lengths)
            return self._forms(facts, cuts, is_looped=is_looped)

        if not cuts or any(same(product(graph.nodes[position].shape), 1) for position, _ in cuts):
            return forms(cuts)  # there is no other way to keep a machine busy with one result
        whole, apart = forms(()), forms(cuts)
        return apart if _is_faster(apart.at(sizes).program, whole.at(sizes).program, sizes, self._target) else whole

    def _graph_of(self, is_looped: bool) -> Graph:
        return self._looped.graph if is_looped and self._looped is not None else self._graph

    def _forms(self, facts: Facts | None, cuts: Cuts, *, is_looped: bool) -> Forms:
        graph, key = self._graph_of(is_looped), (is_looped, facts, cuts)
        if key not in self._known:
            loops = dict.fromkeys(cast(Blocks, node.attr("blocks")) for node in graph.nodes if node.op is Op.BLOCKS)

            def bodies(sizes: Sizes) -> Bodies:
                return {blocks: self._program(blocks, sizes, is_general=facts is None) for blocks in loops}

            known = by_rows(_knowing(graph, facts or ()), cuts)
            self._known[key] = Forms(known, self._target, wide=self._wide, bodies=bodies, lock=self._lock)
        return self._known[key]

    def _program(self, blocks: Blocks, sizes: Sizes, *, is_general: bool) -> tuple[Program, Formula]:
        """The program of a loop's body, laid out for the first block at some sizes, and the bytes of a row."""
        if blocks not in self._bodies:
            body = run(blocks.body, Rules(self._target), Stage.READY)
            self._bodies[blocks] = Alternatives(body, self._target, wide=self._wide, depth=self._depth + 1, lock=self._lock)
        loop, extent = self._bodies[blocks], formula(blocks.extent)(sizes)
        tried = loop.whole.at({**sizes, **blocks.first(min(extent, _TRIED))})
        taken = row_bytes(tried.program, blocks)
        first = {**sizes, **blocks.first(rows_of_block(extent, taken(sizes), sum_bytes(blocks)(sizes)))}
        forms = loop.general(first) if is_general else loop.of(first)
        return forms.at(first).program, taken


def _lengths(graph: Graph) -> tuple[Dim, ...]:
    """Extents along which rows are reduced, that are known at the call only."""
    reduced = ((node, graph.nodes[node.args[0]].shape) for node in graph.nodes if node.family is Family.REDUCTION)
    extents = (shape[dim] for node, shape in reduced for dim in cast(tuple[int, ...], node.attr("dims")))
    return tuple(sorted({extent for extent in extents if literal(extent) is None}, key=str))


def _is_faster(apart: Program, whole: Program, sizes: Sizes, target: Target) -> bool:
    """True if reductions by rows are expected to take less time; where nothing is known of it, if they were few blocks."""
    time, other = program_time(apart, sizes, target), program_time(whole, sizes, target)
    if time is not None and other is not None:
        return time < other
    rows = (launch for launch in whole.launches if isinstance(launch.plan, RowPlan) and not launch.plan.tiled)
    return any(launch.cluster == 1 and launch.grid(sizes) < target.processors for launch in rows)


def _fact(extent: Dim, sizes: Sizes) -> tuple[str, int, int]:
    """An extent with the next power of two, and the largest of some divisors; what is computed of sizes has those of these."""
    size, name = formula(extent)(sizes), str(extent)
    return name, 1 << (size - 1).bit_length(), next(d for d in _DIVISORS if size % d == 0) if name.isidentifier() else 1


def _knowing(graph: Graph, facts: Facts) -> Graph:
    """A graph of which bounds and divisors of some sizes are known."""
    bounds, multiples = dict(graph.bounds), dict(graph.multiples)
    for name, bound, divisor in facts:
        bounds[name] = min(bounds.get(name, bound), bound)
        multiples[name] = math.lcm(multiples.get(name, 1), divisor)
    known = {name: divisor for name, divisor in multiples.items() if divisor > 1}
    return replace(graph, bounds=tuple(bounds.items()), multiples=tuple(known.items()))
