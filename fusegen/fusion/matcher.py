"""The interface through which fusion asks kernel families for groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from fusegen.fusion.groups import Group, GroupKind, Materialized
from fusegen.ir.graph import Graph
from fusegen.ir.ops import Family
from fusegen.target import Target


@dataclass
class Claims:
    """The values that families claim before materialization is decided.

    Attributes:
        ends: last values of generated matmul and attention kernels, and values with a kernel of their own.
        epilogues: the values in `ends` that are the last one of an epilogue.
        fused_matmuls: matmuls computed inside a kernel and never materialized.
        streamed: the matmuls in `fused_matmuls` whose first operand is not materialized either.
        operands: maps a matmul inside a kernel to the values that the kernel reads instead of its operands.
        refusals: maps a matmul to the reason why no generated kernel takes it.
    """

    ends: set[int] = field(default_factory=set)
    epilogues: set[int] = field(default_factory=set)
    fused_matmuls: set[int] = field(default_factory=set)
    streamed: set[int] = field(default_factory=set)
    operands: dict[int, tuple[int, ...]] = field(default_factory=dict)
    refusals: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """The decisions that fusion follows.

    Attributes:
        ends: last values of matmuls and attention, each with a kernel of its own.
        extra_outputs: maps a further value that an epilogue stores to the last value of the epilogue.
        stored: all materialized values known before kernels are built.
        materialized: the values in `stored` that kernels read instead of recomputing them.
        refusals: maps a matmul to the reason why no generated kernel takes it.
        write_copies: copies around writes, each with a kernel of its own.
    """

    ends: Materialized
    extra_outputs: Mapping[int, int]
    stored: Materialized
    materialized: Materialized
    refusals: Mapping[int, str]
    write_copies: Materialized = frozenset()


class Matcher:
    """Matches values of a graph for one family, which builds groups of certain kinds. Fusion asks the families in order, except
    those that need operations of which the graph has none. The defaults match nothing."""

    kinds: tuple[GroupKind, ...] = ()
    needs: tuple[Family, ...] = ()

    def claim(self, graph: Graph, target: Target, claims: Claims) -> None:
        """Adds the values that the family takes regardless of other decisions."""

    def extra_outputs(self, graph: Graph, target: Target, claims: Claims, stored: Materialized) -> Mapping[int, int]:
        """Maps further materialized values to the claimed value whose kernel writes them as well."""
        return {}

    def group(self, graph: Graph, root: int, target: Target, decision: Decision) -> Group | None:
        """Returns the group that ends in a value, or None. The first family's group is used."""
        return None

    def merged(self, graph: Graph, group: Group, other: int, materialized: Materialized) -> Group | None:
        """Returns a group of this family with another output; None if one kernel cannot compute it."""
        return None

    def joined(self, graph: Graph, groups: Sequence[Group], target: Target, decision: Decision) -> Sequence[Group]:
        """Returns all groups, with those of this family joined that can run as one launch."""
        return groups


M = TypeVar("M", bound=Matcher)


def applicable(families: Sequence[Matcher], graph: Graph) -> tuple[Matcher, ...]:
    present = {op.family for op in graph.operations}
    return tuple(family for family in families if not family.needs or not present.isdisjoint(family.needs))


def matcher_of(families: Sequence[M], kind: GroupKind) -> M:
    return next(family for family in families if kind in family.kinds)
