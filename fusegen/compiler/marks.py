"""The matmuls that are computed in another way if that is expected or measured to be faster, or declared."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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
from fusegen.schedule.choices import DeclaredPlans, Measured
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

    def with_sums(
        self,
        marks: MatmulMarks,
        names: Mapping[Group, str],
        expected: ExpectedSizes,
        sizes: Mapping[str, int],
        measured: Measured | None,
    ) -> MatmulMarks:
        """Marks the sums that one launch computes. A function with declared plans has those that it declares: other plans name
        launches of single terms."""
        fused, sums = self._fuse(marks), self._free_sums(marks)
        every = replace(marks, sums=frozenset(sums))
        are_alone, taken = not self._are_joined(every), set[frozenset[int]]()
        for terms, group in sums.items():
            joined = replace(marks, sums=frozenset({terms})) if are_alone else every  # one graph for all is faster to plan
            if not self._are_joined(joined):
                continue
            is_taken = not isinstance(measured, DeclaredPlans) and self._is_faster(terms, marks, joined, expected)
            if measured is not None:
                depths = [depth_of_term(self._graph, term) for term in sorted(terms)]
                is_taken = takes_sum_in_registers(names[group], fused.graph, group, sizes, depths, measured, is_faster=is_taken)
            if is_taken:
                taken.add(terms)
        return self._with_joined(marks, taken)

    def _with_joined(self, marks: MatmulMarks, sums: Collection[frozenset[int]]) -> MatmulMarks:
        """Marks sums, without those that keep others from being one launch."""
        every = replace(marks, sums=frozenset(sums))
        if self._are_joined(every):
            return every
        for terms in sorted(sums, key=max):
            more = replace(marks, sums=marks.sums | {terms})
            marks = more if self._are_joined(more) else marks
        return marks

    def _are_joined(self, marks: MatmulMarks) -> bool:
        """True if generated kernels compute all marked sums."""
        fused = self._fuse(marks)
        return are_joined(fused.graph, fused.groups)

    def _is_faster(self, terms: frozenset[int], apart: MatmulMarks, joined: MatmulMarks, expected: ExpectedSizes) -> bool:
        """True if one launch is expected to compute a sum faster than the launches of its terms."""
        fused, origin = self._fuse(apart), self.origins(apart, self._fuse(apart))
        launches = [group for group in fused.matmul_launches if not terms.isdisjoint(origin[p] for p in group.core_nodes)]
        generated = {origin[p] for group in launches for p in group.core_nodes}
        if not generated <= terms:  # a launch that computes other matmuls, too
            return False
        other, origin = self._fuse(joined), self.origins(joined, self._fuse(joined))
        launch = next(group for group in other.matmul_launches if max(terms) in {origin[p] for p in group.core_nodes})
        return sum_is_faster(
            [self._choice(fused, group, expected) for group in launches],
            [size_of(self._graph, term, expected) for term in terms - generated],
            self._choice(other, launch, expected),
            self._target,
        )

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
        """Marks one norm, since it may keep others from that; without one, first operands, but those of `in_memory`."""
        origin = self.origins(marks, fused)
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

    @cached_property
    def _sums(self) -> Sequence[frozenset[int]]:
        """The terms of sums that one launch could compute."""
        return tuple(summable_matmuls(self._graph, self._target))

    def _free_sums(self, marks: MatmulMarks) -> dict[frozenset[int], Group]:
        """Maps the terms of each sum that one launch could compute to the launch of the last term."""
        fused = self._fuse(marks)
        origin = self.origins(marks, fused)
        launches = {origin[p]: group for group in fused.matmul_launches for p in group.core_nodes}
        return {terms: launches[max(terms)] for terms in self._sums if terms.isdisjoint(marks.on_load) and max(terms) in launches}

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
