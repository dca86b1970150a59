"""torch's own check of tensors, in C++: it tells tensors like earlier ones in a fraction of the time of their parts of a key.

It compares type, dtype, device, shape, strides, whether a gradient is required, and the dispatch keys as modes and transforms have
made them, which say what a negated view is as well, and if autocast is on. It is false where a tensor stands twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch._C._dynamo import guards

Check: TypeAlias = Callable[..., bool]
"""Of tensors, one an argument."""


def check_of(tensors: Sequence[Tensor]) -> Check | None:
    """The check of tensors like these, whose addresses it does not look at; None where some are no plain memory on 16 bytes."""
    if not tensors or any(not tensor.data_ptr() or tensor.data_ptr() & 15 for tensor in tensors):
        return None
    check: Check = guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def like(tensors: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], bool] | None:
    """A test that holds only for tensors of which the parts of a key are the same (`fusegen.runtime.keys`).

    None where there is none.
    """
    try:
        check = check_of(tensors)
    except RuntimeError:  # one has no address
        return None
    if check is None:
        return None
    recording, recorded = torch.is_grad_enabled, torch.is_grad_enabled()

    def test(others: Sequence[Tensor]) -> bool:
        low = 0
        for other in others:
            low |= other.data_ptr() or 1
        return not low & 15 and recording() is recorded and check(*others)

    return test
