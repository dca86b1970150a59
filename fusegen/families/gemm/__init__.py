"""Products on tensor cores with epilogues; several of one first operand are one launch."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import ClassVar

from fusegen.families.base import Emitters, KernelFamily
from fusegen.families.gemm.cuda import emit_cuda
from fusegen.families.gemm.epilogue import CONTRACTION, ending, extended, joined, plain_group, too_wide
from fusegen.families.gemm.lower import lower_contraction
from fusegen.families.gemm.pipelines import pipeline_named
from fusegen.families.gemm.plan import ContractionBody
from fusegen.fusion.decide import derived_from, elementwise_ends, fits_epilogue, matmul_ends
from fusegen.fusion.groups import Group, Materialized, products_of
from fusegen.fusion.matcher import Claims, Decision
from fusegen.fusion.order import depends_on
from fusegen.ir.graph import Graph
from fusegen.ir.ops import Family, Op
from fusegen.schedule.context import Context
from fusegen.schedule.program import Step
from fusegen.target import Target

_MOST_PARTS = 8  # each takes tensor maps of its own among the kernel's parameters


class GemmFamily(KernelFamily):
    """Kernels of products that end in epilogues."""

    kinds = (CONTRACTION,)
    needs = (Family.CONTRACTION,)
    cuda: ClassVar[Emitters] = {ContractionBody: emit_cuda}

    def claim(self, graph: Graph, target: Target, claims: Claims) -> None:
        """Each product with the furthest value that its epilogue can end in."""
        for matmul in products_of(graph):
            if matmul not in claims.inside:
                _take_epilogue(graph, matmul, target, claims)

    def beside(self, graph: Graph, target: Target, claims: Claims, stored: Materialized) -> Mapping[int, int]:
        """Values in memory that are computed point by point of what a product ends in: its epilogue gives both."""
        found: dict[int, int] = {}
        ends = matmul_ends(products_of(graph), claims)
        for end in ends:
            for value in [] if end in found else _candidates(graph, end, stored - claims.ends | claims.epilogues, claims):
                read = {p for p in _read_by(graph, value, end, stored) if found.get(p) != end}
                if value in found or any(end in graph.ancestors[p] for p in read):
                    continue  # a kernel comes between
                others = [p for p in read if p in ends and p not in found and p not in found.values()]
                group = _with(graph, end, [v for v, e in found.items() if e == end], target, claims.ends)
                for more in (*([other, value] for other in others), [value]):  # with a product that ends in the other value
                    if group is not None and _takes(graph, group, more, target, claims):
                        found.update(dict.fromkeys(more, end))
                        break
        claims.ends.update(found, found.values())
        return found

    def group(self, graph: Graph, root: int, target: Target, decision: Decision) -> Group | None:
        """The group of products that end in a claimed value, with everything else that their epilogue gives."""
        if root not in decision.ends:
            return None
        group = ending(graph, root, target, decision.materialized)
        others = [other for other, end in decision.beside.items() if end == root]
        return group if group is None or not others else extended(graph, group, others, decision.materialized) or group

    def joined(self, graph: Graph, groups: Sequence[Group], target: Target) -> Sequence[Group]:
        """The groups, of which products of one first operand are one launch where none waits for another: q, k and v of separate
        weights read their rows once."""
        found = list(groups)
        launches = [_as_launch(graph, group, target) for group in found]
        keys = [_key(graph, launch) for launch in launches]
        number = 0
        while number < len(found):
            same = (n for n in range(number + 1, len(found)) if keys[n] is not None and keys[n] == keys[number])
            partner = next((n for n in same if _can_join(graph, found, launches, number, n)), None)
            if partner is None:
                number += 1
            else:
                found[number] = launches[number] = joined(
                    graph, [g for g in (launches[number], launches[partner]) if g is not None]
                )
                del found[partner], launches[partner], keys[partner]
        return found

    def lower(self, context: Context) -> Sequence[Step]:
        """The launch of a group."""
        return lower_contraction(context)


def _take_epilogue(graph: Graph, product: int, target: Target, claims: Claims) -> None:
    """Claims a product with the furthest value that its epilogue can end in."""
    ends = elementwise_ends(graph, product)
    for end in (*ends, *([product] if _is_wanted_in_other_order(graph, product) else [])):
        group = ending(graph, end, target, claims.ends)
        if group is not None and product in group.anchors:
            claims.ends.add(end)
            claims.epilogues.add(end)
            claims.inside.update(group.anchors)
            return
    why = next((why for end in ends if (why := too_wide(graph, end, product, target, claims.ends))), "")
    if why:
        claims.refusals.setdefault(product, why)


def _is_wanted_in_other_order(graph: Graph, product: int) -> bool:
    """True if the caller gets a product in dims of another order, which a library's result would have to be copied to."""
    for position in graph.outputs:
        permuted = False
        while graph.nodes[position].op in (Op.RESHAPE, Op.PERMUTE):
            permuted |= graph.nodes[position].op is Op.PERMUTE
            (position,) = graph.nodes[position].args
        if permuted and position == product:
            return True
    return False


def _candidates(graph: Graph, end: int, values: Collection[int], claims: Claims) -> list[int]:
    """Those of some values that are computed of a product's end; first those in which another product ends."""
    return sorted(derived_from(graph, end).intersection(values), key=lambda value: (value not in claims.epilogues, value))


def _takes(graph: Graph, group: Group, values: list[int], target: Target, claims: Claims) -> bool:
    """True if an epilogue can give further values, with all products that would end in them otherwise."""
    found = extended(graph, group, values, claims.ends)
    apart = [ending(graph, value, target, claims.ends) for value in values if value in claims.epilogues]
    return found is not None and all(set(other.anchors) <= set(found.anchors) for other in apart if other is not None)


def _with(graph: Graph, end: int, values: list[int], target: Target, kept: Collection[int]) -> Group | None:
    """The group of products that end in a value, with further ones that their epilogue gives."""
    group = ending(graph, end, target, kept)
    return group if group is None or not values else extended(graph, group, values, kept)


def _read_by(graph: Graph, value: int, end: int, stored: Materialized) -> set[int]:
    """The operands of a value besides the one in which a product ends: values in memory, reductions, products."""
    found: set[int] = set()
    stack, seen = [*graph.nodes[value].args], {end}
    while stack:
        position = stack.pop()
        if position not in seen:
            seen.add(position)
            if position in stored or not fits_epilogue(graph, position):
                found.add(position)
            else:
                stack += graph.nodes[position].args
    return found


def _as_launch(graph: Graph, group: Group, target: Target) -> Group | None:
    """The group as a launch on tensor cores; None where they do not serve it."""
    if group.kind.is_library and group.outputs == group.anchors:
        return plain_group(graph, group.outputs[0], target)
    return group if group.kind is CONTRACTION else None


def _key(graph: Graph, group: Group | None) -> Hashable | None:
    """The key that groups of one launch share."""
    if group is None:
        return None
    products = group.parts[0].products
    operands = group.match[products[0]]
    return group.pipeline, operands.a, operands.a_major, operands.b_major, graph.nodes[products[0]].dtype, len(products)


def _can_join(graph: Graph, groups: Sequence[Group], launches: Sequence[Group | None], one: int, other: int) -> bool:
    both = [group for group in (launches[one], launches[other]) if group is not None]
    parts = [part for group in both for part in group.parts]
    widths = pipeline_named(both[0].pipeline).tile_widths(math.lcm(*(part.head for part in parts)), len(parts[0].products))
    if len(parts) > _MOST_PARTS or not widths:
        return False
    return not depends_on(graph, groups, one, other) and not depends_on(graph, groups, other, one)
