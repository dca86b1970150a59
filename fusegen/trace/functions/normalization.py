"""Softmax and norms: composite nodes, which a pass decomposes and the oracle evaluates directly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from typing import cast as cast_to

import torch
import torch.nn.functional as F

from fusegen.dtypes import from_torch
from fusegen.errors import ShapeError, TraceError
from fusegen.ir.infer import shape_text
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import product, same
from fusegen.trace.functions.common import (
    cast,
    dtype_of,
    float_setting,
    normalize_dim,
    require_float,
    tracer_of,
    unsupported_argument,
)
from fusegen.trace.functions.pointwise import div, mul
from fusegen.trace.functions.reductions import mean, reduced, var, vector_norm
from fusegen.trace.functions.views import broadcast_tensors, chunk, reshape, reshaped
from fusegen.trace.registry import implements
from fusegen.trace.scalars import dim_of
from fusegen.trace.values import TracedTensor


@implements("softmax")
def softmax(input: TracedTensor, dim: int | None = None, dtype: torch.dtype | None = None, _stacklevel: int = 3) -> TracedTensor:
    return _softmax_along(Op.SOFTMAX, input, dim, dtype)


@implements("log_softmax")
def log_softmax(
    input: TracedTensor, dim: int | None = None, dtype: torch.dtype | None = None, _stacklevel: int = 3
) -> TracedTensor:
    return _softmax_along(Op.LOG_SOFTMAX, input, dim, dtype)


def _softmax_along(op: Op, input: TracedTensor, dim: int | None, dtype: torch.dtype | None) -> TracedTensor:
    if dim is None:
        raise TraceError(f"{op.row.name} needs dim", hint="give dim, e.g. dim=-1")
    x = cast(input, dtype)
    if not x.ndim:  # a scalar is a row of one element
        return reshaped(x._tracer.add(op, reshaped(x, (1,)), dim=normalize_dim(dim, 0)), ())
    return x._tracer.add(op, x, dim=normalize_dim(dim, x.ndim))


@implements("softmin")
def softmin(input: TracedTensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> TracedTensor:
    return softmax(input._tracer.add(Op.NEG, input), dim, dtype)


@implements("glu")
def glu(input: TracedTensor, dim: int = -1) -> TracedTensor:
    halves = chunk(require_float("glu", input), 2, dim)
    if len(halves) != 2 or not same(halves[0]._node.shape[dim], halves[1]._node.shape[dim]):
        raise ShapeError(f"glu cannot halve a dim of size {input.shape[dim]}", hint="give a dim of even size")
    return input._tracer.add(Op.MUL, halves[0], input._tracer.add(Op.SIGMOID, halves[1]))


@implements("layer_norm")
def layer_norm(
    input: TracedTensor,
    normalized_shape: Sequence[Any],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: Any = True,
) -> TracedTensor:
    count = _checked_count("layer_norm", input, normalized_shape)
    _require_one_dtype("layer_norm", input, (weight, bias))
    affine = [input._tracer.lift(a) for a in (weight, bias) if a is not None]
    return input._tracer.add(
        Op.LAYER_NORM,
        input,
        *affine,
        count=count,
        eps=float_setting("eps", eps),
        has_weight=weight is not None,
        has_bias=bias is not None,
    )


def invertible_layer_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5
) -> torch.Tensor:
    """`torch.nn.functional.layer_norm`; in a kernel, its backward pass reads the result instead of the input.

    The backward pass rebuilds the normalized input as `(result - bias) / weight`. If the result is materialized anyway, as an
    output of the kernel or an operand of a matmul, nothing else of the input's size is saved. The gradient has the rounding error
    of the result, divided by the weight. A weight of 0 gives NaN.

    Args:
        input: (..., *normalized_shape), floats.
        weight, bias: shape `normalized_shape`.
    """
    result = F.layer_norm(input, normalized_shape, weight, bias, eps)
    return _marked_invertible(result) if isinstance(result, TracedTensor) else result


def _marked_invertible(norm: TracedTensor) -> torch.Tensor:
    builder, position = norm._tracer.builder, norm._position
    node = builder.nodes[position]
    marked = replace(node, attrs=tuple(sorted({**dict(node.attrs), "invertible": True}.items())))
    return cast_to(torch.Tensor, norm._tracer.value(builder.add_node(marked, builder.locations[position])))


@implements("native_layer_norm")
def native_layer_norm(
    input: TracedTensor, normalized_shape: Sequence[Any], weight: Any, bias: Any, eps: float
) -> tuple[TracedTensor, TracedTensor, TracedTensor]:
    """The norm, and the mean and 1 / sqrt(var + eps) of each row, in torch's dtypes."""
    tracer, y = input._tracer, layer_norm(input, normalized_shape, weight, bias, eps)
    wide = cast(input, torch.float32) if dtype_of(input).is_half else input
    dims = tuple(range(input.ndim - len(normalized_shape), input.ndim))
    variance = var(wide, dims, correction=0, keepdim=True)
    statistics = mean(wide, dims, True), tracer.add(Op.RSQRT, tracer.add(Op.ADD, variance, tracer.lift(float_setting("eps", eps))))
    parameters = [tracer.lift(p).dtype for p in (weight, bias) if p is not None]
    dtype = wide.dtype if tracer.device.type == "cuda" else [*parameters, input.dtype][0]
    detached = [tracer.add(Op.DETACH, cast(statistic, dtype)) for statistic in statistics]  # no gradient, as in torch
    return y, detached[0], detached[1]


