"""What a rule is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from fusegen.passes.algebra import Value

Gradients: TypeAlias = tuple[Value | None, ...]
Rule: TypeAlias = Callable[[Value, Value], Gradients]
"""From a node and the gradient by it to the gradients by its operands."""


def nothing(y: Value, _dy: Value) -> Gradients:
    """The rule of what is constant wherever it has a derivative."""
    return (None,) * len(y.node.args)
