"""Coordinates in 32 bits: only where nothing can overflow, and the values stay the same."""

from __future__ import annotations

import itertools
import operator

import pytest
import sympy
import torch

import fusegen as fg
from fusegen.dtypes import DType
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import axis_symbol
from fusegen.schedule import terms
from fusegen.schedule.terms import SMALL, Leaf, Term, Terms, narrowed

X, Y = axis_symbol("x"), axis_symbol("y")
AXES = frozenset((X, Y))


class Builder:
    """Integer terms over two axes."""

    def __init__(self) -> None:
        self.terms = Terms()

    def coordinate(self, index: sympy.Expr) -> int:
        return self.terms.add(Term(Leaf.COORDINATE, (), DType.INT64, index))

    def constant(self, value: int) -> int:
        return self.terms.add(Term(Leaf.CONSTANT, (), DType.INT64, str(value)))

    def op(self, op: Op, *args: int) -> int:
        return self.terms.add(Term(op, args, DType.INT64))

    def compared(self, a: int, b: int) -> int:
        return self.terms.add(Term(Op.LT, (a, b), DType.BOOL))

    def operand_types(self, root: int, limit: int = SMALL) -> list[DType]:
        (found,) = narrowed(self.terms, [root], AXES, limit)
        return [self.terms.items[a].dtype for a in self.terms.items[found].args]


@pytest.mark.parametrize("op", [Op.ADD, Op.SUB, Op.MUL])
def test_what_may_overflow_stays_wide(op: Op) -> None:
    b = Builder()
    i = b.coordinate(X)
    below = b.op(Op.SUB, b.constant(-SMALL), b.constant(0))
    root = b.op(op, b.op(op, i, below), i) if op is Op.SUB else b.op(op, i, b.coordinate(Y))
    assert b.operand_types(b.compared(root, b.constant(3))) == [DType.INT64] * 2


@pytest.mark.parametrize("op", [Op.ADD, Op.SUB, Op.MUL], ids=lambda op: op.row.name)
@pytest.mark.parametrize("inner", [Op.ADD, Op.SUB], ids=lambda op: op.row.name)
def test_ranges_are_those_of_all_values(op: Op, inner: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """(a + x) op (b + y), where each part takes any of its values: as wide as the least and the greatest demand, no more."""
    limit = 3
    monkeypatch.setattr(terms, "SMALL", fits := 14)
    compute = {Op.ADD: operator.add, Op.SUB: operator.sub, Op.MUL: operator.mul}
    for a, c in itertools.product(range(-13, 14), repeat=2):
        b = Builder()
        root = b.op(op, b.op(inner, b.constant(a), b.coordinate(X)), b.op(inner, b.constant(c), b.coordinate(Y)))
        parts = [[compute[inner](constant, x) for x in range(limit + 1)] for constant in (a, c)]
        values = [*parts[0], *parts[1], *(compute[op](x, y) for x in parts[0] for y in parts[1])]
        narrow = -fits <= min(values) and max(values) <= fits
        assert (b.operand_types(b.compared(root, b.constant(1)), limit) == [DType.INT32] * 2) is narrow, (a, c)


def test_values_that_are_no_coordinates_keep_their_type() -> None:
    b = Builder()
    loaded = b.terms.add(Term(Leaf.SCALAR, (), DType.INT64, "s"))
    assert b.operand_types(b.compared(b.coordinate(X), loaded)) == [DType.INT64] * 2
    root = b.op(Op.MUL, b.coordinate(X), b.constant(3))
    assert narrowed(b.terms, [root], AXES) == [root], "what leaves the kernel has the type that it had"


@pytest.mark.parametrize(("rows", "index"), [(1000, "i32"), (1 << 16, "i64")])
def test_more_points_than_any_buffer_has_elements_are_counted_in_64_bits(rows: int, index: str) -> None:
    def distances(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x[:, None] - y[None]).abs().std()

    x = torch.empty(rows, device="meta")
    low = fg.kernel(distances).lower(x, x[1:], target="sm_90a")
    assert f"using Index = {index};" in low.sources[0].pipeline
