"""Attention: a product of streaming weights with values, where tensor cores serve it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fusegen.dtypes import DType
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Position, StridedView, repeated_view, strided_view
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Axes, Dim, literal, same
from fusegen.passes.fuse.cone import Cone, domain_axes, walk
from fusegen.passes.fuse.contraction import is_tma_view
from fusegen.passes.fuse.epilogue import is_computed_once
from fusegen.passes.fuse.groups import Domain, Group, GroupKind, products_below
from fusegen.passes.fuse.recurrence import Recurrence, derive
from fusegen.target import Target

_CHANNELS = 8  # of a head, or a multiple: vectors of 16 bytes
_MOST_CHANNELS = 256


@dataclass(frozen=True)
class AttentionOperands:
    """Queries (batch, head, query, channel), keys and values (batch, head, key, channel), channels contiguous.

    Attributes:
        sharing: heads of queries that read one head of keys and values (Ainslie et al., arXiv 2305.13245).
    """

    q: StridedView
    k: StridedView
    v: StridedView
    sharing: int

    @property
    def views(self) -> tuple[StridedView, ...]:
        """All three."""
        return self.q, self.k, self.v


def is_served(target: Target) -> bool:
    """Whether a machine has what the skeleton takes."""
    return target.wgmma


def attention_group(graph: Graph, root: int, target: Target, kept: Collection[int]) -> Group | None:
    """The group of attention that ends in ``root``, or None when it is none or the skeleton cannot serve it.

    Args:
        kept: values that lie in memory.
    """
    if not is_served(target):
        return None
    for values in _products_at(graph, root):
        recurrence = derive(graph, values)
        if recurrence is None or unserved(graph, recurrence, root) is not None:
            continue
        inputs = _inputs(graph, recurrence, root, kept)
        if inputs is not None:
            anchors = (recurrence.score_product, recurrence.first, recurrence.second, values)
            return Group(GroupKind.ATTENTION, (root,), inputs, Domain(graph.nodes[root].shape), tuple(sorted(anchors)))
    return None


def _products_at(graph: Graph, root: int) -> list[int]:
    """The root itself, or the products below its pointwise epilogue."""
    if graph.nodes[root].family is Family.CONTRACTION:
        return [root]
    if graph.nodes[root].family is not Family.POINTWISE:
        return []
    return products_below(graph, root)


def recurrence_of(graph: Graph, group: Group) -> Recurrence:
    """The recurrence of an attention group."""
    for anchor in reversed(group.anchors):
        found = derive(graph, anchor)
        if found is not None:
            return found
    raise ValueError("not an attention group")


def unserved(graph: Graph, recurrence: Recurrence, root: int) -> str | None:
    """Why the attention skeleton cannot compute a recurrence; None when it can."""
    values, scores = graph.nodes[recurrence.values], graph.nodes[recurrence.score_product]
    q, keys = (graph.nodes[_unwidened(graph, a)] for a in scores.args)
    if len(values.shape) != 4 or not all(map(same, graph.nodes[root].shape, values.shape)):
        return "the tensors are not (batch, head, position, channel)"
    if not all(map(same, graph.nodes[recurrence.scores].shape, scores.shape)):
        return "the scores are not of the product's shape"
    if values.dtype not in (DType.BFLOAT16, DType.FLOAT16) or {q.dtype, keys.dtype} != {values.dtype}:
        found = ", ".join(dict.fromkeys(str(node.dtype) for node in (q, keys, values)))
        return f"operands are {found}, not 16-bit floats of one dtype"
    if graph.nodes[root].dtype not in (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32):
        return f"the result is {graph.nodes[root].dtype}"
    for channels in (q.shape[-1], values.shape[-1]):
        if (literal(channels) or _MOST_CHANNELS + 1) > _MOST_CHANNELS or (literal(channels) or 1) % _CHANNELS:
            return f"the head dim is {channels}, no multiple of {_CHANNELS} up to {_MOST_CHANNELS}"
    operands = attention_operands(graph, recurrence)
    if operands is None:
        return "q, k or v is not a view with contiguous channels and 16-byte strides, or batch and heads broadcast"
    return None


def attention_operands(graph: Graph, recurrence: Recurrence) -> AttentionOperands | None:
    """q, k and v as the tensor memory accelerator reads them, or None when it cannot."""
    q, keys = graph.nodes[recurrence.score_product].args
    return operands_of(graph, q, keys, graph.nodes[recurrence.values].args[1])


def operands_of(graph: Graph, q: int, keys: int, values: int) -> AttentionOperands | None:
    """The same for operands of two products: keys are of (batch, head, channel, key)."""
    q, keys = _unwidened(graph, q), _unwidened(graph, keys)
    if any(len(graph.nodes[p].shape) != 4 for p in (q, keys, values)):
        return None
    found = (_operands(graph, strided_view(graph, q), keys, values, sharing) for sharing in _sharings(graph, q, keys))
    itemsize = graph.nodes[values].dtype.itemsize
    served = (o for o in found if o is not None and all(is_tma_view(graph, view, itemsize) for view in o.views))
    return next(served, None)


def _unwidened(graph: Graph, position: int) -> int:
    """What is below a conversion to float32: tensor cores add exact products of 16 bits in it anyway."""
    node = graph.nodes[position]
    is_widened = node.op is Op.CAST and node.dtype is DType.FLOAT32 and graph.nodes[node.args[0]].dtype.is_half
    return node.args[0] if is_widened else position


def _sharings(graph: Graph, q: int, keys: int) -> list[int]:
    """How many heads of queries may share one of keys: all where there is one head of keys; only one where no view repeats any."""
    position, heads = keys, literal(graph.nodes[q].shape[1])
    if heads is not None and same(graph.nodes[keys].shape[1], 1):
        return [heads]
    while graph.nodes[position].family is Family.VIEW and graph.nodes[position].op is not Op.CONCAT:
        if graph.nodes[position].op is Op.EXPAND and heads is not None:
            return [n for n in range(heads, 0, -1) if heads % n == 0]
        (position,) = graph.nodes[position].args
    return [1]


def _operands(graph: Graph, q: StridedView, keys: int, values: int, sharing: int) -> AttentionOperands | None:
    kt, v = (_unrepeated(graph, p, sharing) for p in (keys, values))
    if kt is None or v is None:
        return None
    k = StridedView(kt.base, _transposed(kt.shape), _transposed(kt.strides), kt.offset)
    batched = all(same(view.shape[0], q.shape[0]) and same(view.shape[1] * sharing, q.shape[1]) for view in (k, v))
    return AttentionOperands(q, k, v, sharing) if batched else None


def _unrepeated(graph: Graph, position: int, sharing: int) -> StridedView | None:
    """Keys or values with each head once, whether a view repeats it or the product broadcasts the only one."""
    is_plain = sharing == 1 or same(graph.nodes[position].shape[1], 1)
    return strided_view(graph, position) if is_plain else repeated_view(graph, position, 1, sharing)


def _transposed(dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    return (*dims[:-2], dims[-1], dims[-2])


def _inputs(graph: Graph, recurrence: Recurrence, root: int, kept: Collection[int]) -> tuple[int, ...] | None:
    """What lies in memory, or None when the scores or the epilogue need something that cannot be computed inside."""
    cone = Cone()
    _walk(graph, recurrence.scores, recurrence.score_product, cone, kept)
    _walk(graph, root, recurrence.values, cone, kept)
    if recurrence.sink is not None:
        _walk(graph, recurrence.sink, recurrence.values, cone, kept)
    needed = {recurrence.score_product, recurrence.values}
    if not needed <= set(cone.anchors) or needed & set(cone.inputs):
        return None
    if not is_computed_once(graph, recurrence.values, (root,), cone.inputs):
        return None
    operands = attention_operands(graph, recurrence)
    assert operands is not None  # which `unserved` saw
    return tuple(sorted({*cone.inputs, *(view.base for view in operands.views)}))


def _walk(graph: Graph, root: int, product: int, cone: Cone, kept: Collection[int]) -> None:
    domain = Domain(graph.nodes[root].shape)
    axes = domain_axes(domain)
    walk(graph, root, axes.symbols, axes, lambda p, at, _bounds: p == product and _is_identity(at, axes), cone, kept)


def _is_identity(at: Position, axes: Axes) -> bool:
    return all(i in (s, 0) and (i == s or same(e, 1)) for i, s, e in zip(at, axes.symbols, axes.extents, strict=True))
