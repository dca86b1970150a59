"""Rules of torch around a function's operations: autocast, modes of gradients, 8-bit floats; and torch's functions by name.

The tables of autocast repeat those of torch (``ATen/autocast_mode.h``, ``autocast_mode.cpp``): the dtypes to which it converts the
operands of a function, by device type. Torch keeps them by operations; a function here that torch composes of several has the
policy that gives their dtypes. Functions that no table names keep their operands.
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
    "VF": torch._C._VariableFunctions,  # which torch's own functions call with lists of tensors
}


def twins(names: Sequence[str]) -> list[Callable[..., Any]]:
    """The torch functions of some names that exist in this version of torch; those of ``space.name`` in that space alone."""
    found = (getattr(space, name.rpartition(".")[2], None) for name in names for space in _spaces(name))
    return [function for function in found if callable(function)]


def _spaces(name: str) -> tuple[object, ...]:
    space = name.rpartition(".")[0]
    return (_SPACES[space],) if space else tuple(_SPACES[key] for key in ("torch", "special", "F", "Tensor"))


class Policy(Enum):
    """A rule for the dtypes of a function's operands."""

    LOWER = auto()  # to autocast's dtype
    FLOAT32 = auto()  # to float32
    FLOAT32_BY_DEFAULT = auto()  # to float32, unless the call names a dtype
    FLOAT32_RECIPROCAL = auto()  # to float32 where a number is divided by a tensor: torch multiplies with the reciprocal
    WIDEST = auto()  # to float32 if one of them has it, else to autocast's dtype
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
    return {function: policy for policy, names in table.items() for function in twins(names.split())}


_POLICIES = {"cpu": _by_function(_CPU), "cuda": _by_function(_CUDA)}


