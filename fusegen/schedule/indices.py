"""Indices that are values: how an offset mentions an integer that the kernel reads, and checks before it reads there.

Both are functions in an offset as a division is: axes and sizes in them are replaced with those around them, and what depends
on an axis through a value that is read depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable

import sympy

from fusegen.ir.symbolic import Index


class Loaded(sympy.Function):  # type: ignore[misc]  # sympy has no types
    """An integer in memory: ``Loaded(buffer, offset)``."""

    nargs = (2,)
    is_integer = True

    @property
    def buffer(self) -> int:
        """The buffer's key."""
        return int(self.args[0])

    @property
    def offset(self) -> sympy.Expr:
        """In elements."""
        return self.args[1]


class Checked(sympy.Function):  # type: ignore[misc]
    """A value as an index: ``Checked(value, extent, wraps, buffer)``, which is in [0, extent), or ends the kernel.

    A negative value counts from the end where ``wraps`` is 1. The buffer is the one that is indexed, -1 for what lies in none.
    """

    nargs = (4,)
    is_integer = True
    is_nonnegative = True

    @property
    def wraps(self) -> bool:
        """Whether a negative value counts from the end."""
        return bool(self.args[2])

    @property
    def buffer(self) -> int:
        """The key of the buffer that is indexed."""
        return int(self.args[3])


def loaded_buffers(expressions: Iterable[Index]) -> list[int]:
    """The buffers that some expressions read."""
    return sorted({call.buffer for e in expressions if not isinstance(e, int) for call in e.atoms(Loaded)})


def has_checks(expressions: Iterable[Index]) -> bool:
    """Whether some expressions check an index."""
    return any(e.has(Checked) for e in expressions if not isinstance(e, int))
