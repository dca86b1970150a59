"""Activations that are made of several operations."""

from __future__ import annotations

from typing import Any

from fusegen.dtypes import DType
from fusegen.errors import TraceError
from fusegen.ir.ops import Op
from fusegen.lang.functions.common import binary, dtype_of, floats, numbers, written
from fusegen.lang.functions.pointwise import sub, where
from fusegen.lang.registry import implements
from fusegen.lang.values import TracedTensor


@implements("relu6")
def relu6(input: TracedTensor, inplace: bool = False) -> TracedTensor:
    """min(max(x, 0), 6)."""
    return hardtanh(input, 0, 6, inplace)


@implements("hardtanh")
def hardtanh(input: TracedTensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> TracedTensor:
    """The value between two bounds, which are whole numbers for integers."""
    if dtype_of(numbers("hardtanh", input)) is DType.UINT8 and (min_val < 0 or max_val < 0):
        raise TraceError("hardtanh of uint8 with a negative bound", mend="convert to a signed dtype first")
    bounds = (min_val, max_val) if dtype_of(input).is_float else (int(min_val), int(max_val))
    return written(input, input._tracer.add(Op.HARDTANH, input, *map(input._tracer.lift, bounds)), inplace)


@implements("threshold")
def threshold(input: TracedTensor, threshold: float, value: float, inplace: bool = False) -> TracedTensor:
    """What is above a threshold, and a value in place of the rest."""
    below = binary(Op.LE, numbers("threshold", input), threshold)
    return written(input, where(below, value, input), inplace)


@implements("selu")
def selu(input: TracedTensor, inplace: bool = False) -> TracedTensor:
    """Klambauer et al., Self-Normalizing Neural Networks (arXiv 1706.02515)."""
    scaled = binary(Op.MUL, input._tracer.add(Op.ELU, input, alpha=1.6732632423543772), 1.0507009873554805)
    return written(input, scaled, inplace)


@implements("tanhshrink")
def tanhshrink(input: TracedTensor) -> TracedTensor:
    """x - tanh(x)."""
    return sub(input, input._tracer.add(Op.TANH, input))


@implements("hardshrink")
def hardshrink(input: TracedTensor, lambd: float = 0.5) -> TracedTensor:
    """0 between -lambd and lambd."""
    return where(binary(Op.LE, input._tracer.add(Op.ABS, floats("hardshrink", input)), lambd), 0.0, input)


@implements("softshrink")
def softshrink(input: TracedTensor, lambd: float = 0.5) -> TracedTensor:
    """Values moved towards 0 by lambd, and 0 between."""
    small = binary(Op.LE, input._tracer.add(Op.ABS, floats("softshrink", input)), lambd)
    return where(small, 0.0, sub(input, binary(Op.MUL, input._tracer.add(Op.SIGN, input), lambd)))


@implements("prelu")
def prelu(input: TracedTensor, weight: Any) -> TracedTensor:
    """x above 0, weight * x below; a weight of several elements is one a channel (dim 1)."""
    slope = input._tracer.lift(weight)
    if slope.ndim == 1 and input.ndim > 1:
        slope = slope.reshape((-1, *(1 for _ in range(input.ndim - 2))))
    return binary(Op.PRELU, input, slope)
