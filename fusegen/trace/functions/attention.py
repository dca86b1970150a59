"""Attention: torch's `scaled_dot_product_attention`, and the function that `torch.nn.MultiheadAttention` calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fusegen.errors import ShapeError, TraceError, UnsupportedError
from fusegen.ir.infer import shape_text
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import literal, same, simplify_dim
from fusegen.trace import registry
from fusegen.trace.functions import creation, pointwise
from fusegen.trace.functions.arrangements import repeat_interleave
from fusegen.trace.functions.common import cast, dtype_of, require_float, tracer_of
from fusegen.trace.functions.products import matmul, scaled
from fusegen.trace.functions.random import apply_dropout
from fusegen.trace.functions.views import require_shape, transpose, unsqueeze
from fusegen.trace.modes import autocasted
from fusegen.trace.registry import implements
from fusegen.trace.values import TracedTensor


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
    """dropout(softmax(scale * q @ k.mT + mask)) @ v."""
    query = require_float("scaled_dot_product_attention", query)
    if enable_gqa:
        key, value = (_repeated_heads(x, query) for x in (key, value))
    factor = 1 / math.sqrt(_head_dim(query)) if scale is None else scale
    scores = scaled(matmul(query, transpose(key, -2, -1)), factor)
    if is_causal and attn_mask is not None:
        raise TraceError(
            "scaled_dot_product_attention takes attn_mask or is_causal, not both", hint="include the causal mask in attn_mask"
        )
    if is_causal:
        scores = pointwise.where(_causal(scores), scores, -math.inf)
    if attn_mask is not None:
        scores = _masked(scores, attn_mask)
    weights = scores._tracer.add(Op.SAFE_SOFTMAX, scores, dim=scores.ndim - 1)
    return matmul(_dropped(cast(weights, query.dtype), dropout_p), value)


def _repeated_heads(x: TracedTensor, query: TracedTensor) -> TracedTensor:
    """Repeats the heads of keys or values, (..., heads, position, channel), for the heads of queries (GQA)."""
    for dim in (x._node.shape[-3], query._node.shape[-3]):
        query._tracer.require_literal(dim)
    heads, query_heads = literal(x._node.shape[-3]), literal(query._node.shape[-3])
    if heads is None or query_heads is None or query_heads % heads:
        message = f"scaled_dot_product_attention with enable_gqa: {query.shape[-3]} query heads, {x.shape[-3]} of keys or values"
        raise ShapeError(message, hint="use literal numbers of heads; the query heads must be a multiple of the others")
    return repeat_interleave(x, query_heads // heads, -3)


def _head_dim(query: TracedTensor) -> int:
    """Returns the head dim, which sets the default scale, and specializes the trace to it."""
    query._tracer.require_literal(query._node.shape[-1])
    head_dim = literal(query._node.shape[-1])
    if head_dim is None:
        raise UnsupportedError("the default scale needs a literal head dim, but it is a run-time size", hint="pass scale=")
    return head_dim


def _causal(scores: TracedTensor) -> TracedTensor:
    rows, columns = scores._node.shape[-2:]
    query, key = (creation.iota(scores._tracer, size) for size in (rows, columns))
    return scores._tracer.add(Op.LE, key, unsqueeze(query, 1))


def _masked(scores: TracedTensor, mask: Any) -> TracedTensor:
    """Scores with a mask applied: -inf where a bool mask is False; a float mask, of float32 or the scores' dtype, is added."""
    lifted = scores._tracer.lift(mask)
    if lifted.dtype not in (torch.bool, torch.float32, scores.dtype):
        message = f"an attention mask of {dtype_of(lifted)} cannot be added to scores of {dtype_of(scores)}"
        raise TraceError(message, hint="give a mask of bool, float32 or the queries' dtype")
    shape, mask_shape = scores._node.shape, lifted._node.shape
    if len(mask_shape) > len(shape) or any(
        same(s, 1) and not same(m, 1) for s, m in zip(shape[::-1], mask_shape[::-1], strict=False)
    ):
        raise ShapeError(
            f"an attention mask of {shape_text(mask_shape)} does not broadcast to scores of {shape_text(shape)}",
            hint="give a mask that broadcasts to (..., queries, keys)",
        )
    if lifted.dtype is torch.bool:
        return pointwise.where(lifted, scores, -math.inf)
    return pointwise.add(scores, lifted)


