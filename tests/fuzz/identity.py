"""Values that are one number: a value and its second use, one of equal operands, the greatest of a row and what it is taken of.

A kernel may compute a value with some error, but it has one value: v - v is 0, v <= amax(v), and no sum of exp(v - amax(v)) is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusegen.ir.graph import Graph, Node
from fusegen.ir.ops import Family, Op
from fusegen.ir.reference import RULES as EXACT
from tests.fuzz.enclosure import INF, Exact, Float, where

_SWAPS = (Op.ADD, Op.MUL)  # of which it is all the same which operand comes first
_MIRRORED = {Op.LT: Op.GT, Op.GT: Op.LT, Op.LE: Op.GE, Op.GE: Op.LE}


@dataclass(frozen=True)
class Extreme:
    """The greatest or the least of a value's rows, at each of their elements."""

    of: int
    dims: tuple[int, ...]
    least: bool


class Identity:
    """Which nodes of a graph hold the same numbers.

    Args:
        graph: as traced.
        inputs: by name, widened.
        concrete: an attribute without symbolic sizes.
    """

    def __init__(self, graph: Graph, inputs: Mapping[str, Tensor], concrete: Callable[[Any], Any]) -> None:
        self.graph, self.inputs, self.concrete = graph, inputs, concrete
        self._found: dict[tuple[int, int], Tensor | None] = {}

    def same(self, a: int, b: int) -> Tensor | None:
        """Where two nodes hold one number, in their shape, or one that broadcasts to it; None if nothing says so."""
        if a == b:
            return torch.tensor(True)
        key = (min(a, b), max(a, b))
        if key not in self._found:
            self._found[key] = self._same(self.graph.nodes[a], self.graph.nodes[b])
        return self._found[key]

    def _same(self, a: Node, b: Node) -> Tensor | None:
        if (a.op, a.dtype, a.weak, self._shape(a)) != (b.op, b.dtype, b.weak, self._shape(b)):
            return None
        if a.op is Op.INPUT:
            return _equal(self.inputs[str(a.attr("name"))], self.inputs[str(b.attr("name"))])
        if a.attrs != b.attrs or a.family not in (Family.POINTWISE, Family.VIEW):
            return None
        found = self._all(a, b.args)
        if a.op in _SWAPS:
            swapped = self._all(a, b.args[::-1])
            found = found | swapped if found is not None and swapped is not None else swapped if found is None else found
        if found is None or a.family is Family.POINTWISE:
            return found
        return self._viewed(a, b)

    def _all(self, a: Node, others: tuple[int, ...]) -> Tensor | None:
        """Where all operands are the same."""
        found = torch.tensor(True)
        for mine, other in zip(a.args, others, strict=True):
            here = self.same(mine, other)
            if here is None:
                return None
            if a.family is Family.POINTWISE:
                found = found & here
        return found

    def _viewed(self, a: Node, b: Node) -> Tensor:
        attrs = {key: self.concrete(value) for key, value in a.attrs}
        masks = []
        for mine, other in zip(a.args, b.args, strict=True):
            here = self.same(mine, other)
            assert here is not None
            masks.append(here.expand(self._shape(self.graph.nodes[mine])))
        found: Tensor = EXACT[a.op](*masks, **attrs)
        return found

    def _shape(self, node: Node) -> tuple[int, ...]:
        return tuple(int(self.concrete(extent)) for extent in node.shape)

    def extreme(self, a: int, b: int) -> Extreme | None:
        """What b is, if it is the greatest or the least of each of a's rows."""
        node = self.graph.nodes[b]
        final = self._shape(node)
        while node.op in (Op.EXPAND, Op.RESHAPE):
            if node.op is Op.EXPAND:
                final = self._shape(self.graph.nodes[node.args[0]])
            node = self.graph.nodes[node.args[0]]
        if node.op not in (Op.AMAX, Op.AMIN) or self._shape(node) != final:
            return None
        same = self.same(a, node.args[0])
        if same is None or not same.all() or 0 in self._shape(self.graph.nodes[a]):
            return None
        return Extreme(a, tuple(self.concrete(node.attr("dims"))), node.op is Op.AMIN)

    def sums_weights(self, node: Node) -> bool:
        """True if a node is a sum over exp(v - amax(v)), one term of which is 1."""
        weights = self.graph.nodes[node.args[0]] if node.op is Op.SUM else node
        shifted = self.graph.nodes[weights.args[0]] if weights.op in (Op.EXP, Op.EXP2) else node
        if shifted.op is not Op.SUB:
            return False
        top = self.extreme(*shifted.args)
        return top is not None and not top.least and top.dims == tuple(self.concrete(node.attr("dims")))


