"""Gradient modes inside of a function: results of operations under ``torch.no_grad()`` are constants for autograd."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from fusegen.ir.graph import Node
from fusegen.ir.ops import Op

if TYPE_CHECKING:
    from fusegen.lang.values import TracedTensor


class Recording(Protocol):
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
_GIVES_ITSELF = frozenset(_ITSELF.split())
"""Functions whose result is the tensor itself, with its history, where there is nothing to do."""

_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
_OUTERMOST = str(Path(__file__).with_name("run.py")), "trace"
"""The function that runs the user's: file and name."""


def as_recorded(name: str, result: Any, args: Sequence[Any], before: Sequence[int | None]) -> Any:
    """A function's result, detached where autograd records nothing, though it does where the kernel is called.

    Args:
        name: of the function.
        result: of its handler.
        args: of the call.
        before: how often something had been written to each of them.
    """
    if isinstance(result, (tuple, list)):
        found = [as_recorded(name, each, args, before) for each in result]
        return result if all(map(operator.is_, found, result)) else type(result)(found)
    if not isinstance(result, torch.Tensor):
        return result
    value = cast("TracedTensor", result)
    written = [argument for argument, writes in zip(args, before, strict=True) if argument is value and writes != value._writes]
    is_itself = bool(written) or (name in _GIVES_ITSELF and any(argument is value for argument in args))
    return value if is_itself else _detached(value)


def _detached(value: TracedTensor) -> TracedTensor:
    tracer = value._tracer
    if not _is_switched(tracer) or _is_constant(value._node):
        return value
    if torch.is_grad_enabled() or _in_autograd_function():
        tracer.switches_gradients = True
        return value
    return tracer.add(Op.DETACH, value)


def note_write(tracer: Recording, target: Node) -> None:
    """Notes a write to a tensor that is computed: under torch.no_grad() it keeps its history, which the graph does not show."""
    if _is_switched(tracer) and not _is_constant(target):
        tracer.switches_gradients = True


def _is_switched(tracer: Recording) -> bool:
    """Tells if gradients are recorded otherwise than where the kernel is called."""
    return torch.is_grad_enabled() is not tracer.records


def _is_constant(node: Node) -> bool:
    """Tells if no gradient flows through a value."""
    return node.op is Op.DETACH or not node.dtype.is_float


def _in_autograd_function() -> bool:
    """Tells if the user's function is inside of a ``torch.autograd.Function``, which has a backward pass of its own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) != _OUTERMOST:
        if frame.f_code is _APPLY:
            return True
        frame = frame.f_back
    return False
