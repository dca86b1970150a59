"""Torch's rules around operations: autocast, gradient modes, 8-bit floats; and torch functions by name.

The autocast tables repeat torch's (``ATen/autocast_mode.h``, ``autocast_mode.cpp``): the operand dtypes of each function, by device
type. Torch lists operations; for a function that torch composes of several, the tables contain the policy with the same dtypes.
Other functions keep their operands.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.nn.functional as F

from fusegen.dtypes import DType, autocast_dtype, from_torch
from fusegen.errors import TraceError
from fusegen.ir.graph import Node
from fusegen.ir.ops import Family, Op

if TYPE_CHECKING:
    from fusegen.trace.tracer import Tracer
    from fusegen.trace.values import TracedTensor

_SPACES = {
    "torch": torch,
    "special": torch.special,
    "F": F,
    "Tensor": torch.Tensor,
    "linalg": torch.linalg,
    "nn": torch._C._nn,
    "VF": torch._C._VariableFunctions,  # called by torch's own functions with lists of tensors
}


def functions_named(names: Sequence[str]) -> list[Callable[..., Any]]:
    """Returns the torch functions of some names, if they exist in this version; ``space.name`` only searches that space."""
    candidates = (getattr(space, name.rpartition(".")[2], None) for name in names for space in _spaces(name))
    return [function for function in candidates if callable(function)]


def _spaces(name: str) -> tuple[object, ...]:
    space = name.rpartition(".")[0]
    return (_SPACES[space],) if space else tuple(_SPACES[key] for key in ("torch", "special", "F", "Tensor"))


class Policy(Enum):
    LOWER = auto()  # to autocast's dtype
    FLOAT32 = auto()  # to float32
    FLOAT32_BY_DEFAULT = auto()  # to float32, unless the call names a dtype
    FLOAT32_RECIPROCAL = auto()  # to float32 if a number is divided by a tensor: torch multiplies by the reciprocal
    WIDEST = auto()  # to float32 if an operand has it, else to autocast's dtype
    REFUSED = auto()  # torch raises an error


_CPU = {
    Policy.LOWER: """
        addmm baddbmm bmm chain_matmul linalg.multi_dot linalg.vecdot linear matmul mm prelu scaled_dot_product_attention
    """,
    Policy.FLOAT32: """
        avg_pool3d binary_cross_entropy binary_cross_entropy_with_logits cdist cosine_embedding_loss cross_entropy
        hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss max_pool3d mse_loss nll_loss nn.reflection_pad1d
        nn.reflection_pad2d nn.replication_pad1d nn.replication_pad2d nn.replication_pad3d poisson_nll_loss prod smooth_l1_loss
        soft_margin_loss trace triplet_margin_loss
    """,
    Policy.WIDEST: "cat concat concatenate stack",
}
_CUDA = {
    Policy.LOWER: """
        addmm addr baddbmm bmm chain_matmul einsum linalg.multi_dot linalg.vecdot linear matmul mm mv prelu
        scaled_dot_product_attention
    """,
    Policy.FLOAT32: """
        acos arccos arcsin asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity cross_entropy
        dist exp expm1 group_norm hinge_embedding_loss huber_loss interpolate kl_div l1_loss layer_norm log log10 log1p log2
        logsumexp margin_ranking_loss mse_loss multilabel_soft_margin_loss native_layer_norm nll_loss normalize pairwise_distance
        poisson_nll_loss pow reciprocal rms_norm rsqrt sinh smooth_l1_loss soft_margin_loss softplus square tan
        triplet_margin_loss
    """,
    Policy.FLOAT32_BY_DEFAULT: "cumprod cumsum linalg.norm linalg.vector_norm log_softmax norm prod softmax softmin sum",
    Policy.FLOAT32_RECIPROCAL: "div divide true_divide",
    Policy.WIDEST: "addcdiv addcmul arctan2 atan2 cross dot inner tensordot vdot",
    Policy.REFUSED: "binary_cross_entropy",
}


if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA"):  # older versions of torch
    _CUDA[Policy.FLOAT32] = _CUDA[Policy.FLOAT32].replace(" rms_norm ", " ")


def _by_function(table: Mapping[Policy, str]) -> dict[Callable[..., Any], Policy]:
    return {function: policy for policy, names in table.items() for function in functions_named(names.split())}


_POLICIES = {"cpu": _by_function(_CPU), "cuda": _by_function(_CUDA)}


def under_autocast(function: Callable[..., Any], handler: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a handler to convert its operands like autocast."""

    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = (*args, *kwargs.values())
        tracer = tracer_among(arguments)
        convert = None if tracer is None else _conversion(tracer, function, arguments)
        if tracer is None or convert is None:
            return handler(*args, **kwargs)
        with _switched_off(tracer.device.type):  # as in torch: operations inside of a composition are not converted
            return handler(*map(convert, args), **{name: convert(value) for name, value in kwargs.items()})

    return call


