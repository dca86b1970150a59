"""Which arguments a kernel takes: everything that none can work on is refused at the first call of its kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusegen.errors import ArgumentError, GradientError
from fusegen.runtime.signature import has_memory

LEAST, GREATEST = -(2**63), 2**63 - 1
"""Run-time integers have 64 bits."""


def is_scalar(value: object) -> bool:
    """Whether a value is a number that need not select code."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check(kernel: str, names: Sequence[str], values: Sequence[Any]) -> None:
    """Refuses what no kernel can work on, naming the argument.

    Args:
        kernel: its name.
        names: of the parameters.
        values: one a parameter.

    Raises:
        ArgumentError: an argument has the wrong type or device.
        GradientError: an input requires a gradient.
    """
    first: tuple[str, Tensor] | None = None
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, Tensor):
            check_plain(kernel, name, value)
            continue
        if value.requires_grad and torch.is_grad_enabled():
            raise GradientError(
                f"{kernel}: the argument {name!r} requires a gradient, which kernels do not compute yet",
                mend=f"pass {name}.detach(), or call under torch.no_grad()",
            )
        first = first or (name, value)
        if value.device != first[1].device:
            raise ArgumentError(
                f"{kernel}: {name!r} is on {value.device}, but {first[0]!r} is on {first[1].device}",
                mend=f"move it: {name}.to({str(first[1].device)!r}); pass a number instead of a scalar tensor",
            )
        if value.layout is not torch.strided or not has_memory(value):
            what = f"a {value.layout if has_memory(value) else 'meta' if value.is_meta else 'fake'} tensor"
            raise ArgumentError(f"{kernel}: {name!r} is {what}", mend="use lower(...) to inspect without data")
    if first is None:
        raise ArgumentError(f"{kernel}: no argument is a tensor", mend="pass at least one tensor")


def check_plain(kernel: str, name: str, value: object) -> None:
    """Refuses a value that is no tensor where it cannot select code, or does not fit a run-time number."""
    if is_scalar(value) and isinstance(value, int) and not LEAST <= value <= GREATEST:
        raise ArgumentError(f"{kernel}: {name!r} is {value}, which does not fit 64 bits", mend="pass a float")
    try:
        hash(value)
    except TypeError:
        raise ArgumentError(
            f"{kernel}: {name!r} is a {type(value).__name__}, which is neither a tensor nor hashable",
            mend="pass tensors one by one, and settings as numbers, strings or tuples",
        ) from None
