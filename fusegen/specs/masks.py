"""Masks of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from fusegen.errors import ArgumentError


def require_mask(mask: Tensor) -> None:
    """Checks that a mask is added to scores, or says which keys are seen.

    Raises:
        ArgumentError: it is of integers, as those of tokenizers are, which mean neither.
    """
    if not (mask.is_floating_point() or mask.dtype == torch.bool):
        mend = "give mask.bool(), True where a key is seen, or floats that are added to scores"
        raise ArgumentError(f"a mask of {mask.dtype}", mend=mend)
