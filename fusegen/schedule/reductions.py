"""Reductions in kernels: the rules of `ir.reductions` as terms and functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fusegen.dtypes import DType
from fusegen.ir.graph import Graph, Node
from fusegen.ir.ops import DtypeRule, Op
from fusegen.ir.reductions import REDUCTIONS, RuleValue, StateValues
from fusegen.schedule.kernel import extract_function
from fusegen.schedule.math import Approximations, MathFunction, MathParameter, Reduction
from fusegen.schedule.terms import Leaf, Term, Terms

_OF_BITS = {Op.MAXIMUM: Op.BITWISE_OR, Op.MINIMUM: Op.BITWISE_AND}
"""Operations on truth values in 32 bits."""


def reduction_of(
    graph: Graph, node: int, take: Callable[[str], str], *, fast: Approximations, name: str, gathers: bool = False
) -> Reduction:
    """Returns the reduction of a node, which may be one of its components.

    Args:
        name: the requested name, or the prefix of the components' names; `take` makes them unique.
        gathers: True to combine states as sums about a pivot, if the reduction has a rule for it.
    """
    reduction = graph.nodes[node]
    monoid, element = REDUCTIONS[reduction.op], element_type(graph, reduction)
    names = [name] if len(monoid.components) == 1 else [f"{name}_{c.name}" for c in monoid.components]
    components = tuple(MathParameter(take(n), c.dtype(element)) for n, c in zip(names, monoid.components, strict=True))
    return Reduction(
        reduction.op,
        element,
        components,
        fast if monoid.approximable else Approximations.NONE,
        monoid.pivot_sums if gathers else None,
    )


def element_type(graph: Graph, node: Node) -> DType:
    """Returns the type in which elements are combined: the result's, or the operand's if the state has several components; 32 bits
    for truth values, since threads exchange no fewer."""
    reduced = graph.nodes[node.args[0]] if "part" in dict(node.attrs) else node
    return DType.INT32 if reduced.dtype is DType.BOOL else reduced.dtype.compute


def component(node: Node) -> int:
    """Returns the index of the state's component that a node is."""
    return REDUCTIONS[node.op].component_index(dict(node.attrs).get("part"))


def grouped_by_reduction(graph: Graph, nodes: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Groups nodes by their reduction: maps the first node of each to all of its nodes."""
    states: dict[object, list[int]] = {}
    for position in nodes:
        node = graph.nodes[position]
        states.setdefault((node.op, node.args, node.attr("dims")), []).append(position)
    return {members[0]: tuple(members) for members in states.values()}


def lifted(terms: Terms, op: Op, element: int, index: int) -> tuple[int, ...]:
    """Returns the terms of an element's state; the index is along the reduced dims."""
    dtype = terms.items[element].dtype
    state = REDUCTIONS[op].lift(_operand("element"), _operand("index"))
    return _state(terms, op, state, {"element": element, "index": index}, dtype)


def combined(terms: Terms, op: Op, first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    sides = [[f"{side}{number}" for number in range(len(state))] for side, state in (("a", first), ("b", second))]
    a, b = (tuple(map(_operand, names)) for names in sides)
    operands = dict(zip((*sides[0], *sides[1]), (*first, *second), strict=True))
    return _state(terms, op, REDUCTIONS[op].combine(a, b), operands, terms.items[first[0]].dtype)


def identity_function(name: str, op: Op, dtype: DType) -> MathFunction:
    """Returns the function of the state without elements."""
    terms, monoid = Terms(), REDUCTIONS[op]
    roots = []
    for c in monoid.components:
        kind = c.dtype(dtype)
        of_float, of_integer = c.identity
        identity = str(int(float(of_float) > 0)) if kind is DType.INT32 else of_float if kind.is_float else of_integer
        roots.append(terms.add(Term(Leaf.CONSTANT, (), kind, identity)))
    return extract_function(terms, name, _results(op, roots), {}, fast=Approximations.NONE)[0]


def combine_function(name: str, op: Op, dtype: DType, *, fast: Approximations = Approximations.NONE) -> MathFunction:
    """Returns the function that combines two states: the components of the first, then those of the second."""
    terms, monoid = Terms(), REDUCTIONS[op]
    single = len(monoid.components) == 1
    sides = [[side if single else f"{side}_{c.name}" for c in monoid.components] for side in ("a", "b")]
    types = [c.dtype(dtype) for c in monoid.components]
    parameters: dict[int, MathParameter] = {}
    for names in sides:
        for parameter, kind in zip(names, types, strict=True):
            parameters[terms.add(Term(Leaf.SCALAR, (), kind, parameter))] = MathParameter(parameter, kind)
    roots = combined(terms, op, list(parameters)[: len(types)], list(parameters)[len(types) :])
    function = extract_function(terms, name, _results(op, roots), parameters, fast=fast, doc=monoid.source)[0]
    return replace(function, parameters=tuple(parameters.values()))


def pivot_sum_functions(kind: str, reduction: Reduction) -> tuple[MathFunction, ...]:
    """Returns the functions that combine states as sums about a pivot, with operands in the order of the table's rule.

    ``_gather`` adds an element to sums, ``_spread`` converts a state to sums, and ``_settle`` converts sums to a state.
    """
    rule, dtype = reduction.pivot_sums, reduction.dtype
    assert rule is not None
    before = [f"{name}_before" for name in rule.sums]
    state = [c.name for c in REDUCTIONS[reduction.op].components]
    settled = [name for name in state if name != rule.count]
    element, pivot, count = map(_operand, ("element", "pivot", rule.count))
    sums, components = (tuple(map(_operand, names)) for names in (rule.sums, state))
    added = tuple(a + b for a, b in zip(map(_operand, before), rule.lift(element, pivot), strict=True))
    return (
        _function(f"{kind}_gather", dtype, [*before, "element", "pivot"], rule.sums, added),
        _function(f"{kind}_spread", dtype, [*state, "pivot"], rule.sums, rule.sums_of_state(components, pivot)),
        _function(f"{kind}_settle", dtype, ["pivot", rule.count, *rule.sums], settled, rule.state_of_sums(pivot, count, sums)),
    )


def _function(name: str, dtype: DType, operands: Sequence[str], results: Sequence[str], values: StateValues) -> MathFunction:
    """Returns a function whose operands and results have one type."""
    terms = Terms()
    parameters = {terms.add(Term(Leaf.SCALAR, (), dtype, operand)): MathParameter(operand, dtype) for operand in operands}
    positions = {parameter.name: position for position, parameter in parameters.items()}
    roots = [(result, _put(terms, value, positions, dtype)) for result, value in zip(results, values, strict=True)]
    return replace(
        extract_function(terms, name, roots, parameters, fast=Approximations.NONE)[0], parameters=tuple(parameters.values())
    )


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
    """Builds the term of a value in a rule; a number has the type of the other operands."""
    if value.op is None:
        return operands[value.text]
    if value.is_number:
        return terms.add(Term(Leaf.CONSTANT, (), dtype, value.text))
    known = {k: _put(terms, arg, operands, dtype) for k, arg in enumerate(value.args) if not arg.is_number}
    common = terms.items[known[max(known)]].dtype  # the last operand's, since the first one of `where` is a condition
    args = tuple(known[k] if k in known else _put(terms, arg, operands, common) for k, arg in enumerate(value.args))
    op = _OF_BITS.get(value.op, value.op) if common is DType.INT32 else value.op
    return terms.add(Term(op, args, DType.BOOL if op.row.result is DtypeRule.BOOL else common), variable=value.text or None)
