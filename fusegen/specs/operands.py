"""Operands of the prebuilt fusions: shapes written with names of sizes, and tensors made from sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

Sizes: TypeAlias = Mapping[str, int]

CANONICAL_SIZES: Sizes = {
    "rows": 16384,
    "features": 4096,
    "batch": 4,
    "positions": 4096,
    "heads": 32,
    "kv_heads": 8,
    "channels": 128,
    "pairs": 64,
    "queries": 4096,
    "keys": 4096,
    "vocabulary": 32000,
    "inputs": 4096,
    "outputs": 4096,
    "hidden": 14336,
    "blocks": 32,
    "pages": 2048,
    "page": 16,
    "groups": 32,
    "group": 128,
    "experts": 64,
}
"""The sizes that specs are shown with where they name no others."""

COUNTS = frozenset({"heads", "kv_heads", "page", "blocks", "group", "experts"})
"""Sizes that divide others or are divided by them, and stay as they are where all others change."""

_NAME = re.compile(r"[a-z_]+")


@dataclass(frozen=True)
class Operand:
    """An argument that depends on sizes.

    Attributes:
        shape: dims apart by spaces, each a sum of products of sizes and numbers: ``"batch positions 3*heads*channels"``.
        make: the argument, from the dims, the spec's dtype and all sizes.
    """

    shape: str
    make: Callable[[tuple[int, ...], torch.dtype, Sizes], Any]

    def at(self, dtype: torch.dtype, sizes: Sizes) -> Any:
        """The argument at some sizes."""
        return self.make(tuple(_extent(dim, sizes) for dim in self.shape.split()), dtype, sizes)

    @property
    def sizes(self) -> tuple[str, ...]:
        """The names of sizes in the shape, in order."""
        return tuple(_NAME.findall(self.shape))


def tensor(shape: str, dtype: torch.dtype | None = None) -> Operand:
    """A tensor of any values: of the spec's dtype where it names no other."""
    return Operand(shape, lambda dims, of_spec, _: torch.empty(dims, dtype=dtype or of_spec, device="meta"))


def values(shape: str, make: Callable[[tuple[int, ...], Sizes], Tensor]) -> Operand:
    """A tensor whose values matter, made on the CPU."""
    return Operand(shape, lambda dims, _, sizes: make(dims, sizes).contiguous())


def positive(shape: str) -> Operand:
    """A tensor of the spec's dtype with values from 0.5 to 1.5."""

    def make(dims: tuple[int, ...], dtype: torch.dtype, _: Sizes) -> Tensor:
        return (0.5 + torch.rand(dims, generator=torch.Generator().manual_seed(4))).to(dtype)

    return Operand(shape, make)


def scales(shape: str) -> Operand:
    """A float32 tensor of scales that normal numbers are quantized by, from 0.5/64 to 1.5/64."""

    def make(dims: tuple[int, ...], _: Sizes) -> Tensor:
        return (0.5 + torch.rand(dims, generator=torch.Generator().manual_seed(4))) / 64

    return values(shape, make)


def mask(shape: str) -> Operand:
    """A boolean tensor of which every row has a True."""

    def make(dims: tuple[int, ...], _: Sizes) -> Tensor:
        hidden = torch.rand(dims, generator=torch.Generator().manual_seed(1)) < 0.25
        hidden[..., :1] = False
        return ~hidden

    return values(shape, make)


def indices(shape: str, below: str) -> Operand:
    """A tensor of int64 indices below a size, which is written as a dim is."""

    def make(dims: tuple[int, ...], sizes: Sizes) -> Tensor:
        return torch.randint(max(_extent(below, sizes), 1), dims, generator=torch.Generator().manual_seed(2))

    return values(shape, make)


def size(name: str) -> Operand:
    """A setting that is a size, written as a dim is."""
    return Operand(name, lambda dims, _, __: dims[0])


def shape(dims: str) -> Operand:
    """A setting that is a shape: a tuple of sizes."""
    return Operand(dims, lambda extents, _, __: extents)


def _extent(dim: str, sizes: Sizes) -> int:
    """The value of a dim: a sum of products of names and numbers."""
    return sum(prod(int(part) if part.isdigit() else sizes[part] for part in term.split("*")) for term in dim.split("+"))
