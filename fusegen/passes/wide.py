"""Variances and running sums and products of floats of 32 bits in 64, on the CPU, where torch has them so: squares of what is
around 1e20 leave the range of 32, and rounding errors grow along a row.

GPUs keep 32 bits, as torch does there.
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


def with_wide_sums(graph: Graph) -> Graph:
    """The graph with variances, the means that are asked for beside them, running sums and products computed in float64."""
    narrow = [node for _, node in graph if node.args and graph.nodes[node.args[0]].dtype is DType.FLOAT32]
    spread = {_rows(node) for node in narrow if node.op in SPREADS}
    if not spread and not any(node.op in RUNNING for node in narrow):
        return graph

    def replaced(builder: GraphBuilder, moved: Sequence[int], position: int) -> int | None:
        node = graph.nodes[position]
        is_of_spread = node.op in (*SPREADS, Op.MEAN) and _rows(node) in spread
        is_running = node.op in RUNNING and graph.nodes[node.args[0]].dtype is DType.FLOAT32
        if not is_of_spread and not is_running:
            return None
        wide = Value(builder, moved[node.args[0]], graph.locations[position]).apply(Op.CAST, dtype=DType.FLOAT64)
        return wide.apply(node.op, **dict(node.attrs)).apply(Op.CAST, dtype=node.dtype).position

    return rebuilt(graph, replaced)


def _rows(node: Node) -> tuple[int, object]:
    """The operand of a reduction, and the dims along which it runs."""
    return node.args[0], dict(node.attrs).get("dims")
