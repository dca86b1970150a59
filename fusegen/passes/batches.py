"""Matrices whose batch and heads were merged for `torch.bmm`: what is computed of their products is computed with both dims apart.

Attention is often written so, with queries, keys and values of (batch * heads, position, channel). Merged, each operand is a copy,
since heads lie within a row of a projection; apart, each is a view, and the products are those that the attention kernel knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias, cast

from fusegen.ir.graph import Node, Shape
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import product, same
from fusegen.passes.algebra import Value

_RANK = 3  # of the operands of `torch.bmm`

_Leading: TypeAlias = Shape
"""The two dims that were merged into the first."""


def product_of_merged_batches(x: Value) -> Value | None:
    """Products of each batch and head, before they are merged."""
    a, b = x.arg(0), x.arg(1)
    leading = _leading(a) or _leading(b)
    if leading is None or len(a.node.shape) != len(b.node.shape) or not same(a.node.shape[0], b.node.shape[0]):
        return None
    return _merged(x, lambda: _apart(a, leading).apply(Op.MATMUL, _apart(b, leading)))


def pointwise_of_merged_batches(x: Value) -> Value | None:
    """What is computed point by point of such products, likewise."""
    operands = [x.arg(number) for number in range(len(x.node.args))]
    leading = next((found for o in operands if (found := _leading_of_product(o)) is not None), None)
    rank = len(x.node.shape)
    if leading is None or not same(x.node.shape[0], product(leading)) or any(len(o.node.shape) > rank for o in operands):
        return None
    args = tuple((_apart(o, leading) if len(o.node.shape) == rank else o).position for o in operands)
    return _put(x, replace(x.node, args=args, shape=(*leading, *x.node.shape[1:])))


def reduction_of_merged_batches(x: Value) -> Value | None:
    """What is reduced along other dims of such products, likewise."""
    leading, dims = _leading_of_product(x.arg(0)), cast(tuple[int, ...], x.node.attr("dims"))
    if leading is None or 0 in dims or len(x.node.args) > 1:
        return None
    attrs = tuple((name, tuple(d + 1 for d in dims) if name == "dims" else value) for name, value in x.node.attrs)
    args = (_apart(x.arg(0), leading).position,)
    return _put(x, replace(x.node, args=args, attrs=attrs, shape=(*leading, *x.node.shape[1:])))


def _put(x: Value, node: Node) -> Value:
    return _merged(x, lambda: Value(x.builder, x.builder.put(node, x.location), x.location))


def _merged(x: Value, apart: Callable[[], Value]) -> Value:
    """What is computed with both dims apart, in the shape in which it is wanted."""
    return apart().apply(Op.RESHAPE, shape=x.node.shape)


def _leading(x: Value) -> _Leading | None:
    """The two dims that a view has merged into the first one, below a transposition of the others."""
    below = x.arg(0) if x.node.op is Op.PERMUTE and _keeps_first(x) else x
    if below.node.op is not Op.RESHAPE:
        return None
    merged, given = below.node.shape, below.arg(0).node.shape
    if len(merged) != _RANK or len(given) != len(merged) + 1 or not all(map(same, merged[1:], given[2:])):
        return None
    return given[:2]


def _keeps_first(x: Value) -> bool:
    return cast(tuple[int, ...], x.node.attr("dims"))[0] == 0


def _apart(x: Value, leading: _Leading) -> Value:
    """A value with its first dim as the two that were merged; or as two of one element, where it has one."""
    dims: Shape = (1, 1) if same(x.node.shape[0], 1) else leading
    if x.node.op is Op.PERMUTE and _keeps_first(x):
        order = cast(tuple[int, ...], x.node.attr("dims"))
        return _apart(x.arg(0), leading).apply(Op.PERMUTE, dims=(0, *(d + 1 for d in order)))
    if _leading(x) is not None and all(map(same, x.arg(0).node.shape[:2], dims)):
        return x.arg(0)
    return x.apply(Op.RESHAPE, shape=(*dims, *x.node.shape[1:]))


def _leading_of_product(x: Value) -> _Leading | None:
    """The two dims that were merged, where what lies below was computed of products of matrices."""
    leading = None if x.node.op is Op.PERMUTE else _leading(x)
    return leading if leading is not None and _is_of_products(x.arg(0)) else None


def _is_of_products(x: Value) -> bool:
    stack, seen = [x], set[int]()
    while stack:
        value = stack.pop()
        if value.node.op is Op.MATMUL:
            return len(value.arg(1).node.shape) > 2
        if value.node.family in (Family.POINTWISE, Family.REDUCTION) and value.position not in seen:
            operands = (value.arg(number) for number in range(len(value.node.args)))
            stack += [o for o in operands if len(o.node.shape) == len(x.node.shape)]
        seen.add(value.position)
    return False
