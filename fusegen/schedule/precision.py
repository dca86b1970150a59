"""The approximate functions that each kernel of a program may use, and the sums that are one operation with a product."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise

from fusegen.dtypes import DType
from fusegen.fusion.groups import Group, computed, strip_views
from fusegen.ir.graph import Graph
from fusegen.ir.ops import Family, Op
from fusegen.ir.reductions import REDUCTIONS
from fusegen.schedule.math import Fast
from fusegen.schedule.memory import Memory

_APPROXIMATED = frozenset(
    {Op.EXP, Op.EXP2, Op.EXPM1, Op.LOG1P, Op.TANH, Op.RSQRT, Op.DIV, Op.SIGMOID, Op.ONE_PLUS_ERF}
    | {op for op, m in REDUCTIONS.items() if m.approximable}
)
"""Operations that some language spells approximately where the result ends in 16 bits, or that are made of such."""

_EXTREMES = (Op.AMAX, Op.AMIN)

_CLAMPS = (Op.MAXIMUM, Op.MINIMUM)

_JUMPS = frozenset({Op.FLOOR, Op.CEIL, Op.TRUNC, Op.ROUND, Op.SIGN, Op.FLOOR_DIVIDE, Op.REMAINDER})
"""Operations on floats that are not continuous; those that give bools or integers jump as well."""

_PERIODIC = frozenset({Op.SIN, Op.COS})
"""Operations of numbers that may be large, positions say, of which a unit in the last place may be a part of a turn."""


def approximations(graph: Graph, groups: Sequence[Group], memory: Memory) -> Mapping[Group, Fast]:
    """The functions that each group may use: all of the hardware's if the graph allows it, else those whose error vanishes in 16
    bits."""
    if graph.fast_math:
        return dict.fromkeys(groups, Fast.FAST_MATH)
    allowed = _ending_in_16_bits(graph, groups, memory)
    return {group: Fast.ROUNDED if group in allowed else Fast.NONE for group in groups}


def contractions(graph: Graph, groups: Sequence[Group]) -> frozenset[int]:
    """The float32 sums of a product that may be one operation, ``a * b + c`` rounded once.

    Nothing else reads the product, nor does it lie in memory, so that a sum is one number in all kernels: a row's maximum stays its
    maximum. Sums of two products stay as they are, since ``x * x - y * y`` would not vanish where x is y; so do those of a row's
    product, which is computed once for the row.
    """
    if not graph.fast_math:
        return frozenset()
    kept = {position for group in groups for position in group.outputs} | set(graph.outputs)
    return frozenset(p for p, node in graph if node.op in (Op.ADD, Op.SUB) and _has_a_product(graph, p, kept))


def _has_a_product(graph: Graph, position: int, kept: Collection[int]) -> bool:
    """True if one operand of a sum, and no view of the other, is a product that nothing else reads."""
    node = graph.nodes[position]
    products = [a for a in node.args if graph.nodes[strip_views(graph, a)].op is Op.MUL]
    if len(products) != 1 or node.dtype.compute is not DType.FLOAT32:
        return False
    (place,) = products
    product = graph.nodes[place]
    is_own = product.op is Op.MUL and graph.users[place] == (position,) and place not in kept
    return is_own and product.shape == node.shape and product.dtype.compute is DType.FLOAT32


def _ending_in_16_bits(graph: Graph, groups: Sequence[Group], memory: Memory) -> frozenset[Group]:
    """The groups that may use approximate functions whose error vanishes in 16 bits.

    Only floats of 16 bits or fewer depend on what they approximate, or an extreme of values that the program has in 16 bits: the
    scale by which they are quantized, to floats or to integers. And no step in between: a jump (floor, a comparison, a cast to
    integers) makes a whole unit of what was an error far below one, and so does an angle. A value that two kernels compute is
    approximate in both or in neither: its maximum would lie beside it otherwise, and the root of their difference would be no
    number.
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
    quantized = _quantized(graph)
    exact = {p for r in graph.outputs for p in (r, strip_views(graph, r)) if not graph.nodes[r].dtype.is_narrow} - quantized
    decisive: set[int] = set()  # below a jump
    compared: set[int] = set()  # below an extreme that is exact
    for group in reversed(groups):
        for position in sorted(inside[group], reverse=True):  # users come before their operands
            operands = list(_unrounded(graph.nodes[position].args, group, memory))
            if position in decisive or (position not in quantized and _jumps(graph, position)):
                decisive.update(operands)
            elif position in exact and graph.nodes[position].op not in _EXTREMES:
                exact.update(operands)
            elif position in exact or position in compared:
                compared.update(p for p in operands if not graph.nodes[p].dtype.is_narrow)
    return exact | decisive | compared


def _quantized(graph: Graph) -> set[int]:
    """Results that are numbers rounded to integers of 8 bits, and the steps from the rounding on, which nothing else reads.

    They are rounded as results in floats of 8 bits are: where an error moves a number across the middle of two, either is as near.
    """
    found: set[int] = set()
    for output in graph.outputs:
        steps, position = [output], output
        while graph.nodes[position].family is Family.VIEW or graph.nodes[position].op in (Op.CAST, *_CLAMPS):
            position = graph.nodes[position].args[0]
            steps.append(position)
        is_alone = not graph.users[output] and all(graph.users[below] == (above,) for above, below in pairwise(steps))
        if graph.nodes[output].dtype is DType.INT8 and graph.nodes[position].op is Op.ROUND and is_alone:
            found.update(steps)
    return found


def has_jumps(graph: Graph) -> bool:
    """True if some value may be another one altogether, or stand elsewhere, since floats that it is made of are a little off."""
    return any(node.args and graph.nodes[node.args[0]].dtype.is_float and _jumps(graph, p) for p, node in graph)


def _jumps(graph: Graph, position: int) -> bool:
    node = graph.nodes[position]
    return node.op in _JUMPS or node.op in _PERIODIC or not node.dtype.is_float


def _unrounded(args: Iterable[int], group: Group, memory: Memory) -> Iterable[int]:
    """The operands that are not read from memory in 16 bits or fewer, where every reader sees the same rounded value."""
    return (a for a in args if a not in group.inputs or not memory.dtype(a).is_narrow)
