"""What a call does, as data: formulas and numbers by themselves."""

from __future__ import annotations

from fusegen.program.formula import Formula, FormulaKind, Relation, formula_of, minimum, size
from fusegen.program.numbers import Numbers, Operation, Scalar, python_condition, python_function


def test_formulas_are_computed_and_written() -> None:
    n, m = size("n"), size("m")
    cases = {
        n + 3: (13, "n + 3"),
        (n + 3) // 4: (3, "((n + 3) // 4)"),
        (n + m) * 2: (34, "(n + m) * 2"),
        minimum(n * m, 5): (5, "min(n * m, 5)"),
        Formula(FormulaKind.SUM, (n, Formula(FormulaKind.NEGATION, (m * 2,)))): (-4, "n - m * 2"),
        Formula(FormulaKind.REMAINDER, (n * n, formula_of(7))): (2, "((n * n) % 7)"),
        formula_of(-3) * n: (-30, "n * (-3)"),
        n // (m + -7): (0, "(n // (m + (-7)))"),
    }
    for formula, (value, text) in cases.items():
        assert (formula({"n": 10, "m": 7}), str(formula)) == (value, text)
        assert eval(str(formula), {"n": 10, "m": 5}) == formula({"n": 10, "m": 5})
    assert ((n + 3) // 4 * m).sizes == {"n", "m"} and ((n + 3) // 4).text("/") == "((n + 3) / 4)"
    assert [Relation(n, sign, m)({"n": 3, "m": 4}) for sign in ("==", "!=", "<", "<=", ">", ">=")] == [0, 1, 1, 1, 0, 0]


def chain(length: int) -> Numbers:
    """s + s, and the sum of that and itself, and so on."""
    doubled = [Operation("add", (n, n), is_float=True) for n in range(length)]
    return Numbers((Scalar("s"), *doubled), (("last", length), ("middle", length // 2)))


def test_a_chain_of_any_length() -> None:
    found = python_function(chain(1000), {"s": 0}, {}, {})((1.0,))
    assert found == {"last": 2.0**1000, "middle": 2.0**500}
    assert "…" in chain(1000).text(1000) and chain(2).text(2) == "(s + s) + (s + s)"


def test_a_later_condition_is_asked_where_the_earlier_hold() -> None:
    lines = (Scalar("s"), 0, Operation("gt", (0, 1), is_float=False), 1.0, Operation("div", (3, 0), is_float=True))
    condition = python_condition(Numbers((*lines, Operation("gt", (4, 1), is_float=False)), (("a", 2), ("b", 5))), {"s": 0}, {})
    assert [condition((s,)) for s in (2, 0, -1)] == [True, False, False]
