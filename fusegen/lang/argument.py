"""A caller's tensor besides its sizes and its dtype: an object of some class, with attributes of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor


@dataclass(frozen=True)
class Argument:
    """A tensor argument as an object.

    Attributes:
        name: of the parameter.
        parameter: of the user's function: another one where it is an element of what that takes.
        type: the class that ``isinstance`` answers for.
        attributes: those that the tensor or its class has and torch's tensors have not.
        requires_grad: the tensor's.
    """

    name: str
    parameter: str
    type: type[torch.Tensor]
    attributes: frozenset[str]
    requires_grad: bool

    @classmethod
    def of(cls, name: str, parameter: str, tensor: torch.Tensor) -> Argument:
        """A tensor that a parameter was given."""
        requires_grad = tensor.requires_grad
        if isinstance(tensor, FakeTensor):  # whose class and attributes are torch's means of describing a tensor
            kind = nn.Parameter if isinstance(tensor, nn.Parameter) else torch.Tensor
            return cls(name, parameter, kind, frozenset(), requires_grad)
        own = (vars(each) for each in type(tensor).__mro__ if each.__module__.partition(".")[0] not in ("torch", "builtins"))
        return cls(name, parameter, type(tensor), frozenset(vars(tensor)).union(*own), requires_grad)
