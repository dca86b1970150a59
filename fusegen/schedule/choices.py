"""Choices between plans of a launch, or between programs, and the plans that a declaration gives."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fusegen.errors import ArgumentError
from fusegen.fusion.groups import Domain, Group, computed, strip_views
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph, Node
from fusegen.ir.ops import DtypeRule, Family, Op
from fusegen.ir.symbolic import Dim, literal, product, same
from fusegen.schedule.kernel import Plan
from fusegen.schedule.program import Launch, Program

_DIMS = ("dim", "dims", "part")
"""Attributes of nodes that are not sizes; bools are not sizes either."""


@dataclass(frozen=True)
class Choice:
    """A choice between candidates that `fg.tune` can measure: plans of a launch, or programs.

    Attributes:
        name: the name of the kernel.
        digest: digest of the computation at any size.
        extents: the sizes of the computation.
        candidates: the candidates; the one that is taken without measurements comes first.
        joins: True if candidates make one launch of two, which have choices of their own.
    """

    name: str
    digest: str
    extents: tuple[int, ...]
    candidates: tuple[Plan, ...]
    joins: bool = False


Measured: TypeAlias = Callable[[Choice], Plan | None]
"""Returns the measured or pinned candidate of a choice; None if there is none."""


class DeclaredPlans:
    """A `Measured` function that answers choices with the plans of a declaration.

    Args:
        plans: as in `Graph.plans`.
        measured: answers the choices that no declared plan is a candidate of.
    """

    def __init__(self, plans: Sequence[tuple[str, str]], measured: Measured | None = None) -> None:
        self._plans, self._measured, self._taken = plans, measured, frozenset[tuple[str, str]]()
        self._choices: dict[tuple[str, str, tuple[int, ...]], Choice] = {}

    def __call__(self, choice: Choice) -> Plan | None:
        self._choices = {**self._choices, (choice.name, choice.digest, choice.extents): choice}
        for name, text in self._plans:
            plan = next((plan for plan in choice.candidates if plan.description == text), None)
            if plan is not None and name in ("", choice.name):
                self._taken |= {(name, text)}
                return plan
        if self._measured is None or (choice.joins and self._taken):  # a record does not replace a launch whose plan is declared
            return None
        return self._measured(choice)

    def error(self, program: Program, planned: Callable[[DeclaredPlans], Program] | None = None) -> ArgumentError | None:
        """Returns the error of the first declared plan that a program does not take. A launch may have one without a choice.

        Args:
            planned: returns the program for other declared plans, so that the error can tell plans that exclude each other.
        """
        taken = [(launch.kernel.name, launch.plan.description) for launch in program.launches if launch.plan is not None]
        known = [(choice.name, plan.description) for choice in self._choices.values() for plan in choice.candidates]
        known = list(dict.fromkeys((*known, *taken)))
        for name, text in self._plans:
            if (name, text) not in self._taken and not _has(taken, name, text):
                alone = DeclaredPlans([(name, text)])
                is_taken_alone = planned is not None and len(self._plans) > 1 and alone.error(planned(alone)) is None
                problem, hint = _EXCLUDED if is_taken_alone and not _has(known, name, text) else _problem(known, name, text)
                return ArgumentError(f"{program.graph.name}: plan={text!r} {problem}", hint=hint)
        return None


_EXCLUDED = "is not taken: another declared plan excludes it", "declare one of them"


def _has(plans: Sequence[tuple[str, str]], name: str, text: str) -> bool:
    return any(text == other and name in ("", launch) for launch, other in plans)


def _problem(known: Sequence[tuple[str, str]], name: str, text: str) -> tuple[str, str]:
    """The reason why a declared plan was not taken, and a hint."""
    if not known:
        return "decides nothing: there is no choice at these sizes", "leave out plan="
    if _has(known, name, text):
        return "is not taken: another declared plan decides the same choice", "declare one plan for each choice"
    lines = [f"{launch}: {other}" for launch, other in known]
    of = f" of {name}" if name else ""
    return f"is no candidate{of} at these sizes", "\n    ".join(["give one of these candidates, or none:", *lines])


def choice_of(name: str, graph: Graph, group: Group, sizes: Mapping[str, int], candidates: Sequence[Plan]) -> Choice:
    """Returns the choice between plans of a launch. The extents are rows and columns; for a matmul launch rows, columns of each
    part, and depth; for attention all dims of the result, and the depths of both matmuls."""
    values = tuple(formula(dim)(sizes) for dim in _choice_extents(graph, group))
    return Choice(name, group_digest(graph, group), values, tuple(candidates))


def group_digest(graph: Graph, group: Group) -> str:
    """Returns a digest of a group's computation at any size: operations, dtypes, dims, and which dims have one element. For a
    matmul launch it has the layouts and the class of the epilogue."""
    lines = _matmul_lines(graph, group) if group.parts else _digest_lines(graph, group)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def extents(launch: Launch, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Returns the rows and columns that a launch iterates over; without reductions, the last dim counts as columns."""
    rows, columns = _domain_extents(launch.group.domain)
    return formula(rows)(sizes), formula(columns)(sizes)


