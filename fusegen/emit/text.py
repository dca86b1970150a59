"""Indices and conditions in C."""

from __future__ import annotations

from fusegen.ir.formula import integer_text
from fusegen.ir.index_map import Bounds
from fusegen.ir.symbolic import Index


def c_text(index: Index) -> str:
    """An index in C."""
    return integer_text(index, "/")


def condition_text(bounds: Bounds) -> str:
    """A condition in C."""
    parts = []
    if bounds.lower is not None and bounds.lower != 0:
        parts.append(f"{c_text(bounds.index)} >= {c_text(bounds.lower)}")
    if bounds.upper is not None:
        parts.append(f"{c_text(bounds.index)} < {c_text(bounds.upper)}")
    return " && ".join(parts) or "true"
