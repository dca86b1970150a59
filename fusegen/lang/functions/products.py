"""Matrix products and what is made of them."""

from __future__ import annotations

import math
from typing import Any

import torch

from fusegen.errors import ShapeError, TraceError
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import literal
from fusegen.lang.functions import creation, pointwise
from fusegen.lang.functions.common import tracer_of
from fusegen.lang.functions.normalization import softmax
from fusegen.lang.functions.reductions import reduced
from fusegen.lang.functions.views import reshaped, transpose, unsqueeze
from fusegen.lang.registry import implements
from fusegen.lang.values import TracedTensor


@implements("matmul", "mm", "bmm")
def matmul(input: Any, mat2: Any = None, *, other: Any = None) -> TracedTensor:
    """torch.matmul: vectors take part as one row or one column."""
    tracer = tracer_of(input, mat2, other)
    a, b = tracer.lift(input), tracer.lift(other if mat2 is None else mat2)
    if not a.ndim or not b.ndim:
        raise ShapeError("matmul of a scalar")
    if b.ndim == 2:  # a weight: its sizes are features, whatever place they stand in
        for size in b._node.shape:
            tracer.require_literal(size)
    tracer.require_literal_feature(b._node.shape[-1])
    left, right = a.ndim == 1, b.ndim == 1
    result = tracer.add(Op.MATMUL, unsqueeze(a, 0) if left else a, unsqueeze(b, 1) if right else b)
    shape = list(result._node.shape)
    if left:
        del shape[-2]
    if right:
        del shape[-1]
    return reshaped(result, shape)


@implements("linear")
def linear(input: Any, weight: Any, bias: Any = None) -> TracedTensor:
    """x @ weight.T + bias."""
    tracer = tracer_of(input, weight, bias)
    product = matmul(input, transpose(tracer.lift(weight), -2, -1))
    return product if bias is None else pointwise.add(product, bias)


@implements("mv")
def mv(input: Any, vec: Any) -> TracedTensor:
    """A matrix and a vector."""
    return matmul(input, vec)


@implements("dot", "inner", "vdot")
def dot(input: Any, other: Any) -> TracedTensor:
    """The sum of the products of two vectors."""
    tracer = tracer_of(input, other)
    a, b = tracer.lift(input), tracer.lift(other)
    if a.ndim != 1 or b.ndim != 1:
        raise ShapeError(f"dot of tensors of {a.ndim} and {b.ndim} dims", mend="use vectors, or matmul")
    return reduced(Op.SUM, tracer.add(Op.MUL, a, b), 0, False)


@implements("outer", "ger")
def outer(input: Any, vec2: Any) -> TracedTensor:
    """All products of the elements of two vectors."""
    tracer = tracer_of(input, vec2)
    a, b = tracer.lift(input), tracer.lift(vec2)
    if a.ndim != 1 or b.ndim != 1:
        raise ShapeError(f"outer of tensors of {a.ndim} and {b.ndim} dims", mend="use vectors")
    return tracer.add(Op.MUL, unsqueeze(a, 1), b)


@implements("addmm", "baddbmm")
def addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> TracedTensor:
    """beta * input + alpha * mat1 @ mat2."""
    scaled = matmul(mat1, mat2)
    if alpha != 1:
        scaled = _scaled(scaled, alpha)
    return pointwise.add(scaled, input, alpha=beta)


@implements("scaled_dot_product_attention")
def scaled_dot_product_attention(
    query: TracedTensor,
    key: TracedTensor,
    value: TracedTensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> TracedTensor:
    """softmax(scale * q @ k.mT + mask) @ v, as torch documents it."""
    if dropout_p or enable_gqa:
        raise TraceError("scaled_dot_product_attention: dropout_p and enable_gqa are not supported yet")
    factor = 1 / math.sqrt(_literal_width(query)) if scale is None else scale
    scores = _scaled(matmul(query, transpose(key, -2, -1)), factor)
    if is_causal:
        scores = pointwise.where(_causal(scores), scores, -math.inf)
    if attn_mask is not None:
        scores = _masked(scores, attn_mask)
    return matmul(softmax(scores, -1), value)


def _scaled(x: TracedTensor, factor: Any) -> TracedTensor:
    return x._tracer.add(Op.MUL, x, x._tracer.lift(factor))


def _literal_width(query: TracedTensor) -> int:
    width = literal(query._node.shape[-1])
    if width is None:
        raise ShapeError("the head dim must be literal", mend="pass scale=")
    return width


def _causal(scores: TracedTensor) -> TracedTensor:
    rows, columns = scores._node.shape[-2:]
    query, key = (creation.iota(scores._tracer, size) for size in (rows, columns))
    return scores._tracer.add(Op.LE, key, unsqueeze(query, 1))


def _masked(scores: TracedTensor, mask: Any) -> TracedTensor:
    lifted = scores._tracer.lift(mask)
    if lifted.dtype is torch.bool:
        return pointwise.where(lifted, scores, -math.inf)
    return pointwise.add(scores, lifted)
