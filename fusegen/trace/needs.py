"""Facts that a trace needs: whoever traces starts again with them."""

from __future__ import annotations

import sympy

from fusegen.ir.symbolic import Dim, literal


class NeedsStatic(Exception):
    """Run-time scalars are used where only a number will do; whoever traces starts again with their values."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        super().__init__(", ".join(names))


class NeedsSize(NeedsStatic):
    """Run-time ints are used as sizes; whoever traces starts again with symbols in their place."""


class NeedsTie(NeedsStatic):
    """Ints that are used as sizes must equal other sizes, as they do in this call; whoever traces starts again with one symbol for
    those that are equal."""


class NeedsLiteral(Exception):
    """A size must be literal for what the function does with it; whoever traces starts again with it so."""

    def __init__(self, size: str) -> None:
        self.size = size
        super().__init__(size)


class NeedsSum(Exception):
    """A size must be the sum of others, as it is in this call; whoever traces starts again with it so.

    Args:
        size: the name of a size, or the extent of a literal dim.
        parts: names of sizes.
        number: what is added to them.
        otherwise: what is needed where no dim of a parameter is that size.
    """

    def __init__(self, size: str | int, parts: tuple[str, ...], number: int, otherwise: Exception) -> None:
        self.size, self.parts, self.number, self.otherwise = size, parts, number, otherwise
        super().__init__(size)


def sum_of(one: Dim, other: Dim, otherwise: NeedsLiteral) -> NeedsSum | None:
    """The need for one of two different sizes to be what the other is; None where neither can be: a literal that equals one symbol
    is a coincidence, or a feature's extent."""
    for size, total in ((other, one), (one, other)):
        terms = sympy.Add.make_args(sympy.sympify(total))
        parts = tuple(str(term) for term in terms if term.is_Symbol)
        numbers = [int(term) for term in terms if term.is_Integer]
        if one == other or not parts or len(parts) + len(numbers) < len(terms) or str(size) in parts:
            continue
        if getattr(size, "is_Symbol", False):
            return NeedsSum(str(size), parts, sum(numbers), otherwise)
        if literal(size) is not None and len(terms) > 1:
            return NeedsSum(int(size), parts, sum(numbers), otherwise)
    return None
