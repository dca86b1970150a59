"""What a prebuilt fusion is: a kernel's declaration, and the arguments that it is shown with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

import fusegen as fg
from fusegen.api import Kernel
from fusegen.dtypes import DType, from_torch

Arguments: TypeAlias = dict[str, Any]
Example: TypeAlias = Callable[..., Arguments]

DTYPES = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
"""What every prebuilt fusion takes."""


@dataclass(frozen=True)
class Spec:
    """A prebuilt fusion.

    Attributes:
        name: on the command line.
        kernel: the declaration.
        family: its file.
        example: arguments for a dtype, by parameter: meta tensors, tensors whose values matter, static values. Its other
            parameters are sizes, whose defaults are the canonical ones.
        dtypes: element types that it takes.
    """

    name: str
    kernel: Kernel[..., Any]
    family: str
    example: Example
    dtypes: tuple[DType, ...] = DTYPES

    @property
    def formula(self) -> str:
        """The first line of the declaration's docstring."""
        return (self.kernel.__doc__ or "").strip().partition("\n")[0]

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that the example takes, with their canonical values."""
        parameters = inspect.signature(self.example).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not p.empty}

    def fresh(self) -> Kernel[..., Any]:
        """The kernel without memory of earlier calls: what it generates follows from its arguments alone."""
        return fg.kernel(self.kernel.function)


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor that has a shape and a dtype, and no memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def materialize(arguments: Mapping[str, Any], device: torch.device, seed: int = 0) -> Arguments:
    """The arguments with random tensors in place of meta ones.

    Args:
        arguments: by parameter; tensors that are not meta keep their values.
        device: where the tensors go.
        seed: of the numbers. Floats have a standard normal distribution; integers are 0 or 1, so that they are valid as indices.
    """
    generator = torch.Generator(device).manual_seed(seed)
    return {name: _real(value, device, generator) if isinstance(value, Tensor) else value for name, value in arguments.items()}


def _real(tensor: Tensor, device: torch.device, generator: torch.Generator) -> Tensor:
    if not tensor.is_meta:
        return tensor.to(device)
    if not tensor.is_floating_point():
        return torch.randint(2, tensor.shape, dtype=tensor.dtype, device=device, generator=generator)
    drawn = from_torch(tensor.dtype)
    dtype = drawn.compute.torch if drawn.is_float8 else tensor.dtype  # torch draws no 8-bit floats
    return torch.randn(tensor.shape, dtype=dtype, device=device, generator=generator).to(tensor.dtype)
