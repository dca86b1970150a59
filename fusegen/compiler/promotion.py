"""Values that select code, and change: literals that differ from trace to trace become run-time scalars of one program.

A function that needs a number (``math.sqrt(1 - beta ** step)``), or reads one of its surroundings (``self.eps``), is traced with
it, and the number leaves literals in the graph: constants, and arguments of compositions (`Row.numbers`). Where a later trace
differs in nothing but such literals, these are promoted: one program takes them as scalars, and a further value costs a trace but
nothing of what follows it. What is structure (dims, sizes, the number of nodes) remains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias, cast

from fusegen.compiler.compile import Request, Variant, guards_of
from fusegen.dtypes import DType
from fusegen.errors import FusegenError
from fusegen.guards import State, exact
from fusegen.ir.graph import Graph, GraphBuilder, Node
from fusegen.ir.ops import Op
from fusegen.ir.scalar_program import numbers_of
from fusegen.trace.run import Trace

Compile: TypeAlias = Callable[[Request, Trace, State], Variant]
Number: TypeAlias = int | float

_ANY = "any"


@dataclass
class _Family:
    """Programs of graphs that differ in constants alone.

    Attributes:
        members: for each, the constants of the trace that it was made of, and the positions of those that it takes as scalars.
    """

    members: list[tuple[tuple[str, ...], frozenset[int], Variant]] = field(default_factory=list)


class Promotions:
    """The families of a kernel."""

    def __init__(self) -> None:
        self._families: dict[Hashable, _Family] = {}

    @property
    def count(self) -> int:
        """How many programs there are."""
        return sum(len(family.members) for family in self._families.values())

    def variant(self, request: Request, found: Trace, state: State, compile: Compile, fixed: Hashable) -> Variant:
        """The variant of a trace: an earlier program with other constants, or a new one.

        Args:
            request: what was asked for.
            found: the trace.
            state: what else the function read.
            compile: makes a variant of a trace.
            fixed: values that the user wants to select code.
        """
        skeleton, constants = _taken_apart(found.graph)
        key = (skeleton, request.target, request.wide, str(found.structure), fixed)
        family = self._families.setdefault(key, _Family())
        for theirs, promoted, variant in family.members:
            if all(n in promoted or a == b for n, (a, b) in enumerate(zip(theirs, constants, strict=True))):
                return _with(variant, request, found, state, constants, promoted)
        promoted = _to_promote(family, constants)
        variant, promoted = _compiled(request, found, state, compile, promoted)
        variant = _with(variant, request, found, state, constants, promoted)
        family.members.append((constants, promoted, variant))
        return variant


def _taken_apart(graph: Graph) -> tuple[Graph, tuple[str, ...]]:
    """A graph without its numbers, and the numbers as text; truths and what is no finite number stay."""
    nodes, constants = [], []
    for node in graph.nodes:
        names = _literals(node)
        constants += [str(node.attr(name)) for name in names]
        attrs = tuple((name, (_ANY, type(value)) if name in names else exact(value)) for name, value in node.attrs)
        nodes.append(replace(node, attrs=attrs))
    return replace(graph, nodes=tuple(nodes)), tuple(constants)


def _literals(node: Node) -> tuple[str, ...]:
    """Attributes of a node that are finite numbers: the value of a constant, and arguments that operands can stand for."""
    if node.op is Op.CONSTANT:
        is_number = node.dtype is not DType.BOOL and str(node.attr("value")) not in ("inf", "-inf", "nan")
        return ("value",) if is_number else ()
    names = node.op.row.numbers
    return tuple(n for n, value in node.attrs if n in names and type(value) in (int, float) and math.isfinite(cast(float, value)))


def _to_promote(family: _Family, constants: tuple[str, ...]) -> frozenset[int]:
    """Constants in which a trace differs from the first one of its family, and those that were promoted before."""
    if not family.members:
        return frozenset()
    first = family.members[0][0]
    changed = {n for n, (a, b) in enumerate(zip(first, constants, strict=True)) if a != b}
    return frozenset(changed).union(*(promoted for _, promoted, _ in family.members))


def _compiled(
    request: Request, found: Trace, state: State, compile: Compile, promoted: frozenset[int]
) -> tuple[Variant, frozenset[int]]:
    """The variant with these constants as scalars, or with none where that cannot be compiled."""
    if promoted:
        try:
            return compile(request, replace(found, graph=_promoted(found.graph, promoted)), state), promoted
        except FusegenError:  # a constant that an emitted form depends on
            pass
    return compile(request, found, state), frozenset()


def _name(number: int) -> str:
    """A name that no parameter has, for what takes a constant's place."""
    return f"constant.{number}"


def _promoted(graph: Graph, numbers: frozenset[int]) -> Graph:
    """The graph with scalars in place of some of its literals."""
    builder = GraphBuilder.like(graph)
    moved: list[int] = []
    count = 0
    for position, node in graph:
        names = _literals(node)
        chosen = {name: number for number, name in enumerate(names, count) if number in numbers}
        count += len(names)
        location = graph.locations[position]
        if chosen and node.op is Op.CONSTANT:
            scalar = builder.scalar(_name(chosen["value"]), DType.FLOAT64 if node.dtype.is_float else DType.INT64)
            moved.append(scalar if node.attr("weak") else builder.add(Op.CAST, [scalar], location=location, dtype=node.dtype))
        else:
            rebuilt = Node(node.op, tuple(moved[a] for a in node.args), node.attrs, node.shape, node.dtype, node.weak)
            moved.append(builder.put(_with_operands(builder, rebuilt, chosen), location))
    return builder.build([moved[o] for o in graph.outputs], [moved[w] for w in graph.writes])


def _with_operands(builder: GraphBuilder, node: Node, chosen: Mapping[str, int]) -> Node:
    """A node with scalars in place of some of its attributes, which are numbers."""
    if not chosen:
        return node
    types = {name: DType.FLOAT64 if type(node.attr(name)) is float else DType.INT64 for name in chosen}
    scalars = [builder.scalar(_name(number), types[name]) for name, number in chosen.items()]
    kept = {name: value for name, value in node.attrs if name not in chosen}
    attrs = kept | {"numbers": (*node.numbers, *chosen)}
    return replace(node, args=(*node.args, *scalars), attrs=tuple(sorted(attrs.items())))


def _with(
    variant: Variant, request: Request, found: Trace, state: State, constants: tuple[str, ...], promoted: frozenset[int]
) -> Variant:
    """A variant for a trace that its program serves: with the trace's constants."""
    values = tuple((_name(n), _number(constants[n])) for n in sorted(promoted))
    return replace(
        variant,
        request=replace(request, statics=()),
        traced=found.graph,
        trace=replace(found, hidden=()),
        guards=guards_of(found),
        state=state,
        conditions=numbers_of(found.conditions),
        switches_gradients=found.switches_gradients,
        constants=values,
    )


def _number(text: str) -> Number:
    return int(text) if text.lstrip("-").isdigit() else float(text)
