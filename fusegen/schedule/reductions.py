"""Reductions as a kernel computes them: the rules of `ir.reductions` as terms and functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fusegen.dtypes import DType
from fusegen.ir.graph import Graph, Node
from fusegen.ir.ops import DtypeRule, Op
from fusegen.ir.reductions import REDUCTIONS, RuleValue, StateValues
from fusegen.schedule.kernel import cut
from fusegen.schedule.math import Fast, MathFunction, MathParameter, Reduction
from fusegen.schedule.terms import Leaf, Term, Terms


def reduction_of(graph: Graph, node: int, take: Callable[[str], str], *, fast: Fast, name: str, gathers: bool = False) -> Reduction:
    """The reduction that a node is, or a part of.

    Args:
        take: gives a name of its own for a wanted one.
        fast: which approximate functions may be used.
        name: the wanted one, or what those of several components begin with.
        gathers: whether states are combined as sums about a pivot, where there is a rule for that.
    """
    found = graph.nodes[node]
    monoid, element = REDUCTIONS[found.op], element_type(graph, found)
    names = [name] if len(monoid.components) == 1 else [f"{name}_{c.name}" for c in monoid.components]
    components = tuple(MathParameter(take(n), c.dtype(element)) for n, c in zip(names, monoid.components, strict=True))
    return Reduction(
        found.op, element, components, fast if monoid.approximable else Fast.NONE, monoid.gathering if gathers else None
    )


def element_type(graph: Graph, node: Node) -> DType:
    """The type in which a reduction's elements are combined: that of its result, or of its operand where it has several."""
    reduced = graph.nodes[node.args[0]] if "part" in dict(node.attrs) else node
    return reduced.dtype.compute


def component(node: Node) -> int:
    """The component of its state that a reduction's node is."""
    return REDUCTIONS[node.op].number(dict(node.attrs).get("part"))


