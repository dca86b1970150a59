"""The cost model of attention: expected times in µs of a generated kernel and of torch's kernel.

In the generated kernel, a block computes 128 queries of a head and loops over their keys. Blocks run in waves of one per SM.
Torch's kernel multiplies at a constant rate, and splits the keys of a single query over blocks. The constants are fitted to
measurements (`docs/costs/attention-h100.json`). `tests/unit/test_attention_cost.py` bounds the loss by wrong choices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import sympy

from fusegen.families.attention.operands import stored_operands
from fusegen.families.attention.plan import MOST_ROWS, SPLITS, AttentionBody, FewQueriesPlan
from fusegen.families.gemm.cost import overlapped_time
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph, Node
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import literal
from fusegen.schedule.choices import Choice
from fusegen.schedule.kernel import GENERATED, LIBRARY, Plan
from fusegen.schedule.program import Launch
from fusegen.target import Target

_TILE = 128  # queries per block


@dataclass(frozen=True)
class AttentionSize:
    """The sizes of an attention of 16-bit floats; in causal attention, a query sees only the keys up to its own position. The cost
    model does not cover a bias, nor a mask that torch reads as one. The generated kernel of few queries reads keys and values whose
    elements have `itemsize` bytes; other kernels read them in 16 bits."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    channels: int
    is_causal: bool
    has_bias: bool = False
    itemsize: int = 2

    @property
    def bytes(self) -> int:
        positions = 2 * self.heads * self.queries + 2 * self.kv_heads * self.keys
        return 2 * self.batch * positions * self.channels

    @property
    def mean_keys(self) -> float:
        return (self.keys + 1) / 2 if self.is_causal else float(self.keys)


def attentions_of(graph: Graph) -> tuple[Callable[[Mapping[str, int]], AttentionSize], ...]:
    """Returns the sizes of the attentions for which torch is an alternative, as functions of the graph's sizes.

    Attentions with dropout are left out, since torch computes all of them.
    """
    return tuple(_sized(graph, node) for node in _without_dropout(graph))


def attention_choice(graph: Graph, sizes: Sequence[AttentionSize], *, by_library: bool) -> Choice:
    """Returns the choice between generated kernels and torch for all these attentions together.

    Args:
        by_library: True if torch is expected to be faster.
    """
    digest = f"attention {[(n.dtype.short, n.attr('causal'), *_bias_dims(graph, n)) for n in _without_dropout(graph)]}"
    dims = [(size.batch, size.heads, size.kv_heads, size.queries, size.keys, size.channels) for size in sizes]
    candidates = (LIBRARY, GENERATED) if by_library else (GENERATED, LIBRARY)
    return Choice(graph.name, digest, tuple(itertools.chain.from_iterable(dims)), candidates)


def _without_dropout(graph: Graph) -> list[Node]:
    attentions = [node for _, node in graph if node.op is Op.ATTENTION and node.attr("result") == 0]
    return [node for node in attentions if not node.attr("dropout")]


def _bias_dims(graph: Graph, node: Node) -> list[str]:
    """Returns a letter for each dim of each bias: 1 if the scores share an element along it."""
    return ["".join("1" if literal(extent) == 1 else "n" for extent in graph.nodes[p].shape) for p in node.args[3:]]


def _sized(graph: Graph, node: Node) -> Callable[[Mapping[str, int]], AttentionSize]:
    q, k, *_ = (graph.nodes[p].shape for p in node.args)
    dims = {"batch": q[0], "heads": q[1], "kv_heads": k[1], "queries": q[2], "keys": k[2], "channels": q[3]}
    formulas = {name: formula(dim) for name, dim in dims.items()}
    is_causal, has_bias = bool(node.attr("causal")), len(node.args) > 3
    itemsize = 2 if any(stored_operands(graph, p) is None for p in node.args[1:3]) else 1

    def size(sizes: Mapping[str, int]) -> AttentionSize:
        return AttentionSize(
            **{name: formula_of(sizes) for name, formula_of in formulas.items()},
            is_causal=is_causal,
            has_bias=has_bias,
            itemsize=itemsize,
        )

    return size


