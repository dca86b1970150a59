"""The side of a family of kernels that fusion sees: the values that it takes, and the groups that it makes of them."""

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
    """The products and other values of a graph that families take, before it is decided what lies in memory.

    Attributes:
        ends: values in which those end that a kernel of ours computes, or that have a kernel of their own.
        epilogues: those of them in which an epilogue ends.
        inside: products that are computed on the way, which never lie in memory.
        streamed: those among them whose first operand does not either.
        operands: of products that are computed on the way, what a kernel reads from memory instead of their operands.
        refusals: for a product that looked as if a kernel of ours could take it, why none does.
    """

    ends: set[int] = field(default_factory=set)
    epilogues: set[int] = field(default_factory=set)
    inside: set[int] = field(default_factory=set)
    streamed: set[int] = field(default_factory=set)
    operands: dict[int, tuple[int, ...]] = field(default_factory=dict)
    refusals: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """The decisions that fusion follows.

    Attributes:
        ends: values in which a product or attention ends, each with a kernel of its own.
        beside: values that the epilogue of a product computes besides the one in which it ends, with that one.
        stored: all computed values that lie in memory, as far as is known before there are kernels.
        kept: those of them that kernels read, though they could compute them.
        refusals: for a product that looked as if a kernel of ours could take it, why none does.
        held: copies around writes, each with a kernel of its own.
    """

    ends: Materialized
    beside: Mapping[int, int]
    stored: Materialized
    kept: Materialized
    refusals: Mapping[int, str]
    held: Materialized = frozenset()


class Matcher:
    """The way a family of kernels takes values of a graph. Fusion asks the families in their order; each method says what one does
    that takes nothing.

    Attributes:
        kinds: of the groups that it makes.
        needs: kinds of operations without one of which it takes nothing, so that it is not asked; empty where any graph will do.
    """

    kinds: tuple[GroupKind, ...] = ()
    needs: tuple[Family, ...] = ()

    def claim(self, graph: Graph, target: Target, claims: Claims) -> None:
        """Adds the values that the family takes whatever else is decided."""

    def beside(self, graph: Graph, target: Target, claims: Claims, stored: Materialized) -> Mapping[int, int]:
        """Values in memory that kernels of claimed values give as well, each with the value that it is beside.

        Args:
            stored: computed values that lie in memory.
        """
        return {}

    def group(self, graph: Graph, root: int, target: Target, decision: Decision) -> Group | None:
        """The group that ends in a value; None where the family has none. The first family's is taken."""
        return None

    def merged(self, graph: Graph, group: Group, other: int, kept: Materialized) -> Group | None:
        """A group of the family with another value that it writes as well; None where one kernel cannot."""
        return None

    def joined(self, graph: Graph, groups: Sequence[Group], target: Target) -> Sequence[Group]:
        """All groups of a graph, of which those of the family are joined that can be one launch."""
        return groups


M = TypeVar("M", bound=Matcher)


def asked(families: Sequence[Matcher], graph: Graph) -> tuple[Matcher, ...]:
    """The families that may take something of a graph."""
    present = {op.family for op in graph.operations}
    return tuple(family for family in families if not family.needs or not present.isdisjoint(family.needs))


def matcher_of(families: Sequence[M], kind: GroupKind) -> M:
    """The family that makes groups of a kind."""
    return next(family for family in families if kind in family.kinds)
