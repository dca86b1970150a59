"""Which kernels of a program may approximate: exp, a division and their like, to some units in the last place of float32."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from fusegen.ir.graph import Graph
from fusegen.ir.ops import Op
from fusegen.ir.reductions import REDUCTIONS
from fusegen.passes.fuse import Group
from fusegen.passes.fuse.groups import computed, strip_views
from fusegen.schedule.lower.memory import Memory

_APPROXIMATED = frozenset(
    {Op.EXP, Op.EXP2, Op.RSQRT, Op.DIV, Op.SIGMOID, Op.ONE_PLUS_ERF} | {op for op, m in REDUCTIONS.items() if m.approximable}
)
"""Operations that some language spells approximately where the result ends in 16 bits, or that are made of such."""

_EXTREMES = (Op.AMAX, Op.AMIN)

_JUMPS = frozenset({Op.FLOOR, Op.CEIL, Op.TRUNC, Op.ROUND, Op.SIGN, Op.FLOOR_DIVIDE, Op.REMAINDER})
"""Operations on floats that are not continuous; those that give bools or integers jump as well."""


def approximating(graph: Graph, groups: Sequence[Group], memory: Memory) -> frozenset[Group]:
    """The groups that may use approximate functions.

    Only floats of 16 bits or fewer depend on what they approximate, or an extreme of values that the program has in 16 bits: the
    scale by which they are quantized. And no step in between: a jump (floor, a comparison, a cast to integers) makes a whole unit
    of what was an error far below one. A value that two kernels compute is approximate in both or in neither: its maximum would lie
    beside it otherwise, and the root of their difference would be no number.
    """
    inside = {group: computed(graph, group) for group in groups}
    inexact = {group: {p for p in nodes if graph.nodes[p].op in _APPROXIMATED} for group, nodes in inside.items()}
    exact = _exact(graph, groups, memory, inside)
    allowed = {group for group in groups if not inexact[group] & exact}
    while spoilt := {g for g in allowed if any(inexact[g] & inexact[other] for other in groups if other not in allowed)}:
        allowed -= spoilt
    return frozenset(allowed)


def _exact(graph: Graph, groups: Sequence[Group], memory: Memory, inside: Mapping[Group, Collection[int]]) -> set[int]:
    """The values that must not be approximate, some of them because of what a later group does with them."""
    exact = {p for r in graph.outputs for p in (r, strip_views(graph, r)) if not graph.nodes[r].dtype.is_narrow}
    decisive: set[int] = set()  # below a jump
    compared: set[int] = set()  # below an extreme that is exact
    for group in reversed(groups):
        for position in sorted(inside[group], reverse=True):  # users come before their operands
            operands = list(_unrounded(graph.nodes[position].args, group, memory))
            if position in decisive or _jumps(graph, position):
                decisive.update(operands)
            elif position in exact and graph.nodes[position].op not in _EXTREMES:
                exact.update(operands)
            elif position in exact or position in compared:
                compared.update(p for p in operands if not graph.nodes[p].dtype.is_narrow)
    return exact | decisive | compared


def _jumps(graph: Graph, position: int) -> bool:
    node = graph.nodes[position]
    return node.op in _JUMPS or not node.dtype.is_float


def _unrounded(args: Iterable[int], group: Group, memory: Memory) -> Iterable[int]:
    """The operands that are not read from memory in 16 bits or fewer, where every reader sees the same rounded value."""
    return (a for a in args if a not in group.inputs or not memory.dtype(a).is_narrow)