@implements("multi_head_attention_forward")
def multi_head_attention_forward(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[TracedTensor, TracedTensor | None]:
    """The implementation of `torch.nn.MultiheadAttention`; positions precede the batch dim."""
    if add_zero_attn or any(argument is not None for argument in (bias_k, bias_v, static_k, static_v)):
        raise TraceError(
            "multi_head_attention_forward: bias_k, bias_v, add_zero_attn, static_k and static_v are not supported",
            hint="leave them out",
        )
    dropout_p = dropout_p if training else 0.0
    if is_causal and attn_mask is None:
        raise TraceError("multi_head_attention_forward with is_causal needs attn_mask, as in torch", hint="pass attn_mask")
    tracer = tracer_of(query, key, value)
    query, key, value = (tracer.lift(x) for x in (query, key, value))
    if query.shape[-1] != embed_dim_to_check or embed_dim_to_check % num_heads:
        raise ShapeError(
            f"multi_head_attention: {query.shape[-1]} features do not fit embed_dim {embed_dim_to_check} and {num_heads} heads",
            hint="give embed_dim features, a multiple of the heads",
        )
    batched = query.ndim == 3
    inputs = [x if batched else unsqueeze(x, 1) for x in (query, key, value)]
    weights = [q_proj_weight, k_proj_weight, v_proj_weight] if use_separate_proj_weight else in_proj_weight
    q, k, v = (x.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for x in _project(inputs, weights, in_proj_bias))
    skips_mask = is_causal and key_padding_mask is None and not need_weights
    mask = None if skips_mask else _combine_masks(q, k, attn_mask, key_padding_mask, batched)
    weights_out: TracedTensor | None = None
    if need_weights:
        attended, weights_out = _attention_and_weights(q, k, v, mask, dropout_p)
        weights_out = weights_out.mean(1) if average_attn_weights else weights_out
        weights_out = weights_out if batched else weights_out.squeeze(0)
    else:
        attended = _call(F.scaled_dot_product_attention, q, k, v, mask, dropout_p, skips_mask)
    result = _call(F.linear, attended.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    return result if batched else result.squeeze(1), weights_out


def _attention_and_weights(
    q: TracedTensor, k: TracedTensor, v: TracedTensor, mask: TracedTensor | None, dropout_p: float
) -> tuple[TracedTensor, TracedTensor]:
    """Returns attention and its weights after dropout. The queries are scaled before the matmul, as in torch."""
    q, k = autocasted(torch.bmm, scaled(q, math.sqrt(1 / _head_dim(q))), k)
    if mask is not None:
        (mask,) = autocasted(torch.baddbmm, mask)
    if mask is not None and mask.dtype is not q.dtype:
        raise TraceError(
            f"the attention mask is {dtype_of(mask)}, but the queries are {dtype_of(q)}",
            hint="convert the mask to the queries' dtype",
        )
    scores = matmul(q, transpose(k, -2, -1))
    weights = _dropped(_call(F.softmax, scores if mask is None else pointwise.add(scores, mask), -1), dropout_p)
    return _call(torch.bmm, weights, v), weights


def _call(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a torch function under the rules of autocast."""
    return registry.call(function, args, {})


def _dropped(weights: TracedTensor, dropout_p: float) -> TracedTensor:
    return apply_dropout(weights, dropout_p, True, weights._node.shape)


def _project(inputs: list[TracedTensor], weights: Any, bias: Any) -> list[TracedTensor]:
    """Returns q, k and v. A packed weight takes one matmul if query, key and value are the same tensor."""
    packed = None if isinstance(weights, list) else inputs[0]._tracer.lift(weights)
    if packed is not None and all(x._position == inputs[0]._position for x in inputs):
        return list(_call(F.linear, inputs[0], packed, bias).chunk(3, -1))
    biases = [None] * 3 if bias is None else inputs[0]._tracer.lift(bias).chunk(3)
    weight_list = weights if packed is None else packed.chunk(3)
    return [_call(F.linear, x, w, b) for x, w, b in zip(inputs, weight_list, biases, strict=True)]


def _combine_masks(q: TracedTensor, k: TracedTensor, mask: Any, padding: Any, batched: bool) -> TracedTensor | None:
    """Returns the additive mask for scores of (batch, head, query, key), or None. A True of a bool mask becomes -inf."""
    (batch, heads, queries, _), keys = q._node.shape, k._node.shape[2]
    masks = []
    if mask is not None:
        additive = _additive_mask(q, mask, "attn_mask")
        full_shape = (simplify_dim(batch * heads), queries, keys)
        require_shape("attn_mask", additive, full_shape if additive.ndim == 3 else full_shape[1:])
        masks.append(additive if additive.ndim == 2 else additive.unflatten(0, q.shape[:2]))
    if padding is not None:
        additive = _additive_mask(q, padding, "key_padding_mask")
        require_shape("key_padding_mask", additive, (batch, keys) if batched else (keys,))
        masks.append((additive if batched else unsqueeze(additive, 0))[:, None, None, :])
    return None if not masks else masks[0] if len(masks) == 1 else pointwise.add(*masks)


def _additive_mask(q: TracedTensor, mask: Any, name: str) -> TracedTensor:
    lifted = q._tracer.lift(mask)
    if lifted.dtype is torch.bool:
        return cast(pointwise.where(lifted, -math.inf, 0.0), q.dtype)
    return require_float(name, lifted)
