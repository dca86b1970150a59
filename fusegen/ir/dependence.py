"""Values that depend on others in a way that has derivatives."""

from __future__ import annotations

from collections.abc import Collection

from fusegen.ir.graph import Graph
from fusegen.ir.ops import Op


def dependent(graph: Graph, origins: Collection[int]) -> set[int]:
    """Floats that depend on some nodes through floats alone."""
    found = set(origins)
    for position, node in graph:
        if node.dtype.is_float and not node.weak and node.op is not Op.DETACH and not found.isdisjoint(node.args):
            found.add(position)
    return found
