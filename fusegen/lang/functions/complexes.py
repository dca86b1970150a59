"""Complex tensors made of real ones."""

from __future__ import annotations

from typing import Any

import torch

from fusegen.errors import TraceError
from fusegen.ir.symbolic import same
from fusegen.lang.complex import ComplexTensor
from fusegen.lang.registry import implements
from fusegen.lang.values import TracedTensor


@implements("view_as_complex")
def view_as_complex(input: TracedTensor) -> ComplexTensor:
    """Pairs along the last dim as complex numbers."""
    if not input.ndim or not same(input._node.shape[-1], 2):
        raise TraceError(
            "view_as_complex of a tensor whose last dim has not two elements", mend="reshape it: x.reshape(..., -1, 2)"
        )
    return ComplexTensor(input[..., 0], input[..., 1])


@implements("complex")
def torch_complex(real: Any, imag: Any) -> ComplexTensor:
    """Complex numbers of their parts."""
    _require_floats("complex", real, imag)
    return ComplexTensor(*torch.broadcast_tensors(real, imag))  # type: ignore[no-untyped-call]


@implements("polar")
def polar(abs: Any, angle: Any) -> ComplexTensor:
    """Complex numbers of their magnitudes and angles."""
    _require_floats("polar", abs, angle)
    return ComplexTensor(abs * torch.cos(angle), abs * torch.sin(angle))


def _require_floats(name: str, first: Any, second: Any) -> None:
    """Refuses parts that torch refuses.

    Raises:
        TraceError: they are no float32 or float64 of one dtype.
    """
    if first.dtype is not second.dtype or first.dtype not in (torch.float32, torch.float64):
        raise TraceError(f"{name} of {first.dtype} and {second.dtype}", mend="make both float32, or float64")


@implements("real")
def real(input: TracedTensor) -> TracedTensor:
    """A real number itself."""
    return input
