"""Values that depend on others in a way that has derivatives."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fusegen.ir.graph import Graph, Node
from fusegen.ir.ops import Op


def dependent(graph: Graph, origins: Collection[int]) -> set[int]:
    """Floats that depend on some nodes through floats alone."""
    found = set(origins)
    for position, node in graph:
        if node.dtype.is_float and not node.weak and node.op is not Op.DETACH and not found.isdisjoint(node.args):
            found.add(position)
    return found


def dependencies(nodes: Sequence[Node], position: int) -> set[int]:
    """Nodes without operands that a node depends on through floats that are not detached."""
    found, stack, seen = set[int](), [position], set[int]()
    while stack:
        each = stack.pop()
        node = nodes[each]
        if each in seen or not node.dtype.is_float or node.op is Op.DETACH:
            continue
        seen.add(each)
        stack += node.args
        if not node.args:
            found.add(each)
    return found
