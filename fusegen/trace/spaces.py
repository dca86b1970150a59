"""Torch functions by name: one name stands for the functions of the same meaning in torch, torch.special, F and Tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

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