def autocasted(function: Callable[..., Any], *values: TracedTensor) -> tuple[TracedTensor, ...]:
    """Converts the operands of a torch function that is part of a composition, like autocast."""
    convert = _conversion(values[0]._tracer, function, values)
    return values if convert is None else tuple(map(convert, values))


def tracer_among(values: Iterable[Any]) -> Tracer | None:
    """Returns the tracer of the first traced value, also in nested lists and tuples."""
    return next((tracer for value in flat(values) if (tracer := getattr(value, "_tracer", None)) is not None), None)


def flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from flat(value)
        else:
            yield value


def _conversion(tracer: Tracer, function: Callable[..., Any], arguments: Sequence[Any]) -> Callable[[Any], Any] | None:
    """The conversion of a function's arguments; None if autocast does not change them."""
    kind = tracer.device.type
    policy = _POLICIES.get(kind, {}).get(function)
    lower = None if policy is None else autocast_dtype(kind)
    if policy is None or lower is None:
        return None
    dtype = _dtype(tracer, policy, from_torch(lower), arguments)
    return lambda value: _converted(tracer, value, dtype)


def _dtype(tracer: Tracer, policy: Policy, lower: DType, arguments: Sequence[Any]) -> DType | None:
    """The dtype that floats are converted to; None for no conversion."""
    if policy is Policy.REFUSED:
        message = "binary_cross_entropy is unsafe under torch.autocast, as in torch"
        raise TraceError(message, hint="remove the sigmoid, and use binary_cross_entropy_with_logits")
    if policy is Policy.FLOAT32_BY_DEFAULT and any(isinstance(value, torch.dtype) for value in arguments):
        return None
    if policy is Policy.FLOAT32_RECIPROCAL and isinstance(arguments[0], torch.Tensor):
        return None
    if policy is Policy.WIDEST:
        return _widest(lower, _floats(tracer, arguments))
    return lower if policy is Policy.LOWER else DType.FLOAT32


def _widest(lower: DType, dtypes: Iterable[DType]) -> DType:
    widest = lower
    for dtype in dtypes:
        if DType.FLOAT32 in (widest, dtype):
            widest = DType.FLOAT32
        elif dtype is not lower:
            message = f"torch.autocast to {lower} does not convert {dtype}"
            raise TraceError(message, hint=f"convert it to {lower} or float32")
    return widest


def _floats(tracer: Tracer, values: Iterable[Any]) -> Iterator[DType]:
    for value in flat(values):
        if isinstance(value, torch.Tensor) and _is_converted(lifted := tracer.lift(value)):
            yield lifted._node.dtype


def _is_converted(value: TracedTensor) -> bool:
    dtype = value._node.dtype
    return dtype.is_float and dtype is not DType.FLOAT64


def _converted(tracer: Tracer, value: Any, dtype: DType | None) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_converted(tracer, element, dtype) for element in value)
    if dtype is None or not isinstance(value, torch.Tensor):
        return value
    lifted = tracer.lift(value)
    is_unchanged = not _is_converted(lifted) or lifted._node.dtype is dtype
    return lifted if is_unchanged else tracer.add(Op.CAST, lifted, dtype=dtype)


@contextmanager
def _switched_off(kind: str) -> Iterator[None]:
    torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, True)


# Gradient modes: results of operations under ``torch.no_grad()`` are constants for autograd.


class GradientState(Protocol):
    """The gradient state of a tracer.

    `records` is True if autograd records at the kernel's call, `switches_gradients` if it records something that the graph lacks.
    """

    records: bool
    switches_gradients: bool


_MAY_RETURN_INPUT = """
    contiguous to type type_as positive __pos__ conj resolve_conj resolve_neg dropout float half double bfloat16 int long short bool
    real atleast_1d atleast_2d atleast_3d
"""
MAY_RETURN_INPUT = frozenset(_MAY_RETURN_INPUT.split())
"""Functions that return the tensor itself, with its history, if there is nothing to do."""