def _equal(a: Tensor, b: Tensor) -> Tensor:
    """Where elements are the same, zeros of different signs not."""
    if not a.is_floating_point():
        return a == b
    return (a == b) & (a.signbit() == b.signbit())


def difference(found: Float, same: Tensor, x: Float) -> Float:
    """x - y where y is x: zero, but for what is not finite."""
    certain = (x.lo == x.hi) & x.lo.isinf()
    zero = torch.zeros_like(found.lo)
    none = Float.of(zero, zero, (x.nan | x.may_be_infinite).expand(zero.shape), (x.num & ~certain).expand(zero.shape))
    return where(same.expand(zero.shape), none, found)


def below_top(found: Float, x: Float, dims: tuple[int, ...]) -> Float:
    """x - amax(x): nowhere above zero, and zero where x is certainly the greatest."""
    top = Float.of(found.lo.clamp(max=0.0), found.hi.clamp(max=0.0), found.nan, found.num)
    zero = torch.zeros_like(found.lo)
    return where(winners(x, dims), Float.of(zero, zero, found.nan, found.num), top)


def winners(x: Float, dims: tuple[int, ...]) -> Tensor:
    """Where a number is certainly as great as all others of its row."""
    if any(x.lo.shape[d] == 0 for d in dims):
        return torch.zeros_like(x.num)
    hi = torch.where(x.num, x.hi, -INF)
    top = hi.amax(dims, keepdim=True)
    first = hi == top
    second = torch.where(first, -INF, hi).amax(dims, keepdim=True)
    others = torch.where(first & (first.sum(dims, keepdim=True) == 1), second, top)
    return x.num & (x.lo >= others) & x.lo.isfinite()


def compared(op: Op, found: Exact, same: Tensor, x: Float) -> Exact:
    """A comparison of x with y, where y is x."""
    always = op in (Op.EQ, Op.LE, Op.GE)
    never = op in (Op.LT, Op.GT)
    can = torch.zeros_like(x.num) if never else x.num if always else x.nan
    cannot = torch.ones_like(x.num) if never else x.nan if always else x.num
    return chosen(same, Exact(can, can ^ cannot), found)


def compared_to_top(op: Op, found: Exact, x: Float, top: Float, dims: tuple[int, ...]) -> Exact:
    """A comparison of x with amax(x)."""
    both, none = x.num & top.num, x.nan | top.nan
    yes, no = Exact(both, both ^ none), Exact(torch.zeros_like(both), torch.ones_like(both))
    if op in (Op.LE, Op.GT):
        return yes if op is Op.LE else no
    equal = winners(x, dims) & both & ~none
    return chosen(equal, Exact(torch.full_like(both, op in (Op.EQ, Op.GE)), torch.ones_like(both)), found)


def chosen(condition: Tensor, a: Exact, b: Exact) -> Exact:
    """One of two, element by element."""
    return Exact(torch.where(condition, a.value, b.value), torch.where(condition, a.sure, b.sure))


def mirrored(op: Op) -> Op:
    """The comparison with its operands swapped, or negated."""
    return _MIRRORED.get(op, op)
