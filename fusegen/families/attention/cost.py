"""The time that attention is expected to take, in µs: by a kernel of ours, or by torch's.

The model: ours has a block for each 128 queries of a head, which walks over its keys, in waves of one block a multiprocessor;
torch's multiplies at a rate, and shares the keys of a single query among blocks. Both move bytes meanwhile. The numbers were fitted
to measurements, which `docs/costs/attention-h100.json` holds; `tests/unit/test_attention_cost.py` says how good the choice is that
follows from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fusegen.families.gemm.cost import overlapped_time
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph, Node
from fusegen.ir.ops import Op

_TILE = 128  # queries of a block


@dataclass(frozen=True)
class AttentionSize:
    """Attention of 16-bit floats.

    Attributes:
        batch, heads, kv_heads: how many there are, of queries, and of keys and values.
        queries, keys: positions.
        channels: of a head.
        is_causal: whether a query meets the keys up to its own position alone.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    channels: int
    is_causal: bool

    @property
    def bytes(self) -> int:
        """The bytes of queries, keys, values and the result."""
        positions = 2 * self.heads * self.queries + 2 * self.kv_heads * self.keys
        return 2 * self.batch * positions * self.channels

    @property
    def met(self) -> float:
        """Keys that a query meets, in the mean."""
        return (self.keys + 1) / 2 if self.is_causal else float(self.keys)


def attentions_of(graph: Graph) -> tuple[Callable[[Mapping[str, int]], AttentionSize], ...]:
    """The attention that torch may compute in a graph, as functions of its sizes: it computes all with dropout. None where one has
    a bias, of which nothing was measured."""
    found = [node for _, node in graph if node.op is Op.ATTENTION and node.attr("result") == 0]
    nodes = [node for node in found if not node.attr("dropout")]
    if any(len(node.args) > 3 for node in nodes):
        return ()
    return tuple(_sized(graph, node) for node in nodes)


def _sized(graph: Graph, node: Node) -> Callable[[Mapping[str, int]], AttentionSize]:
    q, k, _ = (graph.nodes[p].shape for p in node.args)
    dims = {"batch": q[0], "heads": q[1], "kv_heads": k[1], "queries": q[2], "keys": k[2], "channels": q[3]}
    formulas, is_causal = {name: formula(dim) for name, dim in dims.items()}, bool(node.attr("causal"))

    def size(sizes: Mapping[str, int]) -> AttentionSize:
        return AttentionSize(**{name: each(sizes) for name, each in formulas.items()}, is_causal=is_causal)

    return size


@dataclass(frozen=True)
class AttentionCosts:
    """Figures of a machine for heads of some channels; times in µs, rates a µs.

    Attributes:
        key, end: of a block, for each key and once.
        causal_key, causal_end: likewise, where blocks have keys of different numbers.
        flops, causal_flops: that torch's kernel computes.
    """

    key: float
    end: float
    causal_key: float
    causal_end: float
    flops: float
    causal_flops: float


_PROCESSORS = 132
_START, _LIBRARY_START = 6.0, 9.0  # the library takes longer on the host
_BANDWIDTH = 2.9e6  # bytes
_SINGLE = 2.8e6  # bytes, of one query

H100: Mapping[int, AttentionCosts] = {
    64: AttentionCosts(0.0095, 0.8, 0.0118, 2.2, 500e6, 440e6),
    80: AttentionCosts(0.0111, 1.0, 0.0125, 4.0, 420e6, 350e6),
    96: AttentionCosts(0.0108, 1.0, 0.0116, 6.0, 480e6, 420e6),
    128: AttentionCosts(0.0125, 1.5, 0.0149, 6.5, 680e6, 600e6),
    256: AttentionCosts(0.0228, 2.0, 0.0267, 11.3, 650e6, 660e6),
}
"""By the most channels of a head."""


_MARGIN = 0.95  # of our time: what is expected to be about as fast is a kernel of ours, which takes along what is around it


def takes_library(sizes: Sequence[AttentionSize], processors: int) -> bool:
    """Tells if some attentions are expected to be faster by torch's kernels than by ours.

    Args:
        processors: multiprocessors of the machine.
    """
    ours, library = (sum(time(size, processors) for size in sizes) for time in (own_time, library_time))
    return library < _MARGIN * ours


def own_time(size: AttentionSize, processors: int) -> float:
    """The time of a kernel of ours.

    Args:
        processors: multiprocessors of the machine.
    """
    costs = _costs(size)
    blocks = size.batch * size.heads * math.ceil(size.queries / _TILE)
    key, end = (costs.causal_key, costs.causal_end) if size.is_causal else (costs.key, costs.end)
    block = size.met * key + end
    return _START + overlapped_time(math.ceil(blocks / processors) * block, size.bytes / _BANDWIDTH)


def library_time(size: AttentionSize, processors: int) -> float:
    """The time of torch's kernel.

    Args:
        processors: multiprocessors of the machine.
    """
    if size.queries == 1:
        return _LIBRARY_START + size.bytes / _SINGLE
    costs = _costs(size)
    blocks = size.batch * size.heads * math.ceil(size.queries / _TILE)
    waves = math.ceil(blocks / processors) * processors  # blocks, those that are not there among them
    flops = 4 * waves * _TILE * size.met * size.channels
    rate = (costs.causal_flops if size.is_causal else costs.flops) * processors / _PROCESSORS
    return _LIBRARY_START + overlapped_time(flops / rate, size.bytes / _BANDWIDTH)


def _costs(size: AttentionSize) -> AttentionCosts:
    return next((costs for most, costs in H100.items() if size.channels <= most), H100[256])
