"""Softmax along rows."""

from __future__ import annotations

import torch
from torch import Tensor

import fusegen as fg
from fusegen.specs.spec import Arguments, Spec, meta


@fg.kernel
def softmax(x: Tensor) -> Tensor:
    """exp(x − max(x))/Σ exp(x − max(x)) along the last dim

    x: any shape.
    """
    return torch.softmax(x, -1)


def _rows(dtype: torch.dtype, rows: int = 16384, features: int = 4096) -> Arguments:
    return {"x": meta(rows, features, dtype=dtype)}


SPECS = (Spec("softmax", softmax, "softmax", _rows),)
