"""What the shared memory of a block holds: arrays, one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

SCRATCH_BYTES = 8
"""Of an element of a state that threads exchange: the widest type."""


@dataclass(frozen=True)
class SharedArrays:
    """Where arrays begin, in bytes.

    Attributes:
        scratch: by which threads exchange components of states.
        sums: to which the row groups of a block add components of column sums.
        staged: fragments of rows.
        bytes: of all arrays.
    """

    scratch: tuple[int, ...]
    sums: tuple[int, ...]
    staged: tuple[int, ...]
    bytes: int


def arranged(scratch: Sequence[int] = (), sums: Sequence[int] = (), staged: Sequence[int] = ()) -> SharedArrays:
    """Arrays of some bytes each, in this order."""
    ends = tuple(accumulate((0, *scratch, *sums, *staged)))
    behind, last = len(scratch), len(scratch) + len(sums)
    return SharedArrays(ends[:behind], ends[behind:last], ends[last:-1], ends[-1])
