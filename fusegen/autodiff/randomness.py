"""Random bits in two passes: both make them of one key, which the forward pass is given."""

from __future__ import annotations

from fusegen.dtypes import DType
from fusegen.ir.graph import Graph, GraphBuilder, InputSpec, Node
from fusegen.ir.ops import Op


def with_key(graph: Graph, name: str) -> Graph:
    """The graph with the key of the random bits that have none of their own as a further input, one int64.

    Args:
        name: of the input.
    """
    builder = GraphBuilder.like(graph)
    moved: list[int] = []
    key: int | None = None
    for position, node in graph:
        args = tuple(moved[a] for a in node.args)
        if node.op is Op.RANDOM and not args:
            key = builder.input(InputSpec(name, DType.INT64, (1,), (0,), hidden=True)) if key is None else key
            args = (key,)
        rebuilt = Node(node.op, args, node.attrs, node.shape, node.dtype, node.weak)
        moved.append(builder.put(rebuilt, graph.locations[position]))
    return builder.build([moved[o] for o in graph.outputs])


def draws(graph: Graph) -> bool:
    """Whether a graph has random bits without a key of their own."""
    return any(node.op is Op.RANDOM and not node.args for _, node in graph)
