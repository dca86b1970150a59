"""Softmax and the norms: composed nodes, which a pass expands and the oracle evaluates whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusegen.dtypes import DType
from fusegen.errors import ShapeError, TraceError
from fusegen.ir.infer import shape_text
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import same
from fusegen.lang.functions.common import cast, dtype_of, normalize_dim
from fusegen.lang.functions.views import reshaped
from fusegen.lang.registry import implements
from fusegen.lang.values import TracedTensor, dim_of


@implements("softmax")
def softmax(input: TracedTensor, dim: int | None = None, dtype: torch.dtype | None = None, _stacklevel: int = 3) -> TracedTensor:
    """exp(x) / sum(exp(x)) along a dim."""
    return _along(Op.SOFTMAX, input, dim, dtype)


@implements("log_softmax")
def log_softmax(
    input: TracedTensor, dim: int | None = None, dtype: torch.dtype | None = None, _stacklevel: int = 3
) -> TracedTensor:
    """log(softmax(x)) along a dim."""
    return _along(Op.LOG_SOFTMAX, input, dim, dtype)


def _along(op: Op, input: TracedTensor, dim: int | None, dtype: torch.dtype | None) -> TracedTensor:
    if dim is None:
        raise TraceError(f"{op.row.name} without dim", mend="give dim, e.g. dim=-1")
    x = cast(input, dtype)
    if not dtype_of(x).is_float:
        raise TraceError(f"{op.row.name} of {dtype_of(x)}", mend="convert to a float dtype first")
    if not x.ndim:  # of one element, which stands for a row of one
        return reshaped(x._tracer.add(op, reshaped(x, (1,)), dim=normalize_dim(dim, 0)), ())
    return x._tracer.add(op, x, dim=normalize_dim(dim, x.ndim))


@implements("layer_norm")
def layer_norm(
    input: TracedTensor, normalized_shape: Sequence[Any], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> TracedTensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dims."""
    count = _normalized("layer_norm", input, normalized_shape)
    affine = [input._tracer.lift(a) for a in (weight, bias) if a is not None]
    return input._tracer.add(
        Op.LAYER_NORM, input, *affine, count=count, eps=_number(eps), has_weight=weight is not None, has_bias=bias is not None
    )


@implements("rms_norm")
def rms_norm(input: TracedTensor, normalized_shape: Sequence[Any], weight: Any = None, eps: float | None = None) -> TracedTensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dims; eps defaults to the computing type's epsilon, as in torch."""
    count = _normalized("rms_norm", input, normalized_shape)
    affine = [] if weight is None else [input._tracer.lift(weight)]
    chosen = _default_eps(dtype_of(input)) if eps is None else _number(eps)
    return input._tracer.add(Op.RMS_NORM, input, *affine, count=count, eps=chosen)


def _default_eps(dtype: DType) -> float:
    return float(torch.finfo(dtype.compute.torch).eps)


def _number(eps: object) -> float:
    if isinstance(eps, TracedTensor):
        eps.require_static()
    if isinstance(eps, (int, float)):
        return float(eps)
    raise TraceError(f"eps is a {type(eps).__name__}", mend="pass a number")


def _normalized(name: str, x: TracedTensor, shape: Sequence[Any]) -> int:
    wanted = tuple(dim_of(s) for s in ((shape,) if isinstance(shape, int) else shape))
    have = x._node.shape
    if not dtype_of(x).is_float:
        raise TraceError(f"{name} of {dtype_of(x)}", mend="convert to a float dtype first")
    last = have[len(have) - len(wanted) :] if len(wanted) <= len(have) else ()
    if not wanted or len(wanted) > len(have) or not all(map(same, wanted, last)):
        x._tracer.require_equal(list(zip(wanted, last, strict=False)))
        raise ShapeError(
            f"{name}: normalized_shape {shape_text(wanted)} for an input of shape {shape_text(have)}",
            mend="give the sizes of the last dims",
        )
    return len(wanted)