_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
_OUTERMOST = str(Path(__file__).with_name("run.py")), "trace"
"""File and name of the function that runs the user's function."""


def detach_like_torch(name: str, result: Any, args: Sequence[Any], before: Sequence[int | None]) -> Any:
    """Detaches results if gradients are off inside of the kernel, but on at its call. `before` has the write counts of the
    arguments before the operation."""
    if isinstance(result, (tuple, list)):
        results = [detach_like_torch(name, element, args, before) for element in result]
        return result if all(map(operator.is_, results, result)) else type(result)(results)
    if not isinstance(result, torch.Tensor) or torch.is_grad_enabled() is cast("TracedTensor", result)._tracer.records:
        return result
    value = cast("TracedTensor", result)
    written = [argument for argument, writes in zip(args, before, strict=True) if argument is value and writes != value._writes]
    is_itself = bool(written) or (name in MAY_RETURN_INPUT and any(argument is value for argument in args))
    tracer = value._tracer
    if is_itself or _is_constant(value._node):
        return value
    if torch.is_grad_enabled() or _in_autograd_function():
        tracer.switches_gradients = True
        return value
    return tracer.add(Op.DETACH, value)


def note_write(tracer: GradientState, target: Node) -> None:
    """Notes a write to a computed tensor. Under torch.no_grad() the tensor keeps its autograd history, which the graph lacks."""
    if torch.is_grad_enabled() is not tracer.records and not _is_constant(target):
        tracer.switches_gradients = True


def _is_constant(node: Node) -> bool:
    return node.op is Op.DETACH or not node.dtype.is_float


def _in_autograd_function() -> bool:
    """True inside of a ``torch.autograd.Function``, which has its own backward pass."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) != _OUTERMOST:
        if frame.f_code is _APPLY:
            return True
        frame = frame.f_back
    return False


# 8-bit floats: stored, moved, compared for equality and converted, as in torch; they have no arithmetic.

_LAST_ROUNDED_DOWN = 464.0
"""The largest number that rounds to 448, the maximum of float8_e4m3fn."""

_CLAMPS = {Op.CLAMP_MIN, Op.CLAMP_MAX}

_FLOAT8_OPS = frozenset({Op.CAST, Op.WHERE, Op.ABS, Op.EQ, Op.NE, Op.COPY})
"""Pointwise operations that torch defines for 8-bit floats."""

_FLOAT8_FAMILIES = frozenset({Family.LEAF, Family.VIEW, Family.INDEXING, Family.WRITE})


def require_wide(op: Op, dtypes: Sequence[DType]) -> None:
    narrow = next((dtype for dtype in dtypes if dtype.is_float8), None)
    if narrow is None or op in _FLOAT8_OPS or op.family in _FLOAT8_FAMILIES:
        return
    if op is Op.MATMUL:
        raise TraceError(
            f"matmul of {narrow} is not supported",
            hint="convert both operands first, or call torch._scaled_mm outside of the kernel",
        )
    raise no_arithmetic(op.row.name, narrow)


def no_arithmetic(name: str, dtype: DType) -> TraceError:
    return TraceError(
        f"{name} of {dtype} is not supported: the dtype is only stored, moved and converted", hint="convert first: x.float()"
    )


def without_overflow(value: TracedTensor) -> TracedTensor:
    """Replaces values that overflow float8_e4m3fn by NaN; a clamped value is unchanged."""
    if _is_clamped(value):
        return value
    tracer = value._tracer
    if value._node.dtype in (DType.FLOAT64, DType.FLOAT8_E5M2) or not value._node.dtype.is_float:
        value = tracer.add(Op.CAST, value, dtype=DType.FLOAT32)  # torch rounds to float32 first
    is_above = tracer.add(Op.GT, tracer.add(Op.ABS, value), tracer.lift(_LAST_ROUNDED_DOWN))
    return tracer.add(Op.WHERE, is_above, tracer.lift(float("nan")), value)


def _is_clamped(value: TracedTensor) -> bool:
    """True if clamps bound a value to the range of float8_e4m3fn."""
    outer, nodes = value._node, value._tracer.builder.nodes
    inner = nodes[outer.args[0]] if outer.op in _CLAMPS else outer
    bounds = [nodes[node.args[1]] for node in (outer, inner) if node.op in _CLAMPS]
    is_known = all(b.op is Op.CONSTANT and abs(b.number) <= _LAST_ROUNDED_DOWN for b in bounds)
    return {outer.op, inner.op} == _CLAMPS and is_known
