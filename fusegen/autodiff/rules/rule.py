"""What a rule is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from fusegen.errors import UnsupportedError
from fusegen.passes.algebra import Value

Gradients: TypeAlias = tuple[Value | None, ...]
Rule: TypeAlias = Callable[[Value, Value], Gradients]
"""From a node and the gradient by it to the gradients by its operands."""


def refused(y: Value, why: str = "") -> UnsupportedError:
    """The error for a node that has no derivative."""
    at = y.location
    where = None if at is None else f"{at.file}, {f'line {at.line}' if at.line else 'first line'} of the function: {at.text}"
    mend = "compute it outside of the kernel and pass it, or name in wrt= what does not reach it"
    return UnsupportedError(f"{y.node.op.row.name} has no derivative{why and f': {why}'}", where=where, mend=mend)


def nothing(y: Value, _dy: Value) -> Gradients:
    """The rule of what is constant wherever it has a derivative."""
    return (None,) * len(y.node.args)
