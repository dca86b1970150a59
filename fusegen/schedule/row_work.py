"""The work of a row kernel, whichever plan it has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowWork:
    """The work of a row kernel.

    Attributes:
        rows, columns: that it goes through.
        moved: bytes to and from memory.
        itemsize: bytes of an element of the row.
        held: bytes of an element of all that is read of the row.
        operands: fragments along the row that it reads or writes.
        shared: of these, the ones that are the same for all rows.
        reductions: along the row.
    """

    rows: int
    columns: int
    moved: int
    itemsize: int
    held: int
    operands: int
    shared: int
    reductions: int
