"""What a program is laid out for: numbers of rows, in classes, so that there are few layouts for all sizes.

Rows select a plan by their class alone. A class reaches from above the one before it to its own number, which stands for all of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from fusegen.ir.symbolic import Dim, literal

CLASSES = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 32768, 65536)
"""The largest number of each class; what is larger counts as the last."""

_MANY = 4096


def class_of(rows: int) -> int:
    """The number that stands for another."""
    return CLASSES[min(bisect_left(CLASSES, rows), len(CLASSES) - 1)]


@dataclass(frozen=True)
class Expected:
    """The numbers of rows that a program is laid out for.

    Attributes:
        classes: of those that are known at the call only.
    """

    classes: Mapping[Dim, int]

    def of(self, dim: Dim) -> int:
        """A size: exactly where it is literal, else its class; what nothing is expected of counts as a few thousand."""
        known = literal(dim)
        return self.classes.get(dim, _MANY) if known is None else known