def under_autocast(function: Callable[..., Any], handler: Callable[..., Any]) -> Callable[..., Any]:
    """A handler whose operands are converted as autocast converts those of a torch function."""

    def call(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        tracer = tracer_among(given)
        convert = None if tracer is None else _conversion(tracer, function, given)
        if tracer is None or convert is None:
            return handler(*args, **kwargs)
        with _switched_off(tracer.device.type):  # as in torch: what a function is composed of keeps its operands
            return handler(*map(convert, args), **{name: convert(value) for name, value in kwargs.items()})

    return call


def autocasted(function: Callable[..., Any], *values: TracedTensor) -> tuple[TracedTensor, ...]:
    """Converts operands as autocast does those of a torch function, of which another one is composed."""
    convert = _conversion(values[0]._tracer, function, values)
    return values if convert is None else tuple(map(convert, values))


def tracer_among(values: Iterable[Any]) -> Tracer | None:
    """The tracer of the first traced value among some, and in lists and tuples among them."""
    return next((tracer for value in flat(values) if (tracer := getattr(value, "_tracer", None)) is not None), None)


def flat(values: Iterable[Any]) -> Iterator[Any]:
    """Values, and those in lists and tuples among them."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from flat(value)
        else:
            yield value


def _conversion(tracer: Tracer, function: Callable[..., Any], given: Sequence[Any]) -> Callable[[Any], Any] | None:
    """From an argument of a torch function to what its handler gets; None where autocast leaves all as they are."""
    kind = tracer.device.type
    policy = _POLICIES.get(kind, {}).get(function)
    lower = None if policy is None else autocast_dtype(kind)
    if policy is None or lower is None:
        return None
    dtype = _dtype(tracer, policy, from_torch(lower), given)
    return lambda value: _converted(tracer, value, dtype)


def _dtype(tracer: Tracer, policy: Policy, lower: DType, given: Sequence[Any]) -> DType | None:
    """The dtype to which a policy converts floats; None where it leaves them as they are."""
    if policy is Policy.REFUSED:
        what = "binary_cross_entropy is unsafe under torch.autocast, which refuses it"
        raise TraceError(what, hint="use binary_cross_entropy_with_logits, on what the sigmoid takes")
    if policy is Policy.FLOAT32_BY_DEFAULT and any(isinstance(value, torch.dtype) for value in given):
        return None
    if policy is Policy.FLOAT32_RECIPROCAL and isinstance(given[0], torch.Tensor):
        return None
    if policy is Policy.WIDEST:
        return _widest(lower, _floats(tracer, given))
    return lower if policy is Policy.LOWER else DType.FLOAT32


def _widest(lower: DType, dtypes: Iterable[DType]) -> DType:
    widest = lower
    for dtype in dtypes:
        if DType.FLOAT32 in (widest, dtype):
            widest = DType.FLOAT32
        elif dtype is not lower:
            what = f"torch.autocast to {lower} does not convert {dtype}"
            raise TraceError(what, hint=f"convert it to {lower} or float32")
    return widest


def _floats(tracer: Tracer, values: Iterable[Any]) -> Iterator[DType]:
    """The dtypes of the operands that autocast converts."""
    for value in flat(values):
        if isinstance(value, torch.Tensor) and _is_converted(lifted := tracer.lift(value)):
            yield lifted._node.dtype


def _is_converted(value: TracedTensor) -> bool:
    dtype = value._node.dtype
    return dtype.is_float and dtype is not DType.FLOAT64


def _converted(tracer: Tracer, value: Any, dtype: DType | None) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_converted(tracer, each, dtype) for each in value)
    if dtype is None or not isinstance(value, torch.Tensor):
        return value
    lifted = tracer.lift(value)
    is_kept = not _is_converted(lifted) or lifted._node.dtype is dtype
    return lifted if is_kept else tracer.add(Op.CAST, lifted, dtype=dtype)


@contextmanager
def _switched_off(kind: str) -> Iterator[None]:
    torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, True)


# Modes of gradients: results of operations under ``torch.no_grad()`` are constants for autograd.


class GradientState(Protocol):
    """The tracer, as far as gradients go.

    Attributes:
        records: whether autograd records operations where the kernel is called.
        switches_gradients: whether it records something that the graph does not show.
    """

    records: bool
    switches_gradients: bool


_ITSELF = """
    contiguous to type type_as positive __pos__ conj resolve_conj resolve_neg dropout float half double bfloat16 int long short bool
    real atleast_1d atleast_2d atleast_3d
"""
GIVES_ITSELF = frozenset(_ITSELF.split())
"""Functions whose result is the tensor itself, with its history, where there is nothing to do."""

_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
_OUTERMOST = str(Path(__file__).with_name("run.py")), "trace"
"""The function that runs the user's: file and name."""


def as_recorded(name: str, result: Any, args: Sequence[Any], before: Sequence[int | None]) -> Any:
    """A function's result, detached where autograd records nothing, though it does where the kernel is called. Before says
    how often something had been written to each argument."""
    if isinstance(result, (tuple, list)):
        found = [as_recorded(name, each, args, before) for each in result]
        return result if all(map(operator.is_, found, result)) else type(result)(found)
    if not isinstance(result, torch.Tensor) or torch.is_grad_enabled() is cast("TracedTensor", result)._tracer.records:
        return result
    value = cast("TracedTensor", result)
    written = [argument for argument, writes in zip(args, before, strict=True) if argument is value and writes != value._writes]
    is_itself = bool(written) or (name in GIVES_ITSELF and any(argument is value for argument in args))
    tracer = value._tracer
    if is_itself or _is_constant(value._node):
        return value
    if torch.is_grad_enabled() or _in_autograd_function():
        tracer.switches_gradients = True
        return value
    return tracer.add(Op.DETACH, value)


def note_write(tracer: GradientState, target: Node) -> None:
    """Notes a write to a tensor that is computed: under torch.no_grad() it keeps its history, which the graph does not show."""
    if torch.is_grad_enabled() is not tracer.records and not _is_constant(target):
        tracer.switches_gradients = True


def _is_constant(node: Node) -> bool:
    return node.op is Op.DETACH or not node.dtype.is_float


def _in_autograd_function() -> bool:
    """True if the user's function is inside of a ``torch.autograd.Function``, which has a backward pass of its own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) != _OUTERMOST:
        if frame.f_code is _APPLY:
            return True
        frame = frame.f_back
    return False


# 8-bit floats: stored, moved, compared for equality and converted, as in torch; nothing is computed in them.

_LAST_ROUNDED_DOWN = 464.0
"""The largest number that rounds to 448, the largest one of float8_e4m3fn."""

_CLAMPS = {Op.CLAMP_MIN, Op.CLAMP_MAX}

_MOVED = frozenset({Op.CAST, Op.WHERE, Op.ABS, Op.EQ, Op.NE, Op.COPY})
"""Pointwise operations that torch has of 8-bit floats as well."""

_MOVING = frozenset({Family.LEAF, Family.VIEW, Family.INDEXING, Family.WRITE})


def require_wide(op: Op, dtypes: Sequence[DType]) -> None:
    """Refuses arithmetic on 8-bit floats."""
    narrow = next((dtype for dtype in dtypes if dtype.is_float8), None)
    if narrow is None or op in _MOVED or op.family in _MOVING:
        return
    if op is Op.MATMUL:
        raise TraceError(f"a product of {narrow}", hint="convert both first, or call torch._scaled_mm outside")
    raise no_arithmetic(op.row.name, narrow)


def no_arithmetic(name: str, dtype: DType) -> TraceError:
    """The error of a function that computes, given 8-bit floats."""
    return TraceError(f"{name} of {dtype}, which is only stored, moved and converted", hint="convert first: x.float()")


def without_overflow(value: TracedTensor) -> TracedTensor:
    """A value with NaN in place of what rounds to more than float8_e4m3fn holds; the value itself where it is clamped."""
    if _is_clamped(value):
        return value
    tracer = value._tracer
    if value._node.dtype in (DType.FLOAT64, DType.FLOAT8_E5M2) or not value._node.dtype.is_float:
        value = tracer.add(Op.CAST, value, dtype=DType.FLOAT32)  # in which torch rounds first
    is_above = tracer.add(Op.GT, tracer.add(Op.ABS, value), tracer.lift(_LAST_ROUNDED_DOWN))
    return tracer.add(Op.WHERE, is_above, tracer.lift(float("nan")), value)


def _is_clamped(value: TracedTensor) -> bool:
    """True if numbers bound a value from both sides, so that float8_e4m3fn holds it."""
    outer, nodes = value._node, value._tracer.builder.nodes
    inner = nodes[outer.args[0]] if outer.op in _CLAMPS else outer
    bounds = [nodes[node.args[1]] for node in (outer, inner) if node.op in _CLAMPS]
    is_known = all(b.op is Op.CONSTANT and abs(b.number) <= _LAST_ROUNDED_DOWN for b in bounds)
    return {outer.op, inner.op} == _CLAMPS and is_known
