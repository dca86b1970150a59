"""Symbolic integers: what simplification may do, checked against plain integers."""

from __future__ import annotations

import itertools
import random

import sympy

from fusegen.ir.formula import ceil_div, formula, relation
from fusegen.ir.symbolic import (
    Axes,
    FloorDiv,
    Modulo,
    axis_symbol,
    exact_quotient,
    size_symbol,
)
from fusegen.program.formula import formula_of, minimum, size

N, M = size_symbol("n"), size_symbol("m")
A, B, C = (axis_symbol(name) for name in "ijk")
AXES = Axes((A, B, C), (N, 6, 4))


def test_exact_quotients() -> None:
    for a, b, quotient in ((12, 4, 3), (8 * N, 4, 2 * N), (N * M, N, M), (N * M + N, N, M + 1)):
        assert exact_quotient(a, b) == quotient
    for a, b in ((12, 5), (5, 0), (N, 2), (N, N * M), (6 * N, 4)):
        assert exact_quotient(a, b) is None


def test_an_axis_below_the_divisor_is_its_own_remainder() -> None:
    assert AXES.floor_div(B, 6) == 0 and AXES.modulo(B, 6) == B
    assert AXES.floor_div(B + 1, 6) != 0, "j + 1 may be 6"
    assert AXES.floor_div(A * M + B, M) != A, "j may be beyond m"


def test_below_claims_nothing_that_is_not_certain() -> None:
    assert AXES.is_below(B, 6) and AXES.is_below(A * 6 + B, N * 6) and AXES.is_below(Modulo(A, sympy.Integer(3)), 3)
    assert not AXES.is_below(B, 5) and not AXES.is_below(A, M) and not AXES.is_below(A * M, N)


def random_expression(random_: random.Random) -> sympy.Expr:
    return sum(
        (random_.choice([1, 2, 3, 4, 6, 8, 24]) * s for s in random_.sample([A, B, C], random_.randint(1, 3))),
        random_.randint(0, 9) * sympy.Integer(1),
    )


def test_division_agrees_with_integers() -> None:
    random_, axes = random.Random(0), Axes((A, B, C), (5, 6, 4))
    for _ in range(60):
        a, b = random_expression(random_), random_.choice([1, 2, 3, 4, 6, 8, 12, 24, 30])
        value, quotient, rest = formula(a), formula(axes.floor_div(a, b)), formula(axes.modulo(a, b))
        for i, j, k in itertools.product(range(5), range(6), range(4)):
            at = {"i": i, "j": j, "k": k}
            assert (quotient(at), rest(at)) == divmod(value(at), b), (a, b, at)


def test_ceil_div() -> None:
    for n in range(1, 20):
        assert ceil_div(N, 8)({"n": n}) == -(-n // 8) == int(str(ceil_div(n, 8)))
    assert str(ceil_div(N, 1)) == "n"


def test_integers_of_a_formula_are_folded() -> None:
    n = size("n")
    for folded, text in (
        (formula_of(2) + n * 4 + 8 + n, "n * 4 + n + 10"),
        (formula_of(0) + n + 0, "n"),
        (n * 4 * 1 * 2, "n * 8"),
        ((n + 4) * 2, "(n + 4) * 2"),
        (formula_of(128) * 1 // 4, "32"),
        (minimum(n, 8, n, 6) * 2, "min(n, 6) * 2"),
        (minimum(n, n), "n"),
        (n // 0, "(n // 0)"),
        (formula_of(4) // 0, "0"),
    ):
        assert str(folded) == text


def test_relations_mean_the_same() -> None:
    for assumed in (
        N > 8,
        sympy.Eq(N, M),
        sympy.Ne(N, 2 * M),
        N * 2 <= M + 7,
        sympy.Not(N < M),
        FloorDiv(N, sympy.Integer(2)) >= M,
    ):
        for n, m in itertools.product(range(1, 9), repeat=2):
            assert relation(assumed)({"n": n, "m": m}) == bool(assumed.subs({N: n, M: m})), (assumed, n, m)
