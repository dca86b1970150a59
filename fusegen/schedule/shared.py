"""Arrays in the shared memory of a block, one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

SCRATCH_BYTES = 8
"""Of an element of a state that threads exchange: the widest type."""
BARRIER_BYTES = 8
BANKS = 32  # of 4 bytes
_MULTIPLE = 8  # elements of an array, so that the next one is aligned


@dataclass(frozen=True)
class SharedArrays:
    """Where arrays begin, in bytes.

    Attributes:
        scratch: by which threads exchange components of states.
        ordered: by which threads exchange rows that they put in order.
        sums: to which the row groups of a block add components of column sums.
        staged: fragments of rows.
        barriers: each of which counts what other blocks send for one reduction.
        bytes: of all arrays.
    """

    scratch: tuple[int, ...]
    ordered: tuple[int, ...]
    sums: tuple[int, ...]
    staged: tuple[int, ...]
    barriers: tuple[int, ...]
    bytes: int


def padded(elements: int) -> int:
    """The room for elements of which those behind each turn of the banks lie one further: threads that store neighbours each, one
    after the other, meet in no bank then."""
    room = elements + elements // BANKS
    return -(-room // _MULTIPLE) * _MULTIPLE


def arranged(
    scratch: Sequence[int] = (),
    sums: Sequence[int] = (),
    staged: Sequence[int] = (),
    barriers: Sequence[int] = (),
    ordered: Sequence[int] = (),
) -> SharedArrays:
    """Arrays of some bytes each, in the order of `SharedArrays`."""
    ends = tuple(accumulate((0, *scratch, *ordered, *sums, *staged, *barriers)))
    first, behind = len(scratch), len(scratch) + len(ordered)
    last = behind + len(sums)
    above = last + len(staged)
    return SharedArrays(ends[:first], ends[first:behind], ends[behind:last], ends[last:above], ends[above:-1], ends[-1])
