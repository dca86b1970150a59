"""Index maps of views: chains of random views, element by element, against torch."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from fusegen.dtypes import DType
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph, GraphBuilder, InputSpec
from fusegen.ir.index_map import broadcast_index, identity_axes, sources, strided_view
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import size_symbol
from tests.naming import case

N = size_symbol("n")


def read(graph: Graph, position: int, index: tuple[int, ...], x: Tensor) -> float:
    """The element of a node, by following index maps down to the input."""
    node = graph.nodes[position]
    if node.op is Op.INPUT:
        return float(x[index])
    axes = identity_axes(node.shape)
    values = {s.name: i for s, i in zip(axes.symbols, index, strict=True)}
    for source in sources(graph, position, axes.symbols, axes):
        bounds = source.bounds
        if bounds is not None:
            place, lower, upper = (formula(e)(values) for e in (bounds.index, bounds.lower or 0, bounds.upper))
            if not lower <= place < upper:
                continue
        return read(graph, source.arg, tuple(formula(i)(values) for i in source.index), x)
    raise AssertionError("no operand holds the element")


def random_view(builder: GraphBuilder, position: int, value: Tensor, random_: random.Random) -> tuple[int, Tensor]:
    """One more view of a node, and what torch makes of it."""
    shape, rank = tuple(value.shape), value.dim()
    kind = random_.choice(["permute", "reshape", "slice", "expand", "concat"])
    if kind == "permute":
        dims = random_.sample(range(rank), rank)
        return builder.add(Op.PERMUTE, [position], dims=tuple(dims)), value.permute(dims)
    if kind == "reshape":
        new = random_shape(value.numel(), random_)
        return builder.add(Op.RESHAPE, [position], shape=new), value.reshape(new)
    dim = random_.randrange(rank)
    if kind == "slice":
        step, start = random_.randint(1, 2), random_.randrange(shape[dim])
        length = random_.randint(1, -(-(shape[dim] - start) // step))
        moved = value[(slice(None),) * dim + (slice(start, start + (length - 1) * step + 1, step),)]
        return builder.add(Op.SLICE, [position], dim=dim, start=start, length=length, step=step), moved
    if kind == "expand":
        one = builder.add(Op.RESHAPE, [position], shape=(*shape[:dim], 1, *shape[dim:]))
        new = (*shape[:dim], 2, *shape[dim:])
        return builder.add(Op.EXPAND, [one], shape=new), value.unsqueeze(dim).expand(new)
    part = builder.add(Op.SLICE, [position], dim=dim, start=0, length=1, step=1)
    return builder.add(Op.CONCAT, [position, part, position], dim=dim), torch.cat([value, value.narrow(dim, 0, 1), value], dim)


def random_shape(count: int, random_: random.Random) -> tuple[int, ...]:
    shape: list[int] = []
    while count > 1 and len(shape) < 3:
        factor = random_.choice([d for d in range(1, count + 1) if count % d == 0])
        shape.append(factor)
        count //= factor
    return (*shape, count)


def test_chains_of_views() -> None:
    for seed in range(10):
        with case(seed):
            chain_of_views(random.Random(seed))


def chain_of_views(random_: random.Random) -> None:
    value = x = torch.arange(24.0).reshape(2, 3, 4)
    builder = GraphBuilder("views")
    position = builder.input(InputSpec("x", DType.FLOAT32, (2, 3, 4), (12, 4, 1)))
    for _ in range(4):
        if value.numel() < 300:
            position, value = random_view(builder, position, value, random_)
    graph = builder.build([position])
    indices = [tuple(i) for i in torch.ones_like(value).nonzero().tolist()]
    for index in random_.sample(indices, min(len(indices), 12)):
        assert read(graph, graph.outputs[0], index, x) == float(value[index])


def test_a_strided_view_is_torch_s() -> None:
    for seed in range(1000, 1010):
        with case(seed):
            strided_views(random.Random(seed))


def strided_views(random_: random.Random) -> None:
    value = x = torch.arange(24.0).reshape(2, 3, 4)
    builder = GraphBuilder("views")
    position = builder.input(InputSpec("x", DType.FLOAT32, (2, 3, 4), (12, 4, 1)))
    values = {position: x}
    for _ in range(3):
        position, value = random_view(builder, position, value, random_)
        values[position] = value
    graph = builder.build(list(values))
    view = strided_view(graph, graph.outputs[-1])
    base = dict(zip(graph.outputs, values.values(), strict=True))[view.base].contiguous()
    assert torch.equal(base.as_strided([int(s) for s in view.shape], [int(s) for s in view.strides], int(view.offset)), value)


def test_broadcasts_read_extents_of_one_at_zero() -> None:
    i, j = identity_axes((N, 4)).symbols
    assert broadcast_index((1, 4), (i, j)) == (0, j)
    assert broadcast_index((4,), (i, j)) == (j,)
    assert broadcast_index((), (i, j)) == ()