def _domain_extents(domain: Domain) -> tuple[Dim, Dim]:
    columns_dims = domain.columns or tuple(range(len(domain.shape)))[-1:]  # a tensor without dims is a row of one
    rows = product(extent for d, extent in enumerate(domain.shape) if d not in columns_dims)
    return rows, product(domain.shape[d] for d in columns_dims)


def _choice_extents(graph: Graph, group: Group) -> tuple[Dim, ...]:
    matmuls = [graph.nodes[p] for p in group.core_nodes if graph.nodes[p].family is Family.CONTRACTION]
    depths = tuple(graph.nodes[node.args[0]].shape[-1] for node in matmuls)
    if group.parts:  # all matmuls have the same first operand
        columns = (graph.nodes[part.products[0]].shape[-1] for part in group.parts)
        return product(matmuls[0].shape[:-1]), *columns, depths[0]
    return (*group.domain.shape, *depths) if depths else _domain_extents(group.domain)


def _digest_lines(graph: Graph, group: Group) -> Iterator[str]:
    inside = computed(graph, group)
    numbers = {position: number for number, position in enumerate(sorted({*group.inputs, *inside}))}
    yield f"{group.kind.name} {group.domain.rows} {group.domain.columns} {[numbers[p] for p in group.outputs]}"
    if graph.fast_math:
        yield "fast math"
    for position, number in numbers.items():
        node = graph.nodes[position]
        description = f"{node.op} {[numbers[a] for a in node.args]} {_attributes(node)}" if position in inside else "input"
        yield f"{number} {node.dtype} {''.join('1' if literal(e) == 1 else 'n' for e in node.shape)} {description}"


def _matmul_lines(graph: Graph, group: Group) -> Iterator[str]:
    """Yields the layouts of a matmul launch and the class of its epilogue: matrices that it reads and writes, and whether it has
    reductions and special functions."""
    yield f"{group.kind.name} {group.pipeline} {len(group.core_nodes)}"
    elements = [product(part.domain.shape) for part in group.parts]
    operands = {strip_views(graph, a) for part in group.parts for matmul in part.products for a in graph.nodes[matmul].args}
    for part, count in zip(group.parts, elements, strict=True):
        layouts = [(group.match[matmul].a_major, group.match[matmul].b_major) for matmul in part.products]
        yield f"{graph.nodes[part.products[0]].dtype} {layouts} {part.head} {part.shift}"
        for output, order in zip(part.outputs, part.orders, strict=True):
            node, is_permuted = graph.nodes[output], order != tuple(sorted(order))
            yield f"{node.dtype} {same(product(node.shape), count)} {output in group.core_nodes} {order if is_permuted else ''}"
    others = [graph.nodes[p] for p in group.inputs if strip_views(graph, p) not in operands]
    yield f"{sorted(f'{n.op} {n.dtype}' for n in others if any(same(product(n.shape), count) for count in elements))}"
    ops = {graph.nodes[p].op for p in computed(graph, group)}
    yield f"{any(op.family is Family.REDUCTION for op in ops)} {any(map(_is_special, ops))}"


def _is_special(op: Op) -> bool:
    """True for functions such as exponentials."""
    return op.family is Family.POINTWISE and op.row.result is DtypeRule.FLOAT


def _attributes(node: Node) -> list[tuple[str, object]]:
    return [(name, value) for name, value in node.attrs if name in _DIMS or isinstance(value, bool)]
