"""The table of fusions: plain torch functions of transformers, each with a function that makes its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])
Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Fusion:
    """An entry.

    Attributes:
        function: plain torch, which is what the kernel must equal.
        inputs: makes small arguments.
        trained: the arguments that gradients are asked for: all of floats where it is None.
        kept: for a function that draws from torch's generator: gives the result where an element is dropped, and where it is kept.
    """

    function: Callable[..., Any]
    inputs: Callable[[], Inputs]
    trained: tuple[int, ...] | None = None
    kept: Callable[..., tuple[Tensor, Tensor]] | None = None

    @property
    def learns(self) -> bool:
        """Tells if anything asks for a gradient."""
        return self.trained != ()


FUSIONS: dict[str, Fusion] = {}


def add(name: str, function: Callable[..., Any], inputs: Callable[[], Inputs], **settings: Any) -> None:
    """Puts an entry into the table; its function has the entry's name from then on."""
    assert name not in FUSIONS, name
    function.__name__ = function.__qualname__ = name
    FUSIONS[name] = Fusion(function, inputs, **settings)


def fusion(inputs: Callable[[], Inputs], **settings: Any) -> Callable[[Function], Function]:
    """Puts the decorated function into the table."""

    def decorate(function: Function) -> Function:
        add(function.__name__, function, inputs, **settings)
        return function

    return decorate


def shaped(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Callable[[], Inputs]:
    """Inputs of normally distributed numbers."""
    return lambda: tuple(torch.randn(shape).to(dtype) for shape in shapes)
