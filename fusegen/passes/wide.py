"""Computes variances, running sums and running products of float32 in float64 on the CPU, like torch.

Squares of numbers around 1e20 overflow float32, and rounding errors grow along a row. GPUs keep 32 bits, as torch does there.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusegen.dtypes import DType
from fusegen.ir.graph import Graph, GraphBuilder, Node
from fusegen.ir.ops import Op
from fusegen.passes.algebra import Value
from fusegen.passes.rewrite import rebuilt

SPREADS = (Op.VAR, Op.STD)
RUNNING = (Op.CUMSUM, Op.CUMPROD, Op.LOGCUMSUMEXP)


def sum_in_float64(graph: Graph) -> Graph:
    """Computes variances, the means of the same rows, and running sums and products in float64."""
    narrow = [node for _, node in graph if node.args and graph.nodes[node.args[0]].dtype is DType.FLOAT32]
    variance_rows = {_rows(node) for node in narrow if node.op in SPREADS}
    if not variance_rows and not any(node.op in RUNNING for node in narrow):
        return graph

    def replaced(builder: GraphBuilder, indices: Sequence[int], position: int) -> int | None:
        node = graph.nodes[position]
        is_of_spread = node.op in (*SPREADS, Op.MEAN) and _rows(node) in variance_rows
        is_running = node.op in RUNNING and graph.nodes[node.args[0]].dtype is DType.FLOAT32
        if not is_of_spread and not is_running:
            return None
        wide = Value(builder, indices[node.args[0]], graph.locations[position]).apply(Op.CAST, dtype=DType.FLOAT64)
        return wide.apply(node.op, **dict(node.attrs)).apply(Op.CAST, dtype=node.dtype).position

    return rebuilt(graph, replaced)


def _rows(node: Node) -> tuple[int, object]:
    return node.args[0], dict(node.attrs).get("dims")
