"""Tensor maps of strided views."""

from __future__ import annotations

from fusegen.ir.formula import formula
from fusegen.ir.strided import StridedView
from fusegen.ir.symbolic import Dim, literal
from fusegen.program.call import TensorMapSpec


def tensor_map(buffer: int, view: StridedView, box: tuple[int, ...], *, writable: bool = False) -> TensorMapSpec:
    """The map of a view of a buffer, whose last dim is contiguous."""
    shape, strides = tuple(map(formula, view.shape)), tuple(map(formula, _strides(view)))
    return TensorMapSpec(buffer, shape, strides, formula(view.offset), box, writable)


def _strides(view: StridedView) -> list[Dim]:
    """Strides; a dim of extent 1 has any, and the copy engine wants none that is 0."""
    strides = list(view.strides)
    for d in range(len(strides) - 2, -1, -1):
        if literal(view.shape[d]) == 1:
            strides[d] = strides[d + 1] * view.shape[d + 1]
    return strides
