"""Which traced tensors would share memory in torch, so that an operation in place is seen under every name of a value, or refused.

A value in place is a new value of the graph, which all names of the same Python object then mean. Other objects over the same
memory (a view, what it is a view of) are out of date from then on, and using one is an error.
"""

from __future__ import annotations

from typing import Protocol

from fusegen.errors import UnsupportedError
from fusegen.lang.places import here


class Memory:
    """The memory that a value and its views would lie in.

    Attributes:
        writes: how often something was written to it.
    """

    def __init__(self) -> None:
        self.writes = 0


class _Value(Protocol):
    _position: int
    _memory: Memory
    _writes: int


def overwrite(target: _Value, result: _Value) -> None:
    """Makes a value mean what was written to it."""
    target._position = result._position
    target._memory.writes += 1
    target._writes = target._memory.writes


def require_current(value: _Value) -> None:
    """Refuses a value whose memory was written to through another one.

    Raises:
        UnsupportedError: torch would give the new elements, which this value does not know.
    """
    if value._writes != value._memory.writes:
        raise UnsupportedError(
            "a tensor is used after a view of it, or what it is a view of, was changed in place",
            where=here(),
            mend="write y = y + 1 in place of y += 1, and put parts together with torch.cat or torch.where",
        )
