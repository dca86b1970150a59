"""The precision of what is summed up."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """x in float32, or in float64 as it is."""
    return x if x.dtype == torch.float64 else x.float()
