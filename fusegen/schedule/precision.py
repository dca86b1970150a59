"""The approximate functions that each kernel of a program may use, and the sums that are fused with a product (FMA)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise

from fusegen.dtypes import DType
from fusegen.fusion.groups import Group, computed, strip_views
from fusegen.ir.graph import Graph
from fusegen.ir.ops import Family, Op
from fusegen.ir.reductions import REDUCTIONS
from fusegen.schedule.math import Approximations
from fusegen.schedule.memory import Memory

_APPROXIMATED = frozenset(
    {Op.EXP, Op.EXP2, Op.EXPM1, Op.LOG1P, Op.TANH, Op.RSQRT, Op.DIV, Op.SIGMOID, Op.ONE_PLUS_ERF}
    | {op for op, m in REDUCTIONS.items() if m.approximable}
)
"""Operations that kernels of some target approximate if the result is rounded to 16 bits, or that contain approximated ones."""

_EXTREMES = (Op.AMAX, Op.AMIN)

_CLAMPS = (Op.MAXIMUM, Op.MINIMUM)

_DISCONTINUOUS = frozenset({Op.FLOOR, Op.CEIL, Op.TRUNC, Op.ROUND, Op.SIGN, Op.FLOOR_DIVIDE, Op.REMAINDER})
"""Operations on floats that are not continuous; operations with bool or integer results are not either."""

_PERIODIC = frozenset({Op.SIN, Op.COS})
"""Operations on numbers that may be large, e.g. positions, so that an error of one ulp can be a large part of a period."""


def approximations(graph: Graph, groups: Sequence[Group], memory: Memory) -> Mapping[Group, Approximations]:
    """Returns the approximate functions that each group may use: all with fast math, else those whose error vanishes in 16 bits."""
    if graph.fast_math:
        return dict.fromkeys(groups, Approximations.FAST_MATH)
    allowed = _groups_tolerating_errors(graph, groups, memory)
    return {group: Approximations.ROUNDED if group in allowed else Approximations.NONE for group in groups}


def contractions(graph: Graph, groups: Sequence[Group]) -> frozenset[int]:
    """Returns the float32 sums ``a * b + c`` that may be one FMA, which rounds once.

    All kernels must compute the same sum, so that e.g. a row's maximum stays its maximum. So the product must not be materialized
    or read by anything else. Sums of two products are excluded, since ``x * x - y * y`` would not vanish for x = y. Products that
    are computed once per row are excluded too.
    """
    if not graph.fast_math:
        return frozenset()
    materialized = {position for group in groups for position in group.outputs} | set(graph.outputs)
    return frozenset(p for p, node in graph if node.op in (Op.ADD, Op.SUB) and _has_a_product(graph, p, materialized))


def _has_a_product(graph: Graph, position: int, materialized: Collection[int]) -> bool:
    """True if exactly one operand of a sum is a product, directly and not through a view, and nothing else reads it."""
    node = graph.nodes[position]
    products = [a for a in node.args if graph.nodes[strip_views(graph, a)].op is Op.MUL]
    if len(products) != 1 or node.dtype.compute is not DType.FLOAT32:
        return False
    (operand,) = products
    product = graph.nodes[operand]
    is_own = product.op is Op.MUL and graph.users[operand] == (position,) and operand not in materialized
    return is_own and product.shape == node.shape and product.dtype.compute is DType.FLOAT32


def _groups_tolerating_errors(graph: Graph, groups: Sequence[Group], memory: Memory) -> frozenset[Group]:
    """Returns the groups that may use approximate functions whose error vanishes in 16 bits.

    All values that depend on the approximation must be floats of 16 bits or fewer, or be read by a backward pass alone whose
    results are, or be a scale for quantization: an extreme of values that the program has in 16 bits. A discontinuity in
    between (floor, a comparison, a cast to integers) would turn a tiny error into a whole unit; an angle amplifies errors too.
    A value that two kernels compute is approximate in both or in neither. Otherwise its maximum would differ from the value,
    and the square root of their difference would be NaN.
    """
    inside = {group: computed(graph, group) for group in groups}
    inexact = {group: {p for p in nodes if graph.nodes[p].op in _APPROXIMATED} for group, nodes in inside.items()}
    exact = _exact(graph, groups, memory, inside)
    allowed = {group for group in groups if not inexact[group] & exact}
    while rejected := {
        g for g in allowed if any(inexact[g] & inexact[neighbour] for neighbour in groups if neighbour not in allowed)
    }:
        allowed -= rejected
    return frozenset(allowed)


def _exact(graph: Graph, groups: Sequence[Group], memory: Memory, inside: Mapping[Group, Collection[int]]) -> set[int]:
    """Returns the values that must not be approximate, because exact results, discontinuities or exact extremes depend on them."""
    quantized = _quantized(graph)
    results = [r for number, r in enumerate(graph.outputs) if number not in graph.approximate]
    exact = {p for r in results for p in (r, strip_views(graph, r)) if not graph.nodes[r].dtype.is_narrow} - quantized
    decisive: set[int] = set()  # operands of a discontinuity
    compared: set[int] = set()  # operands of an extreme that is exact
    for group in reversed(groups):
        for position in sorted(inside[group], reverse=True):  # users are visited before their operands
            operands = list(_unrounded(graph.nodes[position].args, group, memory))
            if position in decisive or (position not in quantized and _is_discontinuous(graph, position)):
                decisive.update(operands)
            elif position in exact and graph.nodes[position].op not in _EXTREMES:
                exact.update(operands)
            elif position in exact or position in compared:
                compared.update(p for p in operands if not graph.nodes[p].dtype.is_narrow)
    return exact | decisive | compared


def _quantized(graph: Graph) -> set[int]:
    """Returns results rounded to 8-bit integers, and all steps from the rounding on that nothing else reads. An error that moves a
    value across the midpoint of two integers is harmless, since both are equally near."""
    quantized: set[int] = set()
    for output in graph.outputs:
        steps, position = [output], output
        while graph.nodes[position].family is Family.VIEW or graph.nodes[position].op in (Op.CAST, *_CLAMPS):
            position = graph.nodes[position].args[0]
            steps.append(position)
        is_alone = not graph.users[output] and all(graph.users[operand] == (user,) for user, operand in pairwise(steps))
        if graph.nodes[output].dtype is DType.INT8 and graph.nodes[position].op is Op.ROUND and is_alone:
            quantized.update(steps)
    return quantized


def has_discontinuities(graph: Graph) -> bool:
    """True if a small error of floats can change a value or an index discontinuously."""
    return any(node.args and graph.nodes[node.args[0]].dtype.is_float and _is_discontinuous(graph, p) for p, node in graph)


def _is_discontinuous(graph: Graph, position: int) -> bool:
    node = graph.nodes[position]
    return node.op in _DISCONTINUOUS or node.op in _PERIODIC or not node.dtype.is_float


def _unrounded(args: Iterable[int], group: Group, memory: Memory) -> Iterable[int]:
    """Returns the operands that are not read from memory in 16 bits or fewer, where all readers see the same rounded value."""
    return (a for a in args if a not in group.inputs or not memory.dtype(a).is_narrow)
