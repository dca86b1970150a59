"""Indices and conditions in C, and which definitions a text needs."""

from __future__ import annotations

import re
from collections.abc import Sequence

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


_NO_CODE = re.compile(r'//[^\n]*|"(?:[^"\\\n]|\\.)*"')


def code_of(text: str) -> str:
    """A text without its comments and strings, in which users' lines and names stand."""
    return _NO_CODE.sub("", text)


def mentions(text: str, name: str) -> bool:
    """Whether a name stands in a text."""
    return re.search(rf"\b{name}\b", text) is not None


def needed(lines: Sequence[str], text: str) -> list[str]:
    """Of definitions (``const type name = …``) before a text, those of what it, or a later one of them, mentions."""
    kept: list[str] = []
    for line in reversed(lines):
        _, _, name, *_ = line.split()
        if mentions("\n".join([*kept, text]), name):
            kept.append(line)
    return kept[::-1]