@dataclass(frozen=True)
class AttentionCosts:
    """Constants of a machine for a head dim; times in µs, rates per µs.

    Attributes:
        key, end: a block's time per key, and its constant time.
        causal_key, causal_end: the same in causal attention, where blocks have different numbers of keys.
        flops, causal_flops: the rate of torch's kernel.
    """

    key: float
    end: float
    causal_key: float
    causal_end: float
    flops: float
    causal_flops: float


_PROCESSORS = 132
_START, _LIBRARY_START = 6.0, 9.0  # launching torch's kernel takes longer on the host
_BANDWIDTH = 2.9e6  # bytes per µs

# Few queries, measured on an H200 (`docs/costs/few-queries-h200.json`, `caches-h200.json`). Times in µs.
_READ_START, _LIBRARY_READ_START = 2.4, 6.7
_KEY, _MASKED_KEY = 4.4e-3, 8e-3  # a block's time per key; the second if the scores read an element per key
_ELEMENT: Mapping[int, float] = {2: 8.4e-6, 1: 1.75e-5}  # and per element of a key and its value, by bytes
_PAGE: Mapping[int, float] = {2: 0.12, 1: 0.05}  # and per page that it requests, by bytes of an element
_READ: Mapping[str, float] = {"NVIDIA H200": 4.2e6, "NVIDIA H100 80GB HBM3": _BANDWIDTH}
"""Bytes per µs of all blocks, by the card of a target."""
_LIBRARY_READ = 1.08  # the rate of torch's kernel, relative to it
_RESIDENT: Mapping[int, float] = {
    1: 2.0,
    2: 0.98,
    4: 0.445,
    8: 0.23,
    16: 0.07,
}  # clusters that run at a time, per SM, by their size
_JOIN, _CLUSTERED_BLOCK = 0.5, 0.0115  # per doubling of the splits, and per block beyond half of the SMs

H100: Mapping[int, AttentionCosts] = {
    64: AttentionCosts(0.0095, 0.8, 0.0118, 2.2, 500e6, 440e6),
    80: AttentionCosts(0.0111, 1.0, 0.0125, 4.0, 420e6, 350e6),
    96: AttentionCosts(0.0108, 1.0, 0.0116, 6.0, 480e6, 420e6),
    128: AttentionCosts(0.0125, 1.5, 0.0149, 6.5, 680e6, 600e6),
    256: AttentionCosts(0.0228, 2.0, 0.0267, 11.3, 650e6, 660e6),
}
"""Constants by the largest head dim."""


_MARGIN = 0.95  # if both are expected to take about as long, the generated kernel also fuses adjacent operations


def takes_library(sizes: Sequence[AttentionSize], target: Target) -> bool:
    """True if torch's kernels are expected to be faster than generated ones for all attentions together; False with a bias."""
    if any(size.has_bias for size in sizes):
        return False
    ours = sum(_own_time(size, target) for size in sizes)
    library = sum(library_time(size, target) + _conversion_time(size, target) for size in sizes)
    return library < _MARGIN * ours


def _own_time(size: AttentionSize, target: Target) -> float:
    """Returns the time of the fastest generated kernel."""
    if size.queries * size.heads // size.kv_heads > MOST_ROWS:
        return generated_time(size, target.sms) + _conversion_time(size, target)
    few_queries = [few_queries_time(size, size.queries, splits, target) for splits in SPLITS]
    return min(few_queries if size.itemsize == 1 else [generated_time(size, target.sms), *few_queries])


def plan_times(launch: Launch, sizes: Mapping[str, int], target: Target) -> dict[Plan, float]:
    """Returns the expected time of each candidate of an attention launch."""
    body = launch.kernel.body
    assert isinstance(body, AttentionBody)
    plan, (batch, heads, queries, keys) = body.plan, (extra(sizes) for extra in launch.extra[:4])
    channels, is_causal = max(plan.head_dim, plan.value_dim), body.visible_keys is not None
    kv_heads, itemsize = heads // plan.gqa_group, body.cache_dtype.itemsize
    size = AttentionSize(batch, heads, kv_heads, queries, keys, channels, is_causal, itemsize=itemsize)
    pair = body.score.axes.symbols[-1]
    reads_scores = any(pair in sympy.sympify(offset).free_symbols for read in body.score.reads for offset in read.offsets)

    page = body.pages.box if body.pages else None

    def time(plan: Plan) -> float:
        if isinstance(plan, FewQueriesPlan):
            return few_queries_time(size, plan.queries, plan.splits, target, reads_scores=reads_scores, page=page)
        return generated_time(size, target.sms)

    return {candidate: time(candidate) for candidate in launch.candidates}


