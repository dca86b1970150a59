"""The matmuls that are computed in another way if that is expected or measured to be faster, or declared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from fusegen.compiler.decision import FusedGraph
from fusegen.families.gemm.choice import (
    MatmulChoice,
    sum_is_faster,
    takes_deferred_norm,
    takes_rows_on_load,
    takes_sum_in_registers,
)
from fusegen.families.gemm.deferred import deferrable_norms, is_fused
from fusegen.families.gemm.heuristics import ExpectedSizes, size_of
from fusegen.families.gemm.pipelines import MatmulMarks
from fusegen.families.gemm.sums import are_joined, depth_of_term, summable_matmuls
from fusegen.fusion.groups import Group, matmuls_of
from fusegen.ir.graph import Graph
from fusegen.schedule.choices import Measured
from fusegen.target import Target
from fusegen.threads import cached_property

ChoiceOf: TypeAlias = Callable[[FusedGraph, Group, ExpectedSizes], MatmulChoice]


class MatmulWays:
    """Marks matmuls of a graph for sums in one launch, deferred norms, and first operands that are computed on load.

    Args:
        fuse: returns the graph with some marks, fused.
        choice: returns the choice for a matmul launch.
    """

    def __init__(self, graph: Graph, target: Target, fuse: Callable[[MatmulMarks], FusedGraph], choice: ChoiceOf) -> None:
        self._graph, self._target, self._fuse, self._choice = graph, target, fuse, choice
        self._matmuls = matmuls_of(graph)

    def origins(self, marks: MatmulMarks, fused: FusedGraph) -> dict[int, int]:
        """Maps each matmul of the fused graph to the original one; a sum in one launch to its last term."""
        return dict(zip(fused.matmuls, (p for p in self._matmuls if p not in marks.joined), strict=True))

    def measured(
        self,
        marks: MatmulMarks,
        in_memory: frozenset[int],
        fused: FusedGraph,
        names: Mapping[Group, str],
        expected: ExpectedSizes,
        sizes: Mapping[str, int],
        measured: Measured,
    ) -> MatmulMarks:
        """Marks one sum or one norm, since it may keep others from that; without one, first operands, but those of `in_memory`."""
        origin = self.origins(marks, fused)
        for terms, (group, joined) in self._sums_of(marks, fused).items():
            depths = [depth_of_term(self._graph, term) for term in sorted(terms)]
            is_faster = self._is_faster(marks, terms, fused, joined, expected)
            if takes_sum_in_registers(names[group], fused.graph, group, sizes, depths, measured, is_faster=is_faster):
                return replace(marks, sums=marks.sums | {terms})
        for group in fused.matmul_launches:
            consumers = self._consumers_of_norm(marks, origin[group.core_nodes[0]])
            if consumers and takes_deferred_norm(names[group], fused.graph, group, sizes, measured):
                return replace(marks, scaled=marks.scaled | consumers)
        on_load = [
            origin[p]
            for group, launch in fused.row_launches.items()
            if takes_rows_on_load(names[group], fused.graph, launch, self._target, expected, sizes, measured)
            for p in launch.core_nodes
        ]
        return replace(marks, rows=marks.rows.union(on_load) - in_memory)

    def expected(self, marks: MatmulMarks, fused: FusedGraph, expected: ExpectedSizes) -> MatmulMarks:
        """Marks one sum that one launch is expected to compute faster."""
        for terms, (_, joined) in self._sums_of(marks, fused).items():
            if self._is_faster(marks, terms, fused, joined, expected):
                return replace(marks, sums=marks.sums | {terms})
        return marks

    def _is_faster(
        self, marks: MatmulMarks, terms: frozenset[int], fused: FusedGraph, joined: FusedGraph, expected: ExpectedSizes
    ) -> bool:
        """True if one launch is expected to compute a sum faster than the launches of its terms."""
        origin = self.origins(marks, fused)
        launches = [group for group in fused.matmul_launches if not terms.isdisjoint(origin[p] for p in group.core_nodes)]
        generated = {origin[p] for group in launches for p in group.core_nodes}
        if not generated <= terms:  # a launch that computes other matmuls, too
            return False
        origin = self.origins(replace(marks, sums=marks.sums | {terms}), joined)
        (launch,) = (group for group in joined.matmul_launches if max(terms) in {origin[p] for p in group.core_nodes})
        return sum_is_faster(
            [self._choice(fused, group, expected) for group in launches],
            [size_of(self._graph, term, expected) for term in terms - generated],
            self._choice(joined, launch, expected),
            self._target,
        )

    @cached_property
    def _sums(self) -> Sequence[frozenset[int]]:
        """The terms of sums that one launch could compute."""
        return tuple(summable_matmuls(self._graph, self._target))

    def _sums_of(self, marks: MatmulMarks, fused: FusedGraph) -> dict[frozenset[int], tuple[Group, FusedGraph]]:
        """Maps the terms of each sum that generated kernels can compute in one launch to the launch of the last term, and to the
        graph with that launch."""
        others, origin = marks.library | marks.on_load | marks.apart | marks.scaled | marks.rows, self.origins(marks, fused)
        launches = {origin[p]: group for group in fused.matmul_launches for p in group.core_nodes}
        free = [terms for terms in self._sums if terms not in marks.sums and terms.isdisjoint(others) and max(terms) in launches]
        joined = {terms: self._fuse(replace(marks, sums=marks.sums | {terms})) for terms in free}
        return {terms: (launches[max(terms)], other) for terms, other in joined.items() if are_joined(other.graph, other.groups)}

    @cached_property
    def _norms(self) -> dict[int, frozenset[int]]:
        """Maps each matmul whose first operand is a norm that may be deferred to all matmuls of that norm."""
        norms = deferrable_norms(self._graph, self._target)
        return {matmul: frozenset(norm.consumers) for norm in norms for matmul in norm.consumers}

    def _consumers_of_norm(self, marks: MatmulMarks, matmul: int) -> frozenset[int]:
        """The matmuls of the norm that a matmul reads, if generated kernels can compute it together with them; none otherwise."""
        consumers = self._norms.get(matmul, frozenset()) - marks.scaled
        if not consumers or not consumers.isdisjoint(marks.on_load | marks.rows.union(*marks.sums)):
            return frozenset()
        deferred = self._fuse(replace(marks, scaled=marks.scaled | consumers))
        return consumers if is_fused(deferred.graph, deferred.groups) else frozenset()