def states_of(graph: Graph, nodes: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """The states that some reductions are parts of: by the first node of each, all of its nodes."""
    found: dict[object, list[int]] = {}
    for position in nodes:
        node = graph.nodes[position]
        found.setdefault((node.op, node.args, node.attr("dims")), []).append(position)
    return {members[0]: tuple(members) for members in found.values()}


def lifted(terms: Terms, op: Op, element: int, index: int) -> tuple[int, ...]:
    """The terms of an element's state.

    Args:
        element, index: terms; the index is along the reduced dims.
    """
    dtype = terms.items[element].dtype
    state = REDUCTIONS[op].lift(_operand("element"), _operand("index"))
    return _state(terms, op, state, {"element": element, "index": index}, dtype)


def combined(terms: Terms, op: Op, one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """The terms of the state of two parts, of those of their states."""
    sides = [[f"{side}{number}" for number in range(len(state))] for side, state in (("a", one), ("b", other))]
    a, b = (tuple(map(_operand, names)) for names in sides)
    operands = dict(zip((*sides[0], *sides[1]), (*one, *other), strict=True))
    return _state(terms, op, REDUCTIONS[op].combine(a, b), operands, terms.items[one[0]].dtype)


def identity_function(name: str, op: Op, dtype: DType) -> MathFunction:
    """A function that gives the state of no elements."""
    terms, monoid = Terms(), REDUCTIONS[op]
    roots = []
    for c in monoid.components:
        kind = c.dtype(dtype)
        roots.append(terms.put(Term(Leaf.CONSTANT, (), kind, c.identity[0 if kind.is_float else 1])))
    return cut(terms, name, _results(op, roots), {}, fast=Fast.NONE)[0]


def combine_function(name: str, op: Op, dtype: DType, *, fast: Fast = Fast.NONE) -> MathFunction:
    """A function that combines two states: the components of the first, then those of the second."""
    terms, monoid = Terms(), REDUCTIONS[op]
    single = len(monoid.components) == 1
    sides = [[side if single else f"{side}_{c.name}" for c in monoid.components] for side in ("a", "b")]
    types = [c.dtype(dtype) for c in monoid.components]
    given: dict[int, MathParameter] = {}
    for names in sides:
        for parameter, kind in zip(names, types, strict=True):
            given[terms.put(Term(Leaf.SCALAR, (), kind, parameter))] = MathParameter(parameter, kind)
    roots = combined(terms, op, list(given)[: len(types)], list(given)[len(types) :])
    function = cut(terms, name, _results(op, roots), given, fast=fast)[0]
    return replace(function, parameters=tuple(given.values()))


def gathering_functions(kind: str, reduction: Reduction) -> tuple[MathFunction, ...]:
    """The functions with which states are combined as sums about a pivot: one adds an element to sums (``_gather``), one gives the
    sums that a state is (``_spread``), and one the state that sums are (``_settle``), each from its operands in the order of the
    table's rule.

    Args:
        kind: what their names begin with.
    """
    rule, dtype = reduction.gathering, reduction.dtype
    assert rule is not None
    before = [f"{name}_before" for name in rule.sums]
    state = [c.name for c in REDUCTIONS[reduction.op].components]
    rest = [name for name in state if name != rule.count]
    element, pivot, count = map(_operand, ("element", "pivot", rule.count))
    sums, parts = (tuple(map(_operand, names)) for names in (rule.sums, state))
    added = tuple(a + b for a, b in zip(map(_operand, before), rule.lift(element, pivot), strict=True))
    return (
        _function(f"{kind}_gather", dtype, [*before, "element", "pivot"], rule.sums, added),
        _function(f"{kind}_spread", dtype, [*state, "pivot"], rule.sums, rule.spread(parts, pivot)),
        _function(f"{kind}_settle", dtype, ["pivot", rule.count, *rule.sums], rest, rule.settle(pivot, count, sums)),
    )


def _function(name: str, dtype: DType, operands: Sequence[str], results: Sequence[str], values: StateValues) -> MathFunction:
    """A function of operands that all have one type, as its results have."""
    terms = Terms()
    given = {terms.put(Term(Leaf.SCALAR, (), dtype, operand)): MathParameter(operand, dtype) for operand in operands}
    places = {parameter.name: place for place, parameter in given.items()}
    roots = [(result, _put(terms, value, places, dtype)) for result, value in zip(results, values, strict=True)]
    return replace(cut(terms, name, roots, given, fast=Fast.NONE)[0], parameters=tuple(given.values()))


def _results(op: Op, roots: Sequence[int]) -> list[tuple[str, int]]:
    components = REDUCTIONS[op].components
    names = ["result"] if len(components) == 1 else [c.name for c in components]
    return list(zip(names, roots, strict=True))


def _operand(name: str) -> RuleValue:
    return RuleValue(None, (), name)


def _state(terms: Terms, op: Op, state: StateValues, operands: Mapping[str, int], element: DType) -> tuple[int, ...]:
    components = REDUCTIONS[op].components
    return tuple(_put(terms, value, operands, c.dtype(element)) for value, c in zip(state, components, strict=True))


def _put(terms: Terms, value: RuleValue, operands: Mapping[str, int], dtype: DType) -> int:
    """The term of a value in a rule; a number has the type of what it meets."""
    if value.op is None:
        return operands[value.text]
    if value.is_number:
        return terms.put(Term(Leaf.CONSTANT, (), dtype, value.text))
    known = {k: _put(terms, arg, operands, dtype) for k, arg in enumerate(value.args) if not arg.is_number}
    common = terms.items[known[max(known)]].dtype  # of values; the condition of `where` is its first operand
    args = tuple(known[k] if k in known else _put(terms, arg, operands, common) for k, arg in enumerate(value.args))
    return terms.put(Term(value.op, args, DType.BOOL if value.op.row.result is DtypeRule.BOOL else common))