_LEAST_TILES = 2  # tiles of keys per block; assumed, not measured: joining costs about as much as reading one


def evenly_split(launch: Launch, sizes: Mapping[str, int], target: Target) -> Plan | None:
    """Returns the candidate of a target without measured costs: the one with the most splits whose blocks run in one wave and have
    at least `_LEAST_TILES` of keys each, else the one without splits."""
    batch, heads, queries, keys = (extra(sizes) for extra in launch.extra[:4])

    def is_even(plan: FewQueriesPlan) -> bool:
        blocks = batch * heads // plan.gqa_group * math.ceil(queries / plan.queries) * plan.splits
        resident = target.sms * max(1, min(plan.blocks_per_sm, target.shared_bytes // plan.shared_bytes))
        return blocks <= resident and plan.splits * plan.tile_k * _LEAST_TILES <= keys

    plans = [plan for plan in launch.candidates if isinstance(plan, FewQueriesPlan)]
    return max(filter(is_even, plans), key=lambda plan: plan.splits, default=next(iter(launch.candidates), None))


def few_queries_time(
    size: AttentionSize, queries: int, splits: int, target: Target, *, reads_scores: bool = False, page: int | None = None
) -> float:
    """Returns the time of a kernel for few queries.

    Args:
        queries: those of a head in a tile.
        reads_scores: True if the scores read an element per key, e.g. a mask, so that a block computes more slowly.
        page: keys that are read at once from a page; None if keys are not in pages.
    """
    tiles, elements = size.batch * size.kv_heads * math.ceil(size.queries / queries), 2 * size.channels
    key = (
        (_MASKED_KEY if reads_scores else _KEY)
        + elements * _ELEMENT[size.itemsize]
        + (_PAGE[size.itemsize] / page if page else 0.0)
    )
    most = max(1, int(_RESIDENT[splits] * target.sms))
    waves = [most] * (tiles // most) + [tiles % most]
    keys = math.ceil(size.keys / splits)  # of a block
    reading = sum(max(keys * key, wave * splits * keys * elements * size.itemsize / _READ[target.card]) for wave in waves if wave)
    joining = _JOIN * math.log2(splits) + _CLUSTERED_BLOCK * max(0, tiles * splits - target.sms // 2) if splits > 1 else 0.0
    return _READ_START + joining + reading


def _conversion_time(size: AttentionSize, target: Target) -> float:
    """Returns the time of a kernel that writes keys and values of 8 bits in 16."""
    elements = 2 * size.batch * size.kv_heads * size.keys * size.channels
    return 0.0 if size.itemsize > 1 else _READ_START + (1 + 2) * elements / _READ[target.card]


def generated_time(size: AttentionSize, sms: int) -> float:
    costs = _costs(size)
    blocks = size.batch * size.heads * math.ceil(size.queries / _TILE)
    key, end = (costs.causal_key, costs.causal_end) if size.is_causal else (costs.key, costs.end)
    block = size.mean_keys * key + end
    return _START + overlapped_time(math.ceil(blocks / sms) * block, size.bytes / _BANDWIDTH)


def library_time(size: AttentionSize, target: Target) -> float:
    if size.queries == 1:
        return _LIBRARY_READ_START + size.bytes / (_LIBRARY_READ * _READ[target.card])
    costs = _costs(size)
    blocks = size.batch * size.heads * math.ceil(size.queries / _TILE)
    waves = math.ceil(blocks / target.sms) * target.sms  # in blocks, including idle SMs of the last wave
    flops = 4 * waves * _TILE * size.mean_keys * size.channels
    rate = (costs.causal_flops if size.is_causal else costs.flops) * target.sms / _PROCESSORS
    return _LIBRARY_START + overlapped_time(flops / rate, size.bytes / _BANDWIDTH)


def _costs(size: AttentionSize) -> AttentionCosts:
    return next((costs for most, costs in H100.items() if size.channels <= most), H100[256])
