"""Numbers that a call computes: chains of any length, conditions in their order."""

from __future__ import annotations

from fusegen.calls.numbers import Numbers, Operation, Scalar, python_condition, python_function


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
