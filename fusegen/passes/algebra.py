"""Arithmetic on graph nodes for rules and expansions: ``0.5 * x * (1.0 + x.tanh())`` adds nodes to a builder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

from fusegen.dtypes import DType
from fusegen.ir.graph import GraphBuilder, Location, Node
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim, product

ValueLike: TypeAlias = "Value | float"


@dataclass(frozen=True)
class Value:
    """A node of a builder, with operators; new nodes inherit its source location."""

    builder: GraphBuilder
    position: int
    location: Location | None

    @property
    def node(self) -> Node:
        return self.builder.nodes[self.position]

    def arg(self, number: int) -> Value:
        return Value(self.builder, self.node.args[number], self.location)

    @property
    def args(self) -> list[Value]:
        return [self.arg(number) for number in range(len(self.node.args))]

    def noted(self, note: str) -> Value:
        """Returns the same value; emitted text explains the nodes that are computed from it."""
        return self if self.location is None else replace(self, location=replace(self.location, note=note))

    def number(self, name: str) -> ValueLike:
        return number(self.args, self.node, name)

    def apply(self, op: Op, *others: ValueLike, **attrs: object) -> Value:
        args = [self.position, *(self.lift(o).position for o in others)]
        return Value(self.builder, self.builder.add(op, args, location=self.location, **attrs), self.location)

    def lift(self, other: ValueLike) -> Value:
        if isinstance(other, Value):
            return other
        return Value(self.builder, self.builder.constant(other), self.location)

    def __add__(self, other: ValueLike) -> Value:
        return self.apply(Op.ADD, other)

    def __radd__(self, other: float) -> Value:
        return self.lift(other).apply(Op.ADD, self)

    def __sub__(self, other: ValueLike) -> Value:
        return self.apply(Op.SUB, other)

    def __rsub__(self, other: float) -> Value:
        return self.lift(other).apply(Op.SUB, self)

    def __mul__(self, other: ValueLike) -> Value:
        return self.apply(Op.MUL, other)

    def __rmul__(self, other: float) -> Value:
        return self.lift(other).apply(Op.MUL, self)

    def __truediv__(self, other: ValueLike) -> Value:
        return self.apply(Op.DIV, other)

    def __rtruediv__(self, other: float) -> Value:
        return self.lift(other).apply(Op.DIV, self)

    def __neg__(self) -> Value:
        return self.apply(Op.NEG)

    def __gt__(self, other: ValueLike) -> Value:
        return self.apply(Op.GT, other)

    def where(self, chosen: ValueLike, other: ValueLike) -> Value:
        """Returns ``chosen`` if this condition holds, else ``other``."""
        return self.apply(Op.WHERE, chosen, other)

    def reduce(self, op: Op, dims: tuple[int, ...], **attrs: object) -> Value:
        return self.apply(op, dims=dims, **attrs)

    def unpermuted(self, order: Sequence[int]) -> Value:
        """Inverts a permutation of the dims."""
        return self.apply(Op.PERMUTE, dims=tuple(order.index(dim) for dim in range(len(order))))

    def count(self, dims: tuple[int, ...]) -> Dim:
        """The number of elements that a reduction combines."""
        return product(self.node.shape[d] for d in dims)

    def mean(self, dims: tuple[int, ...], correction: ValueLike = 0.0) -> Value:
        """sum / (count - correction)."""
        return self.reduce(Op.SUM, dims).per(self.count(dims), correction)

    def per(self, count: Dim, correction: ValueLike = 0.0) -> Value:
        """This / max(count - correction, 0), for a literal or run-time count."""
        if isinstance(count, int) and not isinstance(correction, Value):
            return self * _reciprocal(count - correction)
        size = Value(self.builder, self.builder.size(count), self.location)
        if isinstance(correction, Value):
            divisor = size - correction
            return self / (divisor > 0.0).where(divisor, 0.0)  # not a maximum, which the host would compute with torch
        if correction <= 1.0:  # rows are not empty
            return self / (size if not correction else size - correction)
        return self / (size - correction).apply(Op.MAXIMUM, 0.0)

    def is_constant(self, value: float) -> bool:
        return self.node.op is Op.CONSTANT and self.node.weak and float(self.node.number) == value

    @property
    def dtype(self) -> DType:
        return self.node.dtype


def number(args: Sequence[Value], node: Node, name: str) -> ValueLike:
    """Returns a number argument of a node: a literal, or a run-time operand."""
    names = list(node.numbers)
    if name in names:
        return args[len(node.tensors) + names.index(name)]
    return float(cast(float, node.attr(name)))


def _reciprocal(count: float) -> float:
    """1/count; infinite for a count up to 0, like torch: a sum of 0 becomes NaN."""
    return 1.0 / count if count > 0 else math.inf