@implements("rms_norm")
def rms_norm(input: TracedTensor, normalized_shape: Sequence[Any], weight: Any = None, eps: float | None = None) -> TracedTensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dims. eps defaults to the compute dtype's epsilon, as in torch."""
    count = _checked_count("rms_norm", input, normalized_shape)
    affine = [] if weight is None else [input._tracer.lift(weight)]
    epsilon = float(torch.finfo(dtype_of(input).compute.torch).eps) if eps is None else float_setting("eps", eps)
    return input._tracer.add(Op.RMS_NORM, input, *affine, count=count, eps=epsilon)


@implements("group_norm")
def group_norm(
    input: TracedTensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: Any = True
) -> TracedTensor:
    if input.ndim < 2:
        raise ShapeError(f"group_norm: the tensor has {input.ndim} dims", hint="give it shape (batch, channels, ...)")
    _require_one_dtype("group_norm", input, (weight, bias))
    return _affine(_group_normalized(input, num_groups, eps), weight, bias)


@implements("instance_norm")
def instance_norm(
    input: TracedTensor,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> TracedTensor:
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    if running_mean is not None or running_var is not None:
        raise TraceError("instance_norm that updates running statistics is not supported", hint="pass None for them")
    if input.ndim < 3:
        raise ShapeError(f"instance_norm: the tensor has {input.ndim} dims", hint="give it shape (batch, channels, length, ...)")
    _require_one_dtype("instance_norm", input, (weight, bias))
    return _affine(_group_normalized(input, input.shape[1], eps), weight, bias)


def _require_one_dtype(name: str, x: TracedTensor, parameters: Sequence[Any]) -> None:
    """Requires parameters in the input's dtype, or in float32 for 16-bit inputs, as torch does."""
    dtypes = {x._tracer.lift(p).dtype for p in parameters if p is not None}
    if len(dtypes) > 1 or not dtypes <= {x.dtype, *((torch.float32,) if dtype_of(x).is_half else ())}:
        names = ", ".join(sorted(str(from_torch(dtype)) for dtype in dtypes))
        raise TraceError(
            f"{name}: the input is {dtype_of(x)}, the parameters {names}", hint="convert the parameters to the input's dtype"
        )


def _group_normalized(x: TracedTensor, groups: Any, eps: float) -> TracedTensor:
    grouped = reshape(require_float("norm", x), x.shape[0], groups, -1)
    normed = x._tracer.add(Op.LAYER_NORM, grouped, count=1, eps=float_setting("eps", eps), has_weight=False, has_bias=False)
    return reshaped(normed, x._node.shape)


@implements("batch_norm")
def batch_norm(
    input: TracedTensor,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> TracedTensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias per channel (dim 1). In training, the statistics are the batch's, and
    running statistics must be None."""
    if training and (running_mean is not None or running_var is not None):
        text = "batch_norm in training writes to its running statistics, which cannot be traced"
        raise TraceError(text, hint="pass running_mean=None and running_var=None, and update them outside; or training=False")
    if not training and (running_mean is None or running_var is None):
        raise TraceError("batch_norm has no statistics to normalize by", hint="pass running_mean and running_var, or training=True")
    tracer = require_float("batch_norm", input)._tracer
    _require_one_dtype("batch_norm", input, (running_mean, running_var, weight, bias))
    if training:
        mean, variance = _batch_statistics(input)
    else:
        mean, variance = _per_channel(input, running_mean), _per_channel(input, running_var)
    rstd = tracer.add(Op.RSQRT, tracer.add(Op.ADD, variance, tracer.lift(float_setting("eps", eps))))
    normed = tracer.add(Op.MUL, tracer.add(Op.SUB, input, mean), rstd)
    return cast(_affine(normed, weight, bias), input.dtype)


def _batch_statistics(x: TracedTensor) -> tuple[TracedTensor, TracedTensor]:
    """Returns the mean and the biased variance of each channel."""
    if x.ndim < 2:
        raise ShapeError(f"batch_norm: the tensor has {x.ndim} dims", hint="give it shape (rows, channels, ...)")
    dims = tuple(d for d in range(x.ndim) if d != 1)
    if same(product([x._node.shape[d] for d in dims]), 1):
        raise ShapeError("batch_norm in training needs more than one value per channel", hint="give it more rows")
    wide = cast(x, dtype_of(x).compute.torch)
    return reduced(Op.MEAN, wide, dims, True), reduced(Op.VAR, wide, dims, True, correction=0.0)


@implements("torch.batch_norm")
def torch_batch_norm(
    input: TracedTensor,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> TracedTensor:
    """torch.batch_norm: another parameter order than in torch.nn.functional."""
    return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


@implements("torch.instance_norm")
def torch_instance_norm(
    input: TracedTensor,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> TracedTensor:
    """torch.instance_norm: another parameter order than in torch.nn.functional."""
    return instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


def _affine(x: TracedTensor, weight: Any, bias: Any) -> TracedTensor:
    """x * weight + bias per channel, in the dtype of x."""
    scaled = x if weight is None else x._tracer.add(Op.MUL, x, _per_channel(x, weight))
    shifted_value = scaled if bias is None else x._tracer.add(Op.ADD, scaled, _per_channel(x, bias))
    return cast(shifted_value, x.dtype)


def _per_channel(x: TracedTensor, values: Any) -> TracedTensor:
    """Reshapes one value per channel to broadcast over the trailing dims."""
    lifted = x._tracer.lift(values)
    return reshaped(lifted, (*lifted._node.shape, *(1 for _ in range(x.ndim - 2))))


@implements("normalize")
def normalize(input: TracedTensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None) -> TracedTensor:
    unsupported_argument("normalize", out=out)
    lower_bound = input._tracer.lift(float_setting("eps", eps))
    norm = input._tracer.add(Op.CLAMP_MIN, vector_norm(input, p, dim, True), lower_bound)
    return input._tracer.add(Op.DIV, input, norm)


@implements("cosine_similarity")
def cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> TracedTensor:
    """The cosine along a dim; norms are clamped to eps."""
    tracer = tracer_of(x1, x2)
    dtype = tracer.add(Op.ADD, tracer.lift(x1), tracer.lift(x2)).dtype
    pair = broadcast_tensors(tracer.lift(x1), tracer.lift(x2))
    a, b = (cast(x, dtype_of(x).compute.torch) for x in pair)  # avoids overflow of squares
    lower_bound = tracer.lift(float_setting("eps", eps))
    sizes = [tracer.add(Op.CLAMP_MIN, vector_norm(x, 2, dim), lower_bound) for x in (a, b)]
    cosine = tracer.add(Op.DIV, reduced(Op.SUM, tracer.add(Op.MUL, a, b), dim, False), tracer.add(Op.MUL, *sizes))
    return cast(cosine, dtype)


def _checked_count(name: str, x: TracedTensor, shape: Sequence[Any]) -> int:
    expected = tuple(dim_of(s) for s in ((shape,) if isinstance(shape, int) else shape))
    actual = require_float(name, x)._node.shape
    last = actual[len(actual) - len(expected) :] if len(expected) <= len(actual) else ()
    if not expected or len(expected) > len(actual) or not all(map(same, expected, last)):
        x._tracer.require_equal(list(zip(expected, last, strict=False)))
        raise ShapeError(
            f"{name}: normalized_shape {shape_text(expected)} does not match an input of shape {shape_text(actual)}",
            hint="give the sizes of the last dims",
        )
    return len(expected)


@implements("_weight_norm")
def weight_norm(v: Any, g: Any, dim: int = 0) -> TracedTensor:
    """v * (g / |v|), with the norm over all dims except `dim`, or over all dims if dim is -1."""
    tracer = tracer_of(v, g)
    direction, length = (require_float("weight_norm", tracer.lift(value)) for value in (v, g))
    reduced_dims = None if dim == -1 else [d for d in range(direction.ndim) if d != normalize_dim(dim, direction.ndim)]
    if reduced_dims == []:  # one dim: each element is a row
        return mul(direction, div(length, direction._tracer.add(Op.ABS, direction)))
    return mul(direction, div(length, vector_norm(direction, 2, reduced_dims, reduced_dims is not None)))
