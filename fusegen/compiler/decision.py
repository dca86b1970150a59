"""A graph after fusion, and the implementation of each of its matmuls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from fusegen.compiler.lower import KernelNames
from fusegen.families.gemm.choice import MatmulChoice, row_launches
from fusegen.families.gemm.deep import DeepFusion
from fusegen.families.gemm.epilogue import CONTRACTION
from fusegen.families.gemm.heuristics import ExpectedSizes, rows_and_depth
from fusegen.families.gemm.pipelines import MatmulMarks
from fusegen.families.gemm.plan import CostedPlan
from fusegen.fusion.groups import Group, matmuls_of
from fusegen.ir.graph import Graph
from fusegen.target import Target
from fusegen.threads import cached_property

MatmulKey: TypeAlias = tuple[MatmulMarks, tuple[CostedPlan, ...], frozenset[DeepFusion], KernelNames]


@dataclass(frozen=True)
class FusedGraph:
    """A graph after fusion. The library computes some of its matmuls.

    Attributes:
        graph: has the matmuls of the original graph, in the same order, without those that another one includes.
        groups: its groups, in the order of their launches.
        target: the machine.
        kind: equal for graphs with the same operations at the same positions.
    """

    graph: Graph
    groups: tuple[Group, ...]
    target: Target
    kind: int

    @property
    def matmul_launches(self) -> tuple[Group, ...]:
        """The matmuls that generated kernels compute."""
        return tuple(group for group in self.groups if group.kind is CONTRACTION)

    @cached_property
    def matmuls(self) -> tuple[int, ...]:
        """All matmuls of the graph."""
        return matmuls_of(self.graph)

    @cached_property
    def row_launches(self) -> Mapping[Group, Group]:
        """Maps the groups of matmuls whose first operand a kernel for few rows can compute to launches of matmuls."""
        return dict(row_launches(self.graph, self.groups, self.target))

    def key(self, group: Group, expected: ExpectedSizes) -> tuple[int, Group, int, int]:
        """The key of a matmul launch's choices: they depend only on its own rows and depth."""
        rows, depth = rows_and_depth(self.graph, group.core_nodes[0])
        return self.kind, group, expected.size_of(rows), expected.size_of(depth)


@dataclass(frozen=True)
class MatmulDecision:
    """The implementation of each matmul.

    Attributes:
        marks: matmuls that are computed in another way because that is expected to be faster.
        fused: the graph with these marks, fused.
        plans: plans of the other matmul launches, by their matmuls in the fused graph.
        choices: choices by matmul, including those left to the library.
        deep: pairs of matmul launches that are measured to be faster as one.
        default: the names of the default program's kernels; empty if it has the same groups.
    """

    marks: MatmulMarks
    fused: FusedGraph
    plans: Mapping[tuple[int, ...], CostedPlan]
    choices: Mapping[int, MatmulChoice]
    deep: frozenset[DeepFusion] = frozenset()
    default: KernelNames = ()

    @property
    def key(self) -> MatmulKey:
        """The part of the decision that determines the program."""
        return self.marks, tuple(self.plans.values()), self.deep, self.default
